"""What a pass costs: through what was measured, by hand-computed parts elsewhere, and monotone."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import instantiate
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from medusa_k25.config import conf_dir
from medusa_k25.costs.cycle import SIZES, CycleModel, Length, model_draft_ms, tokens_per_s
from medusa_k25.costs.hardware import Hardware, Point
from medusa_k25.costs.served import KIMI_K25, Served
from medusa_k25.heads import HEADS as TYPES
from medusa_k25.heads import ResidualHeads
from tests.test_served import SMOLLM2

with torch.device("meta"):
    HEADS = ResidualHeads(KIMI_K25.hidden_size, 4)


def machine(name: str) -> Hardware:
    return instantiate(OmegaConf.create(yaml.safe_load((conf_dir() / "hardware" / f"{name}.yaml").read_text())))


RTX = CycleModel(machine("rtx_pro_6000_x8"), KIMI_K25)
B200 = CycleModel(machine("b200_nvl8"), KIMI_K25)
UNMEASURED = CycleModel(replace(RTX.hardware, cycles=(), baseline_tok_s=None), KIMI_K25)


def measured(*points: tuple[int, int, int, float, float]) -> CycleModel:
    """(nodes, batch, context, temperature, ms) on the users' machine."""
    cycles = tuple(Point(*point, "measured", "test") for point in points)
    return CycleModel(replace(RTX.hardware, cycles=cycles, baseline_tok_s=None), KIMI_K25)


def length(mean: float) -> Length:
    return Length(mean, mean, mean)


# --- worked figures


def test_the_users_machine() -> None:
    plain, verify = RTX.cycle(1), RTX.cycle(4)
    assert (plain.ms, plain.basis, plain.assumed) == (12.2, "measured", ())
    assert (verify.ms, verify.low_ms, verify.high_ms, verify.basis) == (30.0, 30.0, 30.0, "assumed")
    assert verify.assumed == (
        "a pass of 4 nodes takes 30 ms: the users' verify pass, measured; that it verified 4 tokens is assumed",
    )
    assert RTX.baseline_tok_s() == 82
    assert RTX.break_even(4).length == pytest.approx(2.46)
    assert plain.parts["all-reduces"] == pytest.approx(122 * 0.051)
    assert verify.parts["all-reduces"] == pytest.approx(25.0, abs=0.02)
    # the parts alone, which know neither measured pass, are within 11% of them
    assert sum(plain.parts.values()) == pytest.approx(12.2, rel=0.02)
    assert sum(verify.parts.values()) == pytest.approx(30, rel=0.11)


def test_a_speed_that_was_measured_with_its_acceptance_length_agrees() -> None:
    """52 tokens/s at about 1.5: the only point that tests the 30 ms. 60 and 41 tokens/s came without an acceptance
    length: 1.80 and 1.23 are those speeds times the same 30 ms."""
    assert RTX.speed(4, length(1.5)).tok_s == pytest.approx(52, rel=0.05)


@pytest.mark.parametrize(("ms", "break_even"), [(30, 2.46), (20, 1.64), (15, 1.23)])
def test_break_even_of_a_cycle(ms: float, break_even: float) -> None:
    model = CycleModel(replace(RTX.hardware, cycles=(Point(4, 1, 1024, 0.0, ms, "measured", "test"),)), KIMI_K25)
    assert model.break_even(4).length == pytest.approx(break_even)


@pytest.mark.parametrize(("nodes", "independent_ms"), [(1, 3.8), (5, 9.1), (8, 12.7), (16, 21.4), (64, 52)])
def test_reading_weights_takes_what_was_worked_out(nodes: int, independent_ms: float) -> None:
    parts = RTX.parts(nodes, 1, 1, independent=True)
    assert parts["weights"] + parts["experts"] == pytest.approx(independent_ms, rel=0.02)


def test_tokens_of_one_text_wake_fewer_experts() -> None:
    one, four = RTX.parts(1, 1, 1)["experts"], RTX.parts(4, 1, 1)["experts"]
    assert four == pytest.approx(2.5 * one, rel=0.02)
    assert RTX.parts(1, 4, 1)["experts"] == pytest.approx(31 / 8 * one, rel=0.02)  # of four requests


