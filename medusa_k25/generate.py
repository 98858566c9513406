"""The target's own answers to prompts: python -m medusa_k25.generate [prompts=FILE] [generate.max_new_tokens=64]"""

from dataclasses import asdict
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from medusa_k25.config import verb
from medusa_k25.conversations import load_prompts
from medusa_k25.report import update_report
from medusa_k25.target import Target


@verb("target", "generate")
def main(cfg: DictConfig) -> None:
    generate(cfg, instantiate(cfg.target))


def generate(cfg: DictConfig, target: Target) -> None:
    report = instantiate(cfg.generate).run(target, load_prompts(cfg.prompts), Path(cfg.conversations))
    update_report(Path(cfg.run_dir), "generate", {"conversations": cfg.conversations, **asdict(report)})


if __name__ == "__main__":
    main()
