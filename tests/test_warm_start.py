"""Heads start from the files of every producer, matched by target token; what does not fit is said or refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_k25.checkpoint import write_heads
from medusa_k25.heads import DraftVocabulary, ResidualHeads
from medusa_k25.serving.formats import MODEL_NAMES, export_heads, medusa_names, rename, tensors_of
from medusa_k25.tree import Tree
from medusa_k25.warm_start import warm_start

D, V = 8, 20
TARGET_VD = torch.randn(V, D, generator=torch.Generator().manual_seed(0))
VOCABULARY = DraftVocabulary(torch.tensor([1, 4, 7, 9]), V)
ALL = DraftVocabulary(torch.arange(V), V)
PROVENANCE = {"target": {"name": "toy", "revision": "main"}, "step": 7, "metrics": {"calibration/speedup": 1.5}}


def trained(num_heads=3, num_blocks=2, vocabulary=VOCABULARY, **options):
    heads = ResidualHeads(D, num_heads, num_blocks, draft_vocab_size=len(vocabulary), **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(generator=generator)
    return heads


def fresh(num_heads=3, num_blocks=2, vocabulary=VOCABULARY, **options):
    heads = ResidualHeads(D, num_heads, num_blocks, draft_vocab_size=len(vocabulary), **options)
    heads.init_lm_heads(vocabulary.rows(TARGET_VD))
    return heads


def write_checkpoint(folder, heads, vocabulary):
    folder.mkdir(parents=True)
    write_heads(folder, heads.state_dict(), heads, vocabulary, PROVENANCE)


def write_run(folder, heads, vocabulary):
    write_checkpoint(folder / "checkpoints" / "step-000007", heads, vocabulary)


def write_export(folder, heads, vocabulary):
    export_heads(folder, heads, vocabulary, Tree.chain(1), torch.float32, PROVENANCE)


def write_vllm(folder, heads, vocabulary, **config):
    folder.mkdir()
    tensors = {rename(name, MODEL_NAMES): tensor.clone() for name, tensor in tensors_of(heads).items()}
    if not heads.own_lm_head:
        tensors["lm_head.weight"] = vocabulary.rows(TARGET_VD)
    if vocabulary is not ALL:
        tensors["token_map"] = vocabulary.token_ids_M
    save_file(tensors, folder / "model.safetensors")
    sizes = {"hidden_size": D, "num_heads": heads.num_heads, "num_hidden_layers": heads.num_blocks}
    flags = {"original_lm_head": not heads.own_lm_head}
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa"} | sizes | flags | config))


def write_medusa(folder, heads, vocabulary, pickled=False, **config):
    assert vocabulary is ALL or not heads.own_lm_head  # the format knows no map
    folder.mkdir()
    names = medusa_names(heads.num_blocks)
    tensors = {rename(name, names): tensor.clone() for name, tensor in tensors_of(heads).items()}
    if pickled:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    sizes = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_blocks}
    (folder / "config.json").write_text(json.dumps(sizes | {"base_model_name_or_path": "toy"} | config))


def write_pickled(folder, heads, vocabulary):
    write_medusa(folder, heads, vocabulary, pickled=True)


WRITERS = [write_checkpoint, write_run, write_export, write_vllm, write_medusa, write_pickled]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("own", [False, True])
def test_every_layout_is_read_whole(tmp_path, write, own):
    source, heads = trained(vocabulary=ALL, own_lm_head=own), fresh(vocabulary=ALL, own_lm_head=own)
    write(tmp_path / "source", source, ALL)
    report = warm_start(heads, ALL, tmp_path / "source", 0.9)
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), source.parameters(), strict=True))
    assert "toy" in report or write is write_vllm
    assert "3 heads x 2 blocks copied" in report
    assert "20 of 20 draft tokens (100.0%)" in report
    assert ("own lm_heads: 20 rows each copied, 0 stay the target's" in report) == own
    assert "DROPPED" not in report


@pytest.mark.parametrize("write", [write_checkpoint, write_export, write_vllm])
@pytest.mark.parametrize("own", [False, True])
def test_a_reduced_vocabulary_is_read_with_its_map(tmp_path, write, own):
    source, heads = trained(own_lm_head=own), fresh(own_lm_head=own)
    write(tmp_path / "source", source, VOCABULARY)
    assert "4 of 4 draft tokens (100.0%)" in warm_start(heads, VOCABULARY, tmp_path / "source", 1.0)
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), source.parameters(), strict=True))


def test_rows_are_matched_by_target_token_and_not_by_place(tmp_path):
    """The source ranks tokens 9, 3, 1, 7 in this order; of the new ones it lacks token 4."""
    source, heads = trained(own_lm_head=True), fresh(own_lm_head=True)
    write_vllm(tmp_path / "source", source, VOCABULARY)
    file = tmp_path / "source" / "model.safetensors"
    tensors = {rename(name, MODEL_NAMES): tensor.clone() for name, tensor in tensors_of(source).items()}
    save_file(tensors | {"token_map": torch.tensor([9, 3, 1, 7])}, file)
    report = warm_start(heads, VOCABULARY, tmp_path / "source", 0.75)
    assert "3 of 4 draft tokens (75.0%)" in report
    assert "3 rows each copied, 1 stay the target's" in report
    for own_MD, given_RD in zip(heads.lm_heads.weight, source.lm_heads.weight, strict=True):
        expected = torch.stack([given_RD[2], TARGET_VD[4], given_RD[3], given_RD[0]])
        assert torch.equal(own_MD, expected)


def test_the_users_story_252_of_32000(tmp_path):
    """The source's 32,000 draft tokens and the new heads' share 252: refused, whatever the heads share."""
    V = 64_000
    new = DraftVocabulary(torch.arange(32_000), V)
    old = DraftVocabulary(torch.arange(31_748, 63_748), V)
    for own in (False, True):
        source = ResidualHeads(2, 2, 1, own_lm_head=own, draft_vocab_size=32_000)
        heads = ResidualHeads(2, 2, 1, own_lm_head=own, draft_vocab_size=32_000)
        before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
        folder = tmp_path / f"own-{own}"
        write_checkpoint(folder, source, old)
        with pytest.raises(ValueError, match=r"252 of 32,000 draft tokens \(0\.8%\).*warm_start_min_match=0\.9"):
            warm_start(heads, new, folder, 0.9)
        for name, tensor in heads.state_dict().items():
            assert torch.equal(tensor.nan_to_num(7), before[name].nan_to_num(7))
        assert "252 of 32,000 draft tokens (0.8%)" in warm_start(heads, new, folder, 252 / 32_000)


@pytest.mark.parametrize("write", WRITERS)
def test_a_source_with_the_whole_vocabulary_knows_every_draft_token(tmp_path, write):
    source, heads = trained(vocabulary=ALL, own_lm_head=True), fresh(own_lm_head=True)
    write(tmp_path / "source", source, ALL)
    assert "4 of 4 draft tokens" in warm_start(heads, VOCABULARY, tmp_path / "source", 1.0)
    assert torch.equal(heads.lm_heads.weight, source.lm_heads.weight[:, VOCABULARY.token_ids_M])


def test_a_source_may_have_rows_beyond_the_targets_tokens(tmp_path):
    padded = DraftVocabulary(torch.arange(V + 4), V + 4)
    source, heads = trained(vocabulary=padded, own_lm_head=True), fresh(vocabulary=ALL, own_lm_head=True)
    write_vllm(tmp_path / "source", source, ALL)
    assert "20 of 20" in warm_start(heads, ALL, tmp_path / "source", 1.0)
    assert torch.equal(heads.lm_heads.weight, source.lm_heads.weight[:, :V])


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_a_shipped_copy_of_the_targets_lm_head_is_nobodys_own(tmp_path, name):
    write_vllm(tmp_path / "source", trained(vocabulary=ALL), ALL)
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensors.pop("lm_head.weight").clone(), **{n: t.clone() for n, t in tensors.items()}}, file)
    report = warm_start(fresh(vocabulary=ALL, own_lm_head=True), ALL, tmp_path / "source", 0.9)
    assert "20 of 20 draft tokens" in report
    assert "the source has no own lm_heads" in report


def test_without_a_map_the_first_tokens_are_meant(tmp_path):
    write_vllm(tmp_path / "source", trained(), ALL, truncated_vocab_size=7)
    assert "2 of 4 draft tokens (50.0%)" in warm_start(fresh(), VOCABULARY, tmp_path / "source", 0.5)


def test_own_lm_heads_are_dropped_loudly_and_shared_ones_leave_the_targets(tmp_path):
    write_checkpoint(tmp_path / "own", trained(own_lm_head=True), VOCABULARY)
    write_checkpoint(tmp_path / "shared", trained(), VOCABULARY)
    assert "WARNING: the source's own lm_heads are DROPPED" in warm_start(fresh(), VOCABULARY, tmp_path / "own", 0.9)
    heads = fresh(own_lm_head=True)
    assert "all rows stay the target's" in warm_start(heads, VOCABULARY, tmp_path / "shared", 0.9)
    assert all(torch.equal(own_MD, VOCABULARY.rows(TARGET_VD)) for own_MD in heads.lm_heads.weight)


def test_what_the_source_lacks_keeps_its_start(tmp_path):
    source, heads = trained(2, 1, own_lm_head=True), fresh(4, 3, own_lm_head=True)
    write_checkpoint(tmp_path / "source", source, VOCABULARY)
    report = warm_start(heads, VOCABULARY, tmp_path / "source", 0.9)
    assert "2 heads x 1 blocks copied; heads 3 to 4 are not in the source and start as the identity" in report
    assert "blocks 2 to 3 are not in the source and start as the identity" in report
    assert "heads 3 to 4 keep the target's" in report
    given, places = tensors_of(source), tensors_of(heads)
    assert all(torch.equal(places[name], tensor) for name, tensor in given.items())
    hidden_ND = torch.randn(5, D)
    features_KND = heads(hidden_ND, torch.zeros(5, 4, dtype=torch.long))
    assert torch.equal(features_KND[:2], source(hidden_ND, torch.zeros(5, 2, dtype=torch.long)))
    assert torch.equal(features_KND[2:], hidden_ND.expand(2, -1, -1))
    assert torch.equal(heads.lm_heads.weight[3], VOCABULARY.rows(TARGET_VD))


def test_what_is_too_much_is_left_out(tmp_path):
    source, heads = trained(4, 3), fresh(2, 1)
    write_checkpoint(tmp_path / "source", source, VOCABULARY)
    report = warm_start(heads, VOCABULARY, tmp_path / "source", 0.9)
    assert "2 heads x 1 blocks copied; the source's heads 3 to 4 are left out; the source's blocks 2 to 3" in report
    given = tensors_of(source)
    assert all(torch.equal(tensor, given[name]) for name, tensor in tensors_of(heads).items())


@pytest.mark.parametrize("write", WRITERS)
def test_biases_are_never_lost_silently(tmp_path, write):
    source = trained(vocabulary=ALL)
    write(tmp_path / "with", source, ALL)
    with pytest.raises(ValueError, match=r"heads\.bias=false would drop.*set heads\.bias=true"):
        warm_start(fresh(vocabulary=ALL, bias=False), ALL, tmp_path / "with", 0.9)
    for name, tensor in tensors_of(source).items():
        if name.endswith("bias"):
            tensor.zero_()
    write(tmp_path / "zero", source, ALL)
    report = warm_start(fresh(vocabulary=ALL, bias=False), ALL, tmp_path / "zero", 0.9)
    assert "the source's biases are zero and are left out" in report
    write(tmp_path / "without", trained(vocabulary=ALL, bias=False), ALL)
    heads = fresh(vocabulary=ALL)
    assert "the source has no biases, they start at zero" in warm_start(heads, ALL, tmp_path / "without", 0.9)
    assert not any(tensor.any() for name, tensor in tensors_of(heads).items() if name.endswith("bias"))


@pytest.mark.parametrize("write", WRITERS)
def test_another_hidden_size_is_refused(tmp_path, write):
    write(tmp_path / "source", trained(vocabulary=ALL), ALL)
    with pytest.raises(ValueError, match="its hidden size is 8, the target's 16"):
        warm_start(ResidualHeads(16, 3, 2), ALL, tmp_path / "source", 0.9)


def test_published_configs_may_count_fewer_heads_but_not_more(tmp_path):
    """The first configs of FasterDecoding counted two of five heads."""
    source = trained(5, 1, vocabulary=ALL)
    write_medusa(tmp_path / "fewer", source, ALL, medusa_num_heads=2)
    report = warm_start(fresh(5, 1, vocabulary=ALL), ALL, tmp_path / "fewer", 0.9)
    assert "5 heads x 1 blocks copied" in report
    assert "config.json counts 2 heads, the file holds 5" in report
    write_medusa(tmp_path / "more", source, ALL, medusa_num_heads=6)
    with pytest.raises(ValueError, match=r"holds 5 heads, its config\.json promises 6"):
        warm_start(fresh(5, 1, vocabulary=ALL), ALL, tmp_path / "more", 0.9)


def test_tensors_in_bf16_are_taken_exactly(tmp_path):
    source, heads = trained(vocabulary=ALL, own_lm_head=True).bfloat16(), fresh(vocabulary=ALL, own_lm_head=True)
    write_vllm(tmp_path / "source", source, ALL)
    warm_start(heads, ALL, tmp_path / "source", 0.9)
    assert all(torch.equal(a, b.float()) for a, b in zip(heads.parameters(), source.parameters(), strict=True))


def damage(folder, change):
    """Write the file of vLLM's layout again with `change` applied to its tensors."""
    write_vllm(folder, trained(vocabulary=ALL, own_lm_head=True), ALL)
    tensors = {
        rename(name, MODEL_NAMES): t.clone()
        for name, t in tensors_of(trained(vocabulary=ALL, own_lm_head=True)).items()
    }
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blocks.1.layers.0.weight"), r"lacks 'blocks\.1\.layers\.0\.weight'"),
        (lambda t: t.pop("blocks.1.layers.0.bias"), r"lacks 'blocks\.1\.layers\.0\.bias'"),
        (lambda t: t.pop("blocks.0.layers.0.weight"), "lacks the first block"),
        (lambda t: t.pop("lm_heads.2.weight"), r"lacks 'lm_heads\.2\.weight'"),
        (lambda t: t.update({"blocks.2.layers.1.weight": torch.zeros(D, 3)}), r"is \[8, 3\], expected \[8, 8\]"),
        (lambda t: t.update({"lm_heads.1.weight": torch.zeros(3, D)}), r"is \[3, 8\], expected \[20, 8\]"),
        (lambda t: t.update({"lm_heads.3.weight": torch.zeros(V, D)}), r"'lm_heads\.3\.weight' has no place"),
        (lambda t: t.update({"embed.weight": torch.zeros(1)}), r"'embed\.weight' has no place"),
        (lambda t: t.update(token_map=torch.zeros(V, dtype=torch.long)), "token_map must name"),
        (lambda t: t.update(token_map=torch.arange(-1, V - 1)), "token_map must name"),
        (lambda t: t.update(token_map=torch.arange(3)), "have 20 rows, token_map names 3 tokens"),
        (lambda t: t.clear(), "lacks the first block"),
    ],
)
def test_damaged_tensors_are_refused(tmp_path, change, message):
    damage(tmp_path / "source", change)
    heads = fresh(vocabulary=ALL, own_lm_head=True)
    with pytest.raises(ValueError, match=message):
        warm_start(heads, ALL, tmp_path / "source", 0.1)


