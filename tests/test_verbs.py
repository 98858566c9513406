"""Heads with own lm_heads and without bias, from a checkpoint through evaluate, export and decode."""

import inspect
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from medusa_k25 import decode, evaluate, export
from medusa_k25.acceptance import HeadsBesideLookup, Share
from medusa_k25.checkpoint import write_heads
from medusa_k25.config import compose
from medusa_k25.serving.beside_files import open_beside
from medusa_k25.serving.formats import load_served
from medusa_k25.tree import Tree
from tests.test_decode import fitted_heads, vocabulary_of
from tests.tiny import NEW_TOKENS, cache_of

DRAFT_SIZE = 300


@pytest.fixture(scope="module")
def cache(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("verbs") / "cache"
    return cache_of(tiny_llama, folder, num_documents=40, end_ids=tiny_llama.end_ids)


@pytest.fixture(scope="module")
def run_verb(cache, tiny_llama, tmp_path_factory):
    """(verb, overrides...) -> what it wrote into report.json; the run folder holds one checkpoint."""
    heads = fitted_heads(tiny_llama, cache, DRAFT_SIZE, bias=False, own_lm_head=True)
    record = {
        "target": {
            "name": tiny_llama.name,
            "revision": "",
            "quantisation": "none",
            "fingerprints": tiny_llama.fingerprints,
        },
        "cache_fingerprint": cache.fingerprint,
        "code_version": "0",
        "step": 1,
        "config": {"num_nodes": 3, "max_width": 10, "hardware": OmegaConf.to_container(compose([]).hardware)},
        "metrics": {"calibration/speedup": 1.0},
        "tree": [[0], [1]],
    }
    run_dir = tmp_path_factory.mktemp("run")
    folder = run_dir / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    write_heads(folder, heads.state_dict(), heads, vocabulary_of(tiny_llama, DRAFT_SIZE), record)

    def run(verb, *overrides):
        config = compose(
            [
                "target=local",
                f"target.path={tiny_llama.path}",
                f"cache={cache.path}",
                f"run_dir={run_dir}",
                f"generate.max_new_tokens={NEW_TOKENS}",
                "evaluate.num_nodes=[4]",
                "num_nodes=3",
                *overrides,
            ]
        )
        inspect.unwrap(verb.main)(config)  # without the command line around it
        return json.loads((run_dir / "report.json").read_text())

    return run


def test_own_lm_heads_go_from_a_checkpoint_to_decoding(run_verb):
    report = run_verb(evaluate)
    length = {(row["predictor"], row["num_nodes"]): row["every"]["length"] for row in report["evaluate"]["rows"]}
    assert length["heads, tree", 4] > length["n-gram lookup", 4] >= 1
    run_verb(export, "num_nodes=4", "export_dtype=float32")
    report = run_verb(decode, "decode_prompts=null")
    assert report["decode"]["holds"]
    assert report["decode"]["acceptance_length"] == length["heads, tree", 4]


@pytest.mark.parametrize("source", ["lookup", "answers"])
def test_a_continuation_beside_the_heads_goes_from_calibration_text_to_decoding(run_verb, capsys, monkeypatch, source):
    tree = "tree=[[0],[1],[0,0],[2]]"
    run_verb(export, f"beside={source}", tree)
    assert "no node pays beside this tree" in capsys.readouterr().out  # random answers have nothing in common
    monkeypatch.setattr(HeadsBesideLookup, "share", lambda lookups, nodes: Share(3, 2))
    made = run_verb(export, f"beside={source}", tree, "export_dtype=float32")["export"]
    assert (made["beside"], made["chain"], made["shortest"]) == (source, 3, 2)
    folder = Path(made["folder"])
    served = load_served(folder)
    opened = open_beside(served, folder, served.vocabulary.vocab_size)
    assert opened is not None
    beside = opened.load()
    assert beside.chain == 3 and len(beside.smaller.paths) == 1
    assert (beside.table is not None) == (source == "answers")
    for written in (capsys.readouterr().out, (folder / "README.md").read_text()):
        assert "3 of the 5 nodes of a pass go to what followed there" in written
    assert run_verb(decode, "decode_prompts=2")["decode"]["holds"]


@pytest.mark.parametrize("more", ["beside=both", "beside=lookup format=vllm", "beside=answers format=medusa"])
def test_only_sglang_drafts_beside_the_heads(run_verb, more):
    with pytest.raises(ValueError, match="expected null, lookup or answers, and format=sglang"):
        run_verb(export, *more.split())


def test_the_tree_is_chosen_again_where_its_limits_are_others(run_verb):
    def tree(*overrides):
        return load_served(Path(run_verb(export, *overrides)["export"]["folder"])).tree

    assert tree() == Tree([[0], [1]])  # as at training
    assert tree("max_width=1") == Tree.chain(2)
    assert tree("num_nodes=4") == Tree.chain(3)  # these heads are fitted to the text
    assert tree("tree=[[0],[2]]") == Tree([[0], [2]])
    for verb, nodes in ((export, "num_nodes=5"), (evaluate, "evaluate.num_nodes=[5]")):
        with pytest.raises(ValueError, match="only 3 were ever right: ask for at most 4 nodes"):
            run_verb(verb, nodes)


def test_predictors_alone_leave_what_is_known_of_heads(run_verb):
    before = run_verb(evaluate)["evaluate"]
    report = run_verb(evaluate, "checkpoint=null")
    assert report["evaluate"] == before
    assert {row["predictor"] for row in report["predictors"]["rows"]}.isdisjoint({"heads, tree", "heads, chain"})
    run_verb(export, "num_nodes=3")  # which reads the evaluation of heads for its card


def test_heads_and_trees_of_another_cache_are_refused(run_verb, tiny_llama, tmp_path):
    """Its training text may be this one's held-out text."""
    other = cache_of(tiny_llama, tmp_path / "other", num_documents=39, end_ids=tiny_llama.end_ids)
    run_verb(export)
    for verb, *overrides in ((evaluate,), (export, "num_nodes=4"), (decode,)):
        with pytest.raises(ValueError, match=f"comes from another cache .* than {other.path} is now .*has grown, or"):
            run_verb(verb, f"cache={other.path}", *overrides)
        run_verb(verb, f"cache={other.path}", "allow_other_cache=true", "decode_prompts=1", *overrides)
