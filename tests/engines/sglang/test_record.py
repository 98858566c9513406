"""Recording in the real engine: the cache is the one that transformers captures, and the server serves on."""

import json
import os
import signal
import textwrap
import threading
import time
import urllib.request
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

from medusa_k25.cache import Cache, self_check
from medusa_k25.cache.capture import Capture
from medusa_k25.cache.record_client import Replay
from medusa_k25.conversations import Generator, read_conversations
from medusa_k25.heads import DraftVocabulary
from medusa_k25.prompts import Prompt
from medusa_k25.serving.sglang import record
from medusa_k25.serving.sglang.graphs import capture_states
from medusa_k25.serving.sglang.recorder import Settings
from medusa_k25.serving.sglang.recording import Recording
from tests.engines.sglang.accepting import TREE, accepting_heads, serve_from
from tests.engines.sglang.engine import serving

GREEDY = {"mode": "greedy", "temperature": 0.0, "top_p": 1.0}
NOISE = 2e-4


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDUSA_K25_RECORD", str(tmp_path / "cache"))
    load_plugins()
    if "sglang.srt.utils.common.kill_process_tree" not in HookRegistry._hooks:
        # plugins are loaded once a process: in this one, before it had the variable
        record.install()
        HookRegistry.apply_hooks()
    return tmp_path / "cache"


def sampling(length, id, temperature=0.0):
    """Parameters of an answer of exactly this length, recorded if there is an id."""
    parameters = {"temperature": temperature, "max_new_tokens": length, "ignore_eos": True}
    return parameters | ({} if id is None else {"custom_params": {"medusa_k25": {"id": id}}})


def ask(running, prompts, lengths, ids, temperature=0.0):
    parameters = [sampling(length, id, temperature) for length, id in zip(lengths, ids, strict=True)]
    return running.generate(input_ids=prompts, sampling_params=parameters)


def answers_of(rows):
    return [row["output_ids"] for row in rows]


def status_of(running):
    (state,) = running.get_server_info()["internal_states"]
    return state["medusa_k25"]


def settled(running, key="waiting"):
    deadline = time.monotonic() + 30
    while (status := status_of(running))[key] or status["running"]:
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return status


def assert_states(target, folder, texts, storage="answers", dtype=torch.float32, noise=NOISE):
    """The cache holds just these texts, {id: (prompt ids, answer ids)}, with the states of a plain forward pass."""
    cache = Cache.open(folder, target, check=False)
    assert sorted(document.id for document in cache.documents) == sorted(texts)
    model = target.load_model(dtype)
    for document in cache.documents:
        prompt, answer = texts[document.id]
        P, T = len(prompt), len(prompt) + len(answer)
        assert cache.token_ids(document).tolist() == prompt + answer
        assert cache.loss_mask(document).tolist() == [False] * P + [True] * len(answer)
        hidden_MD, positions_M = cache.states(document)
        assert positions_M[positions_M >= P - 1].tolist() == list(range(P - 1, T - 1))
        assert storage == "all" or positions_M[0] == P - 1
        expected_MD = model.hidden(torch.tensor([prompt + answer]))[0, positions_M]
        torch.testing.assert_close(hidden_MD.float(), expected_MD.float(), atol=noise, rtol=0.0)
    return cache


def test_what_asks_is_recorded(folder, tiny_k25, engine, prompts_of, greedy):
    """Prompts of several chunks, mixed lengths, one without a mark, one aborted; then a second server goes on."""
    prompts = [prompt * 5 for prompt in prompts_of(tiny_k25, 8)]
    lengths = [24, 3, 17, 24, 2, 9, 24, 1]
    ids = ["d0", "d1", "d2", None, "d4", "d5", "d6", "one token"]
    expected = greedy(tiny_k25, prompts, limit=24, past_the_end=True)
    expected = [answer[:length] for answer, length in zip(expected, lengths, strict=True)]
    texts = {id: (p, a) for id, p, a in zip(ids, prompts, expected, strict=True) if id is not None and len(a) > 1}
    settings = {"disable_radix_cache": True, "chunked_prefill_size": 16}
    with engine(tiny_k25, **settings, disable_overlap_schedule=True) as running:
        assert answers_of(ask(running, prompts, lengths, ids)) == expected
        abort = partial(running.tokenizer_manager.abort_request, abort_all=True)
        threading.Timer(1, running.loop.call_soon_threadsafe, [abort]).start()
        (row,) = running.generate(input_ids=[prompts[0]], sampling_params=[sampling(3000, "aborted")])
        assert row["meta_info"]["finish_reason"]["type"] == "abort"
        status = settled(running)
        assert (status["stored"], status["failed"]) == (6, False)
        assert status["dropped"] == {"answer shorter than two tokens": 1, "aborted": 1}
    cache = assert_states(tiny_k25, folder, texts)
    assert {(d.finish_reason, d.dtype, d.group) for d in cache.documents} == {("length", "float32", None)}
    assert all(document.sampling == GREEDY for document in cache.documents)
    assert self_check(cache, tiny_k25).agreement == 1.0

    with engine(tiny_k25, **settings) as running:
        assert answers_of(ask(running, prompts[:4], lengths[:4], ["d0", "d1", "new", "d2"])) == expected[:4]
        assert status_of(running)["known"] == 3
        with pytest.raises(ValueError, match="not configured to return hidden"):  # as without recording
            running.generate(input_ids=prompts[:1], sampling_params=[sampling(2, None)], return_hidden_states=True)
        # no waiting for the disk: an engine that is shut down writes what it has finished
    assert_states(tiny_k25, folder, texts | {"new": (prompts[2], expected[2])})


