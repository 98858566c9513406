"""A study: runs of several heads and seeds from one command, and what is made of them."""

import sys

import pytest

from medusa_k25 import train as training
from tests.tiny import cache_of


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
    expected = ["recurrent", "residual"]
    common = "max_steps=4-lr=0.01-draft_vocab_size=300"
    assert runs_of(study) == [f"{heads}-{common}-{seed}" for heads in expected for seed in (1, 2)]
    sweep("heads=residual,recurrent", "seed=1,2", "draft_vocab_size=300")
    assert capsys.readouterr().out.count("is trained to step 4 already") == 4
