"""The target's own answers as token ids, without states: all that replay and the training-free predictors read.

They come from a cache or from a file of conversations, in the same splits.

Letters: T tokens, S states of one answer.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_k25.cache import Cache
from medusa_k25.chat import ChatMarks, answer_mask, render
from medusa_k25.conversations import ends_in_loop, prompt_key, read_conversations
from medusa_k25.data.splits import SPLITS, Split, split_of
from medusa_k25.data.windows import documents_of, runs_of
from medusa_k25.prompts import json_lines


@dataclass(frozen=True, eq=False)
class Text:
    """One answer of the target behind what it answers.

    ids_T: int32 [T], up to the answer's last token. start: position of the answer's first token. An answer of A = T -
    start tokens has S = A - 1 states to draft from: state s has the root ids_T[start + s] and ends where the root does.
    document: the conversation's id; answers of one conversation are resampled together.
    temperature: at which the answer was sampled, 0 greedy, None unknown.
    answer_at: tokens of the answer that are thoughts, up to and with the </think>; 0 where it has none.
    """

    ids_T: Tensor
    start: int
    document: str
    group: str | None
    label: str | None
    temperature: float | None
    answer_at: int = 0

    @property
    def num_states(self) -> int:
        return len(self.ids_T) - 1 - self.start

    @property
    def answer_T(self) -> Tensor:
        return self.ids_T[self.start :]

    @cached_property
    def loops(self) -> bool:
        """Whether it ends in a degenerate repetition, which flatters every predictor."""
        return ends_in_loop(self.answer_T.tolist())


ThinkIds = tuple[int, int]  # the tokens <think> and </think>


def answer_at_of(ids_T: Tensor, start: int, think_ids: ThinkIds | None) -> int:
    """How many tokens of the answer from `start` on are thoughts, up to and with the </think>; see `Text`.

    A prompt may have opened them, as Kimi-K2.5's does, and closed them again (instant mode). Thoughts that the answer
    never closes are all of it.
    """
    if think_ids is None:
        return 0
    opens, closes = think_ids
    closed = (ids_T[start:] == closes).nonzero().flatten()
    if len(closed):
        return int(closed[0]) + 1
    marks = ids_T[torch.isin(ids_T, torch.tensor(think_ids))]
    return len(ids_T) - start if len(marks) and int(marks[-1]) == opens else 0


def temperatures_of(texts: Iterable[Text]) -> set[float | None]:
    """At which the answers were sampled; 0 greedy, None unknown."""
    return {text.temperature for text in texts}


def temperature_note(sampled: Collection[float | None], serving: float) -> str | None:
    """What to say where answers (see `temperatures_of`) were not all sampled at the temperature they are served at.

    Replay is unbiased for the temperature of the text alone (see `replay`).
    """
    known = ", ".join(f"{t:g}" for t in sorted(t for t in sampled if t is not None))
    if not known:
        return "the temperature at which the answers were sampled is unknown"
    if set(sampled) == {serving}:
        return None
    unknown = " and an unknown one" if None in sampled else ""
    return (
        f"the answers were sampled at temperature {known}{unknown}, not all at the {serving:g} that the passes are "
        "asked for: text of another temperature accepts otherwise"
    )


def texts_of_cache(cache: Cache, split: Split, think_ids: ThinkIds | None = None) -> list[Text]:
    """Every answer of a split with at least two tokens, in the order of `windows.all_runs`: ranks line up with it."""
    texts = []
    for document in documents_of(cache, split):
        ids_T, positions_M = cache.token_ids(document), cache.positions(document)
        for run in runs_of(cache, document):
            first_root = int(positions_M[run.row_start - document.row_start]) + 1
            stop = first_root + run.row_stop - run.row_start + 1
            texts.append(
                Text(
                    ids_T[:stop],
                    first_root,
                    document.id,
                    document.group,
                    document.label,
                    document.sampling.get("temperature"),
                    answer_at_of(ids_T[:stop], first_root, think_ids),
                )
            )
    return texts


def holds_messages(path: Path) -> bool:
    """Whether a .jsonl file's rows are {"messages"}, to be rendered, and not what `generate` writes, by its first."""
    if not path.is_file():
        raise ValueError(f"no conversations at {path.absolute()}; expected a .jsonl file, such as generate writes")
    _, first = next(json_lines(path), (path, None))
    if first is None:
        raise ValueError(f"{path} holds no conversation; expected a row for each")
    return isinstance(first, Mapping) and "messages" in first and not {"answer_ids", "error"} & first.keys()