def test_drafts_cached_prefixes_and_retractions_leave_no_trace(
    folder, tiny_llama, engine, prompts_of, greedy, monkeypatch
):
    """Recording while speculating in trees: prompts share a prefix, are asked again, and lose their memory midway."""
    monkeypatch.setenv("MEDUSA_K25_RECORD_STORAGE", "all")
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "4")
    shared = prompts_of(tiny_llama, 9)[8] * 3
    prompts = [shared + prompt * 3 for prompt in prompts_of(tiny_llama, 6)]
    lengths = [40, 3, 33, 40, 40, 17]
    expected = greedy(tiny_llama, prompts, limit=40, past_the_end=True)
    expected = [answer[:length] for answer, length in zip(expected, lengths, strict=True)]
    settings = {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 6,
        "chunked_prefill_size": 16,
    }
    texts: dict[str, tuple[list[int], list[int]]] = {}
    retracted = 0
    with engine(tiny_llama, **settings) as running:
        for turn in range(3):
            ids = [f"{turn}-{i}" for i in range(6)]
            rows = ask(running, prompts, lengths, ids)
            assert answers_of(rows) == expected
            texts |= {id: (p, a) for id, p, a in zip(ids, prompts, expected, strict=True)}
            retracted += sum(row["meta_info"]["num_retractions"] for row in rows)
        passes = sum(row["meta_info"]["spec_verify_ct"] for row in rows)
        cached = sum(row["meta_info"]["cached_tokens"] for row in rows)
        print(f"{passes} passes, {cached} tokens cached, {retracted} retractions")
        assert passes < 0.8 * sum(lengths) and cached > 100 and retracted > 0
        status = settled(running)
        assert (status["stored"], status["dropped"]) == (18, {})
    cache = assert_states(tiny_llama, folder, texts, storage="all")
    first = {document.id: cache.positions(document)[0] for document in cache.documents}
    assert min(first.values()) == 0 < max(first.values())  # what was cached has no states


