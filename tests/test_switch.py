"""A server's switch and its counters, without a server."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_k25.serving.control import CONTROL, NODES, Order, Status, give_order, read_status
from medusa_k25.serving.sglang.meter import LONGEST_LABEL, MOST_LABELS, OTHER, WINDOW, Meter, Pays, note_nodes
from medusa_k25.serving.sglang.switch import MAX_ORDER_BYTES, Switch

LOSES, GAINS = Pays(WINDOW, 1.1, 0.9), Pays(WINDOW, 2.0, 1.2)


def good(folder: Path) -> None:
    """A judge that takes every folder."""


def bad(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no export folder")


def carried_out(switch: Switch, pays: Pays | None = None, judge: Callable[[Path], None] = good) -> bool:
    """Whether there was anything to do."""
    plan = switch.look(pays, judge)
    if plan is not None:
        switch.carry_out(plan)
        switch.tell()
    return plan is not None


def drafts(switch: Switch) -> bool:
    return switch.drafting


def test_orders_are_carried_out_once(tmp_path: Path) -> None:
    switch = Switch(tmp_path, Path("first"))
    assert switch.drafting and not carried_out(switch)
    for order, drafting, heads in (
        (Order("off"), False, "first"),
        (Order("on"), True, "first"),
        (Order("on", "second"), True, "second"),
        (Order("off", "nowhere"), False, "second"),
        (Order("off"), False, "second"),
        (Order("off"), False, "second"),
        (Order("auto"), True, "first"),
    ):
        give_order(tmp_path, order)
        assert carried_out(switch) and not carried_out(switch)
        status = read_status(tmp_path)
        assert status == Status(
            "on" if drafting else "off",
            f"control.json says {order.drafting}",
            heads,
            None,
            {key: value for key, value in (("drafting", order.drafting), ("heads", order.heads)) if value},
        )
        assert (switch.drafting, switch.heads) == (drafting, Path(heads))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"drafting": "on", "heads": "missing"}', "missing is no export folder"),
        ('{"drafting": "of"}', "expected one of auto, on, off"),
        ("{", "damaged"),
        (" " * (MAX_ORDER_BYTES + 1), "larger than"),
        ('{"heads": "/' + "long" * 2000 + '"}', "File name too long"),
        ('{"nested": ' + "[" * 900 + "]" * 900 + "}", "expected the keys"),
    ],
)
def test_a_refused_order_changes_nothing(text: str, words: str, tmp_path: Path) -> None:
    switch = Switch(tmp_path, Path("first"))
    give_order(tmp_path, Order("on"))
    assert carried_out(switch)
    (tmp_path / CONTROL).write_text(text)
    assert carried_out(switch, judge=bad) and not carried_out(switch, judge=bad)
    status = read_status(tmp_path)
    assert status is not None and status.error is not None and words in status.error
    assert (status.drafting, status.heads, switch.drafting, switch.heads) == ("on", "first", True, Path("first"))
    give_order(tmp_path, Order("off"))
    assert carried_out(switch, judge=bad)
    status = read_status(tmp_path)
    assert status is not None and status.error is None and not switch.drafting


def test_heads_that_one_rank_cannot_load_change_nothing(tmp_path: Path) -> None:
    switch = Switch(tmp_path, Path("first"))
    give_order(tmp_path, Order("on", "second"))
    plan = switch.look(None, good)
    assert plan is not None and plan.heads == Path("second")
    switch.carry_out(plan, "rank 1 could not load second")
    switch.tell()
    status = read_status(tmp_path)
    assert status is not None and status.error == "rank 1 could not load second"
    assert switch.drafting and switch.heads == Path("first")


def test_what_does_not_pay_is_switched_off_and_says_why(tmp_path: Path) -> None:
    switch = Switch(tmp_path, Path("first"))
    assert not carried_out(switch, GAINS) and not carried_out(switch, None)
    assert carried_out(switch, LOSES) and not drafts(switch) and not carried_out(switch, LOSES)
    status = read_status(tmp_path)
    assert status is not None and status.drafting == "off"
    assert "1.100 tokens a cycle" in status.why and "0.900 times" in status.why
    give_order(tmp_path, Order("auto"))
    assert carried_out(switch, LOSES) and drafts(switch)  # the order comes first
    assert carried_out(switch, LOSES) and not drafts(switch)
    give_order(tmp_path, Order("on"))
    assert carried_out(switch) and not carried_out(switch, LOSES) and drafts(switch)


def test_a_folder_with_other_files_is_loaded_again(tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    heads.mkdir()
    (heads / "config.json").write_text("{}")
    switch = Switch(tmp_path, heads)
    give_order(tmp_path, Order("on"))
    plan = switch.look(None, good)
    assert plan is not None and plan.heads is None
    switch.carry_out(plan)
    (heads / "model.safetensors").write_bytes(b"new")
    give_order(tmp_path, Order("on"))
    plan = switch.look(None, good)
    assert plan is not None and plan.heads == heads
    switch.carry_out(plan)
    give_order(tmp_path, Order("on"))
    plan = switch.look(None, good)
    assert plan is not None and plan.heads is None


def test_without_a_folder_there_are_no_orders() -> None:
    switch = Switch(None, Path("first"))
    assert not carried_out(switch) and carried_out(switch, LOSES) and not switch.drafting


def test_a_folder_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder; make it"):
        Switch(tmp_path / "missing", Path("first"))


def test_cycles_are_counted_by_label_and_depth() -> None:
    meter = Meter()
    meter.add("code", 2, 7, [3, 2, 1])
    meter.add("code", 0, 7, [3, 2, 1])
    meter.add("code", 0, 1, [])
    meter.add("maths", 1, 2, [1])
    meter.add("looked up", 5, 9, [])
    code, maths = meter.counts["code"], meter.counts["maths"]
    assert (code.cycles, code.plain, code.verified, code.emitted) == (3, 1, 2, 5)
    assert (code.drafted, code.accepted) == ({1: 6, 2: 4, 3: 2}, {1: 1, 2: 1})
    beside = meter.counts["looked up"]
    assert (beside.verified, beside.drafted, beside.accepted) == (1, {}, dict.fromkeys(range(1, 6), 1))
    assert (maths.emitted, maths.drafted, maths.accepted) == (2, {1: 1}, {1: 1})


def test_labels_are_taken_from_requests_and_bounded() -> None:
    meter = Meter()
    assert meter.label(None) == meter.label({}) == OTHER
    for asked in (3, "", "x" * (LONGEST_LABEL + 1), "\ud800", "two\nlines"):
        assert meter.label({"medusa_k25_label": asked}) == OTHER
    for number in range(MOST_LABELS):
        label = meter.label({"medusa_k25_label": f"kind {number}"})
        meter.add(label, 0, 1, [])
    assert meter.label({"medusa_k25_label": "one more"}) == OTHER
    assert meter.label({"medusa_k25_label": "kind 3"}) == "kind 3"


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 4)), max_size=80))
def test_whether_it_pays_is_said_of_the_newest_cycles(passes: list[tuple[int, int]]) -> None:
    with mock.patch("medusa_k25.serving.sglang.meter.WINDOW_PASSES", 5):
        check_window(passes)


def check_window(passes: list[tuple[int, int]]) -> None:
    meter, newest = Meter(), list[tuple[int, int]]()
    for requests, drafts in passes:
        meter.paid(requests, requests * (1 + drafts), 3.0, 2.0)
        newest.append((requests, 1 + drafts))
        while len(newest) > 5 and sum(number for number, _ in newest) - newest[0][0] >= WINDOW:
            newest.pop(0)
        cycles = sum(number for number, _ in newest)
        if cycles < WINDOW or len(newest) < 5:
            assert meter.pays is None
            continue
        assert meter.pays is not None
        assert meter.pays.cycles == cycles
        assert meter.pays.length == pytest.approx(sum(number * length for number, length in newest) / cycles)
        assert meter.pays.ratio == pytest.approx(sum(2.0 * length for _, length in newest) / (3.0 * len(newest)))
    meter.forget()
    assert meter.pays is None


def test_a_request_learns_the_nodes_of_every_pass() -> None:
    req = SimpleNamespace(customized_info=None, output_ids=[5])  # of prefill
    note_nodes(req, 9, 2)
    req.output_ids += [6, 7, 8]
    note_nodes(req, 1, 0)
    req.output_ids += [9]
    note_nodes(req, 9, 3)
    req.output_ids += [10, 11]  # a grammar cut the last ones off
    note_nodes(req, 4, 1)
    assert req.customized_info[NODES] == [0, 9, 0, 0, 1, 9, 0, 4, 0]
