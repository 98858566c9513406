"""How fast training reads a cache, and what memory that takes: python -m bench.reading

- speed: windows of 64 positions of D=7168 in bf16, in random order, labels included (`data.windows.Windows`), against
  `cat` of the same files, in turns and from the page cache; the median of the ratios of each round.
- memory: RssAnon, which no file backs, of a fresh process that opens a small and a large cache and reads as many
  windows of each. Their states are holes in sparse files: they take no place on the disk.
"""

import argparse
import json
import multiprocessing
import random
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from bench.cache_reader import anonymous_mb, write_cache
from medusa_k25.cache import Cache
from medusa_k25.cache.manifest import sealed_line
from medusa_k25.data.sampler import Share
from medusa_k25.data.windows import Windows

WINDOW, BATCH_SIZE, K = 64, 8, 4
NO_COUNT = torch.zeros(K, dtype=torch.long)


def read(windows: Windows, count: int) -> int:
    """Read so many windows, at most all of them, in random order; returns the bytes of their states."""
    order = random.Random(0).sample(range(len(windows)), min(count, len(windows)))
    return sum(
        windows[Share(order[i : i + BATCH_SIZE], NO_COUNT)].hidden_ND.nbytes for i in range(0, len(order), BATCH_SIZE)
    )


def compare(path: Path, hidden_size: int, gigabytes: float, rounds: int) -> None:
    cache = write_cache(path, "bfloat16", hidden_size, gigabytes * 1e9)
    windows = Windows(cache, cache.documents, WINDOW, K)
    size = sum(cache.shard_bytes(shard) for shard in range(cache.num_shards))
    print(f"{size / 1e6:,.0f} MB, {len(windows):,} windows of {WINDOW} positions x {hidden_size} in bf16")
    speeds: dict[str, list[float]] = {"windows": [], "cat": []}
    for number in range(rounds):
        start = time.perf_counter()
        speeds["windows"].append(read(windows, len(windows)) / 1e6 / (time.perf_counter() - start))
        start = time.perf_counter()
        subprocess.run("cat -- * > /dev/null", shell=True, check=True, cwd=path / "shards")
        speeds["cat"].append(size / 1e6 / (time.perf_counter() - start))
        print(f"  round {number + 1:2}   " + "  ".join(f"{name} {v[-1]:,.0f} MB/s" for name, v in speeds.items()))
    ratio = median(own / cat for own, cat in zip(*speeds.values(), strict=True))
    print(f"  medians    " + "  ".join(f"{k} {median(v):,.0f} MB/s" for k, v in speeds.items()) + f"; ratio {ratio:.2f}")


def make_sparse(path: Path, num_bytes: float, hidden_size: int) -> Cache:
    """A cache whose every shard is the first one, without the states' bytes."""
    cache = write_cache(path, "bfloat16", hidden_size, 16 * 2048 * hidden_size * 2)
    whole, slot = cache.shard_path(0).read_bytes(), cache._slots[0]["hidden"]
    index = path / "index" / "main.jsonl"
    entry = json.loads(index.read_bytes())
    del entry["line_sha256"]
    documents = entry["documents"]
    with index.open("wb") as lines:
        for shard in range(max(1, round(num_bytes / len(whole)))):
            entry["shard"] = f"shards/main-{shard:05d}.safetensors"
            entry["documents"] = [document | {"id": f"{shard}-{document['id']}"} for document in documents]
            lines.write(sealed_line(entry))
            with (path / entry["shard"]).open("wb") as file:
                file.write(whole[: slot.start])
                file.seek(slot.stop)
                file.write(whole[slot.stop :])
    return Cache.open(path)


def memory_of_reading(path: Path, count: int) -> tuple[float, int]:
    """(RssAnon in MB, bytes of states read)"""
    cache = Cache.open(path)
    windows = Windows(cache, cache.documents, WINDOW, K)
    windows.label_counts(torch.ones(cache.vocab_size, dtype=torch.bool))
    num_bytes = read(windows, count)
    return anonymous_mb(), num_bytes


def compare_memory(scratch: Path, hidden_size: int, sizes_gb: list[float], count: int) -> None:
    found = []
    for size_gb in sizes_gb:
        cache = make_sparse(scratch / f"{size_gb:g}", size_gb * 1e9, hidden_size)
        total = sum(cache.shard_bytes(shard) for shard in range(cache.num_shards))
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            rss_mb, num_bytes = fresh.apply(memory_of_reading, (cache.path, count))
        print(f"  {total / 1e9:5.1f} GB in {cache.num_shards:3} shards, {num_bytes / 1e9:.1f} GB read: {rss_mb:,.0f} MB")
        found.append(rss_mb)
    print(f"  RssAnon of the largest / of the smallest: {found[-1] / found[0]:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the cache to read fast (default 1)")
    parser.add_argument("--sparse", type=float, nargs="+", default=[1.0, 20.0], help="GB of the sparse caches")
    parser.add_argument("--windows", type=int, default=1000, help="that are read of a sparse cache (default 1000)")
    parser.add_argument("--hidden-size", type=int, default=7168)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where to write the caches (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        compare(Path(scratch) / "cache", options.hidden_size, options.gigabytes, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        compare_memory(Path(scratch), options.hidden_size, options.sparse, options.windows)


if __name__ == "__main__":
    main()
