"""What passes take on a running SGLang server: one without speculation, or one that serves heads of some tree.

A pass's cost depends on sizes, so untrained heads will do (`export heads=blank num_nodes=16`). One caveat: at each
depth they draft the same few tokens, and an MoE may wake fewer experts for those than for trained heads' drafts.

The same prompts are answered twice, with few tokens and with many; the times' difference over the difference in passes
is the time of one. Prefill, queueing and HTTP are in both and cancel, and nothing needs to be streamed. The prompts
have been read once before, so that a prefix cache holds them both times.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, strftime
from typing import Any

import yaml
from tqdm import tqdm

from medusa_k25.answer_client import NEUTRAL
from medusa_k25.costs.hardware import Hardware, Point
from medusa_k25.prompts import load_prompts
from medusa_k25.server import Refused, Server

MARK = "# Measured by python -m medusa_k25.probe"
WHOLE_BATCH = 0.8  # of the requests must run in an average pass, else the smaller batches are said


@dataclass(frozen=True)
class Running:
    """A server and what it says of itself; None: it does not say."""

    http: Server
    nodes: int  # that a verify pass takes; 1: it does not speculate
    version: str
    model: str
    longest_prompt: int | None
    kv_tokens: int | None
    running: int | None  # requests at a time
    facts: Mapping[str, Any]  # all that it says

    @property
    def url(self) -> str:
        return self.http.url


@dataclass(frozen=True)
class Place:
    """One thing to measure: `batch` requests at once with `context` tokens before their answers."""

    server: Running
    batch: int
    context: int
    temperature: float
    top_p: float


@dataclass(frozen=True)
class Measured:
    """point: from the least disturbed answers of all rounds. low_ms, high_ms: what single rounds say. running: requests
    in an average pass."""

    point: Point
    low_ms: float
    high_ms: float
    running: float


@dataclass(frozen=True)
class _Timed:
    """passes: of the request that took most. running: requests in an average pass."""

    seconds: float
    passes: int
    running: float


def _of_a_pass(short: _Timed, long: _Timed) -> float:
    """Milliseconds."""
    return 1000 * (long.seconds - short.seconds) / (long.passes - short.passes)


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_p: float = 1.0


class Probe:
    """batches, contexts: requests at once, and tokens before their answers. sampling: (temperature, top_p) each.
    short, long: tokens of an answer, both of which are timed `rounds` times at every place."""

    def __init__(
        self,
        batches: Sequence[int],
        contexts: Sequence[int],
        sampling: Sequence[Mapping[str, float]],
        short: int,
        long: int,
        rounds: int,
        timeout_s: float,
    ):
        if not batches or not contexts or not sampling or min(*batches, *contexts, short, rounds) < 1:
            raise ValueError(
                f"probe: batches {list(batches)}, contexts {list(contexts)}, {len(sampling)} samplings, short={short}, "
                f"rounds={rounds}: expected numbers above 0, one of each at least"
            )
        if long < 2 * short:
            raise ValueError(f"probe: long={long}, short={short}: expected an answer at least twice as long")
        self.batches, self.contexts = sorted(set(batches)), sorted(set(contexts))
        self.sampling = [Sampling(**each) for each in sampling]
        self.short, self.long, self.rounds, self.timeout_s = short, long, rounds, timeout_s

    @property
    def calls_a_place(self) -> int:
        return 1 + 2 * self.rounds

    def open(self, url: str) -> Running:
        """See `running_server`."""
        return running_server(Server(url, retries=2, timeout_s=self.timeout_s))

    def places(self, servers: Sequence[Running]) -> tuple[list[Place], list[str]]:
        """What to measure, by server, and what has been left out or cut, said in sentences.

        ValueError where two servers verify as many nodes, or one serves another model, or nothing is left.
        """
        for server in servers:
            if [other.nodes for other in servers].count(server.nodes) > 1:
                raise ValueError(f"two servers verify {server.nodes} nodes a pass: their cycles would be one point")
            if server.model != servers[0].model:
                raise ValueError(
                    f"{server.url} serves {server.model}, {servers[0].url} serves {servers[0].model}: probe one of them"
                )
        found, notes = list[Place](), list[str]()
        for server in servers:
            contexts = dict[int, None]()  # no two of the same length
            for context in self.contexts:
                most = context
                if server.longest_prompt is not None:
                    most = min(context, server.longest_prompt - self.long - 2 * server.nodes)
                if most < 1:
                    raise ValueError(
                        f"{server.url} takes {server.longest_prompt} tokens, no room for an answer of {self.long}: "
                        "start it with a longer context, or give a smaller probe.long"
                    )
                if most < context:
                    notes.append(f"{server.url}: context {context:,} is cut to {most:,}, the longest it takes")
                contexts[most] = None
            for batch in self.batches:
                if server.running is not None and batch > server.running:
                    notes.append(
                        f"{server.url}: batch {batch} is left out, it runs {server.running} requests at a time"
                    )
                    continue
                for context in contexts:
                    needed = batch * (context + self.long + 2 * server.nodes)
                    if server.kv_tokens is not None and needed > server.kv_tokens:
                        notes.append(
                            f"{server.url}: batch {batch} with context {context:,} is left out, it needs {needed:,} "
                            f"tokens of cache and there are {server.kv_tokens:,}"
                        )
                        continue
                    found += [Place(server, batch, context, each.temperature, each.top_p) for each in self.sampling]
        if not found:
            raise ValueError("nothing is left to measure: " + "; ".join(notes))
        return found, notes

    def requests(self, places: Sequence[Place]) -> int:
        return self.calls_a_place * sum(place.batch for place in places)

    def run(self, places: Sequence[Place], clock: Callable[[], float] = perf_counter) -> list[Measured]:
        """Measure every place. ValueError for a server that counts no verify passes, or whose times make no sense."""
        measured, ids = [], dict[str, list[int]]()
        with tqdm(desc="probe", total=self.calls_a_place * len(places), unit=" call", smoothing=0) as bar:
            for place in places:
                url = place.server.url
                if url not in ids:
                    ids[url] = _text_ids(place.server)
                measured.append(self._measure(place, ids[url], clock, bar))
        return measured

    def _measure(self, place: Place, ids: list[int], clock: Callable[[], float], bar: Any) -> Measured:
        prompts = [_prompt(ids, place.context, i) for i in range(place.batch)]
        self._timed(place, prompts, 2, clock)  # the prefix cache has them from here on
        bar.update()
        shorts, longs = list[_Timed](), list[_Timed]()
        for _ in range(self.rounds):
            shorts.append(self._timed(place, prompts, self.short, clock))
            longs.append(self._timed(place, prompts, self.long, clock))
            bar.update(2)
        # what else runs on the machine only adds time
        short, long = (min(timed, key=lambda each: each.seconds / each.passes) for timed in (shorts, longs))
        if long.passes <= short.passes:
            raise ValueError(
                f"{place.server.url}: {self.long} tokens took {long.passes} passes and {self.short} took "
                f"{short.passes}; give a larger probe.long"
            )
        ms = _of_a_pass(short, long)
        if ms <= 0:
            raise ValueError(
                f"{place.server.url}: {self.long} tokens took no longer than {self.short}; the machine is too busy to "
                "measure: try again, or give a larger probe.long or probe.rounds"
            )
        of_rounds = [_of_a_pass(*both) for both in zip(shorts, longs, strict=True) if both[1].passes > both[0].passes]
        of_rounds.append(ms)
        source = f"python -m medusa_k25.probe, {strftime('%Y-%m-%d')}, SGLang {place.server.version}"
        if place.top_p != 1:
            source += f", top-p {place.top_p:g}"
        point = Point(
            place.server.nodes,
            place.batch,
            place.context,
            place.temperature,
            float(f"{ms:.4g}"),
            "measured",
            source,
            low_ms=float(f"{min(of_rounds):.4g}"),
            high_ms=float(f"{max(of_rounds):.4g}"),
        )
        return Measured(point, min(of_rounds), max(of_rounds), median(each.running for each in longs))

    def _timed(self, place: Place, prompts: list[list[int]], tokens: int, clock: Callable[[], float]) -> "_Timed":
        """All prompts at once."""
        sampling = {"max_new_tokens": tokens, "temperature": place.temperature, "top_p": place.top_p, **NEUTRAL}
        request = {"input_ids": prompts, "sampling_params": sampling | {"ignore_eos": True}}
        once = replace(place.server.http, retries=0)  # a time with a retry in it would be wrong
        started = clock()
        try:
            rows = once.call("/generate", request)
        except Refused as refusal:
            raise ValueError(f"{place.server.url}/generate: {refusal}") from None
        seconds = clock() - started
        if not isinstance(rows, list) or len(rows) != len(prompts):
            raise ValueError(f"{place.server.url} answered {len(prompts)} prompts with {str(rows)[:200]}")
        passes = [self._passes(place.server, row, tokens) for row in rows]
        return _Timed(seconds, max(passes), sum(passes) / max(passes))

    def _passes(self, server: Running, row: Any, tokens: int) -> int:
        about = row.get("meta_info") if isinstance(row, dict) else None
        if not isinstance(about, dict) or about.get("completion_tokens") != tokens:
            raise ValueError(f"{server.url} was asked for {tokens} tokens and answered {str(about or row)[:200]}")
        if server.nodes == 1:
            return tokens - 1  # the first comes from prefill
        passes = about.get("spec_verify_ct")
        if not isinstance(passes, int) or passes < 1:
            raise ValueError(
                f"{server.url} speculates, but an answer says nothing of its verify passes (spec_verify_ct is "
                f"{passes!r}); SGLang counts them from version 0.5 on"
            )
        return passes


def running_server(http: Server) -> Running:
    """ValueError when the address is no SGLang server's; OSError when nobody answers."""
    url = http.url
    try:
        facts = http.call("/server_info")
    except Refused as refusal:
        raise ValueError(f"{url}/server_info: {refusal}; expected the address of an SGLang server") from None
    if not isinstance(facts, dict) or not {"version", "model_path"} <= facts.keys():
        raise ValueError(f"{url}/server_info names no version and model_path: expected an SGLang server")
    nodes = facts.get("speculative_num_draft_tokens") if facts.get("speculative_algorithm") else 1
    if not isinstance(nodes, int) or nodes < 1:
        raise ValueError(f"{url} speculates, but does not say with how many tokens a pass (it says {nodes!r})")
    return Running(
        http,
        nodes,
        version=str(facts["version"]),
        model=str(facts["model_path"]),
        longest_prompt=_count(facts.get("max_req_input_len")),
        kv_tokens=_count(facts.get("max_total_num_tokens")),
        running=_count(facts.get("max_running_requests")),
        facts=facts,
    )


