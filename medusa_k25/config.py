"""The conf/ tree: found, composed, checked, and handed to a verb.

Configuration ends here: an entry point gets a composed `DictConfig`, builds its objects with `hydra.utils.instantiate`,
and nothing below it knows Hydra. Hydra refuses an unknown key on the command line, but takes one in an exp file
silently, so every composed config is compared with what conf/ declares and with the constructors' own signatures.

    @verb("target", "generate")          # the groups that this verb builds
    def main(config: DictConfig) -> None: ...

    if __name__ == "__main__":
        main()
"""

import functools
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
)

# The verbs in the order in which they are used; `python -m medusa_k25` prints this table.
VERBS = {
    "plan": "an experiment + a hardware file -> disk, memory, hours and money, there and on an alternative",
    "generate": "prompts -> conversations.jsonl: the target's own answers",
    "capture": "conversations + target -> a cache of hidden states",
    "inspect": "a cache -> what is in it, and whether every shard is as it was written",
    "train": "a cache -> checkpoints and metrics",
    "evaluate": "a checkpoint + a cache -> acceptance report and the best trees",
    "study": "trained runs of several designs and seeds -> a table of what each accepts, with intervals, and pictures",
    "export": "a checkpoint + a tree -> the folder to serve from",
    "decode": "an export + held-out prompts -> proof that output and counts are those of greedy text and replay",
    "probe": "running servers -> measured cycles, as a hardware file",
}

# What makes a run that run, besides its target and cache: their folders may move, and it may be prolonged, go on with
# other ranks, and log or load otherwise
IDENTITY = {
    *("seed", "draft_vocab_size", "num_nodes", "max_width", "warm_start"),
    *("data", "heads", "loss", "optimizer", "schedule", "trainer", "strategy"),
}
FREE = {
    "data.batch_size",
    "data.num_workers",
    "data.stage_dir",
    "data.stage_gb",
    "trainer.max_steps",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.accumulate_grad_batches",
    "trainer.log_every_n_steps",
}
PROLONGS = {"trainer.max_steps", "patience"}  # free, for a run may be prolonged; but settings of a study

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
EXIT_REQUEUE = 75  # EX_TEMPFAIL: told to stop, everything is saved, run the same command again

_NO_PACKAGE_LINE = "conf/exp/{}.yaml: must start with the line '# @package _global_', before any other comment"
_INSTANTIATE_KEYS = {"_target_", "_partial_", "_convert_", "_args_", "_recursive_"}
_PACKAGE = Path(__file__).resolve().parent


class ConfigError(ValueError):
    """Something in the command or in conf/ that cannot be meant; the message is one line."""


def conf_dir() -> Path:
    """The conf/ tree: inside the package where a wheel was installed, beside it in a checkout."""
    for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no conf/config.yaml in {_PACKAGE} or beside it; install medusa-k25 again")


def compose(overrides: list[str], folder: Path | None = None, groups: tuple[str, ...] = ()) -> DictConfig:
    """The config that a verb that builds `groups` (default: all) would run with; ConfigError where it would refuse."""
    try:
        with _loader(folder or conf_dir()) as loader:
            config = _load(loader, overrides)
            check(config, loader, config.hydra, groups)
    except (HydraException, yaml.YAMLError) as error:
        raise ConfigError(_explain_composition(error, overrides, folder or conf_dir())) from error
    with open_dict(config):
        del config["hydra"]
    return config