def test_every_rank_reads_the_whole_latent_cache() -> None:
    longer = RTX.parts(1, 1, 32768)["context"]
    assert longer == pytest.approx(1000 * 32768 * 70272 / (1.792e12 * 0.6))


def test_every_rank_reads_its_share_of_heads_that_can_be_cut() -> None:
    cut = CycleModel(RTX.hardware, replace(KIMI_K25, kv_shares=4))
    assert cut.parts(1, 1, 32768)["context"] == pytest.approx(RTX.parts(1, 1, 32768)["context"] / 4)


def test_drafting() -> None:
    """411 MB of blocks a rank in 0.38 ms, its lm_head in 0.27, a gather of 0.05; three of four heads in a pass of 4."""
    V = KIMI_K25.vocab_size
    one = RTX.drafting(HEADS, V, 5).ms
    assert one == pytest.approx(0.38 + 0.27 + 0.05, abs=0.01)
    assert RTX.drafting(HEADS, 16384, 5).ms == pytest.approx(one - 0.9 * 0.273, abs=0.01)
    assert RTX.drafting(HEADS, V, 64).ms == one
    assert RTX.drafting(HEADS, V, 4).ms == pytest.approx(one - 0.38 / 4, abs=0.01)
    three = model_draft_ms(RTX.hardware, KIMI_K25, 8e9, steps=3)
    assert three == pytest.approx(3 * (1000 * 1e9 / (1.792e12 * 0.6) + 3 * 0.051))


D, M, GPUS = KIMI_K25.hidden_size, 16384, 8
LM_HEAD = D * M


def kinds(own: bool = False, **options: int) -> dict[str, Any]:
    with torch.device("meta"):
        return {
            name: kind(D, 4, own_lm_head=own, draft_vocab_size=M, **(options if name == "recurrent" else {}))
            for name, kind in TYPES.items()
        }


@pytest.mark.parametrize(
    ("kind", "read", "multiplied", "held"),  # parameters, before a pass of 9 nodes
    [
        ("residual", 4 * D * (D + 1) + LM_HEAD / GPUS, 4 * D * (D + 1) + 4 * LM_HEAD / GPUS, LM_HEAD / GPUS),
        ("residual_root", 4 * D * (2 * D + 1) + LM_HEAD, 4 * D * (2 * D + 1) + 4 * LM_HEAD, LM_HEAD),
        # eight nodes at most have children
        ("hydra", D * (14 * D + 4) + 4 * LM_HEAD, D * (34 * D + 8) + 8 * LM_HEAD, 2 * LM_HEAD),
        ("recurrent", 4 * (3584 * (3 * D + 1) + LM_HEAD), 8 * (3584 * (3 * D + 1) + LM_HEAD), 2 * LM_HEAD),
    ],
)
def test_what_a_rank_does_to_draft(kind: str, read: float, multiplied: float, held: float) -> None:
    found = RTX.drafting(kinds(inner_size=3584)[kind], M, 9)
    assert (found.heads, found.collectives) == (4, 1)
    # a state, or two as a pass of 2 nodes sums: a third of the way from 51 us to the 205 us of 4 nodes
    message_ms = 0.051 if kind == "residual" else (0.051 + (0.205 - 0.051) / 3)
    assert (found.read_bytes, found.flops, found.held_bytes) == pytest.approx((2 * read, 2 * multiplied, 2 * held))
    assert found.ms == pytest.approx(1000 * 2 * read / (1.792e12 * 0.6) + message_ms)
    assert found.parameters == sum(weight.numel() for weight in kinds(inner_size=3584)[kind].parameters())
    assert RTX.drafting(kinds(inner_size=3584)[kind], M, 3).heads == 2


