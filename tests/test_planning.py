"""The arithmetic of a plan, against figures worked out by hand for Kimi-K2.5 and 37,000 samples of 2,000 tokens."""

from dataclasses import replace

import pytest
import yaml
from hydra.utils import instantiate

from medusa_k25.config import conf_dir
from medusa_k25.costs.hardware import Figure, Hardware
from medusa_k25.costs.planning import (
    USERS,
    Assumptions,
    Dataset,
    Run,
    Split,
    cache_bytes,
    estimate,
    planned_run,
    positions_per_s,
    recommendation,
    state_bytes,
    transfer_hours,
    ways,
)
from medusa_k25.costs.served import KIMI_K25
from medusa_k25.costs.training import PEAK_FLOPS
from tests.test_costs import K25, D, meta

ASSUMED = Assumptions(None, None, None, 16_384, setup_hours=1.0, own_hour=15.0)
# An epoch over every token, as the figures were worked out.
EPOCH = Run(positions=74_000_000, validated=0, steps=1, evaluated=0)


def machine(name: str) -> Hardware:
    return instantiate(yaml.safe_load((conf_dir() / "hardware" / f"{name}.yaml").read_text()))


RTX, H200, B200 = (machine(name) for name in ("rtx_pro_6000_x8", "h200_x8", "b200_nvl8"))


def figure(value: float) -> Figure:
    return Figure(value, "assumed", "a test")


def test_the_users_data_are_74_million_tokens():
    assert (USERS.tokens, USERS.samples) == (74_000_000, 37_000)
    assert USERS.answer_tokens == pytest.approx(55e6, rel=0.01)
    assert sum(split.answers for split in (USERS.train, USERS.calibration, USERS.heldout)) == USERS.samples


def test_states_take_what_their_sizes_say():
    assert state_bytes(D, "bfloat16") == 14_336
    assert 74e6 * state_bytes(D, "bfloat16") == pytest.approx(1.06e12, rel=1e-3)
    assert cache_bytes(USERS, D, "all", "bfloat16") == pytest.approx(1.06e12, rel=2e-3)
    assert cache_bytes(USERS.scaled(200_000), D, "all", "bfloat16") == pytest.approx(5.7e12, rel=0.01)
    assert cache_bytes(USERS, D, "all", "float8_e4m3fn") == pytest.approx(0.53e12, rel=0.01)
    answers, everything = (cache_bytes(USERS, D, storage, "bfloat16") for storage in ("answers", "all"))
    assert answers / everything == pytest.approx(1500 / 2000, rel=1e-3)


def test_training_is_as_fast_as_the_peak_says():
    for hardware, tokens_per_s, minutes, read_gb_s in (
        (RTX, 92e3, 13, 1.3),
        (H200, 182e3, 7, 2.6),
        (B200, 413e3, 3, 5.9),
    ):
        assert positions_per_s(K25, hardware) == pytest.approx(tokens_per_s, rel=5e-3)
        estimated = estimate(hardware, K25, USERS, EPOCH, "bfloat16")
        assert round(estimated.hours("train") * 60) == minutes
        assert estimated.read_gb_s == pytest.approx(read_gb_s, rel=0.02)


def test_making_the_data_takes_the_hours():
    data = Dataset.assumed(37_000, 514, 1_486, 16_384, "55 M tokens of answers")
    estimated = estimate(RTX, K25, data, EPOCH, "bfloat16")
    assert estimated.hours("generate") == pytest.approx(7.6, abs=0.05)
    assert estimated.hours("capture") == pytest.approx(3.0, abs=0.1)
    assert estimated.hours("train") < 0.05 * estimated.hours("generate", "capture")
    twice = estimate(RTX, K25, data, EPOCH, "bfloat16", machines=2)
    assert twice.hours("generate") == estimated.hours("generate") / 2
    assert twice.hours("capture") == estimated.hours("capture") / 2
    assert estimate(B200, K25, data, EPOCH, "bfloat16", machines=2).price_per_hour == 2 * 40


def test_own_lm_heads_take_their_state():
    own = replace(K25, heads=meta(own_lm_head=True))
    assert K25.trained == pytest.approx(205.5e6, rel=1e-3)
    assert own.trained - K25.trained == pytest.approx(4.70e9, rel=1e-3)
    assert 16 * (own.trained - K25.trained) == pytest.approx(75e9, rel=0.01)
    assert K25.forward_flops_per_position == pytest.approx(9.81e9, rel=2e-3)
    assert K25.flops_per_position - K25.forward_flops_per_position == pytest.approx(9.81e9, rel=2e-3)