def check(config: DictConfig, loader: ConfigLoader, hydra_config: HydraConf, groups: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for a key that nobody takes, a required argument that nobody gives, a dangling `${...}`.

    Every key must be declared by the files of conf/ that were chosen, or be a parameter of the `_target_` beside it.
    With `groups`, the targets of the other groups are imported only where an exp file or the command line changed their
    set of keys: `generate` does not pay for importing Lightning.
    """
    known_groups = {*loader.list_groups("")} - {"hydra"}
    searched = [o for o in hydra_config.overrides.hydra if o.startswith("hydra.searchpath=")]
    by_default = loader.compute_defaults_list("config", searched, RunMode.RUN).overrides.known_choices
    choices = hydra_config.runtime.choices
    chosen = [
        f"{'' if group in by_default else '+'}{group}={option}"
        for group, option in choices.items()
        if option is not None and group != "exp" and not group.startswith("hydra/")
    ]
    declared = _plain(_load(loader, chosen + searched))
    names = list(_dotted(declared))

    plain = _plain(config)
    for key in declared.keys() - plain.keys() - {"hydra"}:
        raise ConfigError(f"{key}: was deleted; all verbs read one and the same set of keys")
    for key, node in plain.items():
        if key == "hydra":
            continue
        if key not in declared and key not in known_groups - {"exp"}:
            if key == "exp" and isinstance(node, dict):
                raise ConfigError(_NO_PACKAGE_LINE.format(choices["exp"]))
            raise ConfigError(
                f"{key}: no such key or group{_hint(key, {*declared, *known_groups} - {'hydra', key}, names)}"
            )
        if isinstance(node, str) and isinstance(declared.get(key), dict) and "${" not in node:
            raise ConfigError(f"{key}: is a group; an exp file chooses it in its defaults, '- override /{key}: {node}'")
        _check_node(node, declared.get(key), key, names, full=not groups or key in groups)
        _check_interpolations(config, node, key, names)


def verb(*groups: str, folder: Path | None = None) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Makes `main(config)` the entry point of a verb: composes the config from sys.argv, checks it, runs it.

    `groups` are the conf groups that the verb builds (none given: all); their constructors are checked first.
    What a user can get wrong ends as one line `error: ...` on stderr (status 2 for the config, 1 for the run) without a
    traceback, unless HYDRA_FULL_ERROR=1; a bug keeps its traceback. Ctrl-C ends with status 130.
    """

    def decorate(function: Callable[[DictConfig], None]) -> Callable[[], None]:
        @functools.wraps(function)
        def main() -> None:
            wanted = os.environ.get("HYDRA_FULL_ERROR")

            @functools.wraps(function)
            def task(config: DictConfig) -> None:
                _set_environment("HYDRA_FULL_ERROR", wanted)  # as given, for the processes that the verb starts
                with _reported(wanted == "1"):
                    check(config, GlobalHydra.instance().config_loader(), HydraConfig.get(), groups)
                    function(config)

            if {"-h", "--help"} & set(sys.argv[1:]):
                print((inspect.getdoc(sys.modules[function.__module__]) or "").strip(), end="\n\n")
            with _reported(wanted == "1"):
                conf = folder or conf_dir()
                _set_environment("HYDRA_FULL_ERROR", "1")  # Hydra hands its own errors on instead of printing them
                try:
                    hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(task)()
                except (HydraException, ValueError, yaml.YAMLError) as error:  # not the verb's: those end in `task`
                    arguments = get_args_parser().parse_args()
                    if arguments.config_dir:
                        arguments.overrides += [f"hydra.searchpath=['file://{Path(arguments.config_dir).resolve()}']"]
                    raise ConfigError(_explain_composition(error, arguments.overrides, conf)) from error
                finally:
                    _set_environment("HYDRA_FULL_ERROR", wanted)

        return main

    return decorate


# The verbs that work on one run of a study; the others have to do with all of it.
OF_ONE_RUN = {"train", "evaluate", "export", "decode"}


def run_of_study(root: DictConfig) -> str:
    """The folder of this run among those of a study: its heads, what else the command line has set, and the seed.

    recurrent-1, recurrent-share=0.25-1. Empty for a verb that reads or writes what all runs share. What is set inside
    the study's own files is the same for all its runs and so in no name; nor is what makes no other run (see FREE).
    """
    if not HydraConfig.initialized() or HydraConfig.get().job.name not in OF_ONE_RUN:
        return ""
    hydra_config = HydraConfig.get()
    parts = [str(hydra_config.runtime.choices["heads"])]
    for override in hydra_config.overrides.task:
        key, _, value = override.lstrip("+~").partition("=")
        identity = key in PROLONGS or (key.partition(".")[0] in IDENTITY and key not in FREE)
        if identity and key not in ("heads", "seed"):
            parts.append(re.sub(r"[^\w.=]+", "_", f"{key.rpartition('.')[2]}={value}"))
    return "-".join([*parts, str(root.seed)])


OmegaConf.register_new_resolver("run_of_study", lambda *, _root_: run_of_study(_root_), replace=True)


@contextmanager
def _loader(folder: Path) -> Iterator[ConfigLoader]:
    with hydra.initialize_config_dir(str(folder.resolve()), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def _load(loader: ConfigLoader, overrides: list[str]) -> DictConfig:
    return loader.load_configuration("config", overrides, run_mode=RunMode.RUN)


def _plain(config: DictConfig) -> dict[str, Any]:
    """Plain dicts and lists, with `${...}` and `???` as they are written."""
    return cast(dict[str, Any], OmegaConf.to_container(config))


def _dotted(node: Any, path: str = "") -> Iterator[str]:
    for key, value in node.items():
        if key not in _INSTANTIATE_KEYS and key != "hydra":
            yield f"{path}{key}"
            if isinstance(value, dict):
                yield from _dotted(value, f"{path}{key}.")


def _hint(path: str, siblings: set[str], names: list[str]) -> str:
    """The nearest valid name: beside it, else the same name elsewhere, else anything that looks like the whole path."""
    parent, _, leaf = path.rpartition(".")
    elsewhere = [name for name in names if name.rpartition(".")[0] != parent]
    near = (
        get_close_matches(leaf, siblings, 1)
        or [name for name in elsewhere if name.rpartition(".")[2] == leaf]
        or get_close_matches(path, elsewhere, 1, cutoff=0.8)
    )
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; there is {', '.join(sorted(siblings))}" if 0 < len(siblings) <= 20 else ""


def _check_node(node: Any, declared: Any, path: str, names: list[str], full: bool) -> None:
    if isinstance(node, list):
        for i, item in enumerate(node):
            _check_node(item, None, f"{path}.{i}", names, full)
    if not isinstance(node, dict):
        return
    has_target = "_target_" in node
    if has_target:
        changed = not isinstance(declared, dict) or {*node} != {*declared} or node["_target_"] != declared["_target_"]
        if full or changed:
            _check_arguments(node, path, names)
    elif isinstance(declared, dict):
        for key in node.keys() - declared.keys():
            raise ConfigError(f"{path}.{key}: {path} has no '{key}'{_hint(f'{path}.{key}', {*declared}, names)}")
    for key, value in node.items():
        # A plain dict given to a constructor is that constructor's business.
        free_form = has_target and not (isinstance(value, dict) and "_target_" in value)
        below = declared.get(key) if isinstance(declared, dict) and not free_form else None
        _check_node(value, below, f"{path}.{key}", names, full)


def _check_arguments(node: dict[Any, Any], path: str, names: list[str]) -> None:
    target = node["_target_"]
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path}._target_: cannot load {target}: {error}") from error
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return  # a builtin that does not tell
    except TypeError as error:
        raise ConfigError(f"{path}._target_: {target} cannot be called: {error}") from error
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    given = {str(key) for key in node} - _INSTANTIATE_KEYS
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        for key in sorted(given - by_name):
            raise ConfigError(f"{path}.{key}: {target} takes no '{key}'{_hint(f'{path}.{key}', by_name, names)}")
    if node.get("_partial_"):
        return  # the rest comes from code
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given |= {*positional[: len(node.get("_args_", ()))]}
    for p in parameters:
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in given:
            raise ConfigError(f"{path}.{p.name}: {target} needs it; set {path}.{p.name} in conf/ (or _partial_: true)")


def _check_interpolations(config: DictConfig, node: Any, path: str, names: list[str]) -> None:
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            _check_interpolations(config, value, f"{path}.{key}", names)
    elif isinstance(node, str) and "${" in node:
        try:
            OmegaConf.select(config, path)
        except InterpolationKeyError as error:
            key = _first_match(r"Interpolation key '([^']*)' not found", str(error)) or ""
            siblings = {name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == key.rpartition(".")[0]}
            raise ConfigError(
                f"{path}: {node} names '{key}', which is not there{_hint(key, siblings, names)}"
            ) from error
        except InterpolationResolutionError:
            pass  # a '???' or an environment variable, which this verb may not need


def _explain_composition(error: Exception, overrides: list[str], folder: Path) -> str:
    """One line for what Hydra refused, with the nearest valid name where there is one."""
    file = _first_match(r"^In '([^']+)'", str(error))
    where = f"in conf/{file}.yaml: " if file not in (None, "config") else ""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        near = get_close_matches(option, error.options or [], 1)
        return (
            f"{where}{f'{group}={option}: ' if group else ''}conf/{group} has no '{option}'"
            + (f"; did you mean '{near[0]}'?" if near else "")
            + (f" (it has {', '.join(sorted(error.options))})" if error.options else "")
        )
    if file and "@exp." in str(error):  # its defaults went below exp
        return _NO_PACKAGE_LINE.format(file.removeprefix("exp/"))
    if unmatched := _first_match(r"Could not override '([^'@]+)[^']*'\. No match in the defaults list", str(error)):
        with _loader(folder) as loader:
            groups = {*loader.list_groups("")} - {"hydra"}
        if unmatched in groups:
            return f"{where}{unmatched} is not in the defaults list: write +{unmatched}=NAME"
        return f"{where}override {unmatched}: no such group{_hint(unmatched, groups, [])}"
    if key := _first_match(r"Could not override '([^']+)'\.\s+To append", str(error)):
        # Force it in, so that the check says who refuses it; of a sweep (-m) the first value will do.
        forced = []
        for override in OverridesParser.create().parse_overrides(overrides):
            line = override.input_line or ""
            given = line.partition("=")[0]
            if override.is_sweep_override():
                line = f"{given}={next(override.sweep_string_iterator())}"
            forced.append("++" + line if given == key else line)
        if forced != overrides:
            try:
                compose(forced, folder, (key.partition(".")[0],))
            except ConfigError as refused:
                return str(refused)
            return f"{key}: conf/ does not set it, but it can be set: write +{key}=VALUE"
    return " ".join(str(error).split()) or " ".join(str(error.__cause__).split())


def _first_match(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def _reported(with_traceback: bool) -> Iterator[None]:
    """Ends the process with the right status; Hydra would print its own shortened traceback for everything."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception as error:
        _end(error, with_traceback)


def _end(error: Exception, with_traceback: bool) -> NoReturn:
    cause: BaseException = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    from_config = cause is not error
    status = EXIT_FAILED
    message: str | None = None
    if isinstance(cause, ConfigError):
        message, status = str(cause), EXIT_USAGE
    elif isinstance(cause, MissingMandatoryValue):
        message, status = f"{cause.full_key} is needed: give it as {cause.full_key}=VALUE", EXIT_USAGE
    elif isinstance(cause, InterpolationResolutionError):
        message, status = f"{cause.full_key}: {str(cause).splitlines()[0]}", EXIT_USAGE
    elif isinstance(cause, OSError):
        message = f"{cause.filename}: {cause.strerror}" if cause.filename and cause.strerror else str(cause)
    elif isinstance(cause, ValueError) and (from_config or _raised_here(cause)):
        message = str(cause)
    elif from_config and type(cause).__name__ == "MisconfigurationException":
        message = str(cause)  # Lightning's, told by its name because this module does not import it
    if message is None or with_traceback:
        traceback.print_exception(error)
    else:
        print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


def _raised_here(error: BaseException) -> bool:
    """Whether this package itself raised it: a library's ValueError says little without its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _PACKAGE in Path(frames[-1].filename).resolve().parents
