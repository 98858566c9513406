import html
import json
import re
from dataclasses import replace

import pytest

from medusa_k25.acceptance import Evaluation, Replayed, Row
from medusa_k25.adaptive import Adaptive
from medusa_k25.evaluate import Evidence, judged
from medusa_k25.replay import walk
from medusa_k25.reports.evaluation import write_page
from medusa_k25.reports.pictures import accepted_by_head, break_even_of
from medusa_k25.reports.report import acceptance_table, read_report, summary, update_report
from medusa_k25.serving.adaptive_fit import Clocked, Priced, PricedBatch
from medusa_k25.tracking import MetricsTable
from medusa_k25.tree import Tree
from tests.test_acceptance import evaluator_of, made_up
from tests.test_cycle import RTX


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
    return Evaluation(answers=1, loops=0, topics=3, rows=rows, accuracy_KR=accuracy_KR, labels_K=[4, 3], trees=[])


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


def test_the_table_says_of_how_many_topics_the_text_is(evaluation):
    assert "on all 1 held-out answers, of 3 topics\n" in acceptance_table(evaluation)
    assert "on all 1 held-out answers\n" in acceptance_table(replace(evaluation, topics=0))


def test_sections_are_kept_side_by_side(tmp_path):
    update_report(tmp_path, "train", {"a": 1})
    update_report(tmp_path, "export", {"b": 2})
    update_report(tmp_path, "train", {"a": 3})
    assert read_report(tmp_path) == {"train": {"a": 3}, "export": {"b": 2}}


@pytest.fixture
def section():
    """Of made-up text, at the passes of 8 GPUs."""
    (heldout, ranks), (calibration, more), (train, _) = made_up(1, 9), made_up(2, 12), made_up(3, 6)
    replayed = Replayed(heldout, calibration)
    evidence = Evidence(train, replayed, ranks | more, "kimi_k25", RTX, {}, {"checkpoint": "step <1>"})
    return judged(evaluator_of(2, 4, 9), evidence)[2]


def test_the_page_is_one_self_contained_file_with_the_figures(tmp_path, section):
    update_report(tmp_path, "evaluate", section)
    update_report(tmp_path, "export", {"folder": "export", "nodes": 9})
    (tmp_path / "metrics.csv").write_text("step,metric,value\n10,train/loss_head1,3.5\n20,train/loss_head1,2.5\n")
    page = write_page(tmp_path).read_text()
    pictures = {file.stem for file in (tmp_path / "pictures").glob("*.png")}
    assert pictures == {"speed", "acceptance", "heads", "tree", "overfitting", "depth", "groups", "positions", "loss"}
    assert page.count("<svg") == len(pictures)
    assert not re.search(r"""(src|href)=["'](?!#)""", page.replace('xlink:href="#', ""))
    assert "step &lt;1&gt;" in page
    verdict = section["verdict"]
    assert html.escape(verdict["sentence"]) in page
    for row in verdict["rows"]:
        assert f"<th>{html.escape(row['candidate']['predictor'])}</th><td>{row['candidate']['nodes']}</td>" in page
        assert f"<td>{row['speed']['tok_s']:.1f} (" in page
    for assumption in verdict["assumptions"]:
        assert f"<li>{html.escape(assumption)}</li>" in page
    tree = next(row for row in section["rows"] if (row["predictor"], row["num_nodes"]) == ("heads, tree", 9))
    assert f"heads, tree:                 {tree['every']['length']:.3f} (" in summary(tmp_path)
    assert verdict["sentence"] in summary(tmp_path)


