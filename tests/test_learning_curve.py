"""The curve through runs on shares of the data: found where it is known, and honest where it is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_k25.costs.learning_curve import EXPONENTS, TYPICAL, Measured, fit_curve

POSITIONS = (3_000, 6_000, 12_000, 24_000)


def points_of(a, b, c, positions=POSITIONS):
    return [Measured(x, a - b * x**-c) for x in positions]


@given(a=st.floats(1.5, 4), at_first=st.floats(0.1, 0.4), c=st.sampled_from(EXPONENTS[2:].tolist()))
def test_a_power_law_is_found_and_extrapolated(a, at_first, c):
    points = points_of(a, at_first * POSITIONS[0] ** c, c)
    curve = fit_curve(points, most=5)
    truth = a - at_first * POSITIONS[0] ** c * 1e6**-c
    low, high = curve.interval(1e6)
    assert low - 1e-6 <= min(truth, curve.at(1e6)) and max(truth, curve.at(1e6)) <= high + 1e-6
    if c == pytest.approx(TYPICAL):
        assert curve.at(1e6) == pytest.approx(truth, abs=1e-6)
        assert curve.needed(truth) == pytest.approx(1e6, rel=1e-3)


def test_clear_points_outweigh_what_exponents_usually_are():
    positions = [1_000 * 4**i for i in range(7)]
    curve = fit_curve(points_of(3, 60, 0.6, positions), most=5)
    assert curve.best.c == pytest.approx(0.6)


@given(st.lists(st.floats(1, 5), min_size=2, max_size=5))
def test_no_fit_says_that_data_hurt_or_that_a_pass_emits_more_than_it_can(lengths):
    curve = fit_curve([Measured(2_000 * 2**i, length) for i, length in enumerate(lengths)], most=5)
    for positions in (1e3, 1e6, 1e9):
        low, high = curve.interval(positions)
        assert low <= curve.at(positions) <= high
    for fit in curve.possible:
        assert fit.b >= 0 and fit.a <= 5
        assert fit.at(1e9) >= fit.at(1e4)
        assert fit.at(1e12) <= 5


def test_a_curve_that_would_end_above_what_is_possible_is_fitted_below_it():
    points = [Measured(1_000, 1.0), Measured(2_000, 2.0), Measured(4_000, 3.2)]
    best = fit_curve(points, most=3.5).best
    assert best.a == 3.5

    def squares(b):
        return sum((best.a - b * point.positions**-best.c - point.value) ** 2 for point in points)

    assert squares(best.b) < min(squares(0.99 * best.b), squares(1.01 * best.b))
    assert best.rms == pytest.approx((squares(best.b) / 3) ** 0.5)


def test_two_points_leave_the_exponent_open():
    two, four = (fit_curve(points_of(2.5, 8, 0.3, positions), most=5) for positions in (POSITIONS[:2], POSITIONS))
    widths = [high - low for low, high in (curve.interval(1e6) for curve in (two, four))]
    assert widths[0] > 0.5
    assert len({fit.c for fit in two.possible}) > 0.9 * len(EXPONENTS)
    assert widths[1] < widths[0]


def test_a_point_that_lies_apart_widens_the_interval():
    points = points_of(2.5, 8, 0.3)
    apart = [*points[:-1], Measured(points[-1].positions, points[-1].value - 0.1)]
    (low, high), (low_apart, high_apart) = (fit_curve(some, most=5).interval(1e6) for some in (points, apart))
    assert low_apart < low
    assert high_apart - low_apart > high - low


def test_what_will_never_be_reached_has_no_number_of_positions():
    curve = fit_curve(points_of(2.0, 8, TYPICAL), most=5)
    assert curve.needed(2.1) is None
    assert curve.needed(1.9) == pytest.approx((8 / 0.1) ** (1 / TYPICAL), rel=1e-3)
    flat = fit_curve([Measured(1_000, 1.5), Measured(2_000, 1.4)], most=5)
    assert flat.at(1e9) == pytest.approx(1.45)
    assert flat.needed(1.45) is None


def test_bad_points_are_refused():
    with pytest.raises(ValueError, match=r"at least two amounts of data, got \[10, 10\] positions.*data.share="):
        fit_curve([Measured(10, 1.5), Measured(10, 1.6)], most=5)
    for wrong in (0.0, 5.1):
        with pytest.raises(ValueError, match=f"above 0 and up to 5.*value={wrong}"):
            fit_curve([Measured(10, 1.5), Measured(20, wrong)], most=5)