def test_a_terabyte_takes_its_time():
    assert transfer_hours(1e12, 1) == pytest.approx(2.4, abs=0.05)
    assert transfer_hours(1e12, 10) == transfer_hours(1e11, 1)


def test_a_slow_disk_makes_training_longer_and_no_other_stage():
    fast = estimate(B200, K25, USERS, EPOCH, "bfloat16")
    slow = estimate(replace(B200, disk_gb_s=figure(fast.read_gb_s / 2)), K25, USERS, EPOCH, "bfloat16")
    unknown = estimate(replace(B200, disk_gb_s=None), K25, USERS, EPOCH, "bfloat16")
    assert slow.hours("train") == pytest.approx(2 * fast.hours("train"))
    two = estimate(slow.hardware, K25, USERS, EPOCH, "bfloat16", machines=2)  # each has a disk
    assert two.hours("train") == pytest.approx(fast.hours("train"))
    assert unknown.hours() == fast.hours()
    assert slow.hours() - slow.hours("train") == pytest.approx(fast.hours() - fast.hours("train"))


def test_validation_has_no_backward_pass():
    trained = estimate(RTX, K25, USERS, Run(1_000_000, 0, 1, 0), "bfloat16").hours("train")
    validated = estimate(RTX, K25, USERS, Run(0, 1_000_000, 1, 0), "bfloat16").hours("train")
    assert validated / trained == pytest.approx(K25.forward_flops_per_position / K25.flops_per_position)


def test_evaluating_is_forward_work_of_one_device():
    hours = estimate(RTX, K25, USERS, Run(0, 0, 1, evaluated=1_000_000), "bfloat16").hours("evaluate")
    one_device = positions_per_s(K25, RTX) / K25.world_size
    assert hours == pytest.approx(1e6 / one_device / 3600 * K25.forward_flops_per_position / K25.flops_per_position)


def test_the_positions_of_a_run():
    data = replace(USERS, train=Split(1000, 90_000), calibration=Split(100, 10_000), heldout=Split(200, 30_000))
    run = planned_run(data, steps=95, positions_a_step=64, validate_every=10, most_answers=None, most_evaluated=None)
    assert run.positions == round(95 / 1407 * 90_000)  # 1,406.25 steps an epoch, the last of which is shorter
    assert run.validated == 10 * (10_000 + 30_000 + 200 * 90)  # training text: as many answers as held-out text has
    assert run.evaluated == 10_000 + 30_000
    few = planned_run(data, 95, 64, validate_every=10, most_answers=50, most_evaluated=20_000)
    assert few.evaluated == 10_000 + 20_000
    assert few.validated == 10 * (5_000 + 7_500 + 50 * 90)


def test_more_samples_are_like_those_that_were_counted():
    counted = Dataset(
        100, 5_000, 20_000, 777, Split(80, 15_920), Split(10, 1_990), Split(10, 1_990), "counted in a file"
    )
    assert ASSUMED.dataset(counted) is counted
    more = replace(ASSUMED, samples=1_000).dataset(counted)
    assert (more.tokens, more.train.states, more.longest_answer) == (250_000, 159_200, 777)
    assert "scaled from 100" in more.source
    assert ASSUMED.dataset(None) == USERS
    longer = replace(ASSUMED, answer_tokens=400).dataset(counted)
    assert (longer.samples, longer.prompt_tokens, longer.answer_tokens) == (100, 5_000, 40_000)


def test_impossible_assumptions_are_refused():
    for name, value in (
        ("samples", 0),
        ("answer_tokens", 1),
        ("longest_answer", 1),
        ("own_hour", -1),
        ("setup_hours", -1),
    ):
        with pytest.raises(ValueError, match=f"plan.{name}={value}: expected"):
            replace(ASSUMED, **{name: value})


