"""The files between a running server and its operator."""

from pathlib import Path

import pytest

from medusa_k25.serving.control import (
    CONTROL,
    STATUS,
    Order,
    Status,
    give_order,
    last_order,
    read_status,
    write_status,
)


@pytest.mark.parametrize("order", [Order(), Order("off"), Order("on", "/some/export"), Order(heads="relative")])
def test_an_order_is_read_as_it_was_given(order: Order, tmp_path: Path) -> None:
    assert last_order(tmp_path) is None
    give_order(tmp_path, Order("off", "another"))
    give_order(tmp_path, order)
    assert last_order(tmp_path) == order
    assert [file.name for file in tmp_path.iterdir()] == [CONTROL]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"drafting": "maybe"}', "expected one of auto, on, off"),
        ('{"drafting": true}', "expected one of"),
        ('{"heads": 3}', "expected the name of a folder"),
        ('{"heads": ""}', "expected the name of a folder"),
        ('{"drafts": "on"}', "expected the keys drafting and heads"),
        ("[]", "expected an object"),
        ('{"drafting": ', "damaged"),
    ],
)
def test_a_file_that_says_nothing_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / CONTROL).write_text(text)
    with pytest.raises(ValueError, match=words):
        last_order(tmp_path)


def test_status_round_trip(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    status = Status("off", "control.json says so", "/some/export", "no such folder", {"drafting": "off"})
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status
    (tmp_path / STATUS).write_text('{"drafting": "on"}')
    with pytest.raises(ValueError, match="not what a server"):
        read_status(tmp_path)
