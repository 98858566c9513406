import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from medusa_k25.checkpoint import find_checkpoint, load_heads, write_heads
from medusa_k25.heads import DraftVocabulary, ResidualHeads
from medusa_k25.serving.formats import (
    FILE,
    MEDUSA_FILE,
    MODEL_NAMES,
    export_heads,
    load_served,
    medusa_names,
    remarks,
    rename,
    targets_of,
    tensors_of,
)
from medusa_k25.tree import Tree

TREE = Tree([[0], [1], [0, 0]])


def random_heads(num_heads: int = 3, num_blocks: int = 2, bias: bool = True, own: bool = False) -> ResidualHeads:
    heads = ResidualHeads(8, num_heads, num_blocks, bias, own, draft_vocab_size=4 if own else None)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads


VOCABULARY = DraftVocabulary(torch.tensor([1, 4, 7, 9]), vocab_size=12)


some_heads = st.builds(random_heads, st.integers(2, 4), st.integers(1, 3), st.booleans(), st.booleans())


@settings(deadline=None)
@given(some_heads, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_an_export_reads_back_bit_for_bit(tmp_path_factory, heads, dtype):
    folder = tmp_path_factory.mktemp("export")
    export_heads(folder, heads, VOCABULARY, TREE, dtype, {"step": 7})
    served = load_served(folder)
    assert served.tree == TREE
    assert served.vocabulary.token_ids_M.tolist() == [1, 4, 7, 9]
    assert_same(served.heads, heads, dtype)


def assert_same(read, written, dtype):
    assert read.state_dict().keys() == written.state_dict().keys()
    for name, tensor in written.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor.to(dtype))


def test_an_export_of_own_lm_heads_and_no_bias_says_so(tmp_path):
    heads = random_heads(num_heads=2, num_blocks=1, bias=False, own=True)
    export_heads(tmp_path, heads, VOCABULARY, TREE, torch.float32, {})
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {
        f"{what}.weight" for k in range(2) for what in (f"blocks.{k}.layers.0", f"lm_heads.{k}")
    } | {"token_map"}
    assert torch.equal(tensors["lm_heads.1.weight"], heads.state_dict()["lm_heads.weight"][1])
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_fc_bias"], config["original_lm_head"]) == (False, False)


def test_an_export_has_vllms_names_and_the_tree(tmp_path):
    heads = random_heads(num_heads=2, num_blocks=1)
    export_heads(tmp_path, heads, VOCABULARY, TREE, torch.float32, {"step": 7})
    tensors = load_file(tmp_path / "model.safetensors")
    blocks = {f"blocks.{k}.layers.0.{part}" for k in range(2) for part in ("weight", "bias")}
    assert set(tensors) == blocks | {"token_map"}
    assert torch.equal(tensors["blocks.1.layers.0.weight"], heads.state_dict()["heads.1.0.linear.weight"])
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 8,
        "vocab_size": 12,
        "truncated_vocab_size": 4,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "medusa_choices": [[0], [1], [0, 0]],
    }
    assert config | expected == config
    # vLLM renames every other key that holds both "num" and "heads" or "layers" onto its own two
    assert [key for key in config if "num" in key] == ["num_heads", "num_hidden_layers"]


def test_the_whole_vocabulary_needs_no_map(tmp_path):
    export_heads(tmp_path, random_heads(), DraftVocabulary(torch.arange(12), 12), TREE, torch.float32, {})
    assert "token_map" not in load_file(tmp_path / "model.safetensors")
    assert len(load_served(tmp_path).vocabulary) == 12


@pytest.mark.parametrize(
    ("tree", "message"), [(Tree.chain(4), "4 deep but there are 3 heads"), (Tree([[0], [4]]), "rank 4 tokens")]
)
def test_a_tree_that_does_not_fit_is_refused_and_nothing_is_written(tmp_path, tree, message):
    with pytest.raises(ValueError, match=message):
        export_heads(tmp_path / "export", random_heads(), VOCABULARY, tree, torch.float32, {})
    assert not (tmp_path / "export").exists()


def test_a_deep_tree_is_refused_at_load_too(tmp_path):
    export_heads(tmp_path, random_heads(), VOCABULARY, TREE, torch.float32, {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"medusa_choices": [[0], [0, 0], [0, 0, 0], [0] * 4]}))
    with pytest.raises(ValueError, match="3 heads"):
        load_served(tmp_path)


