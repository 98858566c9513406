"""What a plan says, beside what really happens at the sizes of the embedded default: bytes and seconds.

`python -m bench.plan` does the same with the demo's own data and a whole training.
"""

import time
from functools import partial

import pytest
import torch

from bench import training as step_bench
from bench.cache_reader import write_cache
from bench.live_bytes import LiveBytes, tensors_of
from medusa_k25.cache import Cache
from medusa_k25.costs.calibration import timed_positions_per_s
from medusa_k25.costs.planning import Dataset, Split, cache_bytes
from medusa_k25.costs.training import TrainingCost
from medusa_k25.data.splits import SPLITS
from medusa_k25.data.windows import documents_of, runs_of
from medusa_k25.heads import HEADS, Embeddings, Heads, ResidualHeads
from medusa_k25.loss import MedusaLoss
from tests.tiny import cache_of

D, M, K, N = 576, 8192, 4, 512


def planned_bytes(heads: Heads, positions: int) -> int:
    return TrainingCost(
        heads,
        N=positions,
        M=M,
        V=M,
        teacher=False,
        strategy="auto",
        world_size=1,
        low_precision=False,
        device_type="cpu",
        longest_answer=64,
    ).memory_bytes


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in HEADS), ("residual", {"num_blocks": 3}), ("recurrent", {"inner_size": 8 * D})],
)
@pytest.mark.parametrize("positions", [N, 3 * N])
def test_a_step_takes_the_memory_that_is_planned(kind, options, positions):
    """Planned is what a run may be refused for: never too little, and within 20% for the embedded default."""
    heads, lm_head_MD, loss = HEADS[kind](D, K, **options), torch.randn(M, D), MedusaLoss()
    embed = None if heads.reads == "state" else Embeddings(torch.randn(M, D))
    with LiveBytes([lm_head_MD, *tensors_of(heads), *([] if embed is None else tensors_of(embed))]) as live:
        optimizer = torch.optim.AdamW(heads.parameters())
        hidden_ND, path_NK = torch.randn(positions, D), torch.randint(0, M, (positions, K))
        labels_KN = torch.randint(0, M, (K, positions))
        for _ in range(2):
            features_KND = heads(hidden_ND, path_NK, embed)
            total, _ = loss(features_KND, lm_head_MD, labels_KN, torch.full((K,), positions))
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            del features_KND, total
    planned = planned_bytes(heads, positions)
    most = 1.2 if (kind, options, positions) == ("residual", {}, N) else 1.3
    assert live.peak <= planned <= most * live.peak, planned / live.peak


@pytest.mark.parametrize("storage", ["answers", "all"])
def test_a_cache_takes_the_bytes_that_are_planned(tiny_llama, tmp_path, storage):
    cache = cache_of(tiny_llama, tmp_path / "cache", num_documents=40, storage=storage)
    data = counted(cache)
    files = sum(file.stat().st_size for file in cache.path.rglob("*") if file.is_file())
    planned = cache_bytes(data, tiny_llama.hidden_size, storage, "float32")
    # beside whole conversations of a real target, the manifest and the shard's header are not lost in it
    fixed = (cache.path / "manifest.json").stat().st_size + 4096 * cache.num_shards
    assert planned * 0.95 < files < planned * 1.05 + fixed


def counted(cache: Cache) -> Dataset:
    answers = [document.length - document.prompt_length for document in cache.documents]
    splits = {}
    for split in SPLITS:
        runs = [run for document in documents_of(cache, split) for run in runs_of(cache, document)]
        splits[split] = Split(len(runs), sum(run.row_stop - run.row_start for run in runs))
    prompts = sum(document.prompt_length for document in cache.documents)
    return Dataset(len(answers), prompts, sum(answers), max(answers), **splits, source="counted in a cache")


def test_training_takes_the_time_of_the_steps_that_were_timed(tmp_path):
    """Steps under Lightning, with reading and logging, beside bare ones; in CPU seconds, which others do not lengthen.

    Measured 1.00 to 1.04.
    """
    torch.set_num_threads(1)
    cache = write_cache(tmp_path / "cache", "float32", D, 100e6, M)
    optimizer, heads, clock = partial(torch.optim.AdamW, lr=1e-3), ResidualHeads(D, K), time.process_time
    speed = timed_positions_per_s(heads, M, MedusaLoss(), optimizer, N, torch.device("cpu"), False, 1.0, clock)
    module, data = step_bench.build(cache, M)
    steps = step_bench.Steps(clock)
    step_bench.trainer_of(tmp_path / "logs", steps, 7, "auto", 1).fit(module, data)
    ratio = steps.a_step() * speed / N
    assert 0.8 < ratio < 1.25, ratio