@pytest.mark.parametrize("write", [write for write in WRITERS if write is not write_run])
def test_damaged_files_are_refused(tmp_path, write):
    write(tmp_path / "source", trained(vocabulary=ALL), ALL)
    files = [path for path in (tmp_path / "source").rglob("*") if path.is_file()]
    assert len(files) == 2
    for file in files:
        whole = file.read_bytes()
        for content in (whole[: len(whole) // 2], whole[:-20], b"", b"garbage", b"\xff" * 40):
            file.write_bytes(content)
            with pytest.raises(ValueError, match="is damaged|no readable heads"):
                warm_start(fresh(vocabulary=ALL), ALL, tmp_path / "source", 0.9)
        file.write_bytes(whole)
    warm_start(fresh(vocabulary=ALL), ALL, tmp_path / "source", 0.9)


def test_a_pickle_that_is_no_table_of_tensors_is_refused(tmp_path):
    for content in ([torch.zeros(1)], {"0.0.linear.weight": [1]}, {0: torch.zeros(1)}):
        torch.save(content, tmp_path / "medusa_lm_head.pt")
        with pytest.raises(ValueError, match="no table of tensors"):
            warm_start(fresh(), VOCABULARY, tmp_path, 0.9)
    torch.save(trained(), tmp_path / "medusa_lm_head.pt")  # a whole module: loading it would run code
    with pytest.raises(ValueError, match="holds more than weights"):
        warm_start(fresh(), VOCABULARY, tmp_path, 0.9)


def test_a_folder_without_heads_says_what_was_expected(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"holds no heads: expected .*heads\.json.*medusa_lm_head\.safetensors"):
            warm_start(fresh(), VOCABULARY, folder, 0.9)
    write_vllm(tmp_path / "llama", trained(), VOCABULARY, model_type="llama")
    with pytest.raises(ValueError, match="model_type is 'llama', expected 'medusa'"):
        warm_start(fresh(), VOCABULARY, tmp_path / "llama", 0.9)


def test_an_impossible_share_is_refused(tmp_path):
    with pytest.raises(ValueError, match="warm_start_min_match=90: expected a share between 0 and 1"):
        warm_start(fresh(), VOCABULARY, tmp_path, 90)
