"""How fast training reads a cache, and what memory that takes: python -m bench.reading

- speed, against `cat` of the same files, in turns, of windows of 64 positions of D=7168 in bf16 in random order: the
  states alone (`read_rows` into one buffer; also by several readers, as the data loader's workers are), and whole
  training batches (`Windows`: fresh memory, labels). Once from the disk (dropped from the page cache before; a virtual
  disk may have a cache of its own), once from the page cache. Ratios are medians over those of each round; CPU time is
  what to look at on a busy machine.
- memory: RssAnon, which no file backs, of a fresh process that opens a small and a large cache and reads as many
  windows of each. Their states are holes in sparse files: they take no place on the disk.
"""

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch

from bench.cache_reader import anonymous_mb, drop_from_page_cache, write_cache
from medusa_k25.cache import Cache
from medusa_k25.cache.manifest import sealed_line
from medusa_k25.data.sampler import Share
from medusa_k25.data.windows import Windows

WINDOW, BATCH_SIZE, K = 64, 8, 4
READERS = 4
NO_COUNT = torch.zeros(K, dtype=torch.long)


def read(windows: Windows, count: int) -> int:
    """Read so many windows, at most all of them, in random order; returns the bytes of their states."""
    order = random.Random(0).sample(range(len(windows)), min(count, len(windows)))
    return sum(
        windows[Share(order[i : i + BATCH_SIZE], NO_COUNT)].hidden_ND.nbytes for i in range(0, len(order), BATCH_SIZE)
    )


def read_states(windows: Windows, readers: int) -> None:
    """The rows of all windows, in random order; each reader into one buffer."""
    order = random.Random(0).sample(range(len(windows)), len(windows))

    def read(some: list[int]) -> None:
        buffer_ND = torch.empty(WINDOW, windows.cache.hidden_size, dtype=torch.bfloat16)
        for window in some:
            for run, start, stop in windows.pieces(window):
                windows.cache.read_rows(run.document.shard, start, stop, buffer_ND[: stop - start])

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(read, [order[i::readers] for i in range(readers)]))


def cpu_s() -> float:
    """Of this process and those that it has waited for."""
    return sum(os.times()[:4])


def compare(path: Path, hidden_size: int, gigabytes: float, rounds: int) -> None:
    cache = write_cache(path, "bfloat16", hidden_size, gigabytes * 1e9)
    windows = Windows(cache, cache.documents, WINDOW, K)
    files = sum(cache.shard_bytes(shard) for shard in range(cache.num_shards))
    states = windows.num_positions * hidden_size * 2
    print(f"{files / 1e6:,.0f} MB, {len(windows):,} windows of {WINDOW} positions x {hidden_size} in bf16")
    readers: dict[str, tuple[int, Callable[[], object]]] = {
        "cat": (files, lambda: subprocess.run("cat -- * > /dev/null", shell=True, check=True, cwd=path / "shards")),
        "states": (states, lambda: read_states(windows, 1)),
        f"states, {READERS} readers": (states, lambda: read_states(windows, READERS)),
        "batches": (states, lambda: read(windows, len(windows))),
    }
    for place in ("the disk", "the page cache"):
        speeds: dict[str, list[float]] = {name: [] for name in readers}
        cpu: dict[str, list[float]] = {name: [] for name in readers}
        for _ in range(rounds):
            for name, (size, reader) in readers.items():
                if place == "the disk":
                    drop_from_page_cache([cache.shard_path(shard) for shard in range(cache.num_shards)])
                start, cpu_start = time.perf_counter(), cpu_s()
                reader()
                speeds[name].append(size / 1e6 / (time.perf_counter() - start))
                cpu[name].append((cpu_s() - cpu_start) / size * 1e9)
        print(f"  from {place}, medians of {rounds} rounds")
        for name, values in speeds.items():
            ratio = median(own / cat for own, cat in zip(values, speeds["cat"], strict=True))
            seconds = median(cpu[name])
            print(f"    {name:17} {median(values):6,.0f} MB/s, {ratio:.0%} of cat; CPU {seconds:.2f} s/GB", flush=True)


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
        print(
            f"  {total / 1e9:5.1f} GB in {cache.num_shards:3} shards, {num_bytes / 1e9:.1f} GB read: {rss_mb:,.0f} MB"
        )
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