def texts_of_conversations(
    path: Path, marks: ChatMarks | None, think_ids: ThinkIds | None = None
) -> dict[Split, list[Text]]:
    """The answers of a .jsonl file, by split.

    A row is what `generate` writes, or {"messages": [...]} with the answers in it, which is rendered with `marks`: the
    tokenizer's chat template. A prompt that another split reports on is left out, as `windows.documents_of` does.
    Raises ValueError, with file and line, for any other row, and for messages without `marks`.
    """
    found = list(_rendered(path, marks, think_ids) if holds_messages(path) else _generated(path, think_ids))
    splits = [SPLITS.index(split_of(text.group, key)) for key, text in found]
    reported: dict[str, int] = {}
    for (key, _), split in zip(found, splits, strict=True):
        reported[key] = max(reported.get(key, 0), split)
    texts: dict[Split, list[Text]] = {split: [] for split in SPLITS}
    for (key, text), split in zip(found, splits, strict=True):
        if reported[key] == split and text.num_states > 0:
            texts[SPLITS[split]].append(text)
    return texts


def _generated(path: Path, think_ids: ThinkIds | None) -> Iterator[tuple[str, Text]]:
    """(hash of the prompt, text) of the rows that `generate` has answered."""
    for row in read_conversations(path):
        if "error" not in row:
            ids_T = _ids(path, row)
            temperature = row["sampling"].get("temperature")
            start = len(row["prompt_ids"])
            yield (
                prompt_key(row["prompt_ids"]),
                Text(
                    ids_T,
                    start,
                    row["id"],
                    row["group"],
                    row["label"],
                    temperature,
                    answer_at_of(ids_T, start, think_ids),
                ),
            )


def _ids(path: Path, row: Mapping[str, Any]) -> Tensor:
    parts = [row["prompt_ids"], row["answer_ids"]]
    try:
        ids_T = torch.tensor([id for part in parts for id in part], dtype=torch.int32)
    except (TypeError, ValueError, RuntimeError):
        ids_T = torch.tensor([-1])
    if not all(isinstance(part, list) for part in parts) or (ids_T < 0).any():
        raise ValueError(f"{path}, row {row['id']!r}: expected lists of token ids, whole numbers from 0 on")
    return ids_T


def _rendered(path: Path, marks: ChatMarks | None, think_ids: ThinkIds | None) -> Iterator[tuple[str, Text]]:
    """(hash of the first prompt, text) of every answer in rows of {"messages"}."""
    if marks is None:
        raise ValueError(f"{path} holds messages without token ids: name the target's tokenizer, tokenizer=FOLDER")
    for number, (place, row) in enumerate(json_lines(path)):
        messages: Any = row.get("messages") if isinstance(row, Mapping) else None
        if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(f'{place}: expected {{"messages": [...]}} as in the rows before it')
        if not any(message.get("role") == "assistant" for message in messages):
            raise ValueError(f"{place}: no message of the assistant, so there is no answer to read")
        ids_T = torch.tensor(render(marks.tokenizer, messages, {}, row.get("tools"), add_generation_prompt=False))
        try:
            mask_T = answer_mask(ids_T, marks)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        edges_T = torch.cat([mask_T.new_zeros(1), mask_T, mask_T.new_zeros(1)]).int().diff()
        spans = list(zip((edges_T == 1).nonzero().flatten(), (edges_T == -1).nonzero().flatten(), strict=True))
        key = prompt_key(ids_T[: int(spans[0][0])].tolist())
        id, group = str(row.get("id", f"row {number + 1}")), row.get("group", row.get("topic"))
        for start, stop in spans:
            text_T = ids_T[: int(stop)].int()
            answer_at = answer_at_of(text_T, int(start), think_ids)
            yield key, Text(text_T, int(start), id, group, row.get("label"), None, answer_at)