def test_what_medusa_accepts_is_recorded_by_one_of_two_ranks(
    folder, tmp_path, tiny_k25, engine, prompts_of, greedy, monkeypatch
):
    """Trees whose drafts are mostly right, chunked prefill, retractions, two tensor-parallel ranks."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "4")
    prompts = [prompt * 3 for prompt in prompts_of(tiny_k25, 8)]
    expected = greedy(tiny_k25, prompts, limit=40, past_the_end=True)
    lengths = [40, 3, 33, 40, 2, 17, 40, 40]
    ids = [f"d{i}" for i in range(8)]
    everything = DraftVocabulary(torch.arange(tiny_k25.vocab_size), tiny_k25.vocab_size)
    model = tiny_k25.load_model(torch.float32)
    heads = accepting_heads(model, tiny_k25.lm_head, prompts, expected, everything)
    settings = {
        "speculative_algorithm": "MEDUSA",
        "speculative_draft_model_path": str(serve_from(tmp_path / "heads", tiny_k25, heads, everything, TREE)),
        "tp_size": 2,
        "chunked_prefill_size": 16,
        "skip_tokenizer_init": True,
    }
    expected = [answer[:length] for answer, length in zip(expected, lengths, strict=True)]
    with engine(tiny_k25, **settings) as running:
        rows = ask(running, prompts, lengths, ids)
        assert answers_of(rows) == expected
        assert sum(row["meta_info"]["spec_verify_ct"] for row in rows) < 0.6 * sum(lengths)
        assert sum(row["meta_info"]["num_retractions"] for row in rows) > 0
        assert settled(running)["stored"] == 8
    assert_states(tiny_k25, folder, {id: (p, a) for id, p, a in zip(ids, prompts, expected, strict=True)})
    assert [file.name for file in (folder / "index").iterdir()] == ["record-0.jsonl"]


@pytest.mark.parametrize("asked", list(CaptureHiddenMode))
def test_a_caller_gets_the_states_that_it_asked_for(asked, monkeypatch):
    hidden_MD = torch.arange(20.0).reshape(5, 4)
    output = LogitsProcessorOutput(None, hidden_states=hidden_MD)
    seen = []

    def forward(worker, batch, capture_hidden_mode):
        seen.append(capture_hidden_mode)
        return SimpleNamespace(logits_output=output)

    monkeypatch.setattr(record, "_recording", Recording(True, 4, 9, None))
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        reqs=[SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None))] * 2,
        extend_lens=[2, 3],
    )
    worker = SimpleNamespace(is_draft_worker=False)
    result = record._forward(forward, worker, batch, capture_hidden_mode=asked)
    expected = {0: None, 1: hidden_MD[[1, 4]].tolist(), 2: hidden_MD.tolist()}[asked.value]
    found = result.logits_output.hidden_states
    assert (None if found is None else found.tolist()) == expected
    assert seen == [CaptureHiddenMode.FULL]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded():
    with pytest.raises(
        ValueError, match=r"MEDUSA_K25_RECORD=/proc/recorded: .*; name a folder that the server may write"
    ):
        record.install({"MEDUSA_K25_RECORD": "/proc/recorded"})


@pytest.mark.parametrize("is_draft_worker", [False, True])
def test_graphs_of_the_target_carry_states(is_draft_worker):
    model_runner = SimpleNamespace(is_draft_worker=is_draft_worker)
    runner = SimpleNamespace(
        model_runner=model_runner, return_hidden_states_mode=CaptureHiddenMode.NULL, enable_return_hidden_states=False
    )
    capture_states(None, runner)
    expected = (CaptureHiddenMode.NULL, False) if is_draft_worker else (CaptureHiddenMode.FULL, True)
    assert (runner.return_hidden_states_mode, runner.enable_return_hidden_states) == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pp_size": 2}, "--pp-size"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
    ],
)
def test_servers_that_would_record_wrongly_do_not_start(change, named, tmp_path):
    arguments = {
        "pp_size": 1,
        "attn_cp_size": 1,
        "disaggregation_mode": "null",
        "dllm_algorithm": None,
        "speculative_algorithm": None,
    }
    settings = Settings.read({"MEDUSA_K25_RECORD": str(tmp_path / "cache")})
    with pytest.raises(ValueError, match=f"does not work with {named}; start the server without"):
        record._start(settings, SimpleNamespace(server_args=SimpleNamespace(**arguments | change)))
    assert not (tmp_path / "cache").exists()


def test_what_fails_in_recording_is_not_the_servers_fault(monkeypatch):
    """A pass without the states that were asked for: its caller gets its output, and recording is over."""
    recorder: Any = SimpleNamespace()
    monkeypatch.setattr(record, "_recording", recording := Recording(True, 4, 9, recorder))
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        reqs=[SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None))],
    )
    output = LogitsProcessorOutput(None)
    worker = SimpleNamespace(is_draft_worker=False)
    answer = SimpleNamespace(logits_output=output)
    result = record._forward(lambda *_, **__: answer, worker, batch, capture_hidden_mode=CaptureHiddenMode.NULL)
    assert result is answer and recording.failed


SLOW_DISK = """
    import os, time
    from medusa_k25.cache.writer import CacheWriter

    flush = CacheWriter.flush

    def wait(self):
        while not os.path.exists({file!r}):
            time.sleep(0.05)
        flush(self)

    def register():
        CacheWriter.flush = wait
