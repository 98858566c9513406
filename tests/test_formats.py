import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from medusa_k25.checkpoint import arguments_of, find_checkpoint, load_heads, write_heads
from medusa_k25.heads import DraftVocabulary, ResidualHeads
from medusa_k25.serving.formats import MODEL_NAMES, export_heads, load_served, medusa_names, rename, tensors_of
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


@given(some_heads, st.sampled_from([torch.float32, torch.bfloat16]))
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
        (text.replace("medusa_choices", "x"), "lacks 'medusa_choices'"),
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
    write_heads(
        path, heads.state_dict(), heads, VOCABULARY, {"metrics": {"calibration/acceptance_tree": score}, "step": step}
    )
    return path


@given(some_heads)
def test_a_checkpoint_reads_back_bit_for_bit(tmp_path_factory, heads):
    loaded = load_heads(checkpoint_at(tmp_path_factory.mktemp("run"), 5, 1.5, heads))
    assert loaded.vocabulary.token_ids_M.tolist() == [1, 4, 7, 9]
    assert arguments_of(loaded.heads) == arguments_of(heads)
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
