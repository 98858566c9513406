import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medusa_k25.chat import ChatMarks, think_ids_of
from medusa_k25.conversations import prompt_key
from medusa_k25.data.splits import SPLITS, split_of
from medusa_k25.data.texts import (
    Text,
    answer_at_of,
    temperature_note,
    temperatures_of,
    texts_of_cache,
    texts_of_conversations,
)
from medusa_k25.data.windows import all_runs, documents_of, future_of
from tests.tiny import cache_of, random_prompts

ROW = {
    "messages": [{"role": "user", "content": "?"}],
    "answer": "",
    "finish_reason": "length",
    "sampling": {"mode": "sampled", "temperature": 0.6, "top_p": 0.95},
    "dtype": "float32",
    "label": "maths",
}


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_texts_of_a_cache_line_up_with_its_runs(tiny_llama, tmp_path):
    cache = cache_of(tiny_llama, tmp_path / "cache", num_documents=12, turns=2)
    for split in SPLITS:
        runs = all_runs(cache, documents_of(cache, split))
        texts = texts_of_cache(cache, split)
        assert [text.num_states for text in texts] == [run.row_stop - run.row_start for run in runs]
        for text, run in zip(texts, runs, strict=True):
            assert text.ids_T[text.start : -1].tolist() == future_of(cache, run, 1)[:, 0].tolist()
            assert text.ids_T[text.start + 1 :].tolist() == future_of(cache, run, 1)[:, 1].tolist()
            assert text.document == run.document.id


def test_generated_rows_keep_their_split_and_what_is_known_of_them(tmp_path):
    prompts = random_prompts(30)
    rows = [
        ROW | {"id": f"{i}", "group": None, "prompt_ids": prompt, "answer_ids": [7, 8, 7, 8 + i]}
        for i, prompt in enumerate(prompts)
    ]
    rows.append({"id": "failed", "group": None, "messages": [], "error": "empty"})
    rows.append(ROW | {"id": "short", "group": None, "prompt_ids": [9, 9, 9], "answer_ids": [5]})
    texts = texts_of_conversations(write_rows(tmp_path / "answers.jsonl", rows), None)
    assert sum(map(len, texts.values())) == 30  # an answer of one token needs no verify pass
    for split, some in texts.items():
        for text in some:
            assert split_of(None, prompt_key(text.ids_T[: text.start].tolist())) == split
            assert (text.temperature, text.label, text.num_states) == (0.6, "maths", 3)
            assert text.answer_T.tolist() == [7, 8, 7, 8 + int(text.document)]


def test_a_prompt_that_held_out_text_has_is_left_out_elsewhere(tmp_path):
    groups = {split_of(name, ""): name for name in map(str, range(60))}
    rows = [
        ROW | {"id": split, "group": group, "prompt_ids": [1, 2], "answer_ids": [3, 4, 5]}
        for split, group in groups.items()
    ]
    texts = texts_of_conversations(write_rows(tmp_path / "answers.jsonl", rows), None)
    assert {split: len(some) for split, some in texts.items()} == {"train": 0, "calibration": 0, "heldout": 1}


