"""What two sides of a `live` trial make of each other: speed, acceptance beside replay's, equal answers, tool calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from medusa_k25.breakdown import Part, break_down
from medusa_k25.conversations import Job
from medusa_k25.data.texts import Text
from medusa_k25.ngram.beside import Beside
from medusa_k25.replay import Resampling, between, walk_all
from medusa_k25.server import Refused, Server
from medusa_k25.serving.live import WITH, WITHOUT, Opened, Round, Streamed
from medusa_k25.tree import Tree

ALL = "all"
FASTER, SLOWER, CLOSE, NOT_JUDGED = "faster", "slower", "too close to call", "one round, not judged"
CALL_MARKS = ("<|tool_call_begin|>", "<tool_call>")  # before each call: Kimi's; Hermes' and Qwen's
SHOWN = 10  # answers that differ


@dataclass(frozen=True)
class Speed:
    """Medians: of tokens/s of all requests together over rounds (low, high: the slowest and the fastest), of the time
    to the first token and of the time of a later one over answers."""

    tok_s: float
    low_tok_s: float
    high_tok_s: float
    first_ms: float
    token_ms: float | None
    answers: int
    tokens: int

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> "Speed":
        answers = [answer for each in rounds for _, answer in each.whole]
        token_s = [answer.token_s for answer in answers if answer.token_s is not None]
        speeds = [each.tok_s for each in rounds]
        return cls(
            median(speeds),
            min(speeds),
            max(speeds),
            1000 * median(answer.first_s for answer in answers),
            1000 * median(token_s) if token_s else None,
            len(answers),
            sum(len(answer.ids) for answer in answers),
        )


@dataclass(frozen=True)
class Level:
    """What was measured at one concurrency. ratio: of tokens/s with heads to those without, the median of the rounds,
    and the least and the greatest; None where nothing was compared."""

    concurrency: int
    speeds: dict[str, Speed]
    ratio: tuple[float, float, float] | None
    outcome: str | None


def compare_speeds(rounds: Mapping[str, Sequence[Round]]) -> list[Level]:
    levels = []
    for level in dict.fromkeys(each.concurrency for each in rounds[WITH]):
        some = {name: [each for each in all_ if each.concurrency == level] for name, all_ in rounds.items()}
        ratio = outcome = None
        if WITHOUT in some:
            ratios = [ours.tok_s / plain.tok_s for ours, plain in zip(some[WITH], some[WITHOUT], strict=True)]
            ratio = (median(ratios), min(ratios), max(ratios))
            outcome = FASTER if ratio[1] > 1 else SLOWER if ratio[2] < 1 else CLOSE
            if len(ratios) == 1:
                outcome = NOT_JUDGED
        levels.append(Level(level, {name: Speed.of(each) for name, each in some.items()}, ratio, outcome))
    return levels


@dataclass(frozen=True)
class Equality:
    """Greedy answers of both sides, to the same prompt in the same round. differing: at most SHOWN of the others: the
    prompt's id, at how many requests at a time, and the first token that differs, from 0.

    of_itself, of_itself_equal: the answers without heads that were compared with those to the same prompts at the
    lowest concurrency, and how many were equal: what rounding alone makes differ.
    """

    answers: int
    equal: int
    differing: list[tuple[str, int, int]]
    of_itself: int
    of_itself_equal: int


def compare_outputs(jobs: Sequence[Job], rounds: Mapping[str, Sequence[Round]]) -> Equality:
    answers = equal = of_itself = of_itself_equal = 0
    differing = list[tuple[str, int, int]]()
    earlier: dict[int, list[int]] = {}
    lowest = rounds[WITHOUT][0].concurrency
    for ours, plain in zip(rounds[WITH], rounds[WITHOUT], strict=True):
        for (prompt, answer), (_, expected) in zip(ours.answers, plain.answers, strict=True):
            if not isinstance(expected, Streamed):
                continue
            known = earlier.setdefault(prompt, expected.ids)
            if plain.concurrency != lowest:
                of_itself += 1
                of_itself_equal += known == expected.ids
            if isinstance(answer, Streamed):
                answers += 1
                equal += answer.ids == expected.ids
                if answer.ids != expected.ids and len(differing) < SHOWN:
                    at = _same_until(answer.ids, expected.ids)
                    differing.append((jobs[prompt].prompt.id, ours.concurrency, at))
    return Equality(answers, equal, differing, of_itself, of_itself_equal)


def _same_until(ids: Sequence[int], others: Sequence[int]) -> int:
    both = min(len(ids), len(others))
    return next((i for i in range(both) if ids[i] != others[i]), both)


def accepted_parts(
    jobs: Sequence[Job], rounds: Sequence[Round], labels: Sequence[str | None], nodes: int
) -> list[Part]:
    """What verify passes of `nodes` tokens emitted, by the engine's counters: of all answers, then by label.

    labels: of the prompts. Intervals: 95%, by resampling prompts. Empty where no answer took a pass.
    """
    answers = [(prompt, answer) for each in rounds for prompt, answer in each.whole if answer.passes]
    resampling = Resampling([str(prompt) for prompt, _ in answers])
    emitted_I = torch.tensor([answer.emitted for _, answer in answers])
    passes_I = torch.tensor([answer.passes for _, answer in answers])
    found = []
    for name in (ALL, *sorted({label for label in labels if label is not None})):
        here_I = torch.tensor([name == ALL or labels[prompt] == name for prompt, _ in answers], dtype=torch.long)
        emitted, passes = int((emitted_I * here_I).sum()), int((passes_I * here_I).sum())
        prompts = len({prompt for (prompt, _), here in zip(answers, here_I, strict=True) if here})
        if passes:
            lengths_B = resampling.lengths_by_text(emitted_I * here_I, passes_I * here_I)
            interval = between(lengths_B) if prompts > 1 else (1.0, float(nodes))
            found.append(Part(name, prompts, passes, emitted, emitted / passes, interval))
    return found


def replayed_parts(
    texts: Sequence[Text], ranks: Sequence[Tensor], tree: Tree, beside: Beside | None, label: str
) -> list[Part]:
    """The same by replay, on cached answers, of the served tree and what it drafts beside. ranks: see `answer_ranks`.
    Empty without texts."""
    if not texts:
        return []
    accepted = [tree.accepted(each) for each in ranks] if beside is None else beside.accepted(texts, ranks)
    resampling, passes = Resampling([text.document for text in texts]), walk_all(accepted)
    broken, counts = break_down(texts, passes, resampling, tree.num_nodes), passes.acceptance
    interval = resampling.interval(passes, tree.num_nodes)
    every = Part(ALL, resampling.num_documents, counts.passes, counts.emitted, counts.length, interval)
    return [every, *(broken.groups if label == "topic" else broken.labels)]


@dataclass(frozen=True)
class ToolCalls:
    """Of the answers to prompts with tools: those that call one, the calls in them, and those of the calls that the
    server's parser reads as the name of a tool that there is and a JSON object."""

    answers: int
    calling: int
    calls: int
    parsed: int


