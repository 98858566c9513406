"""Heads meet another target: what differs is named, and by what they accept there it is said what to do with them."""

import inspect
import json
import shutil
from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from medusa_k25 import decode, evaluate, export
from medusa_k25.checkpoint import write_heads
from medusa_k25.config import compose
from medusa_k25.costs.cycle import Length
from medusa_k25.costs.new_target import RETRAIN, REUSE, WARM_START, Advice, common_size
from medusa_k25.serving.formats import open_served, refuse_heads_of_another_target
from medusa_k25.target import Target, target_differences
from tests.conftest import write_tiny_llama
from tests.test_decode import fitted_heads, vocabulary_of
from tests.tiny import NEW_TOKENS, cache_of

OLD, NEW = "a" * 40, "b" * 40  # revisions


@pytest.fixture(scope="module")
def home(tiny_llama, tmp_path_factory):
    """The run of heads that were trained on tiny_llama at revision OLD, evaluated there."""
    run_dir = tmp_path_factory.mktemp("home")
    cache = cache_of(tiny_llama, run_dir / "cache", end_ids=tiny_llama.end_ids)
    heads = fitted_heads(tiny_llama, cache)
    record = {
        "target": tiny_llama.identity | {"revision": OLD},
        "cache_fingerprint": cache.fingerprint,
        "code_version": "0",
        "step": 1,
        "config": {"num_nodes": 3, "max_width": 10, "hardware": OmegaConf.to_container(compose([]).hardware)},
        "metrics": {"calibration/speedup": 1.0},
        "tree": [[0], [1]],
    }
    folder = run_dir / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    write_heads(folder, heads.state_dict(), heads, vocabulary_of(tiny_llama), record)
    target = new_target(tiny_llama, run_dir / "target", revision=OLD)
    run_verb(evaluate, target, run_dir, cache, f"checkpoint={folder}")
    return folder


def new_target(old, folder, noise=0.0, revision=NEW):
    """`old` with a little noise in every weight, as if fetched from the hub."""
    shutil.copytree(old.path, folder)
    if noise:
        generator = torch.Generator().manual_seed(5)
        tensors = load_file(folder / "model.safetensors")
        for tensor in tensors.values():
            tensor += noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_commit_hash": revision}))
    return Target.open(folder)


def run_verb(verb, target, run_dir, cache, *overrides):
    config = compose(
        [
            *("target=local", f"target.path={target.path}", f"cache={cache.path}", f"run_dir={run_dir}"),
            *(f"generate.max_new_tokens={NEW_TOKENS}", "evaluate.num_nodes=[4]", "num_nodes=3", *overrides),
        ]
    )
    inspect.unwrap(verb.main)(config)
    return json.loads((run_dir / "report.json").read_text())


@pytest.mark.parametrize(
    ("case", "differs", "actions"),
    [
        ("same weights", [f"revision ({OLD} there, {NEW} here)"], {REUSE}),
        ("a little other", ["lm_head", "final_norm", "embeddings"], {REUSE, WARM_START}),
        ("another", ["lm_head", "final_norm", "embeddings"], {RETRAIN}),
    ],
)
def test_evaluate_says_what_heads_are_worth_on_another_target(
    home, tiny_llama, tmp_path, capsys, case, differs, actions
):
    if case == "another":
        target = Target.open(write_tiny_llama(tmp_path / "target", seed=1))
    else:
        target = new_target(tiny_llama, tmp_path / "target", noise=0.0 if case == "same weights" else 0.004)
    cache = cache_of(target, tmp_path / "cache", num_documents=39, end_ids=target.end_ids)
    run_dir, checkpoint = tmp_path / "run", f"checkpoint={home}"
    with pytest.raises(ValueError, match="was made for target .* in: .*set allow_target_mismatch=true") as error:
        run_verb(evaluate, target, run_dir, cache, checkpoint)
    assert all(part in str(error.value) for part in differs)
    report = run_verb(evaluate, target, run_dir, cache, checkpoint, "allow_target_mismatch=true")
    advice = report["another_target"]["another_target"]
    out, page = capsys.readouterr().out, (run_dir / "another_target.html").read_text()
    assert advice["action"] in actions, advice["sentence"]
    assert advice["sentence"] in out and f"The rule: {advice['rule']}." in out
    assert advice["action"] in page and "The rule: reuse where" in page
    assert "evaluate" not in report  # that is what heads are worth on their own target


