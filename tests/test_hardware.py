import copy
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf

from medusa_k25.config import conf_dir
from medusa_k25.costs.hardware import Hardware

FILES = sorted((conf_dir() / "hardware").glob("*.yaml"))


def build(node: dict) -> Hardware:
    return instantiate(OmegaConf.create(node))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_machine_says_where_its_figures_come_from(file: Path) -> None:
    machine = build(yaml.safe_load(file.read_text()))
    assert machine.name == file.stem
    assert (machine.bandwidth_tb_s.source and machine.bandwidth_tb_s.basis == "datasheet") or machine.gpus == 0
    assert [latency.bytes for latency in machine.allreduces] == sorted(latency.bytes for latency in machine.allreduces)


RTX = yaml.safe_load((conf_dir() / "hardware" / "rtx_pro_6000_x8.yaml").read_text())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("memory_gb.value", 0, "memory_gb: value is 0, expected a number above 0"),
        ("memory_gb.value", "96", "memory_gb: value is '96'"),
        ("memory_gb.value", True, "memory_gb: value is True"),
        ("bandwidth_share.value", 1.2, "bandwidth_share: value is 1.2, expected a number above 0, at most 1"),
        ("memory_gb.basis", "guessed", "expected a basis"),
        ("memory_gb.source", " ", "and a source"),
        ("memory_gb", 96, "memory_gb: expected {basis, source, value}, got 96"),
        ("baseline_tok_s.value", float("nan"), "baseline_tok_s: value is nan"),
        ("allreduces.0.us", -1, r"allreduces\[0\]: us is -1"),
        ("allreduces", [], "8 GPUs, but allreduces is empty"),
        ("cycles.0.ms", 0, r"cycles\[0\]: ms is 0"),
        ("cycles.0.temperature", -1, "temperature is -1"),
        ("cycles.0.nodes", 4, "two cycles of"),
        ("gpus", -8, "gpus: expected a whole number"),
        ("cycles.0.nodes", 1.5, r"cycles\[0\]: nodes, batch and context are whole numbers"),
        ("allreduces.0.bytes", 57344, "two all-reduces of 57344 bytes"),
        ("memory_gb.value", 0.96, "memory_gb is 0.96, expected 1 or more"),
        ("cycles", 12.2, "cycles: expected a list, empty where nothing is known, got 12.2"),
        ("notes", "a note", "notes: expected a list"),
        ("baseline_tok_s.value", 100, r"baseline_tok_s is 100, but the pass of one node .* 12.2 ms, 82.0 tokens/s"),
        ("baseline_tok_s.value", 64, "baseline_tok_s is 64, but the pass of one node"),
        ("fixed_ms.value", 12.3, "fixed_ms is 12.3, but a whole pass of one node took 12.2 ms"),
        ("allreduces.1.us", 25, "an all-reduce of 57,344 bytes takes 25 us, one of 14,336 51"),
        ("cycles.1.ms", 6, "a pass of 4 nodes takes 6 ms, one of 1 node 12.2 at the same batch 1"),
    ],
)
def test_missing_and_impossible_figures_are_refused(path, value, message):
    node = copy.deepcopy(RTX)
    *parents, last = path.split(".")
    place = node
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    place[int(last) if isinstance(place, list) else last] = value
    with pytest.raises(Exception, match="hardware rtx_pro_6000_x8") as raised:
        build(node)
    assert raised.match(message)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("baseline_tok_s.value", 97), ("baseline_tok_s.value", 67), ("fixed_ms.value", 12.2)),
        *(("allreduces.1.us", 26), ("cycles.1.ms", 6.2), ("cycles.0.context", 32768), ("memory_gb.value", 1)),
    ],
)
def test_figures_that_differ_no_more_than_noise_are_taken(path: str, value: float) -> None:
    node = copy.deepcopy(RTX)
    OmegaConf.update(made := OmegaConf.create(node), path, value)
    assert build(made).name == "rtx_pro_6000_x8"


@pytest.mark.parametrize(("low", "high"), [(12.3, 13), (11, 12.1), (0, 13), (11, float("inf")), ("11", 13)])
def test_rounds_that_do_not_hold_their_pass_are_refused(low: float, high: float) -> None:
    node = copy.deepcopy(RTX)
    node["cycles"][0] |= {"low_ms": low, "high_ms": high}
    with pytest.raises(Exception, match=r"cycles\[0\]: expected 0 < low_ms <= ms <= high_ms"):
        build(node)


def test_the_rounds_of_a_pass_may_be_known() -> None:
    node = copy.deepcopy(RTX)
    node["cycles"][0] |= {"low_ms": 12.0, "high_ms": None}
    assert [(p.low_ms, p.high_ms) for p in build(node).cycles] == [(12.0, None), (None, None)]


def test_an_empty_list_may_be_left_out() -> None:
    node = copy.deepcopy(RTX) | {"cycles": None, "notes": None}
    assert (build(node).cycles, build(node).notes) == ((), ())
    with pytest.raises(Exception, match="8 GPUs, but allreduces is empty"):
        build(node | {"allreduces": None})


def test_an_all_reduce_of_any_size() -> None:
    """By hand: 51 us for 14,336 bytes, 205 for 57,344."""
    machine = build(RTX)
    known = [machine.allreduce_us(size) for size in (1, 14336, 57344)]
    assert known == [51, 51, 205]
    assert machine.allreduce_us((14336 + 57344) / 2) == (51 + 205) / 2
    assert machine.allreduce_us(57344 + 43008) == pytest.approx(205 + 154)  # the slope goes on
    one = replace(machine, allreduces=machine.allreduces[:1])
    assert one.allreduce_us(10**6) == 51
    falling = replace(machine, allreduces=(replace(machine.allreduces[0], us=300), machine.allreduces[1]))
    assert falling.allreduce_us(10**6) == 205  # a slope below 0 is noise
    assert replace(machine, allreduces=()).allreduce_us(10**6) == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("moonshotai/Kimi-K2.5", "kimi_k25", True),
        ("moonshotai/Kimi-K2.5", "/models/Kimi-K2.5-NVFP4/", True),
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2", False),
        ("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6", False),
        ("smollm2-135m-instruct", "smollm2-360m-instruct", False),
        ("tiny_k25", "kimi_k25", False),
    ],
)
def test_names_of_one_model(one: str, other: str, same: bool) -> None:
    machine = build(RTX)
    assert replace(machine, target=one).is_of(other) == replace(machine, target=other).is_of(one) == same
