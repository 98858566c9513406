"""The part of an export folder that says what is drafted beside the heads: written, read, and refused when damaged."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_k25.heads import DraftVocabulary, ResidualHeads
from medusa_k25.ngram.beside import Beside
from medusa_k25.ngram.table import AnswersTable
from medusa_k25.serving import beside_files
from medusa_k25.serving.beside_files import TABLE_FILE, open_beside, write_beside
from medusa_k25.serving.formats import export_heads, load_served
from medusa_k25.tree import Tree

V = 30
TREE, SMALLER = Tree([[0], [1], [0, 0], [0, 1], [2]]), Tree([[0], [1]])


def table(ahead: int = 6) -> AnswersTable:
    generator = torch.Generator().manual_seed(0)
    return AnswersTable.build([torch.randint(0, V, (40,), generator=generator, dtype=torch.int32)], ahead)


def exported(folder, beside):
    vocabulary = DraftVocabulary(torch.arange(V), V)
    export_heads(folder, ResidualHeads(8, 2), vocabulary, TREE, torch.float32, {})
    write_beside(folder, beside)
    return folder


def read(folder):
    found = open_beside(load_served(folder), folder, V)
    return None if found is None else found.load()


@pytest.mark.parametrize("source", [None, table()], ids=["lookup", "answers"])
def test_what_is_written_is_read(tmp_path, source):
    beside = Beside(TREE, SMALLER, 3, 4, source)
    again = read(exported(tmp_path, beside))
    assert (again.tree, again.smaller, again.shortest, again.longest) == (TREE, SMALLER, 3, 4)
    assert again.chain == 3
    assert (again.table is None) == (source is None)
    if source is not None:
        assert source.tokens_T.equal(again.table.tokens_T)
        for n, positions_P in source.positions.items():
            assert positions_P.equal(again.table.positions[n]) and source.hashes[n].equal(again.table.hashes[n])
    # an export without leaves nothing of it
    assert read(exported(tmp_path, None)) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chain": 2}, "chain is 2, a tree of 6 nodes leaves 3 beside one of 3"),
        ({"chain": "3"}, "chain is '3', expected an integer"),
        ({"chain": 0}, "chain is 0, expected an integer from 1"),
        ({"shortest": 1}, "matches of 1 to 4 tokens"),
        ({"shortest": 4, "longest": 3}, "matches of 4 to 3 tokens"),
        ({"longest": 5}, "longest is 5, expected an integer from 1 to 4"),
        ({"source": "memory"}, "beside.source is none of lookup, answers"),
        ({"medusa_choices": [[5]]}, "a smaller part of the whole tree"),
        ({"medusa_choices": [[0, 0]]}, "has no parent"),
        ({"medusa_choices": None}, "expected a list of at most"),
        ({"more": 1}, "an object with the keys chain, longest, medusa_choices, shortest, source"),
    ],
    ids=str,
)
def test_a_config_that_says_anything_else_is_refused(tmp_path, change, message):
    folder = exported(tmp_path, Beside(TREE, SMALLER, 2))
    config = json.loads((folder / "config.json").read_text())
    config["beside"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {name: each for name, each in t.items() if name != "positions.3"},
            "expected positions.2",
        ),
        (lambda t: t | {"more": t["tokens"].clone()}, "holds more, "),
        (lambda t: t | {"tokens": t["tokens"].long()}, r"tokens is torch.int64 \[40\], expected a row of int32"),
        (lambda t: t | {"tokens": t["tokens"][None].contiguous()}, r"tokens is torch.int32 \[1, 40\]"),
        (lambda t: t | {"tokens": t["tokens"] - 1}, "tokens holds numbers outside 0 to 29"),
        (lambda t: t | {"tokens": t["tokens"] + 1}, "tokens holds numbers outside 0 to 29"),
        (lambda t: t | {"positions.4": t["positions.4"] + 2}, "positions.4 holds numbers outside 4 to 36"),
        (lambda t: t | {"positions.4": t["positions.4"] - 1}, "positions.4 holds numbers outside 4 to 36"),
        (lambda t: {n: each if n == "tokens" else each[:0].clone() for n, each in t.items()}, "knows no n-gram"),
    ],
)
def test_a_table_that_holds_anything_else_is_refused(tmp_path, change, message):
    folder = exported(tmp_path, Beside(TREE, SMALLER, 2, table=table(4)))
    assert read(folder).reach == 4
    save_file(change(load_file(folder / TABLE_FILE)), folder / TABLE_FILE)
    with pytest.raises(ValueError, match=message):
        read(folder)


def test_a_table_that_is_not_there_is_missed(tmp_path):
    folder = exported(tmp_path, Beside(TREE, SMALLER, 2, table=table()))
    (folder / TABLE_FILE).unlink()
    with pytest.raises(ValueError, match=r"lacks answers.safetensors"):
        read(folder)


def test_a_table_that_no_server_would_read_is_not_written(tmp_path, monkeypatch):
    folder, beside = exported(tmp_path, None), Beside(TREE, SMALLER, 2, table=table())
    monkeypatch.setattr(beside_files, "MAX_TABLE_BYTES", 100)
    with pytest.raises(ValueError, match="bytes, a server reads at most 100; lower corpus_tokens"):
        write_beside(folder, beside)
    assert read(folder) is None
