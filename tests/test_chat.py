"""Chats by token ids: what is kept of any conversation decodes to exactly the answers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_k25.chat import ChatMarks, answer_mask, render, require_mask, show, thinking_of
from medusa_k25.target import Target
from medusa_k25.target_builders import tiny_tokenizer
from tests.conftest import write_tiny_llama

CHATML = """\
{%- if messages[0].role != 'system' %}<|im_start|>system
You are SmolLM.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
NEEDS_SYSTEM = """\
{%- if messages[0].role != 'system' -%}{{ raise_exception('the first message must be the system prompt') }}{%- endif -%}
{%- for message in messages -%}[{{ message.role }}]{{ message.content }}<|im_end|>{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""


def with_template(folder: Path, template: str) -> Target:
    """The tiny Llama with another chat template; ChatML's <|im_start|> is a token of its own, as in SmolLM2."""
    write_tiny_llama(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return Target.open(folder)


@pytest.fixture(scope="module")
def k25_marks(tiny_k25: Target) -> ChatMarks:
    return ChatMarks.of(tiny_k25)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return with_template(tmp_path_factory.mktemp("chatml") / "chatml", CHATML)


@pytest.fixture(scope="module")
def chatml_marks(chatml: Target) -> ChatMarks:
    return ChatMarks.of(chatml)


def encode(marks: ChatMarks, text: str) -> list[int]:
    return marks.tokenizer.encode(text, add_special_tokens=False)


def kept(ids: list[int], marks: ChatMarks) -> str:
    return marks.tokenizer.decode(torch.tensor(ids)[answer_mask(torch.tensor(ids), marks)])


# --- marks


def test_marks_of_kimi(k25_marks: ChatMarks) -> None:
    decode = k25_marks.tokenizer.decode
    assert decode(k25_marks.thinking) == "<|im_assistant|>assistant<|im_middle|><think>"
    assert decode(k25_marks.instant) == "<|im_assistant|>assistant<|im_middle|><think></think>"
    assert decode(k25_marks.end_ids) == "<|im_end|>"


def test_marks_of_chatml(chatml_marks: ChatMarks) -> None:
    assert chatml_marks.tokenizer.decode(chatml_marks.thinking) == "<|im_start|>assistant\n"
    assert chatml_marks.thinking == chatml_marks.instant


@pytest.mark.parametrize(
    ("template", "expected"), [({}, True), ({"thinking": True}, True), ({"thinking": False}, False)]
)
def test_the_mode_of_a_template(
    k25_marks: ChatMarks, chatml_marks: ChatMarks, template: dict[str, bool], expected: bool
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert thinking_of(k25_marks.tokenizer, messages, template) is expected
    assert thinking_of(chatml_marks.tokenizer, messages, template) is None


def test_a_template_that_needs_a_system_prompt(tmp_path: Path) -> None:
    marks = ChatMarks.of(with_template(tmp_path / "target", NEEDS_SYSTEM))
    assert marks.tokenizer.decode(marks.instant) == "[assistant]"
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    messages += [{"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    assert kept(render(marks.tokenizer, messages, {}) + encode(marks, "e f"), marks) == "c<|im_end|>e f"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}", "marks no start of an answer"),
        ("{{ messages[-1].content }}{% if add_generation_prompt %}A:{% endif %}", "holds none of the target's end"),
        ("{{ 'A' if add_generation_prompt else 'B' }}", "marks no start of an answer"),
    ],
)
def test_templates_without_marks_are_refused(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatMarks.of(with_template(tmp_path / "target", template))


def test_a_tokenizer_without_a_template_is_refused(tiny_llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    monkeypatch.setattr(Target, "load_tokenizer", lambda self: tokenizer)
    with pytest.raises(ValueError, match="has no chat template"):
        ChatMarks.of(tiny_llama)


def test_end_tokens_of_another_format_are_refused(tiny_k25: Target) -> None:
    """As when a checkpoint without a generation config calls [EOS] its end."""
    eos = tiny_k25.load_tokenizer().convert_tokens_to_ids("[EOS]")
    with pytest.raises(ValueError, match=r"none of the target's end tokens \['\[EOS\]'\]; set eos_token_id"):
        ChatMarks.of(dataclasses.replace(tiny_k25, end_ids=(eos,)))


# --- masks


def test_the_mask_keeps_the_answers_of_two_turns(chatml_marks: ChatMarks) -> None:
    """Medusa #101: the assistant mask had no effect."""
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    text += "<|im_start|>user\nassistant\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause.<|im_end|>\n"
    assert kept(encode(chatml_marks, text), chatml_marks) == "Hello!<|im_end|>Because.<|im_end|>"


@pytest.mark.parametrize("thinking", [True, False])
def test_what_is_prefilled_is_prompt(k25_marks: ChatMarks, thinking: bool) -> None:
    """Automodel #3739: the prefilled <think></think> was trained on."""
    prompt = render(k25_marks.tokenizer, [{"role": "user", "content": "Hi"}], {"thinking": thinking})
    answer = encode(k25_marks, "hm</think>Hello<|im_end|>" if thinking else "Hello<|im_end|>")
    mask_T = answer_mask(torch.tensor(prompt + answer, dtype=torch.int32), k25_marks)  # as a cache holds them
    assert mask_T.tolist() == [False] * len(prompt) + [True] * len(answer)


@pytest.mark.parametrize(("thinking", "answer"), [(True, "so"), (True, "so</think>4"), (False, "4"), (False, "4 is")])
def test_a_truncated_answer_is_kept(k25_marks: ChatMarks, thinking: bool, answer: str) -> None:
    prompt = render(k25_marks.tokenizer, [{"role": "user", "content": "2+2?"}], {"thinking": thinking})
    assert kept(prompt + encode(k25_marks, answer), k25_marks) == answer


@pytest.mark.parametrize(("mask", "word"), [([False] * 4, "nothing"), ([True] * 4, "everything")])
def test_a_mask_that_keeps_nothing_or_everything_is_refused(k25_marks: ChatMarks, mask: list[bool], word: str) -> None:
    """Megatron-Bridge #3359: assistant masks that were all 0 or all 1."""
    ids = encode(k25_marks, "Hi <|im_end|>")
    with pytest.raises(ValueError, match=f"keeps {word} of 4 tokens, expected the answers alone; .* begins: "):
        require_mask(ids, mask, k25_marks.tokenizer)


def test_a_text_without_answers_is_refused_with_a_sample(k25_marks: ChatMarks, chatml_marks: ChatMarks) -> None:
    other = encode(chatml_marks, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n" * 50)
    with pytest.raises(ValueError) as refusal:
        answer_mask(torch.tensor(other), k25_marks)
    assert "keeps nothing" in str(refusal.value)
    sample = str(refusal.value).partition("It begins: ")[2]
    assert sample == k25_marks.tokenizer.decode(other)[:200]
    prompt = render(k25_marks.tokenizer, [{"role": "user", "content": "Hi"}], {})
    with pytest.raises(ValueError, match="keeps nothing"):
        answer_mask(torch.tensor(prompt), k25_marks)


def test_a_mask_is_shown_on_the_text(k25_marks: ChatMarks) -> None:
    prompt = render(k25_marks.tokenizer, [{"role": "user", "content": "Hi"}], {"thinking": False})
    ids = prompt + encode(k25_marks, "Ho<|im_end|>") + prompt + encode(k25_marks, "Hm")
    start = "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>"
    shown = show(ids, answer_mask(torch.tensor(ids), k25_marks).tolist(), k25_marks.tokenizer)
    assert shown == f"{start}[[Ho<|im_end|>]]{start}[[Hm]]"


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["assistant", "<think>", "</think>", "\n", " assistant\n", "[[", "<|im_middle|>"]
)
CALL = st.tuples(st.sampled_from(["sum", "find"]), TEXT)
TURN = st.fixed_dictionaries(
    {
        "asker": st.sampled_from(["user", "tool", "system"]),
        "question": TEXT,
        "thought": st.none() | TEXT,
        "answer": TEXT,
        "calls": st.lists(CALL, max_size=2),
    }
)


def k25_pieces(turn: dict[str, Any]) -> tuple[str, str, str]:
    """(what is not generated, the header, what is) of a turn. None of thought: instant mode, or history."""
    role = turn["asker"]
    asked = f"<|im_{'user' if role == 'user' else 'system'}|>{role}<|im_middle|>{turn['question']}<|im_end|>"
    header = "<|im_assistant|>assistant<|im_middle|><think>" + ("</think>" if turn["thought"] is None else "")
    answer = ("" if turn["thought"] is None else f"{turn['thought']} </think>") + turn["answer"]
    if turn["calls"]:
        answer += "<|tool_calls_section_begin|>"
        for number, (name, arguments) in enumerate(turn["calls"]):
            answer += f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}"
            answer += "<|tool_call_end|>"
        answer += "<|tool_calls_section_end|>"
    return asked, header, answer


@settings(max_examples=150, deadline=None)
@given(st.lists(TURN, min_size=1, max_size=4), st.none() | st.integers(0, 30))
def test_the_kept_ids_are_the_answers_of_any_chat(
    k25_marks: ChatMarks, turns: list[dict[str, Any]], cut: int | None
) -> None:
    """Every piece is tokenised alone, as prompts and answers are. `cut`: tokens left of the last answer."""
    end = list(k25_marks.end_ids)
    ids, mask = list[int](), list[bool]()
    for turn in turns:
        asked, header, answer = k25_pieces(turn)
        answer_ids = encode(k25_marks, answer)
        if turn["thought"] is not None and answer_ids[0] == k25_marks.instant[-1]:
            answer_ids = encode(k25_marks, "x") + answer_ids  # no thought at all would be instant mode
        answer_ids += end
        if turn is turns[-1] and cut is not None:
            answer_ids = answer_ids[: cut + 1]
        prompt_ids = encode(k25_marks, asked) + encode(k25_marks, header)
        ids += prompt_ids + answer_ids
        mask += [False] * len(prompt_ids) + [True] * len(answer_ids)
    assert answer_mask(torch.tensor(ids), k25_marks).tolist() == mask


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), st.booleans())
def test_the_kept_ids_are_the_answers_of_any_chatml(
    chatml_marks: ChatMarks, turns: list[tuple[str, str]], ended: bool
) -> None:
    ids, mask = encode(chatml_marks, "<|im_start|>system\nBe brief.<|im_end|>\n"), list[bool]()
    mask = [False] * len(ids)
    for question, answer in turns:
        prompt_ids = encode(chatml_marks, f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        answer_ids = encode(chatml_marks, answer + "<|im_end|>")
        ids += prompt_ids + answer_ids + encode(chatml_marks, "\n")
        mask += [False] * len(prompt_ids) + [True] * len(answer_ids) + [False]
    if not ended:
        ids, mask = ids[:-2], mask[:-2]
        if not any(mask):
            return
    assert answer_mask(torch.tensor(ids), chatml_marks).tolist() == mask


def test_a_rendered_history_is_masked(k25_marks: ChatMarks) -> None:
    """Thoughts of earlier turns are stripped by the template; tool calls belong to the answer, their results do not."""
    call = {"id": "functions.sum:0", "type": "function", "function": {"name": "sum", "arguments": '{"a": 2}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning_content": "hm", "content": "Hello"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "reasoning_content": "add", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.sum:0", "content": "4"},
    ]
    ids = render(k25_marks.tokenizer, messages, {"thinking": True}, tools=[{"name": "sum"}])
    assert kept(ids + encode(k25_marks, "so</think>4<|im_end|>"), k25_marks) == (
        "Hello<|im_end|>add</think><|tool_calls_section_begin|><|tool_call_begin|>functions.sum:0"
        '<|tool_call_argument_begin|>{"a": 2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>so</think>4<|im_end|>'
    )
