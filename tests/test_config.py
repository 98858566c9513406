"""Config errors are found at start, named with the nearest valid name, and end without a traceback."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf

from medusa_k25.config import ConfigError, compose, conf_dir
from medusa_k25.heads import ResidualHeads

ROOT = Path(__file__).parents[1]

TOY_CODE = '''
"""A toy verb, with the toy parts that its config builds."""

import json
import logging
import os
import time
from pathlib import Path

from hydra.utils import instantiate

from medusa_k25.config import verb


class Target:
    def __init__(self, path, size=4):
        if size < 0:
            raise ValueError(f"target size is {size}; give a positive one")
        self.path, self.size = path, size


class Heads:
    def __init__(self, size, num_heads=4, block=None, options=None):
        self.size, self.num_heads, self.block, self.options = size, num_heads, block, options


def block(width, act="silu"):
    return (width, act)


@verb("target", "heads")
def main(config):
    logging.getLogger("medusa_k25.toy").info("told")
    target = instantiate(config.target)
    heads = instantiate(config.heads, size=target.size)
    if config.action == "read":
        open(config.name)
    if config.action == "bug":
        [].pop()
    if config.action == "library":
        json.loads("{")
    if config.action == "wait":
        print("waiting", flush=True)
        time.sleep(30)
    print("built", config.name, target.path, heads().num_heads, os.environ.get("HYDRA_FULL_ERROR"))


if __name__ == "__main__":
    main()
'''

TOY_CONF = {
    "config.yaml": """
        defaults:
          - target: small
          - heads: two
          - optimizer: adamw
          - trainer: cpu
          - schedule: linear
          - hardware: null
          - _self_
          - override hydra/job_logging: stdout
          - override hydra/hydra_logging: none
        name: toy
        run_dir: runs/${name}
        cache: ${run_dir}/cache
        action: build
        alternative: null
        hydra:
          run: {dir: .}
          sweep: {dir: runs/multirun, subdir: .}
          output_subdir: null
          job_logging:
            formatters: {simple: {format: "%(message)s"}}
            root: {level: WARNING}
            loggers: {medusa_k25: {level: INFO}}
    """,
    "target/small.yaml": """
        _target_: toy.Target
        path: small
    """,
    "target/large.yaml": """
        _target_: toy.Target
        path: ???
        size: 8
    """,
    "heads/two.yaml": """
        _target_: toy.Heads
        _partial_: true
        num_heads: 2
        block: {_target_: toy.block, width: 3}
        options: {free: 1}
    """,
    "optimizer/adamw.yaml": """
        _target_: torch.optim.AdamW
        _partial_: true
        lr: 1.0e-3
    """,
    "trainer/cpu.yaml": """
        _target_: lightning.Trainer
        max_steps: 400
    """,
    "trainer/gpu.yaml": """
        _target_: lightning.Trainer
        max_steps: 400
        precision: bf16-mixed
    """,
    "schedule/builtin.yaml": """
        _target_: builtins.dict
        anything: 1
    """,
    "schedule/linear.yaml": """
        _target_: toy.block
        width: 1
    """,
    "hardware/cpu.yaml": """
        _target_: toy.block
        width: 2
    """,
    "exp/good.yaml": """
        # @package _global_
        defaults:
          - override /target: large
        name: good
        target: {path: here}
        heads: {num_heads: 5, options: {other: 2}}
        schedule: {act: gelu}
    """,
}


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        path.write_text("\n".join(line[indent:] for line in lines) + "\n")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with conf/ and the module `toy`; the current folder is elsewhere."""
    write_files(tmp_path / "conf", TOY_CONF)
    (tmp_path / "toy.py").write_text(
        TOY_CODE.replace('"heads")', f'"heads", folder=Path({str(tmp_path / "conf")!r}))', 1)
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


def toy_environment(toy: Path, **extra: str) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
    return environment | {"PYTHONPATH": f"{toy}{os.pathsep}{ROOT}"} | extra


def run_toy(toy: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toy", *arguments]
    return subprocess.run(command, env=toy_environment(toy, **environment), capture_output=True, text=True, timeout=60)


def refused(toy: Path, *overrides: str, exp: str | None = None) -> str:
    """The message with which `overrides`, or an exp file with this body, is refused."""
    if exp is not None:
        write_files(toy / "conf", {"exp/bad.yaml": exp})
        overrides = ("+exp=bad", *overrides)
    with pytest.raises(ConfigError) as caught:
        compose(list(overrides), toy / "conf")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_good_experiment_composes(toy: Path) -> None:
    config = compose(
        ["+exp=good", "heads.num_heads=6", "+trainer.min_steps=1", "++cache=elsewhere", "hardware=cpu"], toy / "conf"
    )
    assert "hydra" not in config
    assert (config.name, config.run_dir, config.cache) == ("good", "runs/good", "elsewhere")
    assert config.trainer == {"_target_": "lightning.Trainer", "max_steps": 400, "min_steps": 1}
    assert config.schedule == {"_target_": "toy.block", "width": 1, "act": "gelu"}
    heads = instantiate(config.heads, size=3)()
    assert (heads.size, heads.num_heads, heads.block, dict(heads.options)) == (
        3,
        6,
        (3, "silu"),
        {"free": 1, "other": 2},
    )
    assert instantiate(config.target).path == "here"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_stepz=3", "trainer.max_stepz: lightning.Trainer takes no 'max_stepz'; did you mean 'max_steps'?"),
        (
            "+trainer.max_stepz=3",
            "trainer.max_stepz: lightning.Trainer takes no 'max_stepz'; did you mean 'max_steps'?",
        ),
        ("++optimizer.lrr=1", "optimizer.lrr: torch.optim.AdamW takes no 'lrr'; did you mean 'lr'?"),
        ("heads.block.witdh=1", "heads.block.witdh: toy.block takes no 'witdh'; did you mean 'width'?"),
        (
            "trainer.min_steps=1",
            "trainer.min_steps: conf/ does not set it, but it can be set: write +trainer.min_steps=VALUE",
        ),
        ("trainr.max_steps=3", "trainr: no such key or group; did you mean 'trainer'?"),
        ("max_steps=3", "max_steps: no such key or group; did you mean 'trainer.max_steps'?"),
        ("+ex=good", "ex: no such key or group; did you mean 'exp'?"),
        ("+newkey=1", "newkey: no such key or group; there is action, alternative, cache, exp,"),
        ("exp=good", "exp is not in the defaults list: write +exp=NAME"),
        ("+exp=goood", "exp=goood: conf/exp has no 'goood'; did you mean 'good'? (it has good)"),
        ("target=smal", "target=smal: conf/target has no 'smal'; did you mean 'small'? (it has large, small)"),
        ("targt=small", "targt: no such key or group; did you mean 'target'?"),
        ("cache=${nmae}", "cache: ${nmae} names 'nmae', which is not there; did you mean 'name'?"),
        (
            "cache=${trainr.max_steps}",
            "cache: ${trainr.max_steps} names 'trainr.max_steps', which is not there; did you",
        ),
        ("name", "missing EQUAL"),
        ("~heads", "heads: was deleted"),
        ("++schedule.cdoe=1", "schedule.cdoe: toy.block takes no 'cdoe'; there is act, width"),
        ("name=a,b", "Ambiguous value for argument 'name=a,b'"),
    ],
)
def test_a_wrong_override_is_refused(toy: Path, override: str, message: str) -> None:
    assert message in refused(toy, override)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "trainer: {max_stepz: 3}",
            "trainer.max_stepz: lightning.Trainer takes no 'max_stepz'; did you mean 'max_steps'?",
        ),
        ("optimizer: {lrr: 1}", "optimizer.lrr: torch.optim.AdamW takes no 'lrr'; did you mean 'lr'?"),
        ("heads: {block: {witdh: 1}}", "heads.block.witdh: toy.block takes no 'witdh'; did you mean 'width'?"),
        ("lerning_rate: 1", "lerning_rate: no such key or group"),
        ("run_dri: x", "run_dri: no such key or group; did you mean 'run_dir'?"),
        (
            "trainer: gpu",
            "trainer: is a group; an exp file chooses it in its defaults, '- override /trainer: gpu'",
        ),
        ("target: {_target_: toy.Targt}", "target._target_: cannot load toy.Targt"),
        ("target: {_target_: toy.os}", "target._target_: toy.os cannot be called"),
        ("heads: {block: {_target_: toy.Target}}", "heads.block.width: toy.Target takes no 'width'"),
        ("heads: {options: {_target_: toy.block}}", "heads.options.free: toy.block takes no 'free'"),
        ("optimizer: {betas: {_target_: toy.block}}", "optimizer.betas.width: toy.block needs it"),
        (
            "trainer: {callbacks: [{_target_: toy.block, with: 1}]}",
            "trainer.callbacks.0.with: toy.block takes no 'with'",
        ),
        ("alternative: {_target_: toy.block}", "alternative.width: toy.block needs it; set alternative.width"),
        (
            "defaults: [override /targt: large]",
            "in conf/exp/bad.yaml: override targt: no such group; did you mean 'target'?",
        ),
        ("defaults: [override /target: lage]", "target=lage: conf/target has no 'lage'; did you mean 'large'?"),
        ("name: [", "exp/bad.yaml"),
    ],
)
def test_a_wrong_experiment_file_is_refused(toy: Path, body: str, message: str) -> None:
    assert message in refused(toy, exp=f"# @package _global_\n{body}")


