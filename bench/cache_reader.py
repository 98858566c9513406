"""How fast `Cache.read_rows` is, against `cat` of the same files: python -m bench.cache_reader

Both read the whole cache from the page cache, in turns; the ratio is that of the median speeds. Once before, files are
dropped from the page cache and read cold, as a hint only: a virtual disk may have a cache of its own.
RssAnon shows that the reader's own memory does not grow with the cache.
"""

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from medusa_k25.cache import STORAGE_DTYPES, Cache, CacheWriter


def random_target(hidden_size: int, vocab_size: int) -> Any:
    identity: dict[str, Any] = {"name": "random", "revision": "local", "quantisation": "none"}
    identity |= {"fingerprints": {"lm_head": "", "final_norm": "", "tokenizer": ""}}
    return SimpleNamespace(hidden_size=hidden_size, vocab_size=vocab_size, identity=identity, **identity)


def random_document(number: int, hidden_TD: torch.Tensor, vocab_size: int) -> dict[str, Any]:
    """Arguments of `CacheWriter.add`: random tokens after a prompt of 8, a state each."""
    T = len(hidden_TD)
    return {
        "id": str(number),
        "group": None,
        "token_ids_T": torch.randint(vocab_size, (T,)),
        "loss_mask_T": torch.arange(T) >= 8,
        "hidden_MD": hidden_TD,
        "positions_M": torch.arange(T),
        "prompt_length": 8,
        "finish_reason": "length",
        "sampling": {},
        "dtype": "float32",
        "label": None,
        "origin": {},
    }


def write_cache(path: Path, storage_dtype: str, hidden_size: int, num_bytes: float, vocab_size: int = 1000) -> Cache:
    """A cache of random states of about `num_bytes`: texts of 2048 tokens in shards of 32768, with prompts of 8."""
    target = random_target(hidden_size, vocab_size)
    T = 2048
    torch.manual_seed(0)  # the prompts decide the splits
    hidden_TD = torch.randn(T, hidden_size)
    documents = int(num_bytes / (T * hidden_size * STORAGE_DTYPES[storage_dtype].itemsize))
    with CacheWriter.open(path, target, storage_dtype, engine="none") as writer:
        for number in range(documents):
            writer.add(**random_document(number, hidden_TD, vocab_size))
    return Cache.open(path)


def anonymous_mb() -> float:
    """RssAnon: memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1e3


def drop_from_page_cache(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_windows(cache: Cache, rows: int, out: torch.Tensor) -> None:
    """All states of the cache, `rows` at a time, into one buffer."""
    for shard in range(cache.num_shards):
        stop = len(cache.shard_positions(shard))
        for start in range(0, stop, rows):
            count = min(rows, stop - start)
            cache.read_rows(shard, start, start + count, out[:count])


def mb_per_s(num_bytes: int, action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return num_bytes / 1e6 / (time.perf_counter() - start)


def compare(path: Path, storage_dtype: str, hidden_size: int, gigabytes: float, window_mb: float, rounds: int) -> None:
    cache = write_cache(path, storage_dtype, hidden_size, gigabytes * 1e9)
    files = [cache.shard_path(shard) for shard in range(cache.num_shards)]
    stored = STORAGE_DTYPES[storage_dtype]
    sizes = {
        "read_rows": cache.num_states * hidden_size * stored.itemsize,
        "cat": sum(file.stat().st_size for file in files),  # with token ids, positions and masks
    }
    rows = int(window_mb * 1e6 / (hidden_size * stored.itemsize))
    out = torch.zeros(rows, hidden_size, dtype=torch.float32 if stored == torch.float8_e4m3fn else stored)
    readers: dict[str, Callable[[], object]] = {
        "read_rows": lambda: read_windows(cache, rows, out),
        "cat": lambda: subprocess.run("cat -- * > /dev/null", shell=True, check=True, cwd=path / "shards"),
    }
    print(
        f"{storage_dtype}: {sizes['cat'] / 1e6:,.0f} MB in {len(files)} shards, windows of {rows} rows x {hidden_size}"
    )
    for name, reader in readers.items():
        drop_from_page_cache(files)
        print(f"  cold       {name} {mb_per_s(sizes[name], reader):,.0f} MB/s")
    before = anonymous_mb()
    speeds: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(rounds):
        for name, reader in readers.items():
            speeds[name].append(mb_per_s(sizes[name], reader))
        print(f"  round {number + 1:2}   " + "  ".join(f"{name} {v[-1]:,.0f} MB/s" for name, v in speeds.items()))
    ratio = median(speeds["read_rows"]) / median(speeds["cat"])
    print(f"  ratio of medians {ratio:.2f}; RssAnon {before:.0f} MB before, {anonymous_mb():.0f} MB after", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=STORAGE_DTYPES)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the cache (default 1)")
    parser.add_argument("--window-mb", type=float, default=4.0, help="states read at a time (default 4)")
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where to write the cache (default: a temporary folder)")
    options = vars(parser.parse_args())
    dtypes, folder = options.pop("dtypes"), options.pop("folder")
    for storage_dtype in dtypes:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compare(Path(scratch) / "cache", storage_dtype, **options)


if __name__ == "__main__":
    main()
