import json
import re

import pytest

from medusa_k25.acceptance import Evaluation, Row
from medusa_k25.replay import walk
from medusa_k25.report import acceptance_table, read_report, summary, update_report, write_page
from medusa_k25.tree import Tree


@pytest.fixture
def evaluation():
    def row(predictor, accepted, tree):
        acceptance = walk(accepted)
        return Row(predictor, 9, tree, acceptance, acceptance, (acceptance.length - 0.1, acceptance.length + 0.1))

    rows = [
        row("n-gram lookup", [0, 1, 0, 0], None),
        row("untrained heads, tree", [0, 0, 0, 0], Tree.chain(1)),
        row("heads, tree", [1, 1, 1, 1], Tree([[0], [1]])),
    ]
    return Evaluation(answers=1, loops=0, rows=rows, accuracy_KR=[[0.4, 0.5, 0.6, 0.7, 0.8], [0.2, 0.3, 0.4, 0.5, 0.6]])


def test_the_table_shows_every_predictor(evaluation):
    lines = acceptance_table(evaluation).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("heads, tree")] == ["2.000", "2.000"]
    assert [line.split()[-1] for line in lines if line.startswith("n-gram")] == ["1.333", "1.333"]
    assert next(line for line in lines if line.startswith("2 ")).split()[1:] == [
        "0.200",
        "0.300",
        "0.400",
        "0.500",
        "0.600",
    ]


def test_sections_are_kept_side_by_side(tmp_path):
    update_report(tmp_path, "train", {"a": 1})
    update_report(tmp_path, "export", {"b": 2})
    update_report(tmp_path, "train", {"a": 3})
    assert read_report(tmp_path) == {"train": {"a": 3}, "export": {"b": 2}}


def test_the_page_is_one_self_contained_file_with_the_figures(tmp_path, evaluation):
    update_report(tmp_path, "evaluate", {"checkpoint": "step <1>"} | evaluation.as_json())
    update_report(tmp_path, "export", {"folder": "export", "nodes": 9})
    (tmp_path / "metrics.csv").write_text("step,metric,value\n10,train/loss_head1,3.5\n20,train/loss_head1,2.5\n")
    page = write_page(tmp_path).read_text()
    assert page.count("<svg") == 3
    assert "<td>2.000</td>" in page
    assert "step &lt;1&gt;" in page
    assert not re.search(r"""(src|href)=["'](?!#)""", page.replace('xlink:href="#', ""))
    assert "heads, tree:           2.000 (1.900 to 2.100), 50.0% of the passes saved" in summary(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["evaluate"]["rows"][2]["tree"] == [[0], [1]]