def test_messages_are_rendered_and_every_answer_is_a_text(tiny_k25, tmp_path):
    marks = ChatMarks.of(tiny_k25)
    turn = [{"role": "user", "content": "Name a tree."}, {"role": "assistant", "content": "An old oak."}]
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": turn * 2, "id": "chat"}])
    texts = [text for some in texts_of_conversations(path, marks).values() for text in some]
    assert [marks.tokenizer.decode(text.answer_T).replace("<|im_end|>", "").strip() for text in texts] == [
        "An old oak."
    ] * 2
    assert {text.document for text in texts} == {"chat"}
    with pytest.raises(ValueError, match="name the target's tokenizer"):
        texts_of_conversations(path, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no conversation"), ("{", "not valid JSON"), ("[]\n", "lacks"), ('{"id": "1"}\n', "lacks")],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "file.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        texts_of_conversations(tmp_path / "file.jsonl", None)


def test_a_loop_is_told(tmp_path):
    row = ROW | {"id": "a", "group": None, "prompt_ids": [1], "answer_ids": list(range(9))}
    texts = texts_of_conversations(write_rows(tmp_path / "answers.jsonl", [row]), None)
    (text,) = [text for some in texts.values() for text in some]
    assert not text.loops
    assert replace(text, ids_T=torch.tensor([1] + [4, 5] * 30)).loops


OPEN, CLOSE = 90, 91


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ([1, OPEN], [5, 6, CLOSE, 7, 8], 3),  # Kimi-K2.5's prompt opens the thoughts
        ([1, OPEN, 2], [5, 6, CLOSE], 3),  # and others add a line break
        ([1, OPEN], [5, 6, 7], 3),  # the limit came first: all thoughts
        ([1], [OPEN, 5, CLOSE, 7], 3),
        ([1], [OPEN, 5, 6], 3),
        ([1, OPEN, CLOSE], [5, 6, 7], 0),  # instant mode
        ([OPEN, 3, CLOSE, 1], [5, 6], 0),  # thoughts of an earlier turn
        ([1], [5, 6], 0),
    ],
)
def test_thoughts_go_up_to_their_end(prompt, answer, expected):
    ids_T = torch.tensor(prompt + answer)
    assert answer_at_of(ids_T, len(prompt), (OPEN, CLOSE)) == expected
    assert answer_at_of(ids_T, len(prompt), None) == 0


def test_every_source_tells_where_the_answer_begins(tiny_k25, tiny_llama, tmp_path):
    rows = [ROW | {"id": "a", "group": None, "prompt_ids": [1, OPEN], "answer_ids": [5, CLOSE, 7]}]
    texts = texts_of_conversations(write_rows(tmp_path / "answers.jsonl", rows), None, (OPEN, CLOSE))
    assert [text.answer_at for some in texts.values() for text in some] == [2]

    marks = ChatMarks.of(tiny_k25)
    ids = think_ids_of(marks.tokenizer)
    assert ids is not None and marks.thinking[-1] == ids[0] and marks.instant[-2:] == ids
    turn = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}]
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": turn}])
    texts = texts_of_conversations(path, marks, ids)
    (text,) = [text for some in texts.values() for text in some]
    assert text.answer_at == 0  # the template strips the thoughts, and <think></think> is prompt

    cache = cache_of(tiny_llama, tmp_path / "cache", num_documents=6)
    plain = [text for split in SPLITS for text in texts_of_cache(cache, split)]
    closes = int(plain[0].answer_T[4])
    marked = [text for split in SPLITS for text in texts_of_cache(cache, split, (0, closes))]
    assert marked[0].answer_at == int((plain[0].answer_T == closes).nonzero()[0]) + 1
    assert {text.answer_at for text in plain} == {0}


def test_text_of_another_temperature_is_told(tmp_path):
    def texts(*temperatures):
        text = Text(torch.arange(5), 1, "a", None, None, None)
        return [replace(text, temperature=temperature) for temperature in temperatures]

    assert temperatures_of(texts(0.6, 0.6, None)) == {0.6, None}
    assert temperature_note({0.6}, 0.6) is None
    assert "is unknown" in str(temperature_note({None}, 0.6))
    for temperatures, serving, said in (
        ({0.0}, 0.6, "sampled at temperature 0, not all at the 0.6 that"),
        ({0.0, 1.0, None}, 1.0, "at temperature 0, 1 and an unknown one, not all at the 1"),
    ):
        assert said in str(temperature_note(temperatures, serving))


@pytest.mark.parametrize("ids", ["123", ["a"], [1.5, None], [2, -5], [2**40]])
def test_ids_that_are_none_are_refused(tmp_path, ids):
    row = ROW | {"id": "odd", "group": None, "prompt_ids": [1, 2], "answer_ids": ids}
    with pytest.raises(ValueError, match="row 'odd': expected lists of token ids"):
        texts_of_conversations(write_rows(tmp_path / "answers.jsonl", [row]), None)


def test_messages_without_an_answer_are_refused(tiny_k25, tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "Name a tree."}]}])
    with pytest.raises(ValueError, match="chats.jsonl:1: no message of the assistant"):
        texts_of_conversations(path, ChatMarks.of(tiny_k25))