def test_without_figures_of_their_own_target_nothing_is_advised(home, tiny_llama, tmp_path):
    target = new_target(tiny_llama, tmp_path / "target")
    cache = cache_of(target, tmp_path / "cache", num_documents=39, end_ids=target.end_ids)
    checkpoint = shutil.copytree(home, tmp_path / "elsewhere" / "checkpoints" / home.name)
    more = (f"checkpoint={checkpoint}", "allow_target_mismatch=true")
    advice = run_verb(evaluate, target, tmp_path / "run", cache, *more)["another_target"]["another_target"]
    assert advice["action"] is None and "evaluate them in the run that trained them" in advice["sentence"]


def test_heads_are_exported_for_another_target_and_are_that_ones_alone(home, tiny_llama, tmp_path):
    target = new_target(tiny_llama, tmp_path / "target", noise=0.01)
    cache = cache_of(target, tmp_path / "cache", num_documents=39, end_ids=target.end_ids)
    run_dir, checkpoint = tmp_path / "run", f"checkpoint={home}"
    with pytest.raises(ValueError, match="which differs from target"):
        run_verb(export, target, run_dir, cache, checkpoint)
    run_verb(export, target, run_dir, cache, checkpoint, "allow_target_mismatch=true", "export_dtype=float32")
    card = (run_dir / "export" / "README.md").read_text()
    assert "were trained for another target" in card and "are of the one that they were trained for" in card
    served = open_served(run_dir / "export")
    assert "lm_head" in refuse_heads_of_another_target(served, target)  # a server of this one loads them
    with pytest.raises(ValueError, match="in: lm_head, final_norm, embeddings; choose"):
        refuse_heads_of_another_target(served, Target.open(write_tiny_llama(tmp_path / "third", seed=2)))
    other_size = replace(target, vocab_size=513)
    with pytest.raises(ValueError, match="vocabulary size 512, .* has 513"):
        refuse_heads_of_another_target(served, other_size, allow_mismatch=True)
    assert run_verb(decode, target, run_dir, cache, "decode_prompts=2")["decode"]["holds"]


def test_what_the_owner_does_not_know_is_no_difference(tiny_llama):
    known = tiny_llama.identity
    assert target_differences(known | {"name": "other", "revision": OLD}, known) == []
    assert (
        target_differences({"name": "older", "fingerprints": {"lm_head": known["fingerprints"]["lm_head"]}}, known)
        == []
    )
    assert target_differences(known | {"quantisation": "int4"}, known) == ["quantisation (int4 there, none here)"]
    assert target_differences(known | {"fingerprints": {"embeddings": "0"}}, known) == ["embeddings"]


def test_the_revision_is_read_where_a_download_left_it(tiny_llama, tmp_path):
    folder = new_target(tiny_llama, tmp_path / "local", revision=None).path
    assert Target.open(folder).revision == "local"
    left = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
    left.parent.mkdir(parents=True)
    left.write_text(f"{NEW}\netag\n1.0\n")
    assert Target.open(folder).revision == NEW


def advice(here, home=(1.5, 1.49, 1.51)):
    return Advice(("lm_head",), 4, Length(*here), Length(*home), 1.1, 1.3)


@pytest.mark.parametrize(
    ("here", "action", "possible"),
    [
        ((1.5, 1.49, 1.51), REUSE, (REUSE,)),
        ((1.6, 1.59, 1.61), REUSE, (REUSE,)),  # easier text
        ((1.47, 1.4, 1.54), REUSE, (REUSE, WARM_START)),
        ((1.4, 1.39, 1.41), WARM_START, (WARM_START,)),
        ((1.15, 1.1, 1.2), WARM_START, (WARM_START, RETRAIN)),
        ((1.0, 1.0, 1.01), RETRAIN, (RETRAIN,)),
    ],
)
def test_the_rule(here, action, possible):
    found = advice(here)
    assert (found.action, found.possible) == (action, possible)
    assert ("more answers would settle it" in found.sentence()) == (len(possible) > 1)


def test_the_figures_of_the_rule():
    found = advice((1.4, 1.39, 1.41))
    assert found.loss == pytest.approx((0.0667, 0.0576, 0.0757), abs=2e-4)
    assert found.kept[0] == pytest.approx(0.8) and found.kept[1] < 0.8 < found.kept[2]
    assert advice((1.0, 1.0, 1.0), home=(1.0, 1.0, 1.0)).action == RETRAIN
    assert common_size(8, [4, 8, 16], [4, 16]) == 4 and common_size(8, [8], [4]) is None