"""


@pytest.fixture
def slow_disk(tmp_path, monkeypatch):
    """A plugin of the engine, with which nothing reaches the disk before this file exists."""
    file, site = tmp_path / "disk-is-ready", tmp_path / "site"
    (site / "slow_disk-0.dist-info").mkdir(parents=True)
    (site / "slow_disk.py").write_text(textwrap.dedent(SLOW_DISK.format(file=str(file))))
    (site / "slow_disk-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-disk\nVersion: 0\n")
    entry = "[sglang.srt.plugins]\nslow_disk = slow_disk:register\n"
    (site / "slow_disk-0.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    return file


def test_a_server_serves_on_when_its_disk_does_not(folder, tiny_llama, engine, prompts_of, slow_disk, monkeypatch):
    """Everything is recorded, sampled in bf16, with memory for about ten answers and a disk that stands still; requests
    are retracted, and then sample other tokens than those that were thrown away."""
    size = 30 * tiny_llama.hidden_size * 2
    monkeypatch.setenv("MEDUSA_K25_RECORD_ALL", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")
    monkeypatch.setenv("MEDUSA_K25_RECORD_GB", str(10 * size / 1e9))
    prompts = prompts_of(tiny_llama, 40)
    with engine(tiny_llama, dtype="bfloat16") as running:
        rows = ask(running, prompts, [30] * 40, [None] * 40, temperature=1.0)
        assert all(len(row["output_ids"]) == 30 for row in rows)
        status = status_of(running)
        assert (status["stored"], status["failed"]) == (0, False)
        assert 0 < status["memory_used"] <= status["memory"] == 10 * size
        assert status["dropped"]["memory full"] == 40 - status["waiting"] > 20
        assert sum(row["meta_info"]["num_retractions"] for row in rows) > 0
        slow_disk.touch()
        kept = settled(running)["stored"]
        again = ask(running, prompts[:2], [30] * 2, [None] * 2, temperature=1.0)
        assert settled(running)["stored"] == kept + 2
    cache = Cache.open(folder, tiny_llama, check=False)
    texts = {row["meta_info"]["id"]: (p, row["output_ids"]) for p, row in zip(prompts, rows, strict=True)}
    texts |= {row["meta_info"]["id"]: (p, row["output_ids"]) for p, row in zip(prompts, again, strict=False)}
    texts = {document.id: texts[document.id] for document in cache.documents}
    assert len(texts) == kept + 2
    noise = bf16_noise(tiny_llama, texts)
    cache = assert_states(tiny_llama, folder, texts, dtype=torch.bfloat16, noise=noise)
    document = cache.documents[0]
    assert (cache.manifest.storage_dtype, document.dtype) == ("bfloat16", "bfloat16")
    assert document.sampling == {"mode": "sampled", "temperature": 1.0, "top_p": 1.0}


def bf16_noise(target, texts):
    """How far transformers' own states in bf16 are from those in fp32, at most."""
    exact, rounded = target.load_model(torch.float32), target.load_model(torch.bfloat16)
    batches = [torch.tensor([prompt + answer]) for prompt, answer in texts.values()]
    return max(float((exact.hidden(ids) - rounded.hidden(ids).float()).abs().max()) for ids in batches)


def test_a_replay_is_a_capture(folder, tmp_path, tiny_llama):
    """Conversations that exist go through a server with a prefix cache; it is killed, and the next one goes on."""
    texts = [f"What is {word}?" for word in ("a fox", "the sea", "a fox", "rain", "tea", "it", "this", "one")]
    prompts = [Prompt(f"p{i}", f"topic {i % 3}", [{"role": "user", "content": t}]) for i, t in enumerate(texts)]
    conversations = tmp_path / "conversations.jsonl"
    Generator(max_new_tokens=40, dtype="float32").run(tiny_llama, prompts, conversations)
    lines = conversations.read_text().splitlines(keepends=True)
    half = tmp_path / "half.jsonl"
    half.write_text("".join(lines[:4]))
    Capture().run(tiny_llama, conversations, tmp_path / "captured")

    with serving(tiny_llama, tmp_path / "log", chunked_prefill_size=16) as (url, process):
        report = Replay(url, concurrency=3).run(tiny_llama, half, folder)
        assert (report.stored, report.skipped) == (4, 0)
        os.killpg(process.pid, signal.SIGKILL)
    with serving(tiny_llama, tmp_path / "log", chunked_prefill_size=16) as (url, process):
        report = Replay(url, concurrency=3).run(tiny_llama, conversations, folder)
        assert (report.stored, report.skipped) == (4, 4)
        assert report.check is not None and report.check.agreement == 1.0
        body = json.dumps({"input_ids": [5, 6, 7], "sampling_params": sampling(9, "just before the end")}).encode()
        request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            ids = json.load(answer)["output_ids"]
        process.send_signal(signal.SIGTERM)
        process.wait(90)
    recorded, captured = Cache.open(folder, tiny_llama), Cache.open(tmp_path / "captured", tiny_llama)
    last = recorded.documents.pop()
    assert (last.id, recorded.token_ids(last).tolist()) == ("just before the end", [5, 6, 7, *ids])
    rows = {row["id"]: row for row in read_conversations(conversations)}
    twins = {document.id: document for document in captured.documents}
    assert len(recorded.documents) == 8
    place = dict.fromkeys(["shard", "start", "row_start", "row_stop"], 0)
    for document in recorded.documents:
        twin = twins.pop(document.id)
        assert vars(document) | place == vars(twin) | place
        assert document.group == rows[document.id]["group"]
        assert recorded.token_ids(document).tolist() == captured.token_ids(twin).tolist()
        assert recorded.loss_mask(document).tolist() == captured.loss_mask(twin).tolist()
        hidden_MD, positions_M = recorded.states(document)
        assert positions_M.tolist() == captured.positions(twin).tolist()
        torch.testing.assert_close(hidden_MD, captured.states(twin)[0], atol=NOISE, rtol=0.0)
    assert not twins