@pytest.mark.parametrize("kind", TYPES)
def test_drafting_with_own_lm_heads_and_on_one_gpu(kind: str) -> None:
    shared, own = (RTX.drafting(kinds(own=own)[kind], M, 5) for own in (False, True))
    assert own.parameters - shared.parameters == 4 * LM_HEAD
    shares, times = {"residual": (GPUS, 1), "residual_root": (1, 1)}.get(kind, (1, 4))
    assert own.read_bytes - shared.read_bytes == pytest.approx(2 * (4 - times) * LM_HEAD / shares)
    assert own.flops == shared.flops
    assert own.held_bytes == (2 * LM_HEAD if kind in ("hydra", "recurrent") else 0)  # embeddings
    one = CycleModel(replace(RTX.hardware, gpus=1), replace(KIMI_K25, vocab_size=M))
    alone = one.drafting(kinds()[kind], M, 5)
    assert (alone.collectives, alone.held_bytes) == (0, 0)  # the target's own rows serve
    assert CycleModel(one.hardware, KIMI_K25).drafting(kinds()[kind], M, 5).held_bytes == 2 * LM_HEAD  # of lm_head
    assert alone.ms == pytest.approx(1000 * alone.read_bytes / (1.792e12 * 0.6))


def test_where_products_take_longer_than_reading() -> None:
    slow = replace(RTX.hardware, bf16_tflops=replace(RTX.hardware.bf16_tflops, value=0.1), gpus=0)
    found = CycleModel(slow, KIMI_K25).drafting(HEADS, M, 5)
    assert found.ms == pytest.approx(1000 * found.flops / (0.1e12 * 0.45))


def test_types_are_compared_with_drafting_on_top() -> None:
    types = {each.name: each for each in RTX.types(kinds(inner_size=3584)["recurrent"], M)}
    assert list(types) == list(TYPES) and [name for name, each in types.items() if each.chosen] == ["recurrent"]
    for each in types.values():
        assert [size.drafting.nodes for size in each.sizes] == [4, 8]
        for size in each.sizes:
            assert size.pass_ms == RTX.cycle(size.drafting.nodes).ms
            assert size.break_even == pytest.approx((size.pass_ms + size.drafting.ms) * 0.082)
    assert types["recurrent"].sizes[0].drafting == RTX.drafting(kinds(inner_size=3584)["recurrent"], M, 4)
    assert "12.2" not in types["residual"].sizes[0].drafting.text(30.0)
    assert types["residual"].sizes[0].break_even < types["recurrent"].sizes[0].break_even


def test_faster_all_reduces_are_another_way() -> None:
    lever = RTX.faster_allreduces(4)  # 48 -> 26 us
    saved = 22 / 48 * 122 * 0.205
    assert lever.cycle_ms == pytest.approx(30 - saved)
    assert lever.break_even_today == pytest.approx((30 - saved) * 0.082)
    assert lever.baseline_tok_s == pytest.approx(1000 / (1000 / 82 - 22 / 48 * 122 * 0.051))
    assert 1.5 < lever.break_even_today < lever.break_even < 2.46
    short = CycleModel(replace(RTX.hardware, cycles=(Point(4, 1, 1024, 0.0, 5, "measured", "test"),)), KIMI_K25)
    assert short.faster_allreduces(4, share=0).cycle_ms == RTX.parts(4, 1, 1024)["fixed"]  # no pass takes less
    below = measured((1, 1, 1024, 0.0, 1.0), (4, 1, 1024, 0.0, 2.0)).faster_allreduces(4)  # of 2.2 ms that are fixed
    assert (below.cycle_ms, below.baseline_tok_s) == (2.0, 1000.0)  # no slower than today
    same = RTX.faster_allreduces(4, share=1.0)
    assert (same.cycle_ms, same.break_even) == pytest.approx((30, 2.46))


# --- between, beyond and without measured passes


def test_between_measured_passes_and_beyond_them() -> None:
    between = RTX.cycle(2)
    assert (between.ms, between.basis) == (pytest.approx(12.2 + 17.8 / 3), "interpolated")
    beyond = RTX.cycle(8)
    by_parts = [sum(RTX.parts(8, 1, 1024, i).values()) - sum(RTX.parts(4, 1, 1024, i).values()) for i in (False, True)]
    assert beyond.ms == beyond.low_ms == pytest.approx(30 + by_parts[0])
    assert beyond.high_ms == pytest.approx(30 + by_parts[1]) and beyond.high_ms > beyond.ms
    assert beyond.basis == "extrapolated"
    assert any("beyond the largest that is known" in note for note in beyond.notes)
    assert any("share of the memory bandwidth" in figure for figure in beyond.assumed)


