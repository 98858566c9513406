"""The arithmetic of a run before it starts, against the figures of Kimi-K2.5 and against real objects."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from medusa_k25 import train as training
from medusa_k25.costs.training import GB, TrainingCost, peak_flops
from medusa_k25.heads import ResidualHeads
from tests.test_training import cache, config, config_of  # noqa: F401  (fixtures)

D, V = 7168, 163_840


def meta(num_blocks: int = 1, own_lm_head: bool = False) -> ResidualHeads:
    with torch.device("meta"):
        return ResidualHeads(D, 4, num_blocks, own_lm_head=own_lm_head, draft_vocab_size=V)


K25 = TrainingCost(
    heads=meta(),
    N=16 * 512,
    M=V,
    V=V,
    teacher=False,
    strategy="zero2",
    world_size=8,
    low_precision=True,
    device_type="cuda",
    longest_answer=4096,
)


def test_kimi_k25_takes_what_its_sizes_say():
    assert K25.trained == pytest.approx(205.5e6, rel=1e-3)
    assert K25.flops_per_position == pytest.approx(2 * 9.81e9, rel=2e-3)  # forward and backward
    assert replace(K25, teacher=True).flops_per_position - K25.flops_per_position == 4 * D * V
    own = replace(K25, heads=meta(own_lm_head=True))
    assert own.trained - K25.trained == pytest.approx(4.70e9, rel=1e-3)
    assert replace(own, strategy="ddp", low_precision=False, world_size=1).state_bytes == 16 * own.trained
    assert K25.memory["frozen lm_head"] == pytest.approx(2.35e9, rel=1e-2)


def test_zero_shards_what_it_says():
    P, W = K25.trained, K25.world_size
    per_parameter = {name: replace(K25, strategy=name).state_bytes / P for name in ("ddp", "zero1", "zero2", "zero3")}
    # bf16 weights and gradients of 2 bytes, fp32 copy and moments of 12, sharded as ZeRO's stages say
    assert per_parameter["ddp"] == 16 + 4
    assert per_parameter["zero1"] == pytest.approx(4 + 12 / W)
    assert per_parameter["zero2"] == pytest.approx(2 + 14 / W)
    assert per_parameter["zero3"] == pytest.approx(16 / W)


def test_what_does_not_fit_names_the_settings_that_would():
    own = replace(K25, heads=meta(own_lm_head=True))
    assert own.memory_bytes > 60e9  # weights and moments are sharded, the gradient of the loss is not
    advice = own.smaller(int(24e9))
    assert "heads.own_lm_head=false" in advice
    assert "strategy=" not in advice
    assert "draft_vocab_size=" in advice
    deep = replace(K25, heads=meta(num_blocks=40), strategy="ddp")
    assert "strategy=zero2; strategy=zero3" in deep.smaller(replace(deep, strategy="zero2").memory_bytes)
    large = replace(K25, N=64 * K25.N)
    assert "data.batch_size or data.window 1/64 of now" in large.smaller(K25.memory_bytes)
    assert K25.smaller(1000) == "more devices, or devices with more memory"


def test_a_run_that_cannot_fit_is_refused_before_it_starts(config, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000_000))
    with pytest.raises(ValueError, match=r"a device would need 0\.\d GB .*0\.0 GB are free.*would fit with"):
        training.train(config())
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    with pytest.raises(ValueError, match=r"checkpoints need .* GB, 0\.0 GB are free in .*run_dir="):
        training.train(config())
    assert not (tmp_path / "run").exists()


def test_the_estimate_counts_the_real_objects(config, cache, tiny_k25):  # noqa: F811
    built = training.build(config("heads.num_blocks=2"), tiny_k25, cache)
    cost = built.cost
    parameters = sum(p.numel() for p in built.module.parameters())
    assert cost.trained == parameters
    assert cost.heads.trained_inputs == parameters // 2
    assert cost.memory["frozen lm_head"] == built.module.lm_head_MD.nbytes
    assert f"memory      {cost.memory_bytes / GB:.2f} GB a device" in built.summary


def test_the_flops_are_those_of_the_operations(config, cache, tiny_k25):  # noqa: F811
    """Counted by torch over a forward and backward pass of the heads and plain logits."""
    from torch.utils.flop_counter import FlopCounterMode

    for blocks in (1, 2):
        # biases are added, not multiplied, but are counted: they are few
        built = training.build(config(f"heads.num_blocks={blocks}", "heads.bias=false"), tiny_k25, cache)
        hidden_ND = torch.randn(32, built.cost.D)
        with FlopCounterMode(display=False) as counter:
            features_KND = built.module.heads(hidden_ND, torch.zeros(32, 4, dtype=torch.long))
            (features_KND @ built.module.lm_head_MD.T).sum().backward()
        assert counter.get_total_flops() == 32 * built.cost.flops_per_position


def test_the_speed_of_this_machine_is_measured():
    assert 1e8 < peak_flops(torch.device("cpu"), torch.float32) < 1e14
