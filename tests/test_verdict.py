"""The sentence follows from the intervals, and everything that is not measured is listed."""

import json
from dataclasses import replace

import pytest

from medusa_k25.acceptance import Row
from medusa_k25.costs.cycle import CycleModel, Length
from medusa_k25.costs.drafters import DRAFTERS, drafters_for
from medusa_k25.costs.hardware import Point
from medusa_k25.costs.served import KIMI_K25
from medusa_k25.costs.verdict import Candidate, Verdict, fastest_candidates, judge, published_candidates
from medusa_k25.replay import Acceptance
from tests.test_cycle import B200, RTX, measured

K25 = "moonshotai/Kimi-K2.5"
MEASURED = CycleModel(
    replace(
        RTX.hardware,
        cycles=tuple(Point(n, 1, 1024, 0.0, ms, "measured", "test") for n, ms in ((1, 12.5), (4, 25.0), (8, 40.0))),
        baseline_tok_s=None,
        notes=(),
    ),
    KIMI_K25,
)  # 80 tokens/s; 4 nodes pay from 2.0, 8 from 3.2


def verdict(
    *candidates: Candidate, model: CycleModel = MEASURED, target: str | None = K25, temperature: float = 0.0
) -> Verdict:
    return judge(model, candidates, target, text_temperatures={temperature})


def chain(mean: float, low: float, high: float, nodes: int = 4, name: str = "Medusa chain") -> Candidate:
    return Candidate(name, nodes, Length(mean, low, high))


def test_something_pays() -> None:
    found = verdict(chain(2.2, 2.1, 2.3), chain(2.5, 2.4, 2.6, nodes=8, name="Medusa best tree"))
    assert found.rows[0].candidate.predictor == "Medusa chain" and found.rows[0].outcome == "pays"
    assert found.rows[0].speed.tok_s == pytest.approx(88)
    assert found.sentence == (
        "Medusa chain with 4 nodes pays: 88.0 tokens/s (84.0 to 92.0) against 80.0 without speculation, 1.10x."
    )
    assert found.rows[1].outcome == "does not pay"
    assert found.rows[1].needed_length == pytest.approx(3.2)


def test_nothing_pays() -> None:
    found = verdict(chain(1.8, 1.7, 1.9))
    assert found.sentence == (
        "Nothing pays: the best is Medusa chain with 4 nodes at 72.0 tokens/s (68.0 to 76.0) against 80.0; it would "
        "take an acceptance length of 2.00 at this cycle of 25.0 ms, or a cycle of 22.5 ms at this acceptance length "
        "of 1.80."
    )


@pytest.mark.parametrize(("low", "high"), [(1.9, 2.1), (2.0, 2.2), (1.7, 2.0)])
def test_inside_the_interval_it_is_too_close_to_call(low: float, high: float) -> None:
    found = verdict(chain((low + high) / 2, low, high))
    assert found.rows[0].outcome == "too close to call"
    assert found.sentence.startswith("Too close to call: the best is Medusa chain with 4 nodes")
    assert "an acceptance length of 2.00 at this cycle" in found.sentence


def test_the_cost_has_an_interval_too() -> None:
    """The length alone would pay; what a pass of 16 costs is not that well known."""
    cycle = B200.cycle(16)
    between = B200.baseline_tok_s() * (cycle.ms + cycle.high_ms) / 2000
    found = verdict(chain(between, between, between, nodes=16), model=B200)
    assert found.rows[0].speed.ratio > 1 and found.rows[0].outcome == "too close to call"


def test_what_pays_for_sure_comes_before_what_may_be_faster() -> None:
    found = verdict(chain(2.2, 2.1, 2.3), chain(2.4, 1.9, 2.9, name="wide"))
    assert found.rows[0].candidate.predictor == "wide"
    assert found.sentence.startswith("Medusa chain with 4 nodes pays: 88.0")
    assert "wide with 4 nodes may be faster, but is too close to call: 96.0" in found.sentence