def count_tool_calls(
    server: Server, parser: str, tokenizer: Any, jobs: Sequence[Job], rounds: Sequence[Round]
) -> ToolCalls:
    """ValueError where the server does not parse."""
    known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
    answers = calling = calls = parsed = 0
    for prompt, answer in tqdm([each for one in rounds for each in one.whole], desc="tool calls", leave=False):
        if not (tools := jobs[prompt].prompt.tools):
            continue
        key = (prompt, tuple(answer.ids))
        if key not in known:
            known[key] = tool_calls_in(server, parser, tokenizer.decode(answer.ids), tools)
        answers += 1
        calling += known[key][0] > 0
        calls += known[key][0]
        parsed += known[key][1]
    return ToolCalls(answers, calling, calls, parsed)


def tool_calls_in(server: Server, parser: str, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """(calls, those of them that parse). A call that the parser passes over in silence is counted by its mark."""
    functions: list[Mapping[str, Any]] = [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]
    try:
        found = server.call("/parse_function_call", {"text": text, "tools": functions, "tool_call_parser": parser})
    except Refused as refusal:
        raise ValueError(f"{server.url}/parse_function_call: {refusal}") from None
    calls = found.get("calls") if isinstance(found, dict) else None
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{server.url}/parse_function_call says {str(found)[:200]}, expected calls")
    names = {tool["function"].get("name") for tool in functions}
    good = sum(call.get("name") in names and _is_object(call.get("parameters")) for call in calls)
    marked = max(text.count(mark) for mark in CALL_MARKS)
    return max(len(calls), marked), good


def _is_object(text: Any) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        return False


def compare(
    servers: Sequence[Opened],
    tokenizer: Any,
    jobs: Sequence[Job],
    labels: Sequence[str | None],
    rounds: Mapping[str, Sequence[Round]],
    greedy: bool,
) -> dict[str, Any]:
    """All of it, for a report. labels: of the prompts."""
    nodes = [number for each in rounds[WITH] for _, answer in each.whole for number in answer.nodes]
    lost = None
    if len(servers) > 1 and all(server.says.kv_tokens for server in servers):
        lost = {WITH: servers[0].says.kv_tokens, WITHOUT: servers[1].says.kv_tokens}
    return {
        "levels": [asdict(level) for level in compare_speeds(rounds)],
        "acceptance": [asdict(part) for part in accepted_parts(jobs, rounds[WITH], labels, servers[0].says.nodes)],
        "cycles": {"known": len(nodes), "plain": nodes.count(1), "nodes": sum(nodes)},
        "equality": asdict(compare_outputs(jobs, rounds)) if greedy and WITHOUT in rounds else None,
        "kv_tokens": lost,
        "tools": tools_of(servers, tokenizer, jobs, rounds),
    }


def tools_of(
    servers: Sequence[Opened], tokenizer: Any, jobs: Sequence[Job], rounds: Mapping[str, Sequence[Round]]
) -> dict[str, dict[str, int]] | str:
    """`ToolCalls` by side, or why nothing was parsed."""
    if not any(job.prompt.tools for job in jobs):
        return "no prompt has tools"
    server = servers[0].says
    parser = server.facts.get("tool_call_parser")
    if not isinstance(parser, str):
        return f"{server.url} has no --tool-call-parser, so nothing was parsed"
    try:
        found = {name: count_tool_calls(server.http, parser, tokenizer, jobs, some) for name, some in rounds.items()}
    except ValueError as error:  # what was measured is kept
        return f"nothing was parsed: {error}"
    return {name: asdict(each) for name, each in found.items()}