def test_strange_and_missing_tensors_are_refused(tmp_path):
    export_heads(tmp_path, random_heads(), VOCABULARY, TREE, torch.float32, {})
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"blocks.0.extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'blocks\.0\.extra' has no place"):
        load_served(tmp_path)
    del tensors["blocks.1.layers.0.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks 'blocks\.1\.layers\.0\.bias'"):
        load_served(tmp_path)


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"medusa_fc_bias": False}, r"'blocks\.0\.layers\.0\.bias' has no place.* 1 more fault"),
        ({"original_lm_head": True}, r"'lm_heads\.2\.weight' has no place"),
        ({"num_hidden_layers": 3}, r"lacks 'blocks\.0\.layers\.2\.weight'"),
        ({"hidden_size": 9}, r"is \[8, 8\], expected \[9, 9\]"),
        ({"truncated_vocab_size": 5}, "maps 4 draft tokens, its config says 5"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(tmp_path, claim, message):
    export_heads(tmp_path, random_heads(own=True), VOCABULARY, TREE, torch.float32, {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | claim))
    with pytest.raises(ValueError, match=message):
        load_served(tmp_path)


def test_a_damaged_config_says_so(tmp_path):
    export_heads(tmp_path, random_heads(), VOCABULARY, TREE, torch.float32, {})
    text = (tmp_path / "config.json").read_text()
    for damaged, message in (
        (text[:50], "is damaged"),
        (text.replace("vocab_size", "x"), "lacks 'vocab_size'"),
    ):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(ValueError, match=message):
            load_served(tmp_path)


def test_a_folder_without_an_export_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"lacks config\.json and model\.safetensors; run medusa_k25\.export"):
        load_served(tmp_path)


def test_a_truncated_export_says_so(tmp_path):
    export_heads(tmp_path, random_heads(), VOCABULARY, TREE, torch.float32, {})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="damaged"):
        load_served(tmp_path)


@pytest.mark.parametrize("table", [MODEL_NAMES, medusa_names(2)], ids=["vllm", "medusa"])
def test_the_name_tables_work_in_both_directions(table):
    back = {theirs: ours for ours, theirs in table.items()}
    names = list(tensors_of(random_heads(own=True)))
    assert [rename(rename(name, table), back) for name in names] == names
    assert len({rename(name, table) for name in names}) == len(names)


def checkpoint_at(folder, step, score, heads=None):
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True)
    heads = heads or random_heads()
    write_heads(path, heads.state_dict(), heads, VOCABULARY, {"metrics": {"calibration/speedup": score}, "step": step})
    return path


@given(some_heads)
def test_a_checkpoint_reads_back_bit_for_bit(tmp_path_factory, heads):
    loaded = load_heads(checkpoint_at(tmp_path_factory.mktemp("run"), 5, 1.5, heads))
    assert loaded.vocabulary.token_ids_M.tolist() == [1, 4, 7, 9]
    assert loaded.heads.arguments == heads.arguments
    assert_same(loaded.heads, heads, torch.float32)