def test_the_page_shows_what_choosing_in_every_cycle_is_worth(tmp_path, section):
    rule = Adaptive((1,), (1, 2), ((1.0, 0.0),), (1, 8), ((11.0, 12.0),) * 2, (10.0, 10.0), (0.1, 0.1), 1)
    rows = (
        PricedBatch(1, 100.0, Clocked(90.0, 0.0, 2.0), Clocked(125.0, 0.25, 1.75)),
        PricedBatch(8, 50.0, Clocked(25.0, 0.0, 2.0), None),
    )
    priced = Priced(rule, rows, of_target=False)
    assert [line.split() for line in priced.text().splitlines()[-2:]] == [
        ["1", "100.0", "90.0", "(0.90x)", "125.0", "(1.25x)", "25%", "1.75"],
        ["8", "50.0", "25.0", "(0.50x)", "does", "not", "draft"],
    ]
    update_report(tmp_path, "evaluate", section | {"adaptive": priced.as_json()})
    page = write_page(tmp_path).read_text()
    assert "drafting pays for at most 1 request at a time" in page and "a rehearsal" in page
    assert "<td>90.0 (0.90 times)</td><td>125.0 (1.25 times)</td><td>25%</td><td>1.75</td>" in page
    assert "<td>does not draft</td>" in page


def test_a_page_without_heads(tmp_path):
    (heldout, _), (calibration, _) = made_up(1, 9), made_up(2, 12)
    evidence = Evidence([], Replayed(heldout, calibration), None, "kimi_k25", RTX, {}, {})
    evaluation, _, section = judged(evaluator_of(2, 4), evidence)
    assert "head " not in acceptance_table(evaluation)
    update_report(tmp_path, "predictors", section)
    file = write_page(tmp_path, "predictors")
    assert file.name == "predictors.html" and (tmp_path / "predictors_pictures" / "speed.png").exists()
    page = file.read_text()
    assert "<h2>Heads</h2>" not in page and "n-gram lookup" in page


def test_a_damaged_report_is_named_and_left_alone(tmp_path):
    for content, message in (("{", "is damaged"), ("[]", "is no report of this project")):
        (tmp_path / "report.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            update_report(tmp_path, "train", {})
        assert (tmp_path / "report.json").read_text() == content


def test_the_page_shows_the_training_and_labels(tmp_path, section):
    metrics = {
        f"{text}/acceptance_{shape}": value
        for text, value in (("calibration", 1.5), ("heldout", 1.4), ("train", 1.9))
        for shape in ("tree", "chain")
    }
    metrics |= {"heldout/acceptance_tree/a, <b>": 1.7, "heldout/acceptance_chain/a, <b>": 1.2}
    update_report(tmp_path, "train", {"metrics": metrics})
    update_report(tmp_path, "evaluate", section)
    table = MetricsTable(tmp_path)
    for step, break_even in ((10, 9.0), (20, 2.46)):
        table.log_metrics(metrics | {"break_even": break_even}, step)
    page = write_page(tmp_path).read_text()
    # matplotlib writes the text of a legend into a comment beside its outlines
    assert page.count("<!-- pays from -->") == 2
    assert page.count("<!-- train, tree -->") == page.count("<!-- train, chain -->") == 1
    assert "<tr><th>a, &lt;b&gt;</th><td>1.700</td><td>1.200</td></tr>" in page
    assert "<tr><th>all held-out text</th><td>1.400</td><td>1.400</td></tr>" in page


def test_the_length_from_which_it_pays_is_drawn_by_nodes(section):
    pays = break_even_of(section)
    assert pays[4] == pytest.approx(2.46)
    assert list(pays) == [2, 4, 9] and pays[2] < pays[4] < pays[9]


def test_accepted_drafts_by_head_come_from_the_passes_of_the_tree(evaluation):
    rows = json.loads(json.dumps(evaluation.as_json()))["rows"]
    assert accepted_by_head(rows, 9) == [1.0]
    rows[1]["every"] |= {"accepted": {"0": 5, "1": 2, "2": 1}, "passes": 8}
    rows[1]["tree"] = [[0], [1], [0, 0], [0, 0, 0]]
    assert accepted_by_head(rows, 9) == [3 / 8, 1 / 8, 0.0]
    assert accepted_by_head(rows, 5) == []