def test_without_measured_passes() -> None:
    cycle = B200.cycle(4, draft_ms=0.5)
    assert cycle.basis == "from parts"
    assert cycle.ms == pytest.approx(sum(cycle.parts.values())) and cycle.parts["drafting"] == 0.5
    assert cycle.high_ms > cycle.ms == cycle.low_ms
    assert any("10 us" in figure for figure in cycle.assumed)
    assert B200.cycle(1, draft_ms=0.5).ms == B200.cycle(1).ms  # nothing is drafted
    assert B200.baseline_tok_s() == pytest.approx(1000 / B200.cycle(1).ms)


def test_drafting_is_in_measured_passes_with_drafts() -> None:
    model = measured((1, 1, 1024, 0.0, 10.0), (4, 1, 1024, 0.0, 20.0))
    for nodes in (2, 4, 9):
        assert model.cycle(nodes, draft_ms=3).ms == model.cycle(nodes).ms
    plain = measured((1, 1, 1024, 0.0, 10.0))
    assert plain.cycle(4, draft_ms=3).ms == pytest.approx(plain.cycle(4).ms + 3)


def test_the_speed_of_the_baseline_is_a_measured_pass_where_none_is() -> None:
    model = CycleModel(replace(RTX.hardware, cycles=RTX.hardware.cycles[1:]), KIMI_K25)
    assert model.cycle(1).ms == pytest.approx(1000 / 82)
    assert model.cycle(1).basis == "measured"


def test_other_places_say_so() -> None:
    warm = RTX.cycle(4, temperature=1.0)
    assert (warm.ms, warm.basis) == (30.0, "extrapolated")
    assert "temperature 1 was not measured: passes at 0 are taken" in warm.notes
    batch = RTX.cycle(4, batch=8)
    assert any("batch 8 with 1,024 tokens of context was not measured" in note for note in batch.notes)
    points = (1, 1, 1024, 0.0, 10.0), (1, 8, 1024, 0.0, 20.0), (1, 1, 1024, 1.0, 11.0)
    model = measured(*points)
    for nodes, size, context, temperature, ms in points:
        cycle = model.cycle(nodes, size, context, temperature)
        assert (cycle.ms, cycle.basis) == (ms, "measured")
    at_4 = model.cycle(1, batch=4)  # from batch 1, the nearest below
    assert at_4.ms == pytest.approx(10 + sum(model.parts(1, 4, 1024).values()) - sum(model.parts(1, 1, 1024).values()))


def test_the_nearest_place_has_the_temperature_first() -> None:
    model = measured((1, 4, 1024, 0.0, 30.0), (1, 1, 1024, 1.0, 10.0), (1, 4, 32768, 0.0, 40.0))
    assert model.cycle(1, batch=4, context=4096).ms > 30
    parts = [sum(model.parts(1, batch, 1024).values()) for batch in (2, 4)]
    assert model.cycle(1, batch=2).ms == pytest.approx(30 * parts[0] / parts[1])


def test_products_count_where_they_take_longer_than_reading() -> None:
    """On two cores they do: 2 x 134.5 M x 64 in 80 GFLOP/s, less 269 MB at 12 GB/s."""
    model = CycleModel(replace(machine("cpu"), cycles=()), Served.of_config(SMOLLM2))
    parts = model.parts(64, 1, 1)
    assert parts["weights"] == pytest.approx(22.4, rel=0.01) and parts["all-reduces"] == parts["experts"] == 0
    assert parts["products beyond reading"] == pytest.approx(215.2 - 22.4, rel=0.01)
    assert model.parts(1, 1, 1)["products beyond reading"] == 0
    # reading a long context hides none of them
    assert model.parts(64, 1, 8192)["products beyond reading"] == parts["products beyond reading"]
    assert all(part == 0 for name, part in RTX.parts(16, 8, 1).items() if name == "products beyond reading")


def of_cpu(*nodes: int) -> CycleModel:
    """The passes that the file has, without the spread of their rounds."""
    points = [replace(p, low_ms=None, high_ms=None) for p in machine("cpu").cycles if not nodes or p.nodes in nodes]
    return CycleModel(replace(machine("cpu"), cycles=tuple(points)), Served.of_config(SMOLLM2))


