"""Decode held-out prompts with the exported heads and hold output and counts against greedy text and replay.

python -m medusa_k25.decode [export_dir=FOLDER] [decode_prompts=20]
"""

from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from medusa_k25.cache import Cache
from medusa_k25.config import verb
from medusa_k25.data.windows import documents_of
from medusa_k25.heads import Speculator
from medusa_k25.reports.evaluation import write_page
from medusa_k25.reports.report import read_report, summary, update_report
from medusa_k25.serving.beside_files import open_beside
from medusa_k25.serving.decode import Drafter, prove
from medusa_k25.serving.formats import open_served, refuse_heads_of_another_target


@verb("target")
def main(cfg: DictConfig) -> None:
    target = instantiate(cfg.target)
    cache = Cache.open(Path(cfg.cache), target, allow_target_mismatch=cfg.allow_target_mismatch)
    folder = Path(cfg.export_dir)
    opened = open_served(folder, target.vocab_size)
    differs = refuse_heads_of_another_target(opened, target, cfg.allow_target_mismatch)
    served = opened.load()
    found = open_beside(served, folder, target.vocab_size)
    ours = served.config.get("medusa_k25")
    made_from = ours.get("cache_fingerprint") if isinstance(ours, dict) else None  # blank and foreign heads have none
    if made_from is not None and not cfg.allow_other_cache and not differs:  # another target's text is another text
        cache.refuse_other(made_from, cfg.export_dir)
    drafter = Drafter(Speculator.of(served.heads, served.vocabulary, target), served.tree)
    documents = documents_of(cache, "heldout")[: cfg.decode_prompts]
    proof = prove(
        target.load_model(torch.float32),
        target.end_ids,
        drafter,
        cache,
        documents,
        None if found is None else found.load(),
    )
    print(proof)
    run_dir = Path(cfg.run_dir)
    update_report(run_dir, "decode", proof.as_json())
    if "evaluate" in read_report(run_dir):
        write_page(run_dir)
    print(f"\n{summary(run_dir)}")
    if not proof.holds:
        raise ValueError("decoding did not equal greedy text and replay; see the differences above")


if __name__ == "__main__":
    main()