def table(measured: Sequence[Measured]) -> str:
    lines = ["nodes  batch  context  temperature  ms a pass  range of the rounds"]
    for each in measured:
        point = each.point
        lines.append(
            f"{point.nodes:5}  {point.batch:5}  {point.context:7,}  {point.temperature:11g}  {point.ms:9.2f}  "
            f"{each.low_ms:.2f} to {each.high_ms:.2f}"
        )
        if each.running < WHOLE_BATCH * point.batch:
            lines[-1] += f"; on average {each.running:.1f} of {point.batch} requests ran, the others had ended"
    return "\n".join(lines)


def other_model(server: Running, machine: Hardware) -> str | None:
    """A remark where a server's model does not look like the hardware file's target; None where it does."""
    if machine.is_of(server.model):
        return None
    return (
        f"{server.url} serves {server.model}, the passes of {machine.name} are those of {machine.target}: correct "
        "`target` in the hardware file"
    )


def own_file(path: Path) -> list[Point]:
    """The points of a file that an earlier probe wrote; ValueError where `path` is any other file."""
    if not path.exists():
        return []
    text = path.read_text()
    if not text.startswith(MARK):
        raise ValueError(f"{path} is not a file that probe wrote; give probe_file=FILE")
    return [Point(**point) for point in yaml.safe_load(text)["cycles"]]


