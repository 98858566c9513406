"""The folder to serve from: heads, draft vocabulary and tree under vLLM's names.

python -m medusa_k25.export [checkpoint=best] [num_nodes=9] [tree=[[0],[0,0],[1]]] [export_dir=FOLDER]
"""

from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from medusa_k25.cache import Cache
from medusa_k25.checkpoint import HeadsCheckpoint, find_checkpoint, load_heads
from medusa_k25.config import verb
from medusa_k25.data.windows import documents_of
from medusa_k25.replay import answer_ranks, best_tree
from medusa_k25.report import read_report, update_report
from medusa_k25.serving.formats import export_heads
from medusa_k25.tree import Tree


@verb("target")
def main(cfg: DictConfig) -> None:
    target = instantiate(cfg.target)
    run_dir, folder = Path(cfg.run_dir), Path(cfg.export_dir)
    checkpoint = load_heads(find_checkpoint(run_dir / "checkpoints", cfg.checkpoint))
    checkpoint.refuse_other_target(target)
    vocabulary, trained = checkpoint.vocabulary, checkpoint.record["config"]
    if cfg.tree is not None:
        tree = Tree(cfg.tree)
    elif checkpoint.record["tree"] and all(cfg[key] == trained[key] for key in ("num_nodes", "max_width")):
        tree = Tree(checkpoint.record["tree"])
    else:
        cache = Cache.open(Path(cfg.cache), target)
        lm_head_MD = vocabulary.rows(target.lm_head).float()
        calibration = answer_ranks(checkpoint.heads, lm_head_MD, vocabulary, cache, documents_of(cache, "calibration"))
        tree = best_tree(calibration, cfg.num_nodes, cfg.max_width)
    provenance = {key: checkpoint.record[key] for key in ("target", "cache_fingerprint", "code_version", "step")}
    export_heads(folder, checkpoint.heads, vocabulary, tree, getattr(torch, cfg.export_dtype), provenance)
    update_report(
        run_dir, "export", {"folder": str(folder), "checkpoint": str(checkpoint.path), "nodes": tree.num_nodes}
    )
    if cfg.logger.wandb_project is not None:
        log_to_wandb(cfg, checkpoint, tree, provenance)
    print(f"wrote {folder}: {checkpoint.heads.num_heads} heads in {cfg.export_dtype}, tree of {tree.num_nodes} nodes")


def log_to_wandb(cfg: DictConfig, checkpoint: HeadsCheckpoint, tree: Tree, provenance: dict[str, Any]) -> None:
    """The exported folder as an artifact of the training's run, which it continues, and what `evaluate` has found."""
    _, run = instantiate(cfg.logger)
    step, metrics = checkpoint.record["step"], checkpoint.record["metrics"]
    logged = {key: checkpoint.record[key] for key in ("target", "cache_fingerprint", "code_version", "config")}
    config = Path(cfg.run_dir) / "config.yaml"  # the training may have gone on otherwise after this checkpoint
    if config.exists():
        logged["config"] = OmegaConf.to_container(OmegaConf.load(config))
    run.log_hyperparams(logged)
    run.log_heads(metrics, step)
    if "evaluate" in (report := read_report(Path(cfg.run_dir))):
        run.log_evaluation(report["evaluate"]["rows"], cfg.break_even, step)
    acceptance = {name: value for name, value in metrics.items() if "/acceptance_" in name}
    tree_paths = [list(path) for path in tree.paths]
    run.log_folder(Path(cfg.export_dir), {**provenance, "acceptance": acceptance, "tree": tree_paths})
    run.finish()


if __name__ == "__main__":
    main()
