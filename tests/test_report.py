import json
import re

import pytest

from medusa_k25.acceptance import Evaluation, Row
from medusa_k25.replay import walk
from medusa_k25.reports.evaluation import write_page
from medusa_k25.reports.pictures import accepted_by_head
from medusa_k25.reports.report import acceptance_table, read_report, summary, update_report
from medusa_k25.tracking import MetricsTable
from medusa_k25.tree import Tree


@pytest.fixture
def evaluation():
    def row(predictor, accepted, tree):
        acceptance = walk(accepted)
        interval = (acceptance.length - 0.1, acceptance.length + 0.1)
        return Row(predictor, 9, tree, acceptance, acceptance, interval, interval, acceptance)

    rows = [
        row("n-gram lookup", [0, 1, 0, 0], None),
        row("heads, tree", [1, 1, 1, 1], Tree([[0], [1]])),
    ]
    accuracy_KR = [[0.4, 0.5, 0.6, 0.7, 0.8], [0.2, 0.3, 0.4, 0.5, 0.6]]
    return Evaluation(answers=1, loops=0, rows=rows, accuracy_KR=accuracy_KR, labels_K=[4, 3], trees=[])


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
    assert json.loads((tmp_path / "report.json").read_text())["evaluate"]["rows"][1]["tree"] == [[0], [1]]


def test_the_page_shows_training_text_the_break_even_and_labels(tmp_path, evaluation):
    metrics = {
        f"{text}/acceptance_{shape}": value
        for text, value in (("calibration", 1.5), ("heldout", 1.4), ("train", 1.9))
        for shape in ("tree", "chain")
    }
    metrics |= {"heldout/acceptance_tree/a, <b>": 1.7, "heldout/acceptance_chain/a, <b>": 1.2}
    update_report(tmp_path, "train", {"metrics": metrics})
    update_report(tmp_path, "evaluate", {"checkpoint": "step"} | evaluation.as_json())
    update_report(tmp_path, "export", {"folder": "export", "nodes": 8})  # the tiles show the nearest size there is
    table = MetricsTable(tmp_path)
    for step, break_even in ((10, 9.0), (20, 2.46)):  # the latest counts
        table.log_metrics(metrics | {"break_even": break_even}, step)
    page = write_page(tmp_path).read_text()
    assert page.count("<svg") == 3
    # matplotlib writes the text of a legend into a comment beside its outlines
    assert page.count("<!-- break-even, 2.46 -->") == 2
    assert page.count("<!-- train, tree -->") == page.count("<!-- train, chain -->") == 1
    assert "<b>2.46</b>" in page
    assert "heads, tree, 9 nodes" in page
    assert "<tr><th>a, &lt;b&gt;</th><td>1.700</td><td>1.200</td></tr>" in page
    assert "<tr><th>all held-out text</th><td>1.400</td><td>1.400</td></tr>" in page


def test_accepted_drafts_by_head_come_from_the_passes_of_the_tree(evaluation):
    rows = json.loads(json.dumps(evaluation.as_json()))["rows"]
    assert accepted_by_head(rows, 9) == [1.0]
    rows[1]["every"] |= {"accepted": {"0": 5, "1": 2, "2": 1}, "passes": 8}
    rows[1]["tree"] = [[0], [1], [0, 0], [0, 0, 0]]
    assert accepted_by_head(rows, 9) == [3 / 8, 1 / 8, 0.0]
    assert accepted_by_head(rows, 5) == []