def test_checkpoints_are_found_by_name_score_step_and_path(tmp_path):
    paths = {step: checkpoint_at(tmp_path, step, score) for step, score in [(100, 1.4), (200, 1.6), (1000, 1.5)]}
    (tmp_path / "step-002000.part").mkdir()
    (tmp_path / "step-003000").mkdir()  # half-written: no heads.json
    assert find_checkpoint(tmp_path, "best") == paths[200]
    assert find_checkpoint(tmp_path, "last") == paths[1000]
    assert find_checkpoint(tmp_path, "100") == find_checkpoint(tmp_path, 100) == paths[100]
    assert find_checkpoint(tmp_path, str(paths[100])) == paths[100]
    with pytest.raises(ValueError, match="one of the steps 100, 200, 1000"):
        find_checkpoint(tmp_path, "300")
    with pytest.raises(ValueError, match=r"run medusa_k25\.train first"):
        find_checkpoint(tmp_path / "nowhere", "best")


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = checkpoint_at(tmp_path, 5, 1.5)
    record = (path / "heads.json").read_text()
    for damaged in (
        "{}",
        "[]",
        record[:-9],
        record.replace('"bias"', '"biass"'),
        record.replace('"num_heads": 3', '"num_heads": 2'),
    ):
        (path / "heads.json").write_text(damaged)
        with pytest.raises(ValueError, match="holds no readable heads"):
            load_heads(path)
    (path / "heads.json").write_text(record)
    (path / "heads.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="holds no readable heads"):
        load_heads(path)


def test_other_users_can_read_what_is_written(tmp_path):
    export_heads(tmp_path / "export", random_heads(), VOCABULARY, TREE, torch.float32, {})
    usual = tmp_path / "usual"
    usual.touch()
    for file in (tmp_path / "export/model.safetensors", checkpoint_at(tmp_path, 5, 1.5) / "heads.safetensors"):
        assert file.stat().st_mode == usual.stat().st_mode


# Independent loaders, written from what the formats say and from nothing of this package.


def medusa_logits(folder, hidden_ND):
    """FasterDecoding's and TGI's layout: logits [K, N, V] of every head."""
    config = json.loads((folder / "config.json").read_text())
    assert "architectures" not in config  # with it TGI looks for another kind of speculator
    tensors = {name: t.float() for name, t in load_file(folder / "medusa_lm_head.safetensors").items()}
    layers, logits = config["medusa_num_layers"], []
    for k in range(config["medusa_num_heads"]):
        x_ND = hidden_ND
        for i in range(layers):
            z_ND = x_ND @ tensors.pop(f"{k}.{i}.linear.weight").T + tensors.pop(f"{k}.{i}.linear.bias")
            x_ND = x_ND + z_ND * torch.sigmoid(z_ND)
        logits.append(x_ND @ tensors.pop(f"{k}.{layers}.weight").T)
    assert not tensors
    return torch.stack(logits)


def vllm_logits(folder, hidden_ND):
    """vLLM's layout: logits [K, N, V], minus infinity outside the draft vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    shared = tensors.pop("lm_head.weight") if config["original_lm_head"] else None
    token_map, logits = tensors.pop("token_map", torch.arange(config["vocab_size"])), []
    assert len(token_map) == config["truncated_vocab_size"]
    for k in range(config["num_heads"]):
        x_ND = hidden_ND
        for i in range(config["num_hidden_layers"]):
            z_ND = x_ND @ tensors.pop(f"blocks.{k}.layers.{i}.weight").T
            if config["medusa_fc_bias"]:
                z_ND = z_ND + tensors.pop(f"blocks.{k}.layers.{i}.bias")
            x_ND = x_ND + z_ND * torch.sigmoid(z_ND)
        logits_NV = torch.full((len(x_ND), config["vocab_size"]), -torch.inf)
        logits_NV[:, token_map] = x_ND @ (tensors.pop(f"lm_heads.{k}.weight") if shared is None else shared).T
        logits.append(logits_NV)
    assert not tensors
    return torch.stack(logits)


ALL = DraftVocabulary(torch.arange(12), 12)
LM_HEAD_VD = torch.randn(12, 8, generator=torch.Generator().manual_seed(5))
LOGITS = {"vllm": vllm_logits, "medusa": medusa_logits}


@pytest.mark.parametrize("format", LOGITS)
@pytest.mark.parametrize("vocabulary", [VOCABULARY, ALL], ids=["reduced", "whole"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_independent_loader_drafts_what_the_heads_draft(tmp_path, format, vocabulary, own, bias, dtype):
    torch.manual_seed(3)
    heads = ResidualHeads(8, 3, 2, bias, own, draft_vocab_size=len(vocabulary))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.3).copy_(parameter.to(dtype))
    lm_head_VD = LM_HEAD_VD.to(dtype).float()
    served = export_heads(tmp_path, heads, vocabulary, TREE, dtype, {"step": 7}, format, lm_head_VD, "toy/target")

    hidden_ND = torch.randn(200, 8)
    logits_KNM = heads.with_lm_head(
        vocabulary.rows(lm_head_VD), lambda lm_head: heads(hidden_ND, torch.zeros(200, 3)) @ lm_head.mT
    )
    found_KNV = LOGITS[format](tmp_path, hidden_ND.clone())
    torch.testing.assert_close(found_KNV[..., vocabulary.token_ids_M], logits_KNM)
    best_KN = vocabulary.to_target(logits_KNM.argmax(-1))
    # a token outside the draft vocabulary may tie with the first draft token, and is never better than it
    best_value = found_KNV.gather(-1, best_KN[..., None])
    assert (best_value >= found_KNV - 1e-5).all()
    clear = best_KN != vocabulary.token_ids_M[0]
    assert torch.equal(found_KNV.argmax(-1)[clear], best_KN[clear])

    # what is served from this folder drafts the same, and has the tree
    assert load_served(tmp_path).tree == TREE
    rows_MD = served.vocabulary.rows(lm_head_VD)
    served_KNM = served.heads.float().with_lm_head(
        rows_MD, lambda lm_head: served.heads(hidden_ND, torch.zeros(200, 3)) @ lm_head.mT
    )
    assert torch.equal(served.vocabulary.to_target(served_KNM.argmax(-1))[clear], best_KN[clear])


def test_what_a_format_changes_is_said():
    def said(format, own, vocabulary):
        return " / ".join(remarks(random_heads(own=own), vocabulary, format))

    assert said("sglang", False, VOCABULARY) == said("sglang", True, ALL) == ""
    assert "enable_weights_track" in said("vllm", False, VOCABULARY)
    assert "enable_weights_track" not in said("vllm", False, ALL) + said("vllm", True, VOCABULARY)
    assert "no draft vocabulary with own lm_heads: every head has an own lm_head over all 12" in said(
        "vllm", True, VOCABULARY
    )
    assert "The 8 tokens outside the draft vocabulary repeat" in said("vllm", True, VOCABULARY)
    assert "copies of the target's rows" in said("medusa", False, ALL)
    assert "copies of the target's rows" not in said("medusa", True, ALL)
    assert "FasterDecoding's own code shares one block" in said("medusa", False, ALL)


def test_an_export_in_another_format_replaces_the_one_before(tmp_path):
    for format, files in (("sglang", {FILE}), ("medusa", {MEDUSA_FILE}), ("vllm", {FILE})):
        export_heads(tmp_path, random_heads(), VOCABULARY, TREE, torch.float32, {}, format, LM_HEAD_VD, "toy")
        assert {path.name for path in tmp_path.iterdir()} == files | {"config.json"}
        load_served(tmp_path)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_fasterdecodings_and_tgis_files_are_served_with_a_chain(tmp_path, own):
    """As published: no tree, no vocab_size, too few heads counted; TGI's second version shares the lm_head."""
    heads = ResidualHeads(8, 3, 1, own_lm_head=own, draft_vocab_size=12)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    save_file({rename(n, medusa_names(1)): t.clone() for n, t in tensors_of(heads).items()}, tmp_path / MEDUSA_FILE)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "toy"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    served = load_served(tmp_path, vocab_size=12)
    assert_same(served.heads, heads, torch.float32)
    assert (served.tree, len(served.vocabulary)) == (Tree.chain(3), 12)
    if not own:
        with pytest.raises(ValueError, match="share the target's lm_head, so the target's vocab_size must be given"):
            load_served(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"medusa_choices": [[0], [1], [0, 0]]}))
    assert load_served(tmp_path, vocab_size=12).tree == TREE
    (tmp_path / "config.json").unlink()
    assert load_served(tmp_path, vocab_size=12).tree == Tree.chain(3)
    (tmp_path / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 4}))
    with pytest.raises(ValueError, match="holds 3, its config.json promises medusa_num_heads=4"):
        load_served(tmp_path, vocab_size=12)


