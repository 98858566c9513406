"""The same prompts on a running server with heads and without: what is accepted, how fast it is, and whether the
answers are the same.

Without heads is another server, or the same one with its drafting switched off. The two take turns, round by round, so
that a machine that drifts favours neither; and no request finds its start in the prefix cache, so that whoever comes
second gains nothing.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any
from uuid import uuid4

from tqdm import tqdm

from medusa_k25.answer_client import Answer, Ask, Failed, SGLang, answer_all, open_engine
from medusa_k25.conversations import Job
from medusa_k25.costs.probing import Running, running_server
from medusa_k25.server import Server
from medusa_k25.serving.control import (
    CONTROL,
    CONTROL_FOLDER,
    NODES,
    Order,
    Status,
    give_order,
    last_order,
    read_status,
)
from medusa_k25.target import Target

LABELS = ("topic", "label")
WITH, WITHOUT = "with heads", "without"
SHORT = 16  # tokens of an answer that is not measured
SWITCH_S = 60.0  # in which a server must have heeded its operator


@dataclass(frozen=True, kw_only=True)
class Streamed(Answer):
    """An answer whose tokens were seen to come.

    first_s: from the request to its first tokens. token_s: of a token behind those that came first, on average; None
    where there is none. passes: verify passes as the engine counts them, 0 where it counts none. cached: tokens of the
    prompt that the prefix cache had. emitted: tokens of verify passes: the first one comes from prefill. nodes: that
    each pass verified, 1 of a plain step; empty where the server does not say.
    """

    first_s: float
    token_s: float | None
    passes: int
    emitted: int
    cached: int
    nodes: list[int]


@dataclass(frozen=True)
class Streaming(SGLang):
    """An SGLang server whose answers are timed. incremental: an event has the new tokens alone, not all so far."""

    incremental: bool

    def answer(self, ask: Ask) -> Streamed:
        # a key of its own keeps a request from what others have left in the prefix cache
        request = self.request(ask) | {"stream": True, "extra_key": uuid4().hex}
        began = last_at = perf_counter()
        first_at, at_first, last, ids = None, 0, b"", list[int]()
        for last in self.server.stream("/generate", request):
            last_at = perf_counter()
            if first_at is None or self.incremental:  # reading all of them would slow down what is measured
                event = _event(last)
                ids += event["output_ids"]
                if first_at is None and (at_first := event["meta_info"]["completion_tokens"]):
                    first_at = last_at
        if first_at is None:
            raise Failed("the server streamed no token")
        found = _event(last)
        answer = self.read(found | {"output_ids": ids} if self.incremental else found, ask)
        about, later = found["meta_info"], found["meta_info"]["completion_tokens"] - at_first
        return Streamed(
            answer.ids,
            answer.finish_reason,
            first_s=first_at - began,
            token_s=(last_at - first_at) / later if later > 0 else None,
            passes=about.get("spec_verify_ct") or 0,
            emitted=about["completion_tokens"] - 1,
            cached=about.get("cached_tokens") or 0,
            nodes=[number for number in about.get(NODES) or [] if number],
        )


def _event(text: bytes) -> dict[str, Any]:
    """An event of a stream; Failed for one without tokens and counts."""
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    about = event.get("meta_info") if isinstance(event, dict) else None
    if (
        not isinstance(about, dict)
        or type(about.get("completion_tokens")) is not int
        or not isinstance(event.get("output_ids"), list)
    ):
        raise Failed(f"the server streamed {text[:200]!r}, expected output_ids and meta_info with completion_tokens")
    return event


@dataclass(frozen=True)
class Opened:
    """A server to ask, and what it says of itself."""

    engine: Streaming
    says: Running

    @property
    def most_requests(self) -> int | None:
        """That it runs at a time; None: it does not say."""
        states = self.says.facts.get("internal_states")
        state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
        most = state.get("effective_max_running_requests_per_dp")
        return most if type(most) is int else self.says.running


def open_servers(url: str, baseline: str | None, target: Target, tokenizer: Any, timeout_s: float) -> list[Opened]:
    """The server with heads, and the one without where there is one.

    ValueError where one is no SGLang server that serves `target`, the first one has no heads or the second one has, or
    both serve different models; OSError when nobody answers.
    """
    opened = []
    for each in (url,) if baseline is None else (url, baseline):
        http = Server(each, retries=2, timeout_s=timeout_s)
        engine, says = open_engine(http, target, tokenizer), running_server(http)
        assert isinstance(engine, SGLang)  # or the second line would have refused it
        incremental = bool(says.facts.get("incremental_streaming_output"))
        opened.append(Opened(Streaming(**vars(engine), incremental=incremental), says))
    algorithm = opened[0].says.facts.get("speculative_algorithm")
    if algorithm != "MEDUSA":
        raise ValueError(
            f"server={url} serves no heads, its speculative algorithm is {algorithm}; start it with "
            "--speculative-algorithm MEDUSA --speculative-draft-model-path FOLDER"
        )
    if opened[-1].says.model != opened[0].says.model:
        raise ValueError(
            f"baseline={baseline} serves {opened[-1].says.model}, server={url} serves {opened[0].says.model}: expected "
            "the same model"
        )
    if baseline is not None and opened[-1].says.nodes > 1:
        raise ValueError(f"baseline={baseline} speculates, too; name a server without --speculative-algorithm")
    return opened


class Switch:
    """The drafting of a running server, by the files of its operator; see `control`.

    tick: what the server is asked for so that it looks at them. ValueError where `folder` is not there.
    """

    def __init__(self, folder: Path, engine: Streaming, tick: Ask, seconds: float = SWITCH_S):
        if not folder.is_dir():
            raise ValueError(f"control={folder}: no such folder; name the one that the server has as {CONTROL_FOLDER}")
        self.folder, self.engine, self.tick, self.seconds = folder, engine, tick, seconds
        self.before, self.status = last_order(folder), read_status(folder)

    def give(self, order: Order) -> Status:
        """Returns when the server has carried it out; ValueError when it refuses, or looks at another folder."""
        give_order(self.folder, order)
        deadline = time.monotonic() + self.seconds
        while True:
            self.engine.answer(self.tick)
            status = read_status(self.folder)
            if status is not None and status.order is not None:
                if Order.from_json(status.order, self.folder / CONTROL) == order:
                    if status.error is not None:
                        raise ValueError(f"the server refuses {self.folder / CONTROL}: {status.error}")
                    return status
            if time.monotonic() > deadline:
                raise ValueError(
                    f"the server did not heed {self.folder / CONTROL} within {self.seconds:g} s; expected a server of "
                    f"this address with {CONTROL_FOLDER}={self.folder}"
                )
            time.sleep(0.05)

    @property
    def heads(self) -> Order:
        """What the operator has ordered, or if that is no drafting, drafting."""
        before = self.before or Order()
        return Order("on", before.heads) if before.drafting == "off" else before

    def to_heads(self) -> None:
        self.give(self.heads)

    def off(self) -> None:
        status = self.give(Order("off", self.heads.heads))
        if status.drafting != "off":
            raise ValueError(f"the server was told to switch drafting off, and says that it is {status.drafting}")

    def left(self) -> str | None:
        """What to say where the server has switched its heads off by itself while they were measured."""
        status = read_status(self.folder)
        off = status is not None and status.drafting == "off"
        return f"the server switched drafting off by itself: {status.why}" if status is not None and off else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Whatever happens, an interrupt and SIGTERM included, the operator's order stands again afterwards.

        Drafting is off first, so that the order to draft is a new one also for a server that has given it up.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            raise SystemExit(128 + number)

        terminated = signal.signal(signal.SIGTERM, stop)
        try:
            self.off()
            yield
        except BaseException:
            give_order(self.folder, self.before or Order())  # heeded with the next request
            raise
        else:
            self.give(self.before or Order())
        finally:
            signal.signal(signal.SIGTERM, terminated)


@dataclass(frozen=True)
class Side:
    """enter: what has to be done before its server is asked. left: what has to be said afterwards, None: nothing."""

    name: str
    engine: Streaming
    enter: Callable[[], None] = lambda: None
    left: Callable[[], str | None] = lambda: None

    def require(self, measured: "Round") -> None:
        """ValueError where the answers are not those of this side."""
        url, answers = self.engine.server.url, [answer for _, answer in measured.whole if answer.emitted]
        if self.name == WITH and answers and not any(answer.passes for answer in answers) and self.left() is None:
            raise ValueError(f"{url} serves heads, but its answers count no verify passes (spec_verify_ct)")
        if self.name == WITHOUT and any(0 < answer.passes < answer.emitted for answer in answers):
            raise ValueError(f"answers of {url} have accepted drafts, though it should have drafted nothing")


def sides_of(servers: Sequence[Opened], switch: Switch | None) -> list[Side]:
    if switch is not None:
        engine = servers[0].engine
        return [Side(WITH, engine, switch.to_heads, switch.left), Side(WITHOUT, engine, switch.off)]
    return [Side(name, server.engine) for name, server in zip((WITH, WITHOUT), servers, strict=False)]


def heads_of(server: Opened, switch: Switch | None) -> str:
    """The folder that the server drafts with."""
    status = None if switch is None else read_status(switch.folder)
    return str(server.says.facts.get("speculative_draft_model_path")) if status is None else status.heads


def described(servers: Sequence[Opened], switch: Switch | None) -> str:
    """Who is asked, with and without heads."""
    server = servers[0]
    words = f"{server.says.url}: {server.engine.name} with {server.says.model} and heads of {heads_of(server, switch)}"
    if switch is not None:
        return f"{words}; without heads: the same, switched off in {switch.folder}"
    return words + (f"; without heads: {servers[1].says.url}" if len(servers) > 1 else "; nobody without heads")


@dataclass(frozen=True)
class Round:
    """What one side answered to some prompts, `concurrency` at a time, in so many seconds. answers: by number of the
    prompt in the list of all; a text is why there is none."""

    concurrency: int
    seconds: float
    answers: list[tuple[int, Streamed | str]]

    @property
    def whole(self) -> list[tuple[int, Streamed]]:
        return [(prompt, answer) for prompt, answer in self.answers if isinstance(answer, Streamed)]

    @property
    def tok_s(self) -> float:
        return sum(len(answer.ids) for _, answer in self.whole) / self.seconds


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_p: float
    seed: int


class Trial:
    """concurrency: requests at a time, each of which is measured in `rounds` rounds of either side."""

    def __init__(self, concurrency: Sequence[int], rounds: int, label: str):
        if not concurrency or not all(type(each) is int and each >= 1 for each in (*concurrency, rounds)):
            raise ValueError(
                f"concurrency={list(concurrency)}, rounds={rounds}: expected whole numbers, at least 1 and one of each"
            )
        if label not in LABELS:
            raise ValueError(f"label={label}: expected {' or '.join(LABELS)}, what a row of the prompts has")
        self.concurrency, self.rounds, self.label = sorted(set(concurrency)), rounds, label

    def label_of(self, job: Job) -> str | None:
        return job.prompt.group if self.label == "topic" else job.prompt.label

    def levels(self, servers: Sequence[Opened]) -> tuple[list[int], list[str]]:
        """(concurrency that every server takes, what is left out in sentences); ValueError where nothing is left."""
        found, notes = [], []
        for level in self.concurrency:
            full = [each for each in servers if each.most_requests is not None and level > each.most_requests]
            if full:
                url, most = full[0].says.url, full[0].most_requests
                notes.append(f"concurrency {level} is left out: {url} runs {most} requests at a time")
            else:
                found.append(level)
        if not found:
            raise ValueError("no concurrency is left to measure: " + "; ".join(notes))
        return found, notes

    def asked(self, prompts: int, level: int) -> list[list[int]]:
        """The numbers of the prompts of each round. All are asked once, or as often as it takes to keep `level`
        requests running."""
        size = max(-(-prompts // self.rounds), 2 * level)
        return [[(start * size + i) % prompts for i in range(size)] for start in range(self.rounds)]

    def plan(self, sides: Sequence[Side], prompts: int, levels: Sequence[int]) -> str:
        sizes = {level: len(self.asked(prompts, level)[0]) for level in levels}
        some = ", ".join(f"{size:,} at concurrency {level}" for level, size in sizes.items())
        answers = len(sides) * self.rounds * sum(sizes.values())
        return (
            f"{prompts:,} prompts; {self.rounds} rounds of {some}; {' and '.join(side.name for side in sides)}: "
            f"{answers:,} answers"
        )

    def remarks(self, jobs: Sequence[Job], levels: Sequence[int], switch: Switch | None) -> list[str]:
        """What to say of the prompts, and of the server before it is switched."""
        notes = []
        status = None if switch is None else switch.status
        if status is not None and status.drafting == "off" and (status.order or {}).get("drafting") != "off":
            notes.append(f"the server had switched drafting off by itself ({status.why}); now it drafts again")
        if not any(self.label_of(job) for job in jobs):
            notes.append(f'no prompt has a {self.label}: acceptance is that of all; rows may have "topic" and "label"')
        if levels[-1] > len(jobs):
            notes.append(f"{len(jobs):,} prompts for concurrency {levels[-1]}: some are asked several times at once")
        return notes

    def run(
        self, jobs: Sequence[Job], sides: Sequence[Side], levels: Sequence[int], sampling: Sampling
    ) -> tuple[dict[str, list[Round]], list[str]]:
        """(rounds by the side's name, what has to be said).

        OSError when a server is gone; ValueError where the one with heads counts no verify passes, or where there are
        accepted drafts on the other side.
        """
        rounds: dict[str, list[Round]] = {side.name: [] for side in sides}
        notes = dict[str, None]()
        plan = [(level, asked) for level in levels for asked in self.asked(len(jobs), level)]
        answers = len(sides) * sum(len(asked) for _, asked in plan)
        with tqdm(desc="evaluate", total=answers, unit=" answers", smoothing=0) as bar:
            for place, (level, asked) in enumerate(plan):
                for side in sides if place % 2 == 0 else reversed(sides):
                    bar.set_postfix_str(f"{level} at a time, {side.name}")
                    side.enter()
                    if place % self.rounds == 0:
                        warm = [(i, SHORT) for i in asked[:level]]
                        side.require(self._round(jobs, side, level, warm, sampling, lambda: None))
                    whole = [(i, jobs[i].max_new_tokens) for i in asked]
                    rounds[side.name].append(self._round(jobs, side, level, whole, sampling, bar.update))
                    side.require(rounds[side.name][-1])
                    if note := side.left():
                        notes[note] = None
        for name, some in rounds.items():
            all_of_them = [answer for each in some for _, answer in each.answers]
            failed = [answer for answer in all_of_them if isinstance(answer, str)]
            cached = sum(answer.cached for answer in all_of_them if isinstance(answer, Streamed))
            if failed:
                notes[f"{name}: {len(failed):,} of {len(all_of_them):,} requests have no answer: {failed[0]}"] = None
            if cached:
                notes[f"{name}: {cached:,} tokens of prompts were in the prefix cache all the same"] = None
        return rounds, list(notes)

    def _round(
        self,
        jobs: Sequence[Job],
        side: Side,
        level: int,
        asked: Sequence[tuple[int, int]],
        sampling: Sampling,
        answered: Callable[[], object],
    ) -> Round:
        """asked: numbers of prompts, and the tokens of each answer at most."""
        asks = [Ask(jobs[i].prompt_ids, min(most, jobs[i].max_new_tokens), **asdict(sampling)) for i, most in asked]
        found: dict[int, Streamed | str] = {}
        began = last_at = perf_counter()
        with closing(answer_all(side.engine, asks, level)) as answers:
            for index, answer in answers:
                assert isinstance(answer, Streamed | str)
                if isinstance(answer, Streamed):
                    last_at = perf_counter()
                found[index] = answer
                answered()
        numbered = [(asked[index][0], found[index]) for index in range(len(asked))]
        if last_at == began:
            raise ValueError(f"{side.engine.server.url} answered no prompt of a round: {numbered[0][1]}")
        return Round(level, last_at - began, numbered)