def test_a_missing_rate_names_its_file():
    for name, lacking in (
        ("generate_tok_s", replace(H200, generate_tok_s=None)),
        ("capture_tok_s", replace(H200, capture_tok_s=None)),
    ):
        with pytest.raises(ValueError, match=rf"h200_x8: {name} is null.*conf/hardware/h200_x8.yaml"):
            estimate(lacking, K25, USERS, EPOCH, "bfloat16")
    own, rented = (estimate(hardware, K25, USERS, EPOCH, "bfloat16") for hardware in (RTX, B200))
    no_line = replace(rented, hardware=replace(B200, network_gbit_s=None))
    with pytest.raises(ValueError, match="b200_nvl8: network_gbit_s is null"):
        ways(own, no_line, USERS, KIMI_K25, ASSUMED, "all", "bfloat16")


@pytest.fixture
def shared():
    """(own hour's worth, rented machine) -> the ways, and the recommendation"""

    def make(own_hour, hardware=B200):
        assumed = replace(ASSUMED, own_hour=own_hour)
        own, rented = (estimate(one, K25, USERS, EPOCH, "bfloat16") for one in (RTX, hardware))
        found = ways(own, rented, USERS, KIMI_K25, assumed, "all", "bfloat16")
        return found, recommendation(found, own, rented, assumed)

    return make


def test_the_ways_add_up(shared):
    (home, away, states, fp8, rows, mostly_home), _ = shared(15.0)
    assert (home.rented_hours, home.rent, home.moved) == (0, 0, 0)
    assert home.cost == pytest.approx(15 * home.own_hours)
    assert away.own_hours == 0
    assert away.rent == pytest.approx(40 * away.rented_hours)
    # an hour of setting up, 594 GB of weights over 10 Gbit/s, generating, capturing, a terabyte over 1 Gbit/s
    made = 55.5e6 / 10_000 / 3600 + 74e6 / 50_000 / 3600
    assert states.rented_hours == pytest.approx(1 + 0.143 + made + transfer_hours(1.063e12, 1), rel=0.01)
    assert states.moving_hours == pytest.approx(2.57, abs=0.02)
    assert fp8.moved == pytest.approx(0.75 / 2 * states.moved, rel=0.01)
    assert rows.moved < 0.002 * states.moved  # text, not states
    assert mostly_home.own_hours == pytest.approx(7.7, abs=0.05)


def test_states_move_as_fast_as_the_slower_line():
    own = estimate(replace(RTX, network_gbit_s=figure(100)), K25, USERS, EPOCH, "bfloat16")
    rented = estimate(B200, K25, USERS, EPOCH, "bfloat16")
    states = ways(own, rented, USERS, KIMI_K25, ASSUMED, "all", "bfloat16")[2]
    assert states.moving_hours == pytest.approx(transfer_hours(states.moved, 10))


def test_the_recommendation_follows_the_costs(shared):
    assert "it is not worth renting" in shared(5.0)[1]
    assert "cheaper: it is worth renting" in shared(60.0)[1]
    found, said = shared(15.0)
    best = min(found[1:], key=lambda way: way.cost)
    assert abs(best.cost - found[0].cost) < found[0].cost / 3
    assert "about the same: rent only if having the heads" in said
    slow = replace(B200, generate_tok_s=figure(1_000), capture_tok_s=figure(7_000), price_per_hour=figure(12))
    assert "no faster: do not rent" in shared(18.0, slow)[1]
    assert "it is not worth renting" in shared(0.0)[1]


def test_training_is_a_reason_to_rent_where_it_takes_the_time(shared):
    assert "so training is no reason to rent: what b200_nvl8 buys is generating" in shared(15.0)[1]
    long = replace(EPOCH, positions=100 * EPOCH.positions)
    own, rented = (estimate(one, K25, USERS, long, "bfloat16") for one in (RTX, B200))
    found = ways(own, rented, USERS, KIMI_K25, ASSUMED, "all", "bfloat16")
    said = recommendation(found, own, rented, ASSUMED)
    assert "no reason to rent" not in said
    assert "and b200_nvl8 buys training in 5.0 h, and generating and capturing" in said


def test_the_files_agree_with_the_peaks_that_utilisation_is_measured_against():
    for file in sorted((conf_dir() / "hardware").glob("*.yaml")):
        hardware = machine(file.stem)
        if hardware.gpus:
            (peak,) = [flops for name, flops in PEAK_FLOPS.items() if name in hardware.gpu]
            assert hardware.bf16_tflops.value * 1e12 == peak, file
