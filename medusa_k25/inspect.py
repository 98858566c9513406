"""What is in a cache, and is every shard as it was written? python -m medusa_k25.inspect cache=FOLDER [target=NAME]

Opening checks that cache and target belong together; then everything is read once: about the time of copying it.
"""

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from tqdm import tqdm

from medusa_k25.cache import Cache, Document, verify
from medusa_k25.config import verb
from medusa_k25.conversations import ends_in_loop
from medusa_k25.data.splits import SPLITS, split_of
from medusa_k25.report import update_report


@dataclass(frozen=True)
class Contents:
    """Of some documents of a cache."""

    documents: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    states: int = 0
    bytes: int = 0  # of the states
    loops: int = 0  # answers that end in a repetition loop


@verb("target")
def main(cfg: DictConfig) -> None:
    target = instantiate(cfg.target)
    cache = Cache.open(Path(cfg.cache), target)
    manifest = cache.manifest
    print(f"{cache.path}: {cache.num_shards:,} shards, {manifest.storage_dtype} states of D={cache.hidden_size:,}")
    print(f"written by {manifest.engine} with {manifest.target['name']} ({manifest.target['revision']})")
    contents = [(document, contents_of(cache, document)) for document in cache.documents]
    splits = add_up(((split_of(document.group, document.hash), part) for document, part in contents), SPLITS)
    labels = add_up((document.label or "(no label)", part) for document, part in contents)
    total = add_up(("total", part) for _, part in contents)
    print(table("split", splits | total))
    print(table("label", labels))

    faults = list(tqdm(verify(cache), total=cache.num_shards, desc="verify", unit="shard"))
    damaged = {str(cache.shard_path(shard)): found for shard, found in enumerate(faults) if found}
    section: dict[str, Any] = {
        "cache": str(cache.path),
        "fingerprint": cache.fingerprint,
        "engine": manifest.engine,
        "storage_dtype": manifest.storage_dtype,
        "shards": cache.num_shards,
        "total": asdict(total["total"]),
        "splits": {name: asdict(part) for name, part in splits.items()},
        "labels": {name: asdict(part) for name, part in labels.items()},
        "damaged": damaged,
    }
    update_report(Path(cfg.run_dir), "inspect", section)
    for shard, found in damaged.items():
        print(shard, *found, sep="\n  ")
    if damaged:
        raise ValueError(
            f"{len(damaged)} of {cache.num_shards} shards are damaged: {', '.join(damaged)}; "
            "restore the files, or remove their lines from the index and capture again"
        )
    print(f"{cache.num_shards:,} of {cache.num_shards:,} shards are sound; wrote {Path(cfg.run_dir) / 'report.json'}")


def contents_of(cache: Cache, document: Document) -> Contents:
    answer_ids = cache.token_ids(document)[cache.loss_mask(document)]
    states = document.row_stop - document.row_start
    bytes_a_state = cache.hidden_size * cache.storage_dtype.itemsize
    if cache.storage_dtype == torch.float8_e4m3fn:
        bytes_a_state += 4  # its scale
    loops = int(ends_in_loop(answer_ids.tolist()))
    return Contents(1, document.length, len(answer_ids), states, states * bytes_a_state, loops)


def add_up(parts: Iterable[tuple[str, Contents]], names: Iterable[str] = ()) -> dict[str, Contents]:
    """The sum of each named part: `names` first, also those without a document, then the others as they come."""
    sums = {name: Contents() for name in names}
    for name, part in parts:
        so_far = sums.get(name, Contents())
        sums[name] = Contents(*(a + b for a, b in zip(astuple(so_far), astuple(part), strict=True)))
    return sums


def table(title: str, parts: dict[str, Contents]) -> str:
    columns = ("documents", "tokens", "answer tokens", "states", "GB of states", "end in a loop")
    width = max(map(len, [title, *parts]))
    lines = [f"\n{title:<{width}}" + "".join(f"{column:>15}" for column in columns)]
    for name, part in parts.items():
        counts = f"{part.documents:>15,}{part.tokens:>15,}{part.answer_tokens:>15,}{part.states:>15,}"
        lines.append(f"{name:<{width}}{counts}{part.bytes / 1e9:>15.3f}{part.loops:>15,}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