def test_vllms_heads_of_others_are_served_with_a_chain(tmp_path):
    """Nothing of ours in the config, the copy of lm_head under either name and over either vocabulary."""
    export_heads(tmp_path, random_heads(), VOCABULARY, TREE, torch.float32, {}, "vllm", LM_HEAD_VD)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("medusa_choices", "medusa_k25", "torch_dtype", "architectures"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / FILE)
    tensors["lm_heads.0.weight"] = LM_HEAD_VD
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / FILE)
    assert load_served(tmp_path).tree == Tree.chain(3)


def test_a_pickle_is_not_served(tmp_path):
    torch.save({}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="is a pickle, which may run code and is not read; write it anew with"):
        load_served(tmp_path)


def test_the_target_of_an_export_is_found_and_nothing_else_is_taken_for_it(tmp_path):
    provenance = {"target": {"name": "toy", "fingerprints": {"lm_head": "abc"}}}
    export_heads(tmp_path, random_heads(), VOCABULARY, TREE, torch.float32, provenance)
    (found,) = targets_of(load_served(tmp_path).config)
    assert found == {"name": "toy", "revision": "", "quantisation": "", "fingerprints": {"lm_head": "abc"}}
    strangers: list[Any] = [5, {"target": 5}, {"target": {"fingerprints": {"lm_head": 5}}}]
    for strange in [*strangers, {"also_for": {"fingerprints": {}}}]:
        assert targets_of({"medusa_k25": strange}) == []


def test_an_impossible_export_is_refused_and_nothing_is_written(tmp_path):
    heads = random_heads()
    with torch.no_grad():
        tensors_of(heads)["heads.1.0.linear.bias"][3] = 1e5
    for dtype, format, message in (
        (
            torch.float16,
            "sglang",
            r"'blocks\.1\.layers\.0\.bias' of these heads holds NaN or infinity in torch\.float16",
        ),
        (torch.float64, "sglang", "export_dtype: expected bfloat16, float16 or float32"),
        (torch.float32, "gguf", "format=gguf: expected one of sglang, vllm, medusa"),
    ):
        with pytest.raises(ValueError, match=message):
            export_heads(tmp_path / "export", heads, VOCABULARY, TREE, dtype, {}, format)
    assert not (tmp_path / "export").exists()
