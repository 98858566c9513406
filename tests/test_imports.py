"""Files of other engines: what they hold is in the cache, once, or the reason why not is said."""

import fcntl
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_k25 import capture as capture_verb
from medusa_k25.cache import Cache, verify
from medusa_k25.cache.capture import Capture, CaptureReport
from medusa_k25.cache.imports import FIRST_PLACEHOLDER, Import, normed, numerically
from medusa_k25.reports.report import read_report
from medusa_k25.target import Target
from tests.producers import (
    Known,
    known_texts,
    sglang_line,
    write_sglang_json,
    write_specforge,
    write_speculators,
    write_speculators_03,
    write_vllm,
)

ROOT = Path(__file__).parents[1]
ALL = Capture(storage="all")


@pytest.fixture(scope="module")
def target(tiny_k25: Target) -> Target:
    """With many end tokens, so that some answers end by themselves."""
    return replace(tiny_k25, end_ids=(*tiny_k25.end_ids, *range(5, tiny_k25.vocab_size, 40)))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made") / "conversations.jsonl"


@pytest.fixture(scope="module")
def texts(target: Target, conversations: Path) -> list[Known]:
    made = [text for text in known_texts(target, conversations) if len(text.row["answer_ids"]) >= 9][:12]
    assert len(made) == 12 and {text.row["finish_reason"] for text in made} == {"stop", "length"}
    return made


def write(producer: str, folder: Path, texts: Sequence[Known]) -> str:
    """Write the files of a producer, and say the name of its source."""
    source, _, variant = producer.partition(" ")
    if source == "vllm":
        write_vllm(folder, texts, torch.bfloat16 if variant == "bf16" else torch.float32)
    elif source == "speculators" and variant == "0.3":
        write_speculators_03(folder, texts)
    elif source == "speculators":
        write_speculators(folder, texts, fp8=variant == "fp8", beside=variant == "beside")
    elif source == "specforge":
        strategy = variant if variant in ("dspark", "dflash") else "eagle3"
        write_specforge(folder, texts, strategy, gz=variant == "gz", padding=7 if variant == "padded" else 0)
    else:
        write_sglang_json(folder / ("answers.jsonl.gz" if variant == "gz" else "answers.jsonl"), texts)
    return source


PRODUCERS = {  # and how far a state may be off
    "vllm": 1e-5,
    "vllm bf16": 0.02,
    "speculators": 0.02,
    "speculators beside": 0.02,
    "speculators fp8": 0.2,
    "speculators 0.3": 1e-5,
    "specforge": 0,
    "specforge gz": 0,
    "specforge padded": 0,
    "specforge dspark": 0,
    "sglang_json": 0,
    "sglang_json gz": 0,
}


def assert_stored(cache: Cache, texts: Sequence[Known], capture: Capture, tolerance: float) -> None:
    """The documents are these texts, in this order."""
    assert len(cache.documents) == len(texts)
    for document, text in zip(cache.documents, texts, strict=True):
        assert cache.token_ids(document).tolist() == text.ids_T.tolist()
        assert torch.equal(cache.loss_mask(document), text.mask_T)
        hidden_MD, positions_M = cache.states(document)
        P, T = len(text.row["prompt_ids"]), len(text.ids_T)
        assert positions_M.tolist() == list(range(0 if capture.storage == "all" else P - 1, T - 1))
        torch.testing.assert_close(hidden_MD.float(), text.after_TD[positions_M], atol=3 * tolerance, rtol=tolerance)
        assert (document.prompt_length, document.finish_reason) == (P, text.row["finish_reason"])


@pytest.mark.parametrize("producer", PRODUCERS)
def test_what_a_producer_wrote_is_stored(target: Target, texts: list[Known], tmp_path: Path, producer: str) -> None:
    source = write(producer, tmp_path / "files", texts)
    for capture in (Capture(shard_tokens=100), ALL):
        path = tmp_path / capture.storage
        report = Import(source, tmp_path / "files", capture).run(target, path)
        cache = Cache.open(path, target)
        assert_stored(cache, texts, capture, PRODUCERS[producer])
        assert all(not faults for faults in verify(cache))
        assert (report.stored, report.states, report.faults) == (len(texts), cache.num_states, {})
        assert report.tokens == cache.num_tokens
        assert report.cut == sum(text.row["finish_reason"] == "length" for text in texts)
        assert report.check is not None and report.check.agreement > 0.9
        assert cache.manifest.engine == f"files of {source}"
        for document in cache.documents:
            assert document.id == f"{source}/{document.origin['file']}" and document.origin["source"] == source
            assert document.origin["ids"] == {"vllm": None, "sglang_json": "generated"}.get(source, "rendered")
            assert document.sampling["mode"] == document.dtype == "unknown"
        again = Import(source, tmp_path / "files", capture).run(target, path)
        assert (again.stored, again.skipped, again.states) == (0, len(texts), 0)
        assert Cache.open(path).fingerprint == cache.fingerprint


@pytest.mark.parametrize(("storage_dtype", "tolerance"), [("bfloat16", 0.01), ("float8_e4m3fn", 0.1)])
@pytest.mark.parametrize("producer", ["vllm", "specforge"])
def test_narrow_storage(
    target: Target, texts: list[Known], tmp_path: Path, producer: str, storage_dtype: str, tolerance: float
) -> None:
    source = write(producer, tmp_path / "files", texts)
    capture = Capture(storage_dtype=storage_dtype)
    Import(source, tmp_path / "files", capture).run(target, tmp_path / "cache")
    assert_stored(Cache.open(tmp_path / "cache", target), texts, capture, tolerance)


