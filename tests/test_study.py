"""A study: runs of several heads and seeds from one command, and what is made of them."""

import inspect
import re
import shutil
import sys

import pytest

from medusa_k25 import study as study_verb
from medusa_k25 import train as training
from medusa_k25.checkpoint import find_checkpoint, read_record
from medusa_k25.config import compose
from medusa_k25.reports.report import read_report
from medusa_k25.reports.study import cells_of
from tests.tiny import cache_of

COMMON = "max_steps=4-lr=0.01-draft_vocab_size=300"  # of the runs' names: what the command line has set for all


@pytest.fixture(scope="module")
def sweep(tiny_k25, tmp_path_factory):
    """(overrides...) -> the folder of the study, after its command has run with them"""
    home = tmp_path_factory.mktemp("study")
    cache_of(tiny_k25, home / "runs" / "study" / "cache", num_documents=60)

    def run(*overrides):
        settings = [f"target.home={tiny_k25.path.parent}", "trainer.max_steps=4", "optimizer.lr=0.01"]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(home)
            patch.setattr(sys, "argv", ["train", "-m", "+exp=study", "target=tiny_k25", *settings, *overrides])
            training.main()
        return home / "runs" / "study"

    return run


@pytest.fixture(scope="module")
def study(sweep):
    return sweep("heads=residual,recurrent", "seed=1,2", "draft_vocab_size=300")


def runs_of(study):
    return sorted(path.parent.name for path in study.glob("*/config.yaml"))


def test_one_command_trains_every_combination_and_skips_what_is_there(sweep, study, capsys):
    assert runs_of(study) == [f"{heads}-{COMMON}-{seed}" for heads in ("recurrent", "residual") for seed in (1, 2)]
    sweep("heads=residual,recurrent", "seed=1,2", "draft_vocab_size=300")
    assert capsys.readouterr().out.count("is trained to step 4 already") == 4


@pytest.fixture
def evaluated(study, tiny_k25):
    """(overrides...) -> the section of report.json, after the verb has run with them"""

    def run(*overrides):
        settings = [f"target.home={tiny_k25.path.parent}", f"run_dir={study}", f"cache={study / 'cache'}"]
        config = compose(["+exp=study", "target=tiny_k25", "evaluate.num_nodes=[2,4]", *settings, *overrides])
        inspect.unwrap(study_verb.main)(config)  # without the command line around it
        return read_report(study)["study"]

    return run


def test_a_row_for_each_design_and_the_lengths_that_training_printed(evaluated, study, capsys, monkeypatch):
    section = evaluated()
    out = capsys.readouterr().out
    assert [design["name"] for design in section["designs"]] == [f"residual-{COMMON}", f"recurrent-{COMMON}"]
    for design in section["designs"]:
        assert out.count(f"| {design['name']}") == 7  # tables
        assert design["seeds"] == [1, 2] and len(design["top1"]) == 4
        found = cells_of(design)
        for run, seed in enumerate(design["seeds"]):
            record = read_record(find_checkpoint(study / f"{design['name']}-{seed}" / "checkpoints", "best"))
            assert found["heads, chain", 5, "all answers"]["runs"][run] == record["metrics"]["heldout/acceptance_chain"]
        for cell in found.values():
            low, high = cell["interval"]
            assert low <= cell["mean"] <= high and cell["mean"] == pytest.approx(sum(cell["runs"]) / 2)
        assert ("heads, tree", 4, "without loops") in found and ("heads + n-gram lookup", 9, "other") in found
        assert (found["heads, tree", 4, "all answers"]["difference"] is None) == (design is section["designs"][0])
    assert "| n-gram lookup" in out
    page = (study / "study.html").read_text()
    assert page.count("<svg") == 2 and f"residual-{COMMON}" in page
    assert not re.search(r"(src|href)=.http", page.replace("xlink:", ""))
    assert (study / "study_pictures" / "nodes_all.png").exists()

    monkeypatch.setattr(study_verb, "ranks_of", None)  # they were kept
    assert evaluated() == section
    with pytest.raises(ValueError, match="reference=hydra: there is no such design; there is residual-max_steps"):
        evaluated("reference=hydra")


def test_unfinished_runs_are_left_out_and_false_names_refused(study, tmp_path):
    shutil.copytree(study, tmp_path / "study")
    first, second = (tmp_path / "study" / f"recurrent-{COMMON}-{seed}" for seed in (1, 2))
    shutil.rmtree(second / "checkpoints")
    designs, unfinished = study_verb.designs_in(tmp_path / "study")
    assert [len(runs) for runs in designs.values()] == [2, 1] and unfinished == [second.name]
    shutil.copytree(tmp_path / "study" / f"residual-{COMMON}-2", second, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=f"recurrent-{COMMON}-2 and .*-1 are named as one design, but differ in heads"):
        study_verb.designs_in(tmp_path / "study")
    with pytest.raises(ValueError, match="no finished run in"):
        study_verb.designs_in(first)