def test_a_published_drafter_that_wins_is_named() -> None:
    found = verdict(chain(1.5, 1.4, 1.6), *published_candidates(MEASURED))
    assert found.sentence.startswith("lightseekorg/kimi-k2.5-eagle3")
    assert "measure it on yours" in found.sentence
    assert "The best on your own text is Medusa chain with 4 nodes at 60.0 tokens/s (56.0 to 64.0): does not pay" in (
        found.sentence
    )
    text = found.text()
    for drafter in drafters_for(MEASURED.hardware):
        assert drafter.name in text and drafter.launch in text and drafter.source in text
        assert f"{drafter.name} accepts on your text what it does on its makers'" in found.assumptions
    assert "AQ-MedAI/Kimi-K25-eagle3: what drafting costs is unknown and taken as nothing" in found.assumptions


def published(name: str, model: CycleModel) -> Candidate:
    [candidate] = [each for each in published_candidates(model) if each.predictor == name]
    return candidate


MLA = "lightseekorg/kimi-k2.5-eagle3-mla"
ONE_FIGURE = "AQ-MedAI/Kimi-K25-eagle3"


def test_a_range_over_tasks_says_so_and_holds_what_others_measured() -> None:
    mla = published(MLA, RTX)
    assert (mla.length.low, mla.length.high) == (2.28, 3.139)
    assert mla.length.mean == pytest.approx(20.542 / 7)  # over its makers' tasks alone
    found = verdict(chain(1.5, 1.4, 1.6), mla, model=RTX)
    assert found.rows[0].speed.low_tok_s == pytest.approx(76)
    assert found.rows[0].outcome == "too close to call"
    assert found.rows[0].length == "2.935 (2.280 to 3.139 by task)" and found.rows[0].length in found.text()
    assert found.rows[1].length == "1.500 (1.400 to 1.600)"
    assert found.sentence.startswith(f"Too close to call: the best is {MLA} with 4 nodes at 97.8 tokens/s (76.0 to 104")
    assert ", if a pass takes 30.0 ms, which is assumed; " in found.sentence
    assert f"The acceptance length of {MLA} is its makers'" in found.sentence
    for said in (found.text(), "\n".join(found.assumptions)):
        assert "no interval of confidence, and most makers count the token of prefill, too" in said
        assert "8 RTX PRO 6000 with Kimi-K2.6 in vLLM, 92.4 -> 122.0 tokens/s: an acceptance length of 2.28" in said
    assert "prefill" not in verdict(chain(1.5, 1.4, 1.6), model=RTX).text()


def test_one_published_figure_is_never_sure() -> None:
    """Nor does it pay for sure while nobody knows what its drafting costs."""
    only = published(ONE_FIGURE, MEASURED)
    for mean in (1.2, 3.071, 5.0):
        found = verdict(replace(only, length=Length(mean, mean, mean)))
        assert found.rows[0].outcome == "too close to call"
        assert "; its acceptance length is one figure, without a range; " in found.sentence
        assert "; what drafting costs is unknown; " in found.sentence
        assert f"{mean:.3f} (one figure, no range)" in found.text()
    outcomes = []
    for lengths in (Length(4.8, 4.7, 4.9), Length(1.2, 1.1, 1.3)):
        outcomes.append(verdict(replace(only, length=lengths)).rows[0].outcome)
    assert outcomes == ["too close to call", "does not pay"]
    known = replace(only, length=Length(4.8, 4.7, 4.9), drafting_known=True)
    assert verdict(known).rows[0].outcome == "pays"  # its worst task does


@pytest.mark.parametrize(
    ("model", "nodes", "how"),
    [
        *((RTX, 4, "30.0 ms, which is assumed"), (RTX, 2, "18.1 ms, which is interpolated")),
        *((RTX, 8, "57.0 ms, which is extrapolated"), (B200, 4, "5.0 ms, which is put together from parts")),
    ],
)
@pytest.mark.parametrize("mean", [1.01, 1.99])
def test_the_sentence_says_what_a_pass_that_was_not_measured_is(
    model: CycleModel, nodes: int, how: str, mean: float
) -> None:
    assert f", if a pass takes {how}" in verdict(chain(mean, mean, mean, nodes), model=model).sentence