def hardware_file(chosen: Mapping[str, Any], name: str, measured: Sequence[Point], earlier: Sequence[Point]) -> str:
    """The text of a hardware file: what `chosen` says, with the measured cycles in place of its own.

    `earlier`: of the same file; a pass that was measured again replaces the one before.
    """
    by_place = {(p.nodes, p.batch, p.context, p.temperature): p for p in (*earlier, *measured)}
    points = [by_place[place] for place in sorted(by_place)]
    content = dict(chosen) | {"name": name, "cycles": [asdict(point) for point in points]}
    if any((p.nodes, p.batch, p.temperature) == (1, 1, 0) for p in points):
        content["baseline_tok_s"] = None  # it follows from a measured pass
    body = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=10**6)
    return f"{MARK}: the cycles are measured, all else is {chosen['name']}'s.\n{body}"


def _text_ids(server: Running) -> list[int]:
    """Token ids of the shipped questions, as the server tokenises them: text, so that an MoE routes as for text."""
    text = "\n".join(str(prompt.messages[-1]["content"]) for prompt in load_prompts("package"))
    try:
        found = server.http.call("/tokenize", {"model": server.model, "prompt": text, "add_special_tokens": False})
    except Refused as refusal:
        raise ValueError(f"{server.url}/tokenize: {refusal}; start the server with its tokenizer") from None
    ids = found.get("tokens") if isinstance(found, dict) else None
    if not isinstance(ids, list) or not ids or not all(isinstance(id, int) for id in ids):
        raise ValueError(f"{server.url}/tokenize answered {str(found)[:200]}, expected token ids")
    return ids


def _prompt(ids: list[int], length: int, number: int) -> list[int]:
    """`length` tokens of the text from another place for each number, so that no two requests share a prefix."""
    start = number * 101
    return [ids[(start + i) % len(ids)] for i in range(length)]


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
