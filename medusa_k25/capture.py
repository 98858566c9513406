"""The target's hidden states over its own answers: python -m medusa_k25.capture [conversations=FILE] [cache=FOLDER]

With server=URL a recording SGLang server computes and writes them; storage and dtypes are then its own.
With source=NAME path=FOLDER they are imported from files that another engine wrote; conversations=FILE says which
conversations those are of.
With dry_run=true it only says what it would store, and how much space that takes.
"""

from dataclasses import asdict
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from medusa_k25.cache.capture import Capture
from medusa_k25.cache.imports import Import, first_of
from medusa_k25.cache.record_client import Replay
from medusa_k25.config import ConfigError, verb
from medusa_k25.reports.report import update_report
from medusa_k25.target import Target


@verb("target", "capture")
def main(cfg: DictConfig) -> None:
    capture(cfg, instantiate(cfg.target))


def capture(cfg: DictConfig, target: Target) -> None:
    capturing = instantiate(cfg.capture)
    if cfg.source is not None:
        import_files(cfg, target, capturing)
        return
    if not cfg.conversations:
        raise ConfigError("capture reads the answers of a file: give conversations=FILE, or source= and path=FOLDER")
    conversations, cache = Path(cfg.conversations), Path(cfg.cache)
    if cfg.server is not None:
        capturing = Replay(cfg.server, leave_out=capturing.leave_out)
    if cfg.dry_run:
        capturing.plan(target, conversations, cache)
        print("dry run: nothing was written")
        return
    report = capturing.run(target, conversations, cache)
    update_report(Path(cfg.run_dir), "capture", {"cache": cfg.cache, **asdict(report)})


def import_files(cfg: DictConfig, target: Target, capturing: Capture) -> None:
    if cfg.server is not None or not cfg.path:
        raise ConfigError("source= imports files: give their folder as path=FOLDER, and no server=")
    conversations, cache = Path(cfg.conversations) if cfg.conversations else None, Path(cfg.cache)
    if conversations == Path(cfg.run_dir) / "conversations.jsonl" and not conversations.exists():
        conversations = None  # a run's own need not be there
    importing = Import(cfg.source, Path(cfg.path), capturing, conversations)
    if cfg.dry_run:
        importing.plan(target, cache)
        print("dry run: nothing was written")
        return
    report = importing.run(target, cache)
    update_report(Path(cfg.run_dir), "capture", {"cache": cfg.cache, **asdict(report)})
    if report.faults:
        raise ValueError(
            f"{len(report.faults)} files or texts of {cfg.path} were left out, all others are stored; mend them and "
            f"run the same command again: {first_of(report.faults, count=10)}"
        )


if __name__ == "__main__":
    main()