def test_what_is_too_close_is_said_before_nothing_pays() -> None:
    found = verdict(chain(1.9, 1.85, 1.95), chain(1.7, 1.4, 2.1, name="wide"))
    assert found.sentence.startswith(
        "Too close to call: wide with 4 nodes at 68.0 tokens/s (56.0 to 84.0), and 80.0 without speculation lies inside"
    )
    assert found.sentence.endswith("; Medusa chain with 4 nodes at 76.0 tokens/s (74.0 to 78.0) does not pay.")


def test_text_of_another_target_is_a_rehearsal() -> None:
    rows = chain(2.2, 2.1, 2.3), chain(1.5, 1.4, 1.6, name="n-gram lookup")
    found = verdict(*rows, *published_candidates(MEASURED), target="smollm2")
    for row in found.rows:
        assert (row.outcome == "a rehearsal") == (not row.candidate.published)
    assert found.sentence == (
        "No verdict: the text is smollm2's, the passes are moonshotai/Kimi-K2.5's; as a rehearsal the rows say: "
        + verdict(*rows).sentence
    )
    assert "x a rehearsal" in found.text() and found.target == "smollm2"


def test_text_of_an_unknown_target_is_taken_for_the_machines() -> None:
    found = verdict(chain(2.2, 2.1, 2.3), target=None)
    assert found.rows[0].outcome == "pays" and found.target == K25
    assert found.assumptions[0] == "whose answers these are is not in the file: taken as moonshotai/Kimi-K2.5's"
    assert found.sentence.endswith(
        " 1.10x. Whose answers these are is not in the file: taken as moonshotai/Kimi-K2.5's."
    )
    assert "Whose answers" not in verdict(chain(2.2, 2.1, 2.3)).sentence


def test_needed_lengths_that_no_pass_or_every_pass_has_say_so() -> None:
    slow = measured((1, 1, 1024, 0.0, 12.5), (4, 1, 1024, 0.0, 55.0))
    found = verdict(chain(2.2, 2.1, 2.3), model=slow)
    assert "length of 4.40 (more than a pass of 4 nodes can emit: never) at this cycle of 55.0 ms" in found.sentence
    assert "  4 nodes: 4.40 (4.40 to 4.40) at 55.0 ms, measured (more than a pass of 4 nodes can emit: never)" in (
        found.text()
    )
    text = verdict(chain(2.2, 2.1, 2.3), model=measured((1, 1, 1024, 0.0, 12.5), (4, 1, 1024, 0.0, 12.0))).text()
    assert "  4 nodes: 0.96 (0.96 to 0.96) at 12.0 ms, measured (a pass emits 1 at least: always)" in text
    assert "can emit" not in (usual := verdict(chain(2.2, 2.1, 2.3)).text()) and "always" not in usual


def test_levers_are_for_all_reduces_that_were_measured() -> None:
    assert verdict(chain(2.2, 2.1, 2.3), model=RTX).levers
    found = verdict(chain(2.2, 2.1, 2.3), model=B200)
    assert found.levers == () and "tuned all-reduces" not in found.text()


def test_published_drafters_are_listed_for_their_target_alone() -> None:
    assert len(published_candidates(MEASURED)) == len(DRAFTERS) == 4
    other = CycleModel(replace(MEASURED.hardware, target="smollm2"), KIMI_K25)
    assert published_candidates(other) == []


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.name)
def test_published_figures_can_be(drafter: object) -> None:
    [drafter] = [each for each in DRAFTERS if each is drafter]
    assert 1 < drafter.length.low <= drafter.length.high <= drafter.nodes
    assert drafter.name in drafter.launch and drafter.source.startswith("https://")
    assert drafter.draft_ms(RTX.hardware, KIMI_K25) < 10


