"""Figures of a design: means over seeds, intervals, paired differences, what drafting costs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_k25.acceptance import HeadsTree, Replayed
from medusa_k25.designs import CALM, EVERY, Measured, cells, drafting_flops, measure, parts_of
from medusa_k25.heads import RecurrentHeads, ResidualHeads, ResidualRootHeads
from medusa_k25.replay import between, grow
from medusa_k25.reports.study import Table, learning_curves, markdown, tables
from medusa_k25.tree import Tree
from tests.test_acceptance import made_up


@pytest.fixture(scope="module")
def replayed_and_heads():
    (heldout, ranks), (calibration, more) = made_up(1, 9), made_up(2, 12)
    topics = ["sql", "arithmetic", None]
    heldout = [replace(text, group=topics[i % 3]) for i, text in enumerate(heldout)]
    heldout[0] = replace(heldout[0], ids_T=torch.tensor([1, 1] + [5, 6] * 20, dtype=torch.int32))
    kept = dict(zip(heldout, [torch.zeros(heldout[0].num_states, 3).long(), *list(ranks.values())[1:]], strict=True))
    growth = grow([more[text] for text in calibration], 20, 8)
    return Replayed(heldout, calibration), HeadsTree("heads, tree", growth, kept | more)


def test_a_part_of_the_text_is_measured_as_a_row_of_an_evaluation_is(replayed_and_heads):
    replayed, heads = replayed_and_heads
    parts = parts_of(replayed.heldout)
    assert {name: int(part_I.sum()) for name, part_I in parts.items()} == {
        EVERY: 9,
        CALM: 8,
        "code": 3,
        "maths": 3,
        "other": 3,
    }
    found, row = measure(replayed, parts, heads, [4]), replayed.row(heads, 4)
    assert found["heads, tree", 4, EVERY].length == row.every.length
    assert found["heads, tree", 4, CALM].length == row.without_loops.length
    (cell, *_) = cells([found])
    assert cell.interval == row.interval and cell.difference is None  # of one seed there are only the documents


def run_of(lengths: list[float], spread: float) -> dict:
    """Lengths by draw around a length, as if documents alone were drawn."""
    return {
        ("tree", nodes, EVERY): Measured(length, length + spread * torch.linspace(-1, 1, 201))
        for nodes, length in enumerate(lengths, start=2)
    }


@given(
    st.lists(st.lists(st.floats(1, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    st.floats(0, 0.5),
    st.floats(-0.5, 0.5),
)
@settings(deadline=None)
def test_designs_of_the_same_runs_do_not_differ(lengths, spread, shift):
    """Nor do those that differ by a constant differ by anything else: both see the same draws."""
    runs = [run_of(each, spread) for each in lengths]
    shifted = [run_of([length + shift for length in each], spread) for each in lengths]
    for cell, moved in zip(cells(runs, runs), cells(shifted, runs), strict=True):
        assert [cell.difference, cell.difference_interval] == [0, (0, 0)]
        assert moved.difference == pytest.approx(shift, abs=1e-5)
        assert moved.difference_interval == pytest.approx((shift, shift), abs=1e-5)
        assert moved.interval == pytest.approx([value + shift for value in cell.interval], abs=1e-5)


def test_an_interval_covers_documents_and_seeds():
    run, far = run_of([2.0], 0.1), run_of([3.0], 0.1)
    assert cells([run, run, run])[0].interval == pytest.approx(between(run["tree", 2, EVERY].lengths_B))
    (cell,) = cells([run, far])
    assert cell.mean == 2.5 and cell.runs == [2.0, 3.0]
    low, high = cell.interval
    assert low < 2.1 and high > 2.9
    still = [run_of([2.0], 0.0), run_of([2.5], 0.0), run_of([3.0], 0.0)]  # the documents say all the same
    (cell,) = cells(still)
    assert 2.0 <= cell.interval[0] < 2.2 and 2.8 < cell.interval[1] <= 3.0


def test_a_size_that_not_all_runs_have_is_left_out():
    assert [cell.nodes for cell in cells([run_of([2.0, 2.5], 0.1), run_of([2.0], 0.1)])] == [2]
    (first, second) = cells([run_of([2.0, 2.5], 0.1)], [run_of([1.5], 0.1)])
    assert first.difference == 0.5 and second.difference is None


def test_drafting_is_counted_by_paths_that_go_on():
    tree, D, M = Tree([[0], [1], [2], [0, 0], [1, 0], [1, 1]]), 8, 20
    recurrent = RecurrentHeads(D, num_heads=4)
    product = 2 * (2 * D * (3 * D + 1) + M * D)
    assert drafting_flops(recurrent, M, tree) == 3 * product  # head 1 once, head 2 below two paths, no deeper one
    assert drafting_flops(recurrent, M, Tree.chain(4)) == 4 * product
    residual = ResidualHeads(D, num_heads=4)
    assert drafting_flops(residual, M, tree) == 2 * 2 * (D * (D + 1) + M * D)
    root = ResidualRootHeads(D, num_heads=4)
    assert drafting_flops(root, M, Tree.chain(1)) == 2 * (root.products[0] + M * D)


def design(name: str, positions: int, length: float) -> dict:
    runs = cells([run_of([length] * 20, 0.1)])
    some = [cell.as_json() | {"predictor": "heads, tree"} for cell in runs]
    return {
        "name": name,
        "seeds": [1],
        "steps": 6,
        "positions": positions,
        "parameters": 1_000_000,
        "top1": [0.5],
        "drafting_mflop": [["heads, tree", 17, 3.0]],
        "cells": some,
    }


def test_designs_that_differ_in_their_share_of_the_data_are_one_curve():
    designs = [design("hydra", 900, 2.0), design("hydra-share=0.5", 450, 1.5), design("recurrent-lr=0.1", 900, 3.0)]
    curves = learning_curves(designs)
    assert {name: [(x, mean) for x, mean, *_ in points] for name, points in curves.items()} == {
        "hydra": [(450, 1.5), (900, 2.0)],
        "recurrent-lr=0.1": [(900, 3.0)],
    }


def test_a_table_is_markdown_and_has_a_row_a_design():
    designs = [design("hydra", 900, 2.0), design("recurrent", 900, 3.0)]
    section = {"designs": designs, "training_free": [], "parts": {EVERY: 5}, "answers": 5, "reference": "hydra"}
    shown: list[Table] = tables(section)
    title, head, rows = next(table for table in shown if table[0].startswith("Tokens a cycle on 5"))
    assert "all of them (5)" in title and [row[head.index("9 nodes")][:5] for row in rows] == ["2.000", "3.000"]
    lines = markdown(head, rows).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[2].startswith("| hydra ")