@pytest.mark.parametrize("body", ["name: mine", "# mine\n# @package _global_\ndefaults: [override /target: large]"])
def test_an_experiment_file_without_its_package_line_on_top_is_refused(toy: Path, body: str) -> None:
    assert "conf/exp/bad.yaml: must start with the line '# @package _global_'" in refused(toy, exp=body)


def test_arguments_given_by_position_and_partially_are_not_missing(toy: Path) -> None:
    body = "# @package _global_\nalternative: {_target_: toy.block, _args_: [3]}\nheads: {block: {_partial_: true}}"
    write_files(toy / "conf", {"exp/fine.yaml": body})
    assert instantiate(compose(["+exp=fine"], toy / "conf").alternative) == (3, "silu")


def test_a_builtin_without_a_signature_takes_anything(toy: Path) -> None:
    assert instantiate(compose(["schedule=builtin"], toy / "conf").schedule) == {"anything": 1}


def test_a_file_of_conf_itself_is_checked(toy: Path) -> None:
    write_files(toy / "conf", {"heads/own.yaml": "_target_: toy.Heads\nnum_head: 3\nsize: 1"})
    assert "heads.num_head: toy.Heads takes no 'num_head'; did you mean 'num_heads'?" in refused(toy, "heads=own")


def test_a_verb_runs_and_writes_nothing_of_its_own(toy: Path) -> None:
    result = run_toy(toy, "+exp=good", "target.path=there")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "told\nbuilt good there 5 None\n"
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ["heads.num_haeds=3"],
            2,
            "error: heads.num_haeds: toy.Heads takes no 'num_haeds'; did you mean 'num_heads'?\n",
        ),
        (["+schedule.widht=3"], 2, "error: schedule.widht: toy.block takes no 'widht'; did you mean 'width'?\n"),
        (
            ["target=large"],
            2,
            "error: target.path is needed: give it as target.path=VALUE\n",
        ),
        (["+target.size=-1"], 1, "error: target size is -1; give a positive one\n"),
        (["heads=null"], 2, "error: Config group override must be a string or a list. Got NoneType\n"),
        (["name=${oc.env:TOY_UNSET}"], 2, 'error: name: KeyError raised while resolving interpolation: "Environment'),
        (["action=read", "name=absent.txt"], 1, "error: absent.txt: No such file or directory\n"),
    ],
)
def test_user_errors_are_one_line(toy: Path, arguments: list[str], status: int, message: str) -> None:
    result = run_toy(toy, *arguments)
    assert result.returncode == status
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1
    assert list(Path.cwd().iterdir()) == []