def both_ways(model: CycleModel, base: tuple[int, int, int], asked: tuple[int, int, int]) -> list[float]:
    """By the difference and by the ratio of the parts."""
    ms = model.cycle(*base).ms
    before, after = (sum(model.parts(*place).values()) for place in (base, asked))
    return sorted([ms + after - before, ms * after / before])


@pytest.mark.parametrize("asked", [(4, 1, 8192), (4, 16, 128), (64, 1, 128)])
def test_far_from_what_was_measured_both_ways_to_go_on_are_inside(asked: tuple[int, int, int]) -> None:
    model = of_cpu(4)
    cycle = model.cycle(*asked)
    low, high = both_ways(model, (4, 1, 128), asked)
    assert (cycle.low_ms, cycle.high_ms, cycle.basis) == (pytest.approx(low), pytest.approx(high), "extrapolated")
    assert low < 0.9 * high and low - 1e-9 <= cycle.ms <= high + 1e-9
    assert any("more than 4 times away" in note for note in cycle.notes)


def test_near_what_was_measured_one_way_is_taken() -> None:
    model = of_cpu()
    for asked in ((4, 1, 512), (4, 4, 128), (16, 1, 128)):
        cycle = model.cycle(*asked)
        assert cycle.low_ms == cycle.ms == cycle.high_ms and not any("times away" in note for note in cycle.notes)
    between = measured((1, 1, 1024, 0.0, 10.0), (64, 1, 1024, 0.0, 90.0)).cycle(10)
    assert between.basis == "interpolated" and not any("times away" in note for note in between.notes)
    assert (between.low_ms, between.high_ms) == pytest.approx((10, 90))  # costs may rise by steps


def test_the_rounds_of_a_measured_pass_are_its_interval() -> None:
    points = (
        Point(1, 1, 1024, 0.0, 10.0, "measured", "test", 9.0, 11.0),
        Point(5, 1, 1024, 0.0, 20.0, "measured", "test", high_ms=26.0),
    )
    model = CycleModel(replace(RTX.hardware, cycles=points), KIMI_K25)
    found = [(model.cycle(n).low_ms, model.cycle(n).ms, model.cycle(n).high_ms) for n in (1, 3, 5)]
    assert found == [pytest.approx(each) for each in ((9, 10, 11), (9, 15, 26), (20, 20, 26))]
    beyond = model.cycle(6)
    assert beyond.low_ms == beyond.ms and beyond.high_ms >= 1.3 * beyond.ms
    speed = model.speed(5, length(2.0))
    assert (speed.low_tok_s, speed.high_tok_s) == pytest.approx((2000 / 26, 100))


def test_a_far_cheaper_pass_costs_something() -> None:
    """The difference of the parts is more than the measured pass took."""
    cycle = measured((16, 32, 32768, 0.0, 5.0)).cycle(1)
    assert 0 < cycle.low_ms == pytest.approx(cycle.ms / 2, rel=0.01) and cycle.low_ms < cycle.ms <= cycle.high_ms


def test_a_cheaper_pass_than_any_measured_costs_something() -> None:
    model = measured((16, 32, 32768, 0.0, 5.0))  # far less than the parts say
    ms = [model.cycle(nodes, batch).ms for nodes, batch in ((1, 1), (4, 1), (4, 32), (16, 32))]
    assert 0 < ms[0] and ms == sorted(ms) and ms[-1] < 5


# --- properties

places = st.tuples(st.integers(1, 64), st.integers(1, 64), st.integers(1, 10**5))
series = st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted)
MODELS = st.sampled_from([RTX, B200, UNMEASURED])


@given(MODELS, places, st.integers(1, 20))
def test_larger_passes_cost_more(model: CycleModel, place: tuple[int, int, int], more: int) -> None:
    nodes, batch, context = place
    smaller = model.cycle(nodes, batch, context)
    assert 0 < smaller.low_ms <= smaller.ms <= smaller.high_ms
    for larger in (model.cycle(nodes, batch + more, context), model.cycle(nodes, batch, context + 100 * more)):
        assert larger.ms >= smaller.ms - 1e-9
    if (batch, context) == (1, 1024) or model is not RTX:
        assert model.cycle(nodes + more, batch, context).ms >= smaller.ms - 1e-9


