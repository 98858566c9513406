"""Heads of another target: reuse them, start from them, or train from scratch? By what they accept of its answers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, hypot, log
from typing import Any

from medusa_k25.costs.cycle import Length

REUSE, WARM_START, RETRAIN = "reuse the heads", "start from the heads", "train from scratch"
SMALL_LOSS = 0.03
LEAST_KEPT = 0.25
RULE = (
    f"reuse where the acceptance length falls by at most {SMALL_LOSS:.0%}; train from scratch where less than "
    f"{LEAST_KEPT:.0%} of the drafts that a pass accepts (acceptance length - 1) is left; start from them between. "
    "Both bounds are rules of thumb"
)
Z = 1.96  # of a 95% interval


@dataclass(frozen=True)
class Advice:
    """What the old heads are worth on another target. home: on held-out answers of the target they were trained for.

    loss: share of the acceptance length; kept: share of the accepted drafts; (mean, low, high), 95%, as if the texts
    had been drawn independently. lookup: what needs no training. break_even: from which length on `nodes` pay.
    """

    differs: tuple[str, ...]
    nodes: int
    here: Length
    home: Length
    lookup: float
    break_even: float

    @property
    def loss(self) -> tuple[float, float, float]:
        ratio = log(self.here.mean / self.home.mean)
        error = Z * hypot(_error(self.here) / self.here.mean, _error(self.home) / self.home.mean)
        return 1 - exp(ratio), 1 - exp(ratio + error), 1 - exp(ratio - error)

    @property
    def kept(self) -> tuple[float, float, float]:
        here, home = self.here.mean - 1, self.home.mean - 1
        if home <= 0:
            return 0.0, 0.0, 0.0
        share = here / home
        error = Z * hypot(_error(self.here), share * _error(self.home)) / home
        return share, share - error, share + error

    @property
    def action(self) -> str:
        return _action(self.loss[0], self.kept[0])

    @property
    def possible(self) -> tuple[str, ...]:
        """Every action that the intervals leave open."""
        ends = [_action(loss, kept) for loss in self.loss for kept in self.kept]
        return tuple(action for action in (REUSE, WARM_START, RETRAIN) if action in ends)

    def sentence(self) -> str:
        loss, low, high = self.loss
        said = (
            f"Another target ({', '.join(self.differs)}): {self.action}. With {self.nodes} nodes a pass emits "
            f"{_interval(self.here)} tokens on its answers, and {_interval(self.home)} on those of the target that "
            f"they were trained for: {loss:.1%} less ({low:.1%} to {high:.1%}); {self.kept[0]:.0%} of the accepted "
            f"drafts are left. N-gram lookup has {self.lookup:.3f} here, and it pays from {self.break_even:.2f} on."
        )
        if others := [action for action in self.possible if action != self.action]:
            said += f" The intervals also allow: {' or '.join(others)}; more answers would settle it."
        return said

    def as_json(self) -> dict[str, Any]:
        found = {"action": self.action, "possible": self.possible, "loss": self.loss, "kept": self.kept}
        return asdict(self) | found | {"sentence": self.sentence(), "rule": RULE}


def _action(loss: float, kept: float) -> str:
    if kept < LEAST_KEPT:
        return RETRAIN
    return REUSE if loss <= SMALL_LOSS else WARM_START


def _error(length: Length) -> float:
    return (length.high - length.low) / (2 * Z)


def _interval(length: Length) -> str:
    return f"{length.mean:.3f} ({length.low:.3f} to {length.high:.3f})"


def common_size(judged: int, here: Sequence[int], home: Sequence[int]) -> int | None:
    """The size of a pass to compare at: as near as can be to the judged one; None where no size is in both."""
    return min({*here} & {*home}, key=lambda nodes: abs(nodes - judged), default=None)