def test_the_norm_is_the_targets(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_TLD = torch.randn(200, 2, target.hidden_size, generator=generator) * 20
    hidden_TD = hidden_TLD[:, -1]  # not contiguous, as in the files
    weight_D = target.norm_weight.float()

    def reference(rows_MD: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(rows_MD, (target.hidden_size,), weight_D, target.norm_eps)

    for positions_M in (torch.arange(3, 190), torch.tensor([0, 1, 5, 6, 7, 150, 199])):
        plain = torch.empty(len(positions_M), target.hidden_size)
        normed(hidden_TD, None, positions_M, weight_D, target.norm_eps, plain)
        torch.testing.assert_close(plain, reference(hidden_TD[positions_M]))
        fp8_TD, scales_T1 = hidden_TD.to(torch.float8_e4m3fn), torch.rand(200, 1, generator=generator)
        scaled = torch.empty(len(positions_M), target.hidden_size, dtype=torch.bfloat16)
        normed(fp8_TD, scales_T1, positions_M, weight_D, target.norm_eps, scaled)
        wanted = reference((fp8_TD.float() * scales_T1)[positions_M])
        torch.testing.assert_close(scaled, wanted.bfloat16(), atol=0.01, rtol=0.01)


# What the texts say about themselves


def test_conversations_say_what_the_files_cannot(
    target: Target, texts: list[Known], conversations: Path, tmp_path: Path
) -> None:
    rows = [text.row | {"group": "g", "label": "chat", "origin": {"engine": "vllm 0.32"}} for text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # with include_output_tokens, vLLM leaves the last token out: it has no state
    short = [replace(text, ids_T=text.ids_T[:-1], before_TLD=text.before_TLD[:-1]) for text in texts]
    for name, files in (("whole", texts), ("short", short)):
        write_vllm(tmp_path / name, files)
        Import("vllm", tmp_path / name, Capture(), tmp_path / "rows.jsonl").run(target, tmp_path / f"cache {name}")
        cache = Cache.open(tmp_path / f"cache {name}", target)
        assert_stored(cache, texts, Capture(), 1e-5)
        for document, row in zip(cache.documents, rows, strict=True):
            assert (document.id, document.group, document.label) == (row["id"], "g", "chat")
            assert (document.sampling, document.dtype) == (row["sampling"], "float32")
            assert document.origin["engine"] == "vllm 0.32" and document.origin["file"].endswith(".safetensors")

    unknown = tmp_path / "unknown.jsonl"
    unknown.write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    report = Import("vllm", tmp_path / "whole", Capture(), unknown).run(target, tmp_path / "some")
    assert (report.stored, len(report.faults)) == (5, len(texts) - 5)
    assert "no answered conversation of" in report.faults["cmpl-5-a0b.safetensors"]


@pytest.mark.parametrize("masked_end", [True, False])
def test_padding_hides_no_conversation(
    target: Target, texts: list[Known], conversations: Path, tmp_path: Path, masked_end: bool
) -> None:
    files = texts
    if not masked_end:  # the mask leaves the end token out
        files = [replace(t, mask_T=t.mask_T & (torch.arange(len(t.ids_T)) < len(t.ids_T) - 1)) for t in texts]
    write_specforge(tmp_path / "files", files, padding=9)
    report = Import("specforge", tmp_path / "files", Capture(), conversations).run(target, tmp_path / "cache")
    assert report.faults == {}
    cache = Cache.open(tmp_path / "cache", target)
    assert_stored(cache, texts, Capture(), 0)
    assert [document.id for document in cache.documents] == [text.row["id"] for text in texts]


def test_a_conversation_in_two_files_is_stored_once(
    target: Target, texts: list[Known], conversations: Path, tmp_path: Path
) -> None:
    write_vllm(tmp_path / "files", texts)
    shutil.copy(tmp_path / "files/cmpl-3-a0b.safetensors", tmp_path / "files/again.safetensors")
    report = Import("vllm", tmp_path / "files", Capture(), conversations).run(target, tmp_path / "cache")
    assert (report.stored, report.skipped, report.faults) == (len(texts), 1, {})


def test_several_answers_and_text_after_them(target: Target, texts: list[Known], tmp_path: Path) -> None:
    """Of two answers with a question between them and padding after them, what the heads need is kept."""
    changed = []
    for text in texts:
        P = len(text.row["prompt_ids"])
        mask_T = text.mask_T.clone()
        mask_T[P + 3 : P + 6] = False
        changed.append(replace(text, mask_T=mask_T))
    write_specforge(tmp_path / "files", changed, padding=9)
    Import("specforge", tmp_path / "files", Capture()).run(target, tmp_path / "cache")
    cache = Cache.open(tmp_path / "cache", target)
    for document, text in zip(cache.documents, changed, strict=True):
        P, T = len(text.row["prompt_ids"]), len(text.ids_T)
        assert cache.token_ids(document).tolist() == text.ids_T.tolist()
        hidden_MD, positions_M = cache.states(document)
        assert positions_M.tolist() == [*range(P - 1, P + 2), *range(P + 5, T - 1)]
        assert torch.equal(hidden_MD, text.after_TD[positions_M])


def test_an_end_token_outside_the_mask_ends_the_answer(target: Target, texts: list[Known], tmp_path: Path) -> None:
    ended = [text for text in texts if text.row["finish_reason"] == "stop"]
    write_specforge(
        tmp_path / "files",
        [replace(t, mask_T=t.mask_T & (torch.arange(len(t.ids_T)) < len(t.ids_T) - 1)) for t in ended],
    )
    report = Import("specforge", tmp_path / "files", Capture()).run(target, tmp_path / "cache")
    assert report.cut == 0
    for document, text in zip(Cache.open(tmp_path / "cache").documents, ended, strict=True):
        assert (document.length, document.finish_reason) == (len(text.ids_T) - 1, "stop")


def test_loops_cut_and_short_answers_are_counted(target: Target, texts: list[Known], tmp_path: Path) -> None:
    def with_answer(text: Known, answer_ids: list[int]) -> Known:
        P = len(text.row["prompt_ids"])
        ids_T = torch.tensor(text.row["prompt_ids"] + answer_ids)
        row = text.row | {"answer_ids": answer_ids, "finish_reason": "length"}
        mask_T = torch.arange(len(ids_T)) >= P
        return replace(text, row=row, ids_T=ids_T, mask_T=mask_T, after_TD=text.after_TD[:1].repeat(len(ids_T), 1))

    odd = [with_answer(texts[0], [7, 8] * 20), with_answer(texts[1], [7]), with_answer(texts[2], [])]
    write_specforge(tmp_path / "files", [*texts, *odd])
    cut = sum(text.row["finish_reason"] == "length" for text in texts)

    def imported(*leave_out: str) -> CaptureReport:
        run = Import("specforge", tmp_path / "files", Capture(leave_out=leave_out))
        return run.run(target, tmp_path / f"cache {len(leave_out)}")

    report = imported()
    assert (report.stored, report.short, report.left_out) == (len(texts) + 1, 2, 0)
    assert (report.loops, report.cut) == (1, cut + 1)
    report = imported("loop")
    assert (report.stored, report.left_out, report.loops, report.cut) == (len(texts), 1, 1, cut + 1)
    report = imported("loop", "cut")
    assert (report.stored, report.left_out, report.loops) == (len(texts) - cut, 1 + cut, 1)


def test_images_of_sglang_are_mapped_masked_and_counted(
    target: Target, tiny_llama: Target, texts: list[Known], tmp_path: Path
) -> None:
    lines = [sglang_line(text) for text in texts]
    images = [FIRST_PLACEHOLDER, FIRST_PLACEHOLDER + 2**62 - 1, FIRST_PLACEHOLDER + 12345]
    prompt_ids = [images[i % 3] if i < 4 else id for i, id in enumerate(texts[2].row["prompt_ids"])]
    lines[2] = sglang_line(texts[2], prompt_ids)
    lines[5] = sglang_line(texts[5], [target.vocab_size, *texts[5].row["prompt_ids"][1:]])
    file = tmp_path / "files/answers.jsonl"
    file.parent.mkdir()
    file.write_text("".join(lines))
    report = Import("sglang_json", file.parent, ALL).run(target, tmp_path / "cache")
    assert (report.stored, report.placeholders) == (len(texts) - 1, 4)
    assert list(report.faults) == ["answers.jsonl:6"]
    assert f"token id {target.vocab_size} at position 0, expected 0 to 511" in report.faults["answers.jsonl:6"]
    cache = Cache.open(tmp_path / "cache", target)
    document = next(d for d in cache.documents if d.id.endswith(":3"))
    assert cache.token_ids(document)[:4].tolist() == [target.placeholder_id] * 4
    assert not cache.loss_mask(document)[:4].any()
    assert "4 tokens are of images" in str(report)

    assert tiny_llama.placeholder_id is None
    reading = Import("sglang_json", file.parent, ALL).plan(target, tmp_path / "other").reading
    with pytest.raises(ValueError, match="is an image in SGLang, and config.json of target tiny-llama names no"):
        replace(reading, target=tiny_llama)._mapped(torch.tensor([3, images[1]]))


# States that are not what the source is known to write


def shifted(text: Known) -> Known:
    return replace(text, before_TLD=text.before_TLD.roll(1, 0), after_TD=text.after_TD.roll(1, 0))


def with_last_layer(change: Callable[[Known], Tensor]) -> Callable[[Known], Known]:
    return lambda text: replace(text, before_TLD=torch.stack([text.before_TLD[:, 0], change(text)], dim=1))


@pytest.mark.parametrize(
    ("producer", "change", "message"),
    [
        (
            "vllm",
            with_last_layer(lambda text: text.after_TD),
            "before the final norm.*the final norm was applied twice",
        ),
        ("vllm", shifted, r"labels are shifted by -1 \(h_t predicts x_t\)"),
        ("speculators fp8", with_last_layer(lambda text: text.after_TD), "the final norm was applied twice"),
        ("speculators 0.3", shifted, "shifted by -1"),
        (
            "specforge",
            lambda text: replace(text, after_TD=text.before_TLD[:, -1]),
            r"after the final norm\), but .*the final norm is missing \(pre-norm states\)",
        ),
        ("specforge", shifted, "shifted by -1"),
    ],
)
def test_another_convention_is_refused_before_anything_is_stored(
    target: Target,
    texts: list[Known],
    tmp_path: Path,
    producer: str,
    change: Callable[[Known], Known],
    message: str,
) -> None:
    source = write(producer, tmp_path / "files", [change(text) for text in texts])
    with pytest.raises(ValueError, match=f"nothing was imported from .*read as {source} writes them.*{message}"):
        Import(source, tmp_path / "files", Capture()).run(target, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_layer_before_the_last_is_refused(
    target: Target, texts: list[Known], conversations: Path, tmp_path: Path
) -> None:
    """It predicts the next token, but not as well as it should at the temperature that the conversations name."""
    write_vllm(tmp_path / "files", [with_last_layer(lambda text: text.before_TLD[:, -2])(text) for text in texts])
    importing = Import("vllm", tmp_path / "files", Capture(), conversations)
    with pytest.raises(ValueError, match="nothing was imported .*The data seems to have: states of an unknown layer"):
        importing.run(target, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_files_of_another_convention_are_not_added_to_a_good_cache(
    target: Target, texts: list[Known], tmp_path: Path
) -> None:
    write_vllm(tmp_path / "files", texts[:6])
    Import("vllm", tmp_path / "files", Capture()).run(target, tmp_path / "cache")
    before = Cache.open(tmp_path / "cache").fingerprint
    write_vllm(tmp_path / "files/new", [shifted(text) for text in texts[6:]])
    with pytest.raises(ValueError, match="nothing was imported from .*shifted by -1"):
        Import("vllm", tmp_path / "files", Capture()).run(target, tmp_path / "cache")
    assert Cache.open(tmp_path / "cache").fingerprint == before


def test_states_of_another_target_are_refused(
    target: Target, tiny_llama: Target, texts: list[Known], tmp_path: Path
) -> None:
    write_vllm(tmp_path / "files", texts)
    with pytest.raises(
        ValueError, match="nothing was imported from .*no known convention; an unknown layer, another target"
    ):
        Import("vllm", tmp_path / "files", Capture()).run(tiny_llama, tmp_path / "cache")
    wide = [replace(text, before_TLD=text.before_TLD.repeat(1, 1, 2)) for text in texts]
    write_vllm(tmp_path / "wide", wide)
    with pytest.raises(
        ValueError, match="none of 12 texts from .*states of D=128, target .* has D=64; pick the target"
    ):
        Import("vllm", tmp_path / "wide", Capture()).run(target, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


# Texts unlike the others


def with_states(text: Known, change: Callable[[Tensor], Tensor]) -> Known:
    """Whether a source norms its states or not."""
    layers = [text.before_TLD[:, 0], change(text.before_TLD[:, -1])]
    return replace(text, before_TLD=torch.stack(layers, dim=1), after_TD=change(text.after_TD))


def noise(states_TD: Tensor) -> Tensor:
    """As large as a state is, all the same."""
    noise_TD = torch.randn(states_TD.shape, generator=torch.Generator().manual_seed(1))
    return noise_TD * (states_TD.norm(dim=1, keepdim=True) / noise_TD.norm(dim=1, keepdim=True))


PREFERS = r"its states are not those of its tokens: .* h_t prefers x_\{t\+1\} at \d+ of \d+ positions"
SIZE = r"its states are not those of its tokens: RMS\(h / norm weight\) is .*, expected 0.9 to 1.05"


@pytest.mark.parametrize("producer", ["vllm", "specforge"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda states_TD: states_TD.roll(1, 0), PREFERS),
        (lambda states_TD: states_TD.roll(-1, 0), PREFERS),
        (noise, f"{PREFERS}|{SIZE}"),
        (torch.zeros_like, SIZE),
        (lambda states_TD: states_TD * 1e30, SIZE),
    ],
)
def test_one_misaligned_text_among_good_ones_is_named(
    target: Target,
    texts: list[Known],
    tmp_path: Path,
    producer: str,
    change: Callable[[Tensor], Tensor],
    message: str,
) -> None:
    many = [*texts, *texts[:8]]
    many[3] = with_states(many[3], change)
    source = write(producer, tmp_path / "files", many)
    report = Import(source, tmp_path / "files", Capture()).run(target, tmp_path / "cache")
    name = {"vllm": "cmpl-3-a0b.safetensors", "specforge": "rows_0-5/data_3.ckpt"}[source]
    assert (report.stored, list(report.faults)) == (19, [name])
    with pytest.raises(ValueError, match=message):
        raise ValueError(report.faults[name])
    assert_stored(Cache.open(tmp_path / "cache", target), many[:3] + many[4:], Capture(), 1e-5)


def test_what_was_mended_is_stored_while_other_texts_are_still_misaligned(
    target: Target, texts: list[Known], tmp_path: Path
) -> None:
    bad = [1, 4, 5, 8, 9]
    write_vllm(tmp_path / "files", [shifted(text) if i in bad else text for i, text in enumerate(texts)])
    run = Import("vllm", tmp_path / "files", Capture())
    report = run.run(target, tmp_path / "cache")
    assert (report.stored, len(report.faults)) == (len(texts) - 5, 5)
    write_vllm(tmp_path / "files", [shifted(text) if i in bad[1:] else text for i, text in enumerate(texts)])
    report = run.run(target, tmp_path / "cache")
    assert (report.stored, len(report.faults)) == (1, 4)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_text_is_no_reason_to_suspect_its_states(tiny_k25: Target, tmp_path: Path, temperature: float) -> None:
    sampled = known_texts(tiny_k25, tmp_path / "conversations.jsonl", temperature)
    write_vllm(tmp_path / "files", sampled)
    run = Import("vllm", tmp_path / "files", Capture(), tmp_path / "conversations.jsonl")
    report = run.run(tiny_k25, tmp_path / "cache")
    assert (report.stored + report.short, report.faults) == (len(sampled), {}) and report.stored > 10


def test_a_strategy_without_last_states_is_refused(target: Target, texts: list[Known], tmp_path: Path) -> None:
    write_specforge(tmp_path / "files", texts, "dflash")
    with pytest.raises(ValueError, match="holds no last state, only hidden_states, input_ids, loss_mask: .*dflash"):
        Import("specforge", tmp_path / "files", Capture()).run(target, tmp_path / "cache")


# Files


def test_numbers_are_sorted_by_their_value() -> None:
    names = ["rows_0-2000/data_2.ckpt", "rows_0-2000/data_10.ckpt", "rows_2000-4000/data_2000.ckpt"]
    names += ["rows_10000-12000/data_10000.ckpt"]
    assert [path.as_posix() for path in sorted(map(Path, reversed(names)), key=numerically)] == names


def test_120_files_are_stored_in_their_order(target: Target, texts: list[Known], tmp_path: Path) -> None:
    many = (texts * 10)[:120]
    write_speculators(tmp_path / "files", many)
    Import("speculators", tmp_path / "files", Capture(shard_tokens=200)).run(target, tmp_path / "cache")
    files = [document.origin["file"] for document in Cache.open(tmp_path / "cache", target).documents]
    assert files == [f"hidden_states/hs_{i}.safetensors" for i in range(120)]


def test_only_new_files_are_imported(target: Target, texts: list[Known], tmp_path: Path) -> None:
    write_vllm(tmp_path / "files/monday", texts[:5])
    run = Import("vllm", tmp_path / "files", Capture())
    assert run.run(target, tmp_path / "cache").stored == 5
    write_vllm(tmp_path / "files/tuesday", texts[5:])
    report = run.run(target, tmp_path / "cache")
    assert (report.stored, report.skipped) == (len(texts) - 5, 5)
    assert_stored(Cache.open(tmp_path / "cache", target), texts, Capture(), 1e-5)


def test_another_folder_under_the_same_names_is_refused(target: Target, texts: list[Known], tmp_path: Path) -> None:
    write_vllm(tmp_path / "monday", texts[:6])
    write_vllm(tmp_path / "tuesday", texts[6:])
    Import("vllm", tmp_path / "monday", Capture()).run(target, tmp_path / "cache")
    with pytest.raises(ValueError, match="cmpl-0-a0b.safetensors holds another text than the document that .* has of"):
        Import("vllm", tmp_path / "tuesday", Capture()).run(target, tmp_path / "cache")


def test_files_that_are_being_written_are_left_for_the_next_run(
    target: Target, texts: list[Known], tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    write_vllm(folder, texts)
    run = Import("vllm", folder, Capture())
    (folder / ".hs_3.safetensors.1.tmp").touch()
    with (
        (folder / "cmpl-0-a0b.safetensors.lock").open("w") as first,
        (folder / "cmpl-9-a0b.safetensors.lock").open("w") as second,
        (folder / "not-yet.safetensors.lock").open("w") as third,
    ):
        for lock in (first, second, third):
            fcntl.flock(lock, fcntl.LOCK_EX)
        report = run.run(target, tmp_path / "cache")
        assert (report.stored, report.unfinished, report.faults) == (len(texts) - 2, 4, {})
        assert "4 files are still being written" in str(report)
    (folder / ".hs_3.safetensors.1.tmp").unlink()
    report = run.run(target, tmp_path / "cache")
    assert (report.stored, report.skipped, report.unfinished) == (2, len(texts) - 2, 0)


def test_nothing_but_unfinished_files(target: Target, texts: list[Known], tmp_path: Path) -> None:
    write_vllm(tmp_path / "files", texts[:1])
    with (tmp_path / "files/cmpl-0-a0b.safetensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="nothing to import from .* yet: 1 files are still being written"):
            Import("vllm", tmp_path / "files", Capture()).run(target, tmp_path / "cache")


def test_a_growing_file_of_lines(target: Target, texts: list[Known], tmp_path: Path) -> None:
    file = tmp_path / "files/answers.jsonl"
    write_sglang_json(file, texts)
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:7]) + lines[7][:-50])
    run = Import("sglang_json", file.parent, Capture())
    report = run.run(target, tmp_path / "cache")
    assert (report.stored, report.unfinished, report.faults) == (7, 1, {})
    file.write_bytes(whole)
    report = run.run(target, tmp_path / "cache")
    assert (report.stored, report.skipped, report.unfinished) == (len(texts) - 7, 7, 0)
    assert_stored(Cache.open(tmp_path / "cache", target), texts, Capture(), 0)


def test_parts_share_the_files_and_new_files_move_none(target: Target, texts: list[Known], tmp_path: Path) -> None:
    folder, cache = tmp_path / "files", tmp_path / "cache"
    write_vllm(folder, (texts * 3)[:30])
    runs = [Import("vllm", folder, Capture(part=f"{i}/3")) for i in (1, 2, 3)]
    shares = [{file.name for file in run._files(cache)[0]} for run in runs]
    assert sum(map(len, shares)) == 30 and min(map(len, shares)) > 3
    assert [run.run(target, cache).stored for run in runs] == [len(share) for share in shares]
    write_vllm(folder, (texts * 4)[:40])
    for run, share in zip(runs, shares, strict=True):
        assert share <= {file.name for file in run._files(cache)[0]}
    assert sum(run.run(target, cache).stored for run in runs) == 10
    assert {file.stem for file in (cache / "index").iterdir()} == {f"part-{i}-of-3" for i in (1, 2, 3)}
    assert len({document.id for document in Cache.open(cache).documents}) == 40 == len(Cache.open(cache).documents)


def test_a_part_without_files_has_nothing_to_do(
    target: Target, texts: list[Known], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_vllm(tmp_path / "files", texts[:1])
    runs = [Import("vllm", tmp_path / "files", Capture(part=f"{i}/2")) for i in (1, 2)]
    (empty,) = (run for run in runs if not run._files(tmp_path / "cache")[0])
    report = empty.run(target, tmp_path / "cache")
    assert (report.stored, report.check) == (0, None) and not (tmp_path / "cache").exists()
    assert f"part {empty.capture.part} has none of the files in" in capsys.readouterr().out
    assert sum(run.run(target, tmp_path / "cache").stored for run in runs if run is not empty) == 1
    assert (empty.run(target, tmp_path / "cache").stored, len(Cache.open(tmp_path / "cache").documents)) == (0, 1)


@pytest.mark.parametrize("source", ["vllm", "sglang_json"])
def test_a_cache_below_the_imported_folder_is_none_of_its_files(
    target: Target, texts: list[Known], tmp_path: Path, source: str
) -> None:
    write(source, tmp_path / "run", texts)
    cache = tmp_path / "run/cache"
    assert Import(source, tmp_path / "run", Capture()).run(target, cache).stored == len(texts)
    for path in (tmp_path / "run", tmp_path / "run/../run"):
        report = Import(source, path, Capture()).run(target, cache)
        assert (report.stored, report.skipped, report.faults) == (0, len(texts), {})
    with pytest.raises(ValueError, match="holds no files of"):
        Import(source, cache, Capture()).run(target, cache)


def test_counts_of_one_text_are_numbers(target: Target, texts: list[Known], tmp_path: Path) -> None:
    write_vllm(tmp_path / "files", [next(text for text in texts if text.row["finish_reason"] == "length")])
    report = Import("vllm", tmp_path / "files", Capture()).run(target, tmp_path / "cache")
    assert "; 0 answers end in a loop, 1 are cut by" in str(report)


def test_blank_lines_and_a_last_line_without_its_end(target: Target, texts: list[Known], tmp_path: Path) -> None:
    file = tmp_path / "files/answers.jsonl"
    file.parent.mkdir()
    file.write_text("\n \n".join(map(sglang_line, texts)).rstrip("\n"))
    report = Import("sglang_json", file.parent, Capture()).run(target, tmp_path / "cache")
    assert (report.stored, report.unfinished, report.faults) == (len(texts), 0, {})
    assert_stored(Cache.open(tmp_path / "cache", target), texts, Capture(), 0)
    again = Import("sglang_json", file.parent, Capture()).run(target, tmp_path / "cache")
    assert (again.stored, again.skipped) == (0, len(texts))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("evil"),))


def damage_vllm(folder: Path) -> dict[str, str]:
    """Spoil some files, and say what is to be said about them."""
    files = [folder / f"cmpl-{i}-a0b.safetensors" for i in range(7)]
    files[0].write_bytes(files[0].read_bytes()[:-10])
    files[1].write_bytes(b"")
    for i, change in enumerate(
        (
            lambda tensors: {"hidden_states": tensors["hidden_states"][3:]},
            lambda tensors: {"hidden_states": tensors["hidden_states"][:, 0]},
            lambda tensors: {"hidden_states": tensors["hidden_states"] * torch.nan},
            lambda tensors: {"token_ids": tensors["token_ids"] - 100},
        ),
        start=2,
    ):
        tensors = load_file(files[i])
        save_file({k: t.contiguous() for k, t in (tensors | change(tensors)).items()}, files[i])
    save_file({"hidden_states": torch.zeros(3, 1, 64)}, files[6])
    return {
        files[0].name: "cannot be read .*truncated, or still being written",
        files[1].name: "cannot be read",
        files[2].name: r"states of \d+ tokens for \d+ token ids: prefix caching was on .*switch it off",
        files[3].name: r"hidden_states has shape \[.*expected \[tokens, layers, hidden size\]",
        files[4].name: "NaN or Inf",
        files[5].name: r"token id -\d+ at position \d+, expected 0 to 511; the text is another target's",
        files[6].name: "token_ids",
    }


def damage_specforge(folder: Path) -> dict[str, str]:
    files = [folder / f"rows_0-5/data_{i}.ckpt" for i in range(5)]
    files[0].write_bytes(files[0].read_bytes()[:-100])
    files[1].write_bytes(pickle.dumps(Evil()))
    torch.save({"input_ids": Evil()}, files[2])
    for file, change in zip(
        files[3:], ({"loss_mask": torch.ones(7)}, {"hidden_state": torch.zeros(1, 3, 64)}), strict=True
    ):
        torch.save(torch.load(file, weights_only=True) | change, file)
    return {
        "rows_0-5/data_0.ckpt": "cannot be read",
        "rows_0-5/data_1.ckpt": "cannot be read",
        "rows_0-5/data_2.ckpt": "cannot be read .*holds Python objects, which could run code and are not loaded",
        "rows_0-5/data_3.ckpt": "a loss mask of 7 flags, 7 of them set, for",
        "rows_0-5/data_4.ckpt": "states of 3 tokens for",
    }


def damage_speculators(folder: Path) -> dict[str, str]:
    states = folder / "hidden_states"
    shutil.copy(states / "hs_1.safetensors", states / "hs_0.safetensors")
    shutil.copy(states / "hs_1.safetensors", states / "hs_99.safetensors")
    return {
        "hidden_states/hs_0.safetensors": "row 0 of the Arrow dataset has other token ids than the file",
        "hidden_states/hs_99.safetensors": "the Arrow dataset has 12 rows, none for this file",
    }


def damage_sglang_json(folder: Path) -> dict[str, str]:
    file = folder / "answers.jsonl"
    lines = file.read_text().splitlines()
    rows = [json.loads(line) for line in lines[:5]]
    del rows[0]["meta_info"]["hidden_states"]
    rows[1]["meta_info"]["hidden_states"][0] = rows[1]["meta_info"]["hidden_states"][0][2:]
    rows[2]["meta_info"]["hidden_states"][-1] = [1.0, 2.0]
    rows[3] = [1]
    lines[:5] = [json.dumps(row) for row in rows]
    lines[4] = lines[4][:-9]
    file.write_text("".join(line + "\n" for line in lines))
    return {
        "answers.jsonl:1": "cannot be read .*KeyError: 'hidden_states'.*not a file of this source",
        "answers.jsonl:2": "prefix caching was on .*or the prompt was read in chunks",
        "answers.jsonl:3": "cannot be read",
        "answers.jsonl:4": "cannot be read",
        "answers.jsonl:5": "cannot be read",
    }


def odd_vllm(folder: Path, text: Known) -> dict[str, str]:
    """Write files like no other beside good ones, and say what is to be said about them."""
    good: dict[str, Tensor] = {"hidden_states": text.before_TLD.contiguous(), "token_ids": text.ids_T}
    T, ids_T, fp8_TLD = len(text.ids_T), text.ids_T, text.before_TLD.to(torch.float8_e4m3fn).contiguous()
    odd: dict[str, tuple[dict[str, Tensor], str]] = {
        "no layers": ({"hidden_states": torch.zeros(T, 0, 64)}, r"\[\d+, 0, 64\], expected \[tokens, layers, hidden"),
        "no tokens": ({"hidden_states": torch.zeros(0, 2, 64), "token_ids": ids_T[:0]}, "the mask keeps nothing"),
        "2-d ids": ({"token_ids": ids_T[:, None]}, r"the token ids have shape \[\d+, 1\], expected \[tokens\]"),
        "0-d ids": ({"token_ids": torch.tensor(3)}, r"the token ids have shape \[\], expected \[tokens\]"),
        "bool ids": ({"token_ids": ids_T.bool()}, "the token ids are torch.bool, expected integers"),
        "float ids": ({"token_ids": ids_T + 0.25}, "the token ids are torch.float32, expected integers"),
        "int states": ({"hidden_states": good["hidden_states"].int()}, "the states are torch.int32, expected floating"),
        "fp8": ({"hidden_states": fp8_TLD}, "the states are torch.float8_e4m3fn without scales; expected"),
        "scales": (
            {"hidden_states": fp8_TLD, "hidden_states_scales": torch.ones(T - 1, 1, 1)},
            r"\d+ scales for the states of \d+ tokens, expected one a token",
        ),
    }
    for name, (change, _) in odd.items():
        save_file(good | change, folder / f"{name}.safetensors")
    (folder / "nowhere.safetensors").symlink_to(folder / "gone")
    (folder / "folder.safetensors").mkdir()
    save_file(good, os.fsdecode(b"%s/caf\xe9.safetensors" % os.fsencode(folder)))
    expected = {f"{name}.safetensors": message for name, (_, message) in odd.items()}
    expected["nowhere.safetensors"] = r"cannot be read \(FileNotFoundError"
    expected["folder.safetensors"] = "cannot be read"
    return expected | {"caf\\xe9.safetensors": "its name is not UTF-8"}


def odd_states(hidden_TD: Tensor) -> dict[str, tuple[Any, str]]:
    return {
        "list": (hidden_TD.tolist(), r"a list, expected a dense tensor|'list' object has no attribute"),
        "1-d": (hidden_TD[:, 0].clone(), r"states have shape \[\d+\], expected \[tokens, hidden size\]"),
        "sparse": (hidden_TD.to_sparse(), "sparse_coo on cpu, expected a dense tensor on the CPU"),
        "meta": (hidden_TD.to("meta"), "on meta, expected a dense tensor on the CPU"),
        "complex": (hidden_TD.to(torch.complex64), "the states are torch.complex64, expected floating point"),
        "int": (hidden_TD.int(), "the states are torch.int32, expected floating point"),
        "fp8": (hidden_TD.to(torch.float8_e4m3fn), "the states are torch.float8_e4m3fn without scales"),
        "two texts": (
            torch.stack([hidden_TD, hidden_TD]),
            r"states have shape \[2, \d+, 64\], expected \[tokens, hidden",
        ),
    }


def odd_specforge(folder: Path, text: Known) -> dict[str, str]:
    good = {"input_ids": text.ids_T, "loss_mask": text.mask_T.long(), "hidden_state": text.after_TD[None]}
    odd: list[tuple[Any, str]] = [
        (good | {"hidden_state": hidden}, message) for hidden, message in odd_states(text.after_TD).values()
    ]
    odd += [
        (
            {name: torch.cat([tensor.view(1, len(text.ids_T), -1).squeeze(2)] * 2) for name, tensor in good.items()},
            r"\[2, \d+\]",
        ),
        (
            {3: 4} | {name: good[name] for name in ("input_ids", "loss_mask")},
            "no last state, only 3, input_ids, loss_mask",
        ),
        ([1, 2], "cannot be read .*not a file of this source"),
        (good | {"input_ids": "abc"}, "cannot be read .*not a file of this source"),
        (good | {"loss_mask": torch.tensor(1)}, "flags of the loss mask have shape"),
    ]
    for i, (data, _) in enumerate(odd):
        torch.save(data, folder / f"data_{100 + i}.ckpt")
    return {f"data_{100 + i}.ckpt": message for i, (_, message) in enumerate(odd)}


def odd_speculators_03(folder: Path, text: Known) -> dict[str, str]:
    good = {"input_ids": text.ids_T, "loss_mask": text.mask_T.long()}
    odd: list[tuple[Any, str]] = [
        (good | {"hidden_states": [hidden]}, message) for hidden, message in odd_states(text.before_TLD[:, -1]).values()
    ]
    odd.append((good | {"hidden_states": []}, "cannot be read .*list index out of range"))
    for i, (data, _) in enumerate(odd):
        torch.save(data, folder / f"data_{100 + i}.pt")
    return {f"data_{100 + i}.pt": message for i, (_, message) in enumerate(odd)}


def odd_sglang_json(folder: Path, text: Known) -> dict[str, str]:
    good = json.loads(sglang_line(text))
    facts, ids = good["meta_info"], good["output_ids"]
    odd: list[tuple[Any, str]] = [
        (
            {"input_ids": [4], "output_ids": [], "meta_info": {"hidden_states": []}},
            r"states have shape \[0\], expected",
        ),
        (good | {"output_ids": [id + 0.5 for id in ids]}, r"token id \d+\.5, expected an integer"),
        (good | {"output_ids": [7.0, *ids[1:]]}, r"token id 7\.0, expected an integer"),
        (good | {"output_ids": [True, *ids[1:]]}, "token id True, expected an integer"),
        (good | {"output_ids": [10**30, *ids[1:]]}, "cannot be read"),
        (good | {"meta_info": facts | {"finish_reason": {"type": "abort"}}}, "'abort', expected stop or length"),
        (good | {"meta_info": facts | {"finish_reason": {"type": ["stop"]}}}, r"\['stop'\], expected stop or length"),
        (good | {"meta_info": facts | {"finish_reason": "stop"}}, "cannot be read .*TypeError"),
        (None, "cannot be read .*TypeError"),
    ]
    (folder / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row, _ in odd) + "[" * 100_000 + "\n")
    expected = {f"odd.jsonl:{number}": message for number, (_, message) in enumerate(odd, start=1)}
    return expected | {f"odd.jsonl:{len(odd) + 1}": "cannot be read .*RecursionError"}


@pytest.mark.parametrize("odd", [odd_vllm, odd_specforge, odd_speculators_03, odd_sglang_json])
def test_files_like_no_other_are_named_and_the_others_stored(
    target: Target, texts: list[Known], tmp_path: Path, odd: Callable[[Path, Known], dict[str, str]]
) -> None:
    source = write(odd.__name__.removeprefix("odd_").replace("_03", " 0.3"), tmp_path / "files", texts)
    expected = odd(tmp_path / "files", texts[0])
    for _ in range(2):  # with good files, and alone: those were stored
        report = Import(source, tmp_path / "files", Capture()).run(target, tmp_path / "cache")
        assert report.faults.keys() == expected.keys()
        for name, message in expected.items():
            with pytest.raises(ValueError, match=message):
                raise ValueError(report.faults[name])
        str(report).encode()
    assert (report.stored, report.skipped) == (0, len(texts))
    assert_stored(Cache.open(tmp_path / "cache", target), texts, Capture(), 1e-5)


@pytest.mark.parametrize("damage", [damage_vllm, damage_specforge, damage_speculators, damage_sglang_json])
def test_damaged_files_are_named_and_the_others_stored(
    target: Target,
    texts: list[Known],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], dict[str, str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(damage.__name__.removeprefix("damage_"), tmp_path / "files", texts)
    expected = damage(tmp_path / "files")
    total = len(texts) + ("hidden_states/hs_99.safetensors" in expected)
    report = Import(source, tmp_path / "files", Capture()).run(target, tmp_path / "cache")
    assert (report.stored, report.faults.keys()) == (total - len(expected), expected.keys())
    for name, message in expected.items():
        with pytest.raises(ValueError, match=message):
            raise ValueError(report.faults[name])
    assert f"{len(expected)} faulty" in str(report)
    assert not (tmp_path / "evil").exists()
    assert all(not faults for faults in verify(Cache.open(tmp_path / "cache", target)))
    again = Import(source, tmp_path / "files", Capture()).run(target, tmp_path / "cache")
    assert (again.stored, again.skipped, again.faults) == (0, report.stored, report.faults)
    write(damage.__name__.removeprefix("damage_"), tmp_path / "files", texts)
    mended = Import(source, tmp_path / "files", Capture()).run(target, tmp_path / "cache")
    assert (mended.stored, mended.skipped) == (len(texts) - report.stored, report.stored)


def test_a_folder_without_files_is_refused(target: Target, tmp_path: Path) -> None:
    (tmp_path / "data_1.ckpt").touch()
    with pytest.raises(ValueError, match=r"holds no files of speculators; expected names such as .*\(specforge\)"):
        Import("speculators", tmp_path, Capture()).run(target, tmp_path / "cache")
    with pytest.raises(ValueError, match="nowhere does not exist"):
        Import("vllm", tmp_path / "nowhere", Capture()).run(target, tmp_path / "cache")
    with pytest.raises(
        ValueError, match="source is 'eagle', expected one of vllm, speculators, specforge, sglang_json"
    ):
        Import("eagle", tmp_path, Capture())


def test_states_without_their_arrow_dataset_are_refused(target: Target, texts: list[Known], tmp_path: Path) -> None:
    write_speculators(tmp_path / "files", texts)
    shutil.move(tmp_path / "files/hidden_states", tmp_path / "lost/hidden_states")
    with pytest.raises(ValueError, match="no Arrow dataset .*put it back, or take source=vllm"):
        Import("speculators", tmp_path / "lost", Capture()).run(target, tmp_path / "cache")


# Space


def test_a_dry_run_says_what_it_takes_and_writes_nothing(
    target: Target,
    texts: list[Known],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = texts * 20
    write_vllm(tmp_path / "files", many)
    states = sum(len(text.row["answer_ids"]) for text in many)
    run = Import("vllm", tmp_path / "files", Capture())
    run.plan(target, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    out = capsys.readouterr().out
    assert f"{len(many)} files of 0.0" in out and "states x 268 bytes" in out
    estimate = int(out.split(" states")[0].split()[-1].replace(",", ""))
    assert abs(estimate / states - 1) < 0.1  # from a sample of them

    usage = shutil.disk_usage(tmp_path)._replace(free=states * 200)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="its disk has .* free; make room"):
        run.run(target, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


# The verb


def test_the_verb(
    tiny_k25: Target,
    texts: list[Known],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_vllm(tmp_path / "files", texts)

    def status(*more: str) -> int:
        options = ["target=tiny_k25", f"target.home={tiny_k25.path.parent}", f"cache={tmp_path / 'cache'}"]
        options += [f"run_dir={tmp_path / 'run'}", "source=vllm", *more]
        monkeypatch.setattr(sys, "argv", ["capture", *options])
        try:
            capture_verb.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    path = f"path={tmp_path / 'files'}"
    for nowhere in ((), ("path=",)):
        assert status(*nowhere) == 2 and "give their folder as path=FOLDER" in capsys.readouterr().err
    assert status("source=null", "conversations=null") == 2 and "give conversations=FILE" in capsys.readouterr().err
    assert status(path, "conversations=/nowhere.jsonl") == 1 and "no conversations at" in capsys.readouterr().err
    assert status(path, "dry_run=true") == 0 and not (tmp_path / "cache").exists()
    assert status(path, "conversations=null") == 0
    assert read_report(tmp_path / "run")["capture"]["stored"] == len(texts)
    damaged = tmp_path / "files/new.safetensors"
    damaged.write_bytes(b"no")
    assert status(path) == 1
    assert "1 files or texts of" in capsys.readouterr().err
    assert list(read_report(tmp_path / "run")["capture"]["faults"]) == ["new.safetensors"]
    damaged.unlink()
    write_vllm(tmp_path / "files", [with_states(texts[0], torch.zeros_like), *texts[1:]])
    assert status(path, f"cache={tmp_path / 'other'}") == 1
    assert "cmpl-0-a0b.safetensors: its states are not those of its tokens" in capsys.readouterr().err
    assert read_report(tmp_path / "run")["capture"]["stored"] == len(texts) - 1


# Kills

FORKS = """
import os, pickle, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from medusa_k25.cache.capture import Capture
from medusa_k25.cache.imports import Import
target = pickle.loads(Path(sys.argv[2]).read_bytes())
for line in sys.stdin:
    child = os.fork()  # without the imports, which take longer than the work
    if child == 0:
        Import("specforge", Path(sys.argv[3]), Capture(shard_tokens=200)).run(target, Path(sys.argv[4]))
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def test_a_killed_import_goes_on(target: Target, texts: list[Known], tmp_path: Path) -> None:
    """Killed at random moments of its work again and again, it ends with every text once."""
    many = texts * 12
    write_specforge(tmp_path / "files", many)
    (tmp_path / "target").write_bytes(pickle.dumps(target))
    draws, cache, found, partly = random.Random(0), tmp_path / "cache", 0, 0
    command = [sys.executable, "-c", FORKS, ROOT, tmp_path / "target", tmp_path / "files", cache]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, bufsize=1, **pipes) as server:  # type: ignore[call-overload]
        for kill in range(6):
            server.stdin.write("go\n")
            while not (line := server.stdout.readline().strip()).isdecimal():
                assert line, "the process that forks has ended"
            index = cache / "index/main.jsonl"
            before, deadline = index.stat().st_size if index.exists() else 0, time.monotonic() + 10
            if kill % 2:  # half of them once it is storing, the others before it
                while (not index.exists() or index.stat().st_size == before) and time.monotonic() < deadline:
                    time.sleep(0.001)
            time.sleep(draws.uniform(0, 0.1))
            with suppress(ProcessLookupError):  # it was faster
                os.kill(int(line), signal.SIGKILL)
            while server.stdout.readline().strip() != "gone":
                pass
            if (cache / "manifest.json").exists():
                opened = Cache.open(cache, check=False)
                assert len(opened.documents) >= found
                assert all(not faults for faults in verify(opened))
                found = len(opened.documents)
                partly += 0 < found < len(many)
        server.stdin.close()
    assert partly >= 2
    report = Import("specforge", tmp_path / "files", Capture(shard_tokens=200)).run(target, cache)
    assert (report.skipped, report.stored, report.faults) == (found, len(many) - found, {})
    assert_stored(Cache.open(cache, target), many, Capture(), 0)
