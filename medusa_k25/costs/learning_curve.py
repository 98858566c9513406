"""What heads reach against training positions: a curve through runs on shares of the data, and what more would give.

The value is an acceptance length, or a speed against no speculation.

value(x) = a - b x^-c, with b >= 0 (more data never hurts) and a at most what a pass can give.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

EXPONENTS = np.linspace(0.05, 1.0, 39)
# What an exponent is taken to be before any point is seen: published data curves of language models have 0.1 to 0.5.
# A few points, noisy as they are, say less about it than this.
TYPICAL, SPREAD = 0.3, 0.2
NOISE = 0.01  # in a run's value, between seeds and schedules


@dataclass(frozen=True)
class Measured:
    """One run: the distinct positions that it learnt from, and its value on held-out text."""

    positions: int
    value: float


@dataclass(frozen=True)
class Fit:
    a: float
    b: float
    c: float
    rms: float  # of the residuals

    def at(self, positions: float) -> float:
        return self.a - self.b * positions**-self.c


@dataclass(frozen=True)
class Curve:
    """The likeliest fit, given TYPICAL, and all that the points do not rule out: interval() spans those."""

    points: tuple[Measured, ...]
    best: Fit
    possible: tuple[Fit, ...]

    def at(self, positions: float) -> float:
        return self.best.at(positions)

    def interval(self, positions: float) -> tuple[float, float]:
        values = [fit.at(positions) for fit in self.possible]
        return min(values), max(values)

    def needed(self, value: float) -> float | None:
        """Positions at which the best fit reaches `value`; None: never."""
        a, b, c = self.best.a, self.best.b, self.best.c
        if value >= a:
            return None
        return float((b / (a - value)) ** (1 / c)) if b else 0.0


def fit_curve(points: Sequence[Measured], most: float) -> Curve:
    """Through runs on at least two amounts of data. most: what no heads can exceed.

    A fit is possible whose residuals are within NOISE or twice the best fit's, also with one point left out: seen from
    two or three points the exponent hardly shows, and the interval says so.
    """
    points = tuple(sorted(points, key=lambda point: point.positions))
    if len({point.positions for point in points}) < 2:
        raise ValueError(
            f"a learning curve needs runs on at least two amounts of data, got {[point.positions for point in points]} "
            "positions; train with data.share=0.25, 0.5 and 1"
        )
    if wrong := [point for point in points if not 0 < point.value <= most or point.positions < 1]:
        raise ValueError(f"expected values above 0 and up to {most:g}, of at least one position, got {wrong}")
    fits = _fits(points, most)
    best = min(fits, key=lambda fit: len(points) * (fit.rms / NOISE) ** 2 + ((fit.c - TYPICAL) / SPREAD) ** 2)
    possible = []
    for some in [points, *combinations(points, len(points) - 1)]:
        if len({point.positions for point in some}) >= 2:
            found = _fits(some, most)
            limit = max(NOISE, 2 * min(fit.rms for fit in found))
            possible += [fit for fit in found if fit.rms <= limit]
    return Curve(points, best, tuple(possible))


def _fits(points: Sequence[Measured], most: float) -> list[Fit]:
    """The least squares for every exponent."""
    x, y = np.array([p.positions for p in points], dtype=float), np.array([p.value for p in points])
    found = []
    for c in EXPONENTS.tolist():
        z = x**-c
        b = -float(((z - z.mean()) * (y - y.mean())).sum() / ((z - z.mean()) ** 2).sum())
        a = float(y.mean() + b * z.mean())
        if a > most:
            a, b = most, float(((most - y) * z).sum() / (z**2).sum())
        if b < 0:
            a, b = float(y.mean()), 0.0
        found.append(Fit(a, b, c, float(np.sqrt(np.mean((a - b * z - y) ** 2)))))
    return found
