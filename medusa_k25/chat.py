"""Chats as token ids: how the target's template renders them, and which of their tokens the model generated.

Letters: T tokens.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from medusa_k25.target import Target

SAMPLE_CHARACTERS = 200


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The ids of a conversation that waits for its next answer. `template`: more variables for the chat template.

    Raises jinja2's TemplateError where the template refuses the conversation.
    """
    # Kimi-K2.5's own tokenizer has other defaults than transformers: all that matters is named
    return tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=False,
        **template,
    )


def thinking_of(tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> bool | None:
    """Whether answers begin with thoughts, with these variables; None where the template has no such switch."""
    prompt_ids = render(tokenizer, messages, template)
    modes = {thinking: render(tokenizer, messages, {**template, **_switched(thinking)}) for thinking in (True, False)}
    if modes[True] == modes[False]:
        return None
    return next((thinking for thinking, ids in modes.items() if ids == prompt_ids), None)


def _switched(thinking: bool) -> dict[str, bool]:
    return {"thinking": thinking, "enable_thinking": thinking}  # Kimi's name and Qwen's


def think_ids_of(tokenizer: Any) -> tuple[int, int] | None:
    """The tokens <think> and </think>; None where the tokenizer has no token for either."""
    vocabulary = tokenizer.get_vocab()
    marks = [vocabulary.get(mark) for mark in ("<think>", "</think>")]
    return None if None in marks else (marks[0], marks[1])


@dataclass(frozen=True)
class ChatMarks:
    """What a target's chats are cut at.

    thinking, instant: the ids that open an answer in either mode, prefilled <think> or <think></think> included; the
    same where the template has no such switch. end_ids: tokens that end an answer.
    """

    thinking: tuple[int, ...]
    instant: tuple[int, ...]
    end_ids: tuple[int, ...]
    tokenizer: Any

    @classmethod
    def of(cls, target: Target) -> "ChatMarks":
        """Read from the target's chat template: what its generation prompt adds to a conversation.

        Raises ValueError when it has no template, adds nothing, or ends an answer with none of the target's end ids.
        """
        return cls.read(target.load_tokenizer(), target.end_ids, target.path)

    @classmethod
    def read(cls, tokenizer: Any, end_ids: tuple[int, ...], path: Path) -> "ChatMarks":
        """The same of a tokenizer alone. path: its folder, for messages."""
        if tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer of {path} has no chat template; add chat_template.jinja to it")
        thinking, instant = (_header(tokenizer, end_ids, path, mode) for mode in (True, False))
        return cls(thinking, instant, end_ids, tokenizer)


def _header(tokenizer: Any, end_ids: tuple[int, ...], path: Path, thinking: bool) -> tuple[int, ...]:
    template = _switched(thinking)
    question, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
    start = [question]
    try:
        before = render(tokenizer, start, template, add_generation_prompt=False)
    except TemplateError:
        start = [{"role": "system", "content": "0"}, question]
        before = render(tokenizer, start, template, add_generation_prompt=False)
    opened = render(tokenizer, start, template)
    if opened[: len(before)] != before or len(opened) == len(before):
        raise ValueError(
            f"the chat template of {path} marks no start of an answer: with add_generation_prompt it turns "
            f"{tokenizer.decode(before)!r} into {tokenizer.decode(opened)!r}; expected the same and more"
        )
    answered = render(tokenizer, [*start, answer], template, add_generation_prompt=False)[len(before) :]
    if not set(answered) & set(end_ids):
        raise ValueError(
            f"the chat template of {path} writes an answer as {tokenizer.decode(answered)!r}, which holds none "
            f"of the target's end tokens {tokenizer.convert_ids_to_tokens(list(end_ids))}; set eos_token_id in "
            "its generation_config.json"
        )
    return tuple(opened[len(before) :])


def answer_mask(ids_T: Tensor, marks: ChatMarks) -> Tensor:
    """bool [T]: the tokens that the model generated, in all answers of a rendered conversation.

    An answer begins after the longest header that fits, so that a prefilled <think></think> is prompt, and goes on to
    its end token inclusive, or to the end of the text. Tool calls are part of it, their results are not. An answer is
    left out where text that was tokenised whole has merged the header's last token with the answer's first.
    Raises ValueError, with the start of the text, for a mask that keeps nothing or everything.
    """
    headers = sorted({marks.thinking, marks.instant}, key=len, reverse=True)
    ids = ids_T.tolist()
    openings = torch.isin(ids_T, torch.tensor([header[0] for header in headers])).nonzero().flatten().tolist()
    ends = torch.isin(ids_T, torch.tensor(marks.end_ids)).nonzero().flatten().tolist()
    mask_T = torch.zeros(len(ids), dtype=torch.bool)
    stop = 0
    for opening in openings:
        if opening < stop:  # in an answer
            continue
        for header in headers:
            start = opening + len(header)
            if tuple(ids[opening:start]) == header:
                end = bisect_left(ends, start)
                stop = ends[end] + 1 if end < len(ends) else len(ids)
                mask_T[start:stop] = True
                break
    require_mask(ids, mask_T.tolist(), marks.tokenizer)
    return mask_T


def require_mask(ids: Sequence[int], mask: Sequence[bool], tokenizer: Any) -> None:
    """Refuse a mask that keeps nothing or everything: nothing would be learnt, or the prompts, too."""
    if any(mask) and not all(mask):
        return
    # a token has at least a character, but for parts of one
    sample = show(ids[:SAMPLE_CHARACTERS], mask[:SAMPLE_CHARACTERS], tokenizer)[:SAMPLE_CHARACTERS]
    raise ValueError(
        f"the mask keeps {'everything' if any(mask) else 'nothing'} of {len(ids)} tokens, expected the answers alone; "
        f"is the text in the target's own chat format? It begins: {sample}"
    )


def show(ids: Sequence[int], mask: Sequence[bool], tokenizer: Any) -> str:
    """The decoded text, with [[what the mask keeps]] in brackets."""
    return bracketed(pieces(ids, mask, tokenizer))


def pieces(ids: Sequence[int], mask: Sequence[bool], tokenizer: Any | None) -> list[tuple[bool, str]]:
    """(whether the mask keeps it, text) of one stretch after the other; without a tokenizer the ids instead."""
    stretches = []
    for kept, group in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        some = [int(id) for id, _ in group]
        stretches.append((kept, tokenizer.decode(some) if tokenizer is not None else " ".join(map(str, some))))
    return stretches


def bracketed(pieces: Iterable[tuple[bool, str]]) -> str:
    return "".join(f"[[{text}]]" if kept else text for kept, text in pieces)
