"""The target's hidden states over its own answers: python -m medusa_k25.capture [conversations=FILE] [cache=FOLDER]

With server=URL a recording SGLang server computes and writes them; storage and dtypes are then its own.
With dry_run=true it only says what it would store, and how much space that takes.
"""

from dataclasses import asdict
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from medusa_k25.cache.record_client import Replay
from medusa_k25.config import verb
from medusa_k25.report import update_report
from medusa_k25.target import Target


@verb("target", "capture")
def main(cfg: DictConfig) -> None:
    capture(cfg, instantiate(cfg.target))


def capture(cfg: DictConfig, target: Target) -> None:
    capturing = instantiate(cfg.capture)
    if cfg.server is not None:
        capturing = Replay(cfg.server, leave_out=capturing.leave_out)
    conversations, cache = Path(cfg.conversations), Path(cfg.cache)
    if cfg.dry_run:
        capturing.plan(target, conversations, cache)
        print("dry run: nothing was written")
        return
    report = capturing.run(target, conversations, cache)
    update_report(Path(cfg.run_dir), "capture", {"cache": cfg.cache, **asdict(report)})


if __name__ == "__main__":
    main()