@given(series, st.data())
def test_cycles_pass_through_measured_ones_and_stay_between(nodes: list[int], data: st.DataObject) -> None:
    ms = sorted(data.draw(st.lists(st.floats(1, 100), min_size=len(nodes), max_size=len(nodes))))
    model = measured(*((n, 1, 1024, 0.0, each) for n, each in zip(nodes, ms, strict=True)))
    for n, each in zip(nodes, ms, strict=True):
        assert model.cycle(n).ms == each
    costs = [model.cycle(n).ms for n in range(1, 50)]
    assert all(after >= before - 1e-9 for before, after in pairwise(costs))
    asked = data.draw(st.integers(nodes[0], nodes[-1]))
    assert ms[0] - 1e-9 <= model.cycle(asked).ms <= ms[-1] + 1e-9


@given(MODELS, places, st.floats(0, 5))
def test_at_break_even_nothing_is_won(model: CycleModel, place: tuple[int, int, int], draft_ms: float) -> None:
    nodes, batch, context = place
    even = model.break_even(nodes, batch, context, draft_ms=draft_ms)
    baseline = model.baseline_tok_s(batch, context)
    assert 1000 * even.length / even.cycle_ms == pytest.approx(baseline)
    assume(even.length >= 1)
    speed = model.speed(nodes, length(even.length), batch, context, draft_ms=draft_ms)
    assert speed.ratio == pytest.approx(1)


def test_the_usual_context_is_the_measured_one_nearest_to_1024() -> None:
    points = tuple(
        Point(1, batch, context, 0.0, 12, "measured", "test") for batch, context in ((1, 128), (1, 2048), (8, 1024))
    )
    assert CycleModel(replace(RTX.hardware, cycles=points), KIMI_K25).usual_context == 2048
    assert CycleModel(replace(RTX.hardware, cycles=()), KIMI_K25).usual_context == 1024


def test_a_speed_takes_the_intervals_of_length_and_cycle() -> None:
    point = B200.speed(16, Length(2.4, 2.3, 2.5))
    assert point.low_tok_s == pytest.approx(2300 / point.cycle.high_ms)
    assert point.high_tok_s == pytest.approx(2500 / point.cycle.low_ms)


def test_an_interval_holds_its_mean() -> None:
    assert Length.around(1.5, (1.4, 1.6)) == Length(1.5, 1.4, 1.6)
    assert Length.around(1.5, (1.5 + 1e-12, 1.5 - 1e-12)) == Length(1.5, 1.5, 1.5)
    assert Length.around(1.0, (1 - 1e-12, 1.0)) == Length(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="acceptance length 0.9"):
        Length.around(0.9, (0.8, 1.0))


# --- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RTX.cycle(0), "a pass of 0 nodes"),
        (lambda: RTX.cycle(1, batch=0), "batch 0"),
        (lambda: RTX.cycle(1, temperature=-1), "temperature -1"),
        (lambda: RTX.cycle(1, temperature=float("nan")), "temperature nan"),
        (lambda: RTX.cycle(4, draft_ms=-1), "drafting takes -1 ms"),
        (lambda: RTX.faster_allreduces(4, share=1.2), "a share of their time"),
        (lambda: tokens_per_s(0.9, 30), "acceptance length 0.9: expected 1 or more"),
        (lambda: Length(0.9, 0.8, 1.0), r"acceptance length 0.9 \(0.8 to 1\): expected 1 <= low"),
        (lambda: Length(1.5, 1.6, 1.7), "expected 1 <= low <= mean <= high"),
        (lambda: Length(1.5, 1.2, float("nan")), "expected 1 <= low"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("num_nodes", [1, 2.5, "4"])
def test_a_number_of_nodes_is_a_whole_one(num_nodes: int) -> None:
    with pytest.raises(ValueError, match=f"num_nodes={num_nodes}: expected a whole number, 2 or more"):
        RTX.heads_ms(HEADS, 1000, num_nodes)
    assert list(RTX.heads_ms(HEADS, 1000, 4)) == [4] and list(RTX.heads_ms(HEADS, 1000)) == list(SIZES)