def test_experiments_may_lie_in_a_folder_of_the_users_own(toy: Path) -> None:
    mine = {"exp/mine.yaml": "# @package _global_\nname: mine", "exp/bad.yaml": "# @package _global_\nnmae: mine"}
    write_files(toy / "mine", mine | {"heads/mine.yaml": "_target_: toy.Heads\n_partial_: true\nnum_heads: 7"})
    for where in (f"--config-dir={toy / 'mine'}", f"hydra.searchpath=[file://{toy / 'mine'}]"):
        fine = run_toy(toy, "+exp=mine", "heads=mine", where)
        assert (fine.stderr, fine.stdout) == ("", "told\nbuilt mine small 7 None\n")
    where = f"--config-dir={toy / 'mine'}"
    assert "did you mean 'name'?" in run_toy(toy, "+exp=bad", where).stderr
    assert "heads.num_haeds: toy.Heads takes no" in run_toy(toy, "+exp=mine", "heads.num_haeds=3", where).stderr


@pytest.mark.parametrize(("action", "error"), [("bug", "IndexError"), ("library", "JSONDecodeError")])
def test_a_bug_keeps_its_traceback(toy: Path, action: str, error: str) -> None:
    result = run_toy(toy, f"action={action}")
    assert result.returncode == 1
    assert "Traceback" in result.stderr and 'toy.py", line' in result.stderr and error in result.stderr


