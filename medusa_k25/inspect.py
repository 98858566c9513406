"""What is in a cache, who made it, and is it what it claims to be?

python -m medusa_k25.inspect cache=FOLDER [target=NAME]               a sample is checked, everything is counted
python -m medusa_k25.inspect cache=FOLDER [target=NAME] verify=full   every shard is re-hashed, every document checked

Opening checks that cache and target belong together. Counting reads ids and masks, not the states.
"""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from medusa_k25.cache import Cache, self_check, verify
from medusa_k25.cache.check import check_sample, index_faults, spread, unlisted_files
from medusa_k25.chat import pieces
from medusa_k25.checkpoint import find_checkpoint, load_heads
from medusa_k25.config import verb
from medusa_k25.conversations import default_device
from medusa_k25.data.contents import Census, Histogram, Lengths, first_answer
from medusa_k25.data.splits import split_of
from medusa_k25.data.windows import documents_of
from medusa_k25.fp8_cost import argmax_agreement, head_costs
from medusa_k25.reports.cache import summary, write_cache_page
from medusa_k25.reports.report import update_report
from medusa_k25.target import Target

# verify -> positions of the self-check at most, in as many documents at most
SELF_CHECKS = {"sample": (512, 256), "full": (8192, 8192)}
SAMPLES = 4  # documents that are shown


@verb("target")
def main(cfg: DictConfig) -> None:
    if cfg.verify not in SELF_CHECKS:
        raise ValueError(f"verify={cfg.verify}: expected one of {', '.join(SELF_CHECKS)}")
    target = instantiate(cfg.target)
    run_dir = Path(cfg.run_dir)
    cache = Cache.open(Path(cfg.cache), target, check=False)
    section = facts(cache) | {"verify": cfg.verify}
    print(
        f"{cache.path}: {cache.num_shards:,} shards, {cache.manifest.storage_dtype} states of D={cache.hidden_size:,}"
    )
    print(
        f"written by {cache.manifest.engine} with {cache.manifest.target['name']} ({cache.manifest.target['revision']})"
    )
    for file, size in section["unlisted"].items():
        print(f"note: {file} ({size / 1e6:,.1f} MB) is in no index: a killed writer left it, or one is at work")
    if cache.repeated:
        print(
            f"note: {len(cache.repeated):,} documents are stored twice, by commands that ran at once; the first copy "
            "of each is used"
        )
    if cfg.verify == "full":
        section["damaged"] = damaged = damage(cache)
        update_report(run_dir, "inspect", section)
        for name, faults in damaged.items():
            print(name, *faults, sep="\n  ")
        if damaged:
            raise ValueError(
                f"{len(damaged)} files of {cache.path} are damaged: {', '.join(damaged)}; "
                "restore them, or remove the shards' lines from the index and capture again"
            )
    check_sample(cache)
    check = self_check(cache, target, *SELF_CHECKS[cfg.verify])
    section |= counts(cache) | {
        "self_check": asdict(check),
        "fp8": fp8_cost(cache, target, run_dir / "checkpoints", cfg.checkpoint),
        "samples": samples(cache, target),
    }
    update_report(run_dir, "inspect", section)
    print(summary(section))
    sound = f"{cache.num_shards:,} of {cache.num_shards:,} shards are sound; " if cfg.verify == "full" else ""
    print(f"{sound}wrote {run_dir / 'report.json'} and {write_cache_page(run_dir)}")


def facts(cache: Cache) -> dict[str, Any]:
    """What manifest and index say."""
    manifest = cache.manifest
    writers = Counter(cache.shard_path(shard).name.rpartition("-")[0] for shard in range(cache.num_shards))
    return {
        "cache": str(cache.path),
        "fingerprint": cache.fingerprint,
        "engine": manifest.engine,
        "created": manifest.created,
        "target": {key: manifest.target[key] for key in ("name", "revision", "quantisation")},
        "storage_dtype": manifest.storage_dtype,
        "shards": cache.num_shards,
        "writers": dict(writers),
        "repeated": len(cache.repeated),
        "unlisted": {str(file): file.stat().st_size for file in unlisted_files(cache)},
    }


def damage(cache: Cache) -> dict[str, list[str]]:
    """File -> its faults, after reading everything."""
    found = index_faults(cache)
    sizes = [cache.shard_bytes(shard) for shard in range(cache.num_shards)]
    with tqdm(total=sum(sizes), desc="verify", unit="B", unit_scale=True, smoothing=0) as bar:
        for shard, faults in enumerate(verify(cache)):
            if faults:
                found[str(cache.shard_path(shard))] = faults
            bar.update(sizes[shard])
    return found


def counts(cache: Cache) -> dict[str, Any]:
    census = Census(cache)
    lengths = {"prompt": census.prompts_N, "answer": census.answers_A, "document": census.lengths_N}
    return {
        "total": asdict(census.total()),
        "splits": {name: asdict(part) for name, part in census.by_split().items()},
        "labels": {name: asdict(part) for name, part in census.by_label().items()},
        "lengths": {name: asdict(Lengths.of(some)) for name, some in lengths.items()},
        "histograms": {name: asdict(Histogram.of(some)) for name, some in lengths.items()},
        "duplicates": asdict(census.duplicates()),
        "origins": census.origins(),
    }


def fp8_cost(cache: Cache, target: Target, checkpoints: Path, which: str | int) -> dict[str, Any]:
    """What storing as fp8 would cost; "note" says what was measured, or why it was not."""
    if cache.storage_dtype == torch.float8_e4m3fn:
        return {"note": "the states are stored as fp8: what that cost can only be measured on a cache stored wider"}
    same_argmax, positions = argmax_agreement(cache, target.lm_head)
    size = (cache.hidden_size + 4) / (cache.hidden_size * cache.storage_dtype.itemsize)
    cost: dict[str, Any] = {"same_argmax": same_argmax, "positions": positions, "size": size}
    try:
        checkpoint = load_heads(find_checkpoint(checkpoints, which))
        checkpoint.refuse_other_target(target)
    except ValueError as error:  # a cache can be looked into without heads
        return cost | {"note": f"not measured with heads: {error}"}
    costs = head_costs(cache, documents_of(cache, "heldout"), checkpoint.speculator(target, default_device()))
    return cost | {
        "heads": [
            asdict(head)
            | {
                "top1": head.hits / max(head.labels, 1),
                "top1_fp8": (head.hits + head.gained - head.lost) / max(head.labels, 1),
                "points": head.points,
                "points_error": head.points_error,
            }
            for head in costs
        ],
        "note": f"heads of {checkpoint.path}",
    }


def samples(cache: Cache, target: Target) -> list[dict[str, Any]]:
    """Some documents, decoded where the tokenizer loads."""
    try:
        tokenizer = target.load_tokenizer()
    except ValueError as error:
        print(f"note: samples are shown as ids: {error}")
        tokenizer = None
    some = [cache.documents[index] for index in spread(len(cache.documents), SAMPLES)]
    return [
        {
            "id": document.id,
            "split": split_of(document.group, document.hash),
            "pieces": pieces(*first_answer(cache, document), tokenizer),
        }
        for document in some
    ]


if __name__ == "__main__":
    main()
