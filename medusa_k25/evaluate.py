"""What a checkpoint accepts on held-out text, and in which tree.

python -m medusa_k25.evaluate [checkpoint=best|last|STEP|FOLDER]
"""

from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from medusa_k25.cache import Cache
from medusa_k25.checkpoint import find_checkpoint, load_heads
from medusa_k25.config import verb
from medusa_k25.conversations import default_device
from medusa_k25.report import acceptance_table, update_report, write_page


@verb("target", "evaluate")
def main(cfg: DictConfig) -> None:
    target = instantiate(cfg.target)
    cache = Cache.open(Path(cfg.cache), target)
    run_dir = Path(cfg.run_dir)
    checkpoint = load_heads(find_checkpoint(run_dir / "checkpoints", cfg.checkpoint))
    checkpoint.refuse_other_target(target)
    if not cfg.allow_other_cache:
        cache.refuse_other(checkpoint.record["cache_fingerprint"], str(checkpoint.path))
    device = default_device()
    lm_head_MD = checkpoint.vocabulary.rows(target.lm_head).to(device, torch.float32)
    heads = checkpoint.heads.to(device)
    evaluation = instantiate(cfg.evaluate).of_cache(cache, heads, checkpoint.vocabulary, lm_head_MD)
    print(acceptance_table(evaluation))
    made_from = {"checkpoint": str(checkpoint.path), "cache_fingerprint": cache.fingerprint}
    update_report(run_dir, "evaluate", made_from | evaluation.as_json())
    print(f"wrote {write_page(run_dir)}")


if __name__ == "__main__":
    main()
