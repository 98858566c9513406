"""What a server's cycles did, as seen from outside: counters for its metrics endpoint, and whether drafting still pays.

A cycle is what one request gets of one decode pass: a plain step, which verifies the root alone, or a verify pass. What
the scheduler has taken over is counted, a round behind the device; nothing here waits for it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from medusa_k25.serving.control import NODES

OTHER = "other"  # requests without a label, and those beyond the first MOST_LABELS labels
# Each label is many time series of the metrics endpoint, and requests can say what they like.
MOST_LABELS, LONGEST_LABEL = 32, 64
LABEL = "medusa_k25_label"  # a request's own word for itself, among its custom_params
# The newest cycles are looked at for whether drafting pays: so many, of so many passes at least: half a minute of those
# that take 30 ms.
WINDOW, WINDOW_PASSES = 2048, 1024
FLUSH_S = 1.0


@dataclass
class Counts:
    """Of one label. drafted, accepted: tokens by depth, 1-based."""

    plain: int = 0
    verified: int = 0
    emitted: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    @property
    def cycles(self) -> int:
        return self.plain + self.verified


@dataclass(frozen=True)
class Pays:
    """cycles: how many of the newest are in it. length: tokens a cycle. ratio: speed against none, by the costs."""

    cycles: int
    length: float
    ratio: float


class Meter:
    """counts: of every label there was."""

    def __init__(self) -> None:
        self.counts: dict[str, Counts] = defaultdict(Counts)
        self._window: deque[tuple[int, int, float, float]] = deque()  # requests, emitted, ms with and without drafting
        self._sums = [0.0] * 4

    def label(self, params: Mapping[str, Any] | None) -> str:
        """What a request with these custom_params is counted as."""
        asked = (params or {}).get(LABEL)
        if not isinstance(asked, str) or not 0 < len(asked) <= LONGEST_LABEL or not asked.isprintable():
            return OTHER
        return asked if asked in self.counts or len(self.counts) < MOST_LABELS else OTHER

    def add(self, label: str, accepted: int, nodes: int, depths: Sequence[int]) -> None:
        """One cycle. accepted: drafts. nodes: that it verified, 1 of a plain step. depths: how many of them at each
        depth below the root; () where that depends on what was looked up beside the heads."""
        counts = self.counts[label]
        counts.emitted += accepted + 1
        if nodes > 1:
            counts.verified += 1
        else:
            counts.plain += 1
        for depth, there in enumerate(depths, start=1):
            counts.drafted[depth] += there
        for depth in range(1, accepted + 1):
            counts.accepted[depth] += 1

    def paid(self, requests: int, emitted: int, cost_ms: float, plain_ms: float) -> None:
        """One pass of `requests` cycles that drafted, and what a plain step without heads would have taken."""
        entry = (requests, emitted, cost_ms, emitted / requests * plain_ms)
        self._window.append(entry)
        self._sums = [total + part for total, part in zip(self._sums, entry, strict=True)]
        while len(self._window) > WINDOW_PASSES and self._sums[0] - self._window[0][0] >= WINDOW:
            gone = self._window.popleft()
            self._sums = [total - part for total, part in zip(self._sums, gone, strict=True)]

    @property
    def pays(self) -> Pays | None:
        """Over the newest cycles; None until there are enough of them."""
        requests, emitted, cost_ms, plain_ms = self._sums
        if requests < WINDOW or len(self._window) < WINDOW_PASSES:
            return None
        return Pays(int(requests), emitted / requests, plain_ms / cost_ms)

    def forget(self) -> None:
        """Begin the window anew: other heads, or drafting again."""
        self._window.clear()
        self._sums = [0.0] * 4


def note_nodes(req: Any, nodes: int, accepted: int) -> None:
    """Into the request's meta_info, one number a token: how many nodes the pass verified that emitted it, 1 for a plain
    step, and 0 where the same pass had emitted the token before, or prefill emitted it."""
    if req.customized_info is None:
        req.customized_info = {}
    noted, known = req.customized_info.setdefault(NODES, []), len(req.output_ids)
    del noted[known:]
    noted += [0] * (known - len(noted)) + [nodes] + [0] * accepted


class Exporter:
    """The counts as series of SGLang's /metrics, which gathers the files of all processes (prometheus_client)."""

    def __init__(self, meter: Meter):
        from prometheus_client import Counter as Series
        from prometheus_client import Gauge

        self.meter, self._flushed_at, self._told = meter, 0.0, Counter[tuple[str, ...]]()
        self._cycles = Series("medusa_k25:cycles_total", "Decode cycles of requests, by kind.", ["label", "kind"])
        self._emitted = Series(
            "medusa_k25:emitted_tokens_total", "Tokens of these cycles, with those beyond an answer's end.", ["label"]
        )
        self._drafted = Series("medusa_k25:drafted_tokens_total", "Drafts verified, by depth.", ["label", "depth"])
        self._accepted = Series("medusa_k25:accepted_tokens_total", "Drafts accepted, by depth.", ["label", "depth"])
        self._on = Gauge("medusa_k25:drafting", "1: heads draft, 0: switched off.", multiprocess_mode="mostrecent")
        of_all = {"labelnames": ["label"], "multiprocess_mode": "mostrecent"}
        self._length = Gauge("medusa_k25:accept_length", "Tokens a cycle, since the start.", **of_all)
        self._plain = Gauge("medusa_k25:plain_share", "Share of plain steps, since the start.", **of_all)

    def flush(self, drafting: bool, force: bool = False) -> None:
        """Not more than once in FLUSH_S: every series is a file that is written."""
        if not force and monotonic() - self._flushed_at < FLUSH_S:
            return
        self._flushed_at = monotonic()
        self._on.set(drafting)
        for label, counts in self.meter.counts.items():
            self._raise_to(self._cycles, counts.plain, label, "plain")
            self._raise_to(self._cycles, counts.verified, label, "verify")
            self._raise_to(self._emitted, counts.emitted, label)
            for series, by_depth in ((self._drafted, counts.drafted), (self._accepted, counts.accepted)):
                for depth, tokens in by_depth.items():
                    self._raise_to(series, tokens, label, str(depth))
            self._length.labels(label).set(counts.emitted / counts.cycles)
            self._plain.labels(label).set(counts.plain / counts.cycles)

    def _raise_to(self, series: Any, value: int, *labels: str) -> None:
        key = (series._name, *labels)
        series.labels(*labels).inc(value - self._told[key])
        self._told[key] = value