def test_drafting_with_six_layers_takes_their_bytes_and_all_reduces() -> None:
    (dflash,) = [drafter for drafter in DRAFTERS if drafter.layers == 6]
    read_ms = (6.96 + 2.35) / (8 * 1.792 * 0.6)
    assert dflash.draft_ms(RTX.hardware, KIMI_K25) == pytest.approx(read_ms + 13 * 0.051)


def test_every_assumption_is_listed() -> None:
    assert verdict(chain(2.2, 2.1, 2.3)).assumptions == (
        "measured passes have the drafting of heads inside: a lookup is taken to take as long",
        "tuned all-reduces are as much faster as others measured at 32,768 bytes, 48 to 26 us, at every size",
    )
    listed = "\n".join(
        verdict(chain(2.2, 2.1, 2.3, nodes=16), model=B200, temperature=1.0, target="smollm2").assumptions
    )
    for part in (
        "passes are those of moonshotai/Kimi-K2.5 on b200_nvl8, the text is smollm2's",
        "sampled at temperature 1, not all at the 0 that",
        "a pass of 16 nodes, 7.2 ms, is put together from parts",
        "are beyond the largest that is known (131,072)",
        "share of the memory bandwidth that is reached: 0.6",
        "an all-reduce of 14,336 bytes takes 10 us",
        "0.672 as the exponent",
    ):
        assert part in listed
    assert "temperature at which the answers were sampled is unknown" in "".join(
        judge(MEASURED, [chain(2, 2, 2)], K25).assumptions
    )
    users = verdict(chain(2.2, 2.1, 2.3), model=RTX).assumptions
    assert any("that it verified 4 tokens is assumed" in each for each in users)
    assert any("9 to 26% slower" in each for each in users)


def test_break_even_and_levers_are_given_for_every_size() -> None:
    found = verdict(chain(2.2, 2.1, 2.3), chain(2.2, 2.1, 2.3, nodes=6))
    lengths = {each.nodes: each.length for each in found.break_even}
    assert list(lengths) == [nodes for nodes, _ in found.levers] == [2, 4, 6, 8, 16]
    assert (lengths[4], lengths[6], lengths[8]) == pytest.approx((2.0, 2.6, 3.2))
    assert "  4 nodes: 2.00 (2.00 to 2.00) at 25.0 ms, measured" in found.text()
    assert "if drafting took no time" not in found.text()
    assert "speculation pays, if drafting took no time\n" in verdict(chain(2.2, 2.1, 2.3), model=B200).text()


def test_a_verdict_is_json() -> None:
    found = json.loads(json.dumps(verdict(chain(2.2, 2.1, 2.3)).as_json()))
    assert found["rows"][0]["speed"]["tok_s"] == pytest.approx(88)
    assert found["break_even"][1]["length"] == pytest.approx(2)
    assert found["rows"][0]["candidate"]["length"]["mean"] == 2.2


def row(nodes: int, calibration: float, heldout: float) -> Row:
    counts = [Acceptance(1, 1000, round(1000 * length), {}) for length in (heldout, calibration)]
    return Row("heads, tree", nodes, None, counts[0], counts[0], (heldout - 0.1, heldout + 0.1), (1, 2), counts[1])


def test_each_predictor_has_the_size_that_is_fastest_on_calibration_text() -> None:
    rows = [row(4, 2.0, 1.9), row(8, 3.1, 4.0)]  # passes of 25 and 40 ms
    (found,) = fastest_candidates(rows, MEASURED, {"heads, tree": lambda nodes: nodes / 4})
    assert (found.nodes, found.draft_ms) == (4, 1.0)
    assert (found.length.low, found.length.mean, found.length.high) == pytest.approx((1.8, 1.9, 2.0))
    (found,) = fastest_candidates([row(4, 2.0, 1.9), row(8, 3.3, 1.5)], MEASURED, {})
    assert (found.nodes, found.length.mean) == (8, 1.5)  # held-out text is only reported


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="no predictor to judge"):
        verdict()
    with pytest.raises(ValueError, match="Medusa chain: 1 nodes; a pass with drafts verifies 2"):
        verdict(chain(1.0, 1.0, 1.0, nodes=1))
