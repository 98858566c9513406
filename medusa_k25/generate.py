"""The target's own answers to prompts: python -m medusa_k25.generate [prompts=FILE] [generate.max_new_tokens=64]

With server=URL an SGLang server, or an OpenAI-compatible one that takes token ids, gives the answers.
With dry_run=true it only says how many prompts and tokens that would be.
"""

from dataclasses import asdict
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from medusa_k25.config import verb
from medusa_k25.prompts import load_prompts
from medusa_k25.reports.report import update_report
from medusa_k25.target import Target


@verb("target", "generate")
def main(cfg: DictConfig) -> None:
    generate(cfg, instantiate(cfg.target))


def generate(cfg: DictConfig, target: Target) -> None:
    generator, prompts, conversations = instantiate(cfg.generate), load_prompts(cfg.prompts), Path(cfg.conversations)
    if cfg.dry_run:
        generator.plan(target, prompts, conversations, cfg.server)
        print("dry run: nothing was written")
        return
    report = generator.run(target, prompts, conversations, cfg.server)
    update_report(Path(cfg.run_dir), "generate", {"conversations": cfg.conversations, **asdict(report)})


if __name__ == "__main__":
    main()