def test_full_error_shows_the_traceback_of_a_user_error(toy: Path) -> None:
    result = run_toy(toy, "action=read", "name=absent.txt", HYDRA_FULL_ERROR="1")
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "FileNotFoundError" in result.stderr


def test_ctrl_c_ends_with_a_notice(toy: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "toy", "action=wait"],
        env=toy_environment(toy),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a test run in the background ignores SIGINT, and its children would inherit that
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        while process.stdout.readline() != "waiting\n":
            assert process.poll() is None
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr.read() == "interrupted; the same command continues\n"


def test_hydras_own_features_work(toy: Path) -> None:
    shown = run_toy(toy, "--cfg", "job", "+exp=good")
    assert shown.returncode == 0
    assert OmegaConf.create(shown.stdout).heads.num_heads == 5
    swept = run_toy(toy, "-m", "heads.num_heads=3,4", "name=run_${heads.num_heads}")
    assert (swept.returncode, swept.stderr) == (0, "")
    assert [line for line in swept.stdout.splitlines() if line.startswith("built")] == [
        "built run_3 small 3 None",
        "built run_4 small 4 None",
    ]
    for key in ("heads.num_haeds", "+heads.num_haeds"):
        assert "did you mean 'num_heads'?" in run_toy(toy, "-m", "name=a,b", f"{key}=3,4").stderr


def test_verbs_are_listed_without_importing_torch() -> None:
    code = "import runpy, sys; runpy.run_module('medusa_k25', run_name='__main__'); assert 'torch' not in sys.modules"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    verbs = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ")]
    assert verbs == "plan generate capture inspect train evaluate study export decode probe".split()
    assert "--help" in result.stdout
    assert all((ROOT / "medusa_k25" / f"{verb}.py").is_file() for verb in verbs)


EXPERIMENTS = sorted((conf_dir() / "exp").glob("*.yaml"))


def test_the_default_config_composes() -> None:
    assert compose([]).run_dir == f"runs/{compose([]).name}"


@pytest.mark.parametrize(
    "group", sorted(p.name for p in conf_dir().iterdir() if p.is_dir() and p.name not in ("exp", "hydra"))
)
def test_every_option_of_a_group_fits_its_constructor(group: str) -> None:
    for option in sorted((conf_dir() / group).glob("*.yaml")):
        compose([f"{group}={option.stem}"])


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_composes_and_follows_the_rules(path: Path) -> None:
    config = compose([f"+exp={path.stem}"])
    assert config.name == path.stem or path.stem in config.run_dir
    # Hydra reads its package line from the top only, so the command is the second line.
    package, command = path.read_text().splitlines()[:2]
    assert package == "# @package _global_"
    assert command.startswith("# python -m medusa_k25.") and f"+exp={path.stem}" in command
    # An exp body would beat `target=...` and device counts given on the command line.
    body = yaml.safe_load(path.read_text())
    assert "target" not in body
    assert not {"devices", "num_nodes", "accelerator"} & set(body.get("trainer", {}))
    assert "tiny_k25" in compose([f"+exp={path.stem}", "target=tiny_k25"]).target._target_
    # nor the head type: heads are sized in files of their group
    plain = compose([f"+exp={path.stem}", "heads=residual", "draft_vocab_size=null"])
    heads = instantiate(plain.heads)(hidden_size=8, draft_vocab_size=16)
    assert (type(heads), plain.draft_vocab_size) == (ResidualHeads, None)
