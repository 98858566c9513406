"""How fast states are stored and imported, against a plain copy of the same bytes: python -m bench.cache_writer

The states of each text lie in a file, as bf16, in the page cache, as vLLM writes them. Each way reads them and leaves
them in files of a shard's size, every one fsynced: the copy as they are, `CacheWriter` checked, hashed and listed in an
index, the import with the final norm applied before.
Rounds alternate between the ways; shown are medians, and the median of the ratios of each round. CPU time is what to
look at on a busy machine.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from bench.cache_reader import random_document, random_target
from medusa_k25.cache import CacheWriter
from medusa_k25.cache.capture import Capture
from medusa_k25.cache.imports import Import, Reading, Stored, rows_by_ids, store_texts

T = 2048  # tokens of a text
VOCAB_SIZE = 1000
BLOCK_BYTES = 2**20


def lm_head(hidden_size: int) -> torch.Tensor:
    """Rows [V, D] in bf16, always the same."""
    return torch.randn(VOCAB_SIZE, hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()


def write_texts(folder: Path, hidden_size: int, num_bytes: float) -> list[Path]:
    """A file of states [T, 1, D] in bf16 for each text, and conversations.jsonl with their token ids."""
    folder.mkdir()
    rows_VD = lm_head(hidden_size)
    files = [folder / f"{i}.safetensors" for i in range(max(1, int(num_bytes / (T * hidden_size * 2))))]
    with (folder / "conversations.jsonl").open("w") as conversations:
        for number, file in enumerate(files):
            ids_T = torch.randint(VOCAB_SIZE, (T,))
            hidden_T1D = rows_VD[ids_T.roll(-1)][:, None]  # which predicts the next token, before and after the norm
            save_file({"hidden_states": hidden_T1D, "token_ids": ids_T}, file)
            row: dict[str, Any] = {"prompt_ids": ids_T[:8].tolist(), "answer_ids": ids_T[8:].tolist()}
            row |= {"id": str(number), "group": None, "messages": [], "answer": "", "finish_reason": "length"}
            conversations.write(json.dumps(row | {"sampling": {}, "dtype": "bfloat16", "label": None}) + "\n")
    return files


def copy(files: list[Path], out: Path, texts_a_shard: int) -> None:
    out.mkdir()
    for first in range(0, len(files), texts_a_shard):
        with (out / str(first)).open("wb") as shard:
            for file in files[first : first + texts_a_shard]:
                with file.open("rb") as source:
                    shutil.copyfileobj(source, shard, BLOCK_BYTES)
            shard.flush()
            os.fsync(shard.fileno())


def store(files: list[Path], out: Path, hidden_size: int, shard_tokens: int) -> None:
    target = random_target(hidden_size, VOCAB_SIZE)
    hidden_TD = torch.empty(T, hidden_size, dtype=torch.bfloat16)
    with CacheWriter.open(out, target, "bfloat16", engine="none", shard_tokens=shard_tokens) as writer:
        for number, file in enumerate(files):
            with file.open("rb", buffering=0) as source:
                source.seek(file.stat().st_size - hidden_TD.nbytes)
                source.readinto(hidden_TD.view(torch.uint8).numpy().data)
            writer.add(**random_document(number, hidden_TD, VOCAB_SIZE))


def import_files(files: list[Path], out: Path, hidden_size: int, shard_tokens: int) -> None:
    """All that `Import.run` does after its checks of a sample."""
    target = random_target(hidden_size, VOCAB_SIZE)
    target.norm_weight, target.norm_eps = torch.rand(hidden_size) + 0.5, 1e-5
    target.end_ids, target.placeholder_id, target.lm_head = (), None, lm_head(hidden_size)
    capture = Capture(storage="all", storage_dtype="bfloat16", shard_tokens=shard_tokens)
    conversations = files[0].with_name("conversations.jsonl")
    importing = Import("vllm", files[0].parent, capture, conversations)
    reading = Reading(importing, target, Stored(None, {}), rows_by_ids(conversations))
    with CacheWriter.open(out, target, "bfloat16", engine="none", shard_tokens=shard_tokens) as writer:
        counts, faults = store_texts(reading, files, writer)
    assert not faults and counts["stored"] == len(files), (counts, faults)


def compare(scratch: Path, hidden_size: int, gigabytes: float, shard_tokens: int, rounds: int) -> None:
    files = write_texts(scratch / "texts", hidden_size, gigabytes * 1e9)
    size = sum(file.stat().st_size for file in files)
    print(f"{size / 1e6:,.0f} MB of bf16 states x {hidden_size}, shards of {shard_tokens:,} tokens")
    ways: dict[str, Callable[[Path], None]] = {
        "copy": lambda out: copy(files, out, shard_tokens // T),
        "CacheWriter": lambda out: store(files, out, hidden_size, shard_tokens),
        "import": lambda out: import_files(files, out, hidden_size, shard_tokens),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            os.sync()  # nobody writes what another one has left
            start, cpu_start = time.perf_counter(), time.process_time()
            way(scratch / "out")
            cpu_s[name].append(time.process_time() - cpu_start)
            speeds[name].append(size / 1e6 / (time.perf_counter() - start))
            shutil.rmtree(scratch / "out")
        print(f"  round {number + 1:2}   " + "  ".join(f"{name} {v[-1]:,.0f} MB/s" for name, v in speeds.items()))
    for name, values in speeds.items():
        ratio = median(own / plain for own, plain in zip(values, speeds["copy"], strict=True))
        cpu = median(cpu_s[name]) / size * 1e9
        print(f"  {name:12} {median(values):6,.0f} MB/s, {ratio:.0%} of copy; CPU {cpu:.2f} s/GB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the states (default 2)")
    parser.add_argument("--hidden-size", type=int, default=7168)
    parser.add_argument("--shard-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    options = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(dir=options.pop("folder")) as scratch:
        compare(Path(scratch), **options)


if __name__ == "__main__":
    main()
