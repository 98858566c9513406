"""Recording without an engine: what is kept of any order of passes, the thread that writes, the client that replays."""

import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_k25.cache import Cache, CacheWriter
from medusa_k25.cache.capture import Capture
from medusa_k25.cache.record_client import Replay
from medusa_k25.capture import capture
from medusa_k25.config import compose
from medusa_k25.conversations import Generator
from medusa_k25.prompts import Prompt
from medusa_k25.serving.sglang.recorder import Mark, Recorder, Request, Settings
from medusa_k25.serving.sglang.recording import KEY, Recording
from medusa_k25.target import Target

D = 64  # of tiny_llama


def recorder_of(target: Target, path: Path, memory: int = 10**9, idle_s: float = 0.05, **changes: Any) -> Recorder:
    writer = CacheWriter.open(path, target, "float32", "test", writer="record-0", shard_tokens=10**9)
    facts: dict[str, Any] = {"dtype": "float32", "storage": "answers", "shard_tokens": 10**9} | changes
    return Recorder(writer, memory=memory, idle_s=idle_s, **facts)


def record(recorder: Recorder, id: str, prompt_length: int = 3, answer_length: int = 5) -> None:
    """A document of one prefill and plain decoding."""
    request = recorder.begin(Mark(id=id), id, prompt_length)
    if request is not None:
        for position in range(prompt_length - 1, prompt_length + answer_length):
            recorder.keep(request, position, torch.full((1, D), float(position)))
        ids = list(range(3, 3 + prompt_length + answer_length))
        recorder.finish(request, ids[:prompt_length], ids[prompt_length:], "length", {"mode": "greedy"})


def wait_for(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- marks and settings


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda v: st.lists(v), max_leaves=4
    )
    | st.dictionaries(
        st.sampled_from([*Mark.__dataclass_fields__, "other"]),
        st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(['{"mode": 1}', "[" * 1000, "{", "1"]),
    )
)
def test_any_mark_is_read_or_refused(value: Any) -> None:
    try:
        mark = Mark.parse(value)
    except ValueError:
        return
    json.dumps(mark.sampling)
    assert mark.prompt_length is None or type(mark.prompt_length) is int
    assert mark.sampling is None or isinstance(mark.sampling, dict)
    assert all(fact is None or isinstance(fact, str) for fact in (mark.id, mark.group, mark.dtype, mark.label))


def test_a_mark_says_what_is_wrong() -> None:
    assert Mark.parse({"id": "a", "prompt_length": 3, "sampling": '{"mode": "greedy"}', "group": None}) == Mark(
        id="a", prompt_length=3, sampling={"mode": "greedy"}
    )
    assert Mark.parse(True) == Mark()
    for value, message in [
        ({"name": "a"}, "unknown: name; expected id, group"),
        ({"prompt_length": "3"}, "prompt_length: expected a whole number"),
        ({"prompt_length": True}, "prompt_length: expected a whole number"),
        ({"id": ""}, "id: expected text of 1 to 1024"),
        ({"label": "x" * 1025}, "label: expected text"),
        ({"sampling": "[" * 1000}, "sampling: expected an object as JSON text"),
        ("yes", "expected true or an object, got str"),
    ]:
        with pytest.raises(ValueError, match=message):
            Mark.parse(value)


def test_settings() -> None:
    found = Settings.read({"MEDUSA_K25_RECORD": "/data/cache"})
    assert found == Settings(Path("/data/cache"), False, "answers", None, 8 * 10**9)
    found = Settings.read({"MEDUSA_K25_RECORD": "/c", "MEDUSA_K25_RECORD_ALL": "1", "MEDUSA_K25_RECORD_GB": "0.5"})
    assert found.everything and found.memory == 5 * 10**8
    for name, value in [("ALL", "yes"), ("STORAGE", "some"), ("DTYPE", "fp8"), ("GB", "0"), ("GB", "inf"), ("GB", "x")]:
        with pytest.raises(ValueError, match=f"MEDUSA_K25_RECORD_{name} is '{value}', expected"):
            Settings.read({"MEDUSA_K25_RECORD": "/c", f"MEDUSA_K25_RECORD_{name}": value})


# ---- one request


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=12),
    st.integers(0, 20),
    st.none() | st.integers(0, 30),
)
def test_each_wanted_position_is_kept_once(pieces: list[tuple[int, int]], first: int, stop: int | None) -> None:
    request = Request(Mark(), "a", first, stop)
    expected: dict[int, float] = {}
    for number, (start, count) in enumerate(pieces):
        rows_MD = torch.tensor([[p + 100.0 * number] * 2 for p in range(start, start + count)]).reshape(count, 2)
        request.keep(start, rows_MD)
        for p in range(start, start + count):
            if p >= first and (stop is None or p < stop):
                expected.setdefault(p, p + 100.0 * number)
    assert sorted(p for low, high in request.held for p in range(low, high)) == sorted(expected)
    assert request.bytes == 8 * len(expected)
    for low in range(0, 31, 5):
        assert request.lacks(low, low + 4) == any(p not in expected for p in range(low, low + 4))
    if expected:
        hidden_MD, positions_M = request.states(1000)
        assert positions_M.tolist() == sorted(expected)
        assert hidden_MD[:, 1].tolist() == [expected[p] for p in sorted(expected)]


# ---- any order of passes


@dataclass(eq=False)
class Req:
    """The engine's request, as far as recording looks at it."""

    rid: str
    origin_input_ids: list[int]
    sampling_params: Any
    output_ids: list[int] = field(default_factory=list)
    finished_reason: Any = None
    finished_len: int | None = None
    multimodal_inputs: None = None
    lora_id: None = None
    input_embeds: None = None

    @property
    def output_ids_through_stop(self) -> list[int]:
        return self.output_ids[: self.finished_len]

    def finished(self) -> bool:
        return self.finished_reason is not None


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_extend(self) -> bool:
        return self.name == "extend"


class Output:
    def __init__(self, hidden_states: Tensor) -> None:
        self.hidden_states = hidden_states


def state_of(req: Req, position: int, token: int) -> list[float]:
    return [float(position), float(token), float(len(req.rid))] + [1.0] * (D - 3)


class Engine:
    """A scheduler that draws what happens next: it prefills in chunks over a cached prefix, decodes, verifies trees,
    mixes, retracts and aborts, and processes a result before or after the next pass (overlap)."""

    def __init__(
        self, recording: Recording, chance: random.Random, reqs: list[Req], overlap: bool, lengths: dict[str, int]
    ) -> None:
        self.recording = recording
        self.chance = chance
        self.waiting = list(reqs)
        self.prefilled: dict[Req, int] = {}  # tokens of a chunked prefill, or of a running request
        self.running: list[Req] = []
        self.inflight: list[Any] = []
        self.overlap = overlap
        self.lengths = lengths
        self.retracted: set[Req] = set()

    def token(self) -> int:
        return self.chance.randrange(512)

    def run(self) -> None:
        while self.waiting or self.running or self.inflight:
            batch = self.schedule()
            if batch is not None:
                self.launch(*batch)
            while len(self.inflight) > (1 if self.overlap and batch is not None else 0):
                self.process(*self.inflight.pop(0))
            self.running = [req for req in self.running if not req.finished()]

    def schedule(self) -> tuple[str, list[Req]] | None:
        for req in list(self.running):
            if self.chance.random() < 0.1:  # out of memory: back to the queue
                self.running.remove(req)
                self.retracted.add(req)
                self.waiting.append(req)
        if self.waiting and self.chance.random() < 0.5:
            req = self.waiting[0]
            # a retracted request comes back after its last result was looked at
            if not any(req in reqs for reqs, _, _ in self.inflight) or req not in self.retracted:
                return "extend", [req, *(self.running if self.chance.random() < 0.3 else [])]
        if self.running:
            return ("verify" if self.chance.random() < 0.5 else "decode"), list(self.running)
        return None

    def known_ids(self, req: Req) -> list[int]:
        """The tokens so far, those of passes whose result was not looked at included."""
        ids = req.origin_input_ids + req.output_ids
        for reqs, _, tokens in self.inflight:
            if req in reqs:
                ids = ids + tokens[reqs.index(req)]
        return ids

    def launch(self, mode: str, reqs: list[Req]) -> None:
        rows, tokens = [], []
        batch = SimpleNamespace(reqs=reqs, forward_mode=Mode(mode), prefix_lens=[], extend_lens=[], decoding_reqs=None)
        accepted = []
        width = self.chance.randint(1, 4)
        if mode == "extend":
            batch.decoding_reqs = reqs[1:]
        for i, req in enumerate(reqs):
            ids = self.known_ids(req)
            last = len(ids) - 1
            if mode == "extend" and i == 0:
                self.retracted.discard(req)
                if req not in self.prefilled:  # the cache may know a prefix, but never the last token
                    low = len(req.origin_input_ids) - 1 if not req.output_ids else last
                    self.prefilled[req] = self.chance.randint(0, min(last, low))
                start = self.prefilled[req]
                stop = self.chance.randint(start + 1, len(ids))
                batch.prefix_lens.append(start)
                batch.extend_lens.append(stop - start)
                rows += [state_of(req, p, ids[p]) for p in range(start, stop)]
                self.prefilled[req] = stop
                done = stop == len(ids)
                tokens.append([self.token()] if done else [])
                if done:
                    self.waiting.remove(req)
                    self.running.append(req)
                    del self.prefilled[req]
            elif mode == "verify":
                path = [ids[last], *(self.token() for _ in range(self.chance.randint(0, width - 1)))]
                at = self.chance.sample(range(1, 5), len(path) - 1)
                nodes = [[-1.0] * D for _ in range(5)]  # what was not accepted
                for depth, node in enumerate([0, *at]):
                    nodes[node] = state_of(req, last + depth, path[depth])
                accepted.append([i * 5 + node for node in [0, *at]] + [-1] * (width - len(path)))
                rows += nodes
                tokens.append([*path[1:], self.token()])
            else:
                batch.prefix_lens.append(last)
                batch.extend_lens.append(1)
                rows.append(state_of(req, last, ids[last]))
                tokens.append([self.token()])
        output = Output(torch.tensor(rows))
        self.recording.take(batch, output)
        if mode == "verify":
            self.recording.accept(output, torch.tensor(accepted))
        output.hidden_states.fill_(-7)  # the next replay of a graph
        self.inflight.append((reqs, output, tokens))

    def process(self, reqs: list[Req], output: Output, tokens: list[list[int]]) -> None:
        rows = getattr(output, KEY, None)
        before = [] if rows is None else [len(req.output_ids) for req, _, _ in rows.requests]
        for req, new in zip(reqs, tokens, strict=True):
            if req.finished() or req in self.retracted or not new:
                continue
            req.output_ids += new
            if len(req.output_ids) >= self.lengths[req.rid]:
                req.finished_len = self.lengths[req.rid]
                req.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length"})
            elif self.chance.random() < 0.03:
                req.finished_reason = SimpleNamespace(to_json=lambda: {"type": "abort"})
        if rows is not None:
            self.recording.keep(rows, before)
        for req in reqs:
            if req.finished():
                self.recording.finish(req)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_any_order_of_passes_gives_every_state_once(tiny_llama: Target, seed: int) -> None:
    chance = random.Random(seed)
    path = Path(tempfile.mkdtemp(prefix="record"))
    storage = chance.choice(["answers", "all"])
    recorder = recorder_of(tiny_llama, path, storage=storage)
    reqs, lengths = [], {}
    for i in range(chance.randint(1, 3)):
        ids = [chance.randrange(512) for _ in range(chance.randint(2, 12))]
        marked: Any = chance.choice([None, True, {"id": f"document-{i}"}])
        split = chance.randint(1, len(ids) - 1)
        if chance.random() < 0.5 and marked is not None:
            marked = {"id": f"document-{i}", "prompt_length": split}
        parameters = SimpleNamespace(
            custom_params=None if marked is None else {KEY: marked}, top_k=1, temperature=1.0, top_p=1.0
        )
        reqs.append(Req("r" * (i + 1), ids, parameters))
        lengths["r" * (i + 1)] = chance.randint(1, 10)
    Engine(Recording(False, D, 512, recorder), chance, reqs, chance.random() < 0.5, lengths).run()
    recorder.close()
    cache = Cache.open(path, check=False)
    stored = {document.id: document for document in cache.documents}
    assert recorder.status()["memory_used"] == recorder.status()["running"] == recorder.status()["waiting"] == 0
    for i, req in enumerate(reqs):
        marks = req.sampling_params.custom_params
        mark = None if marks is None else Mark.parse(marks[KEY])
        document = stored.pop(f"document-{i}", None) or stored.pop(req.rid, None)
        ids = req.origin_input_ids + ([] if mark is None or mark.prompt_length else req.output_ids_through_stop)
        P = len(req.origin_input_ids) if mark is None or mark.prompt_length is None else mark.prompt_length
        ended = req.finished_reason.to_json()["type"] == "length"
        if mark is None or not ended or len(ids) - P < 2:
            assert document is None
            continue
        if document is None:  # a cached prefix reached into the answer, which only a replayed one can have before
            assert mark.prompt_length is not None
            assert any("cached prefix" in reason for reason in recorder.dropped)
            continue
        hidden_MD, positions_M = cache.states(document)
        assert cache.token_ids(document).tolist() == ids
        assert positions_M[positions_M >= P - 1].tolist() == list(range(P - 1, len(ids) - 1))
        assert storage == "all" or positions_M[0] == P - 1
        assert hidden_MD.tolist() == [state_of(req, p, ids[p]) for p in positions_M.tolist()]
    assert not stored
    marked = sum(req.sampling_params.custom_params is not None for req in reqs)
    reqs.clear()
    del req  # what is gone was counted already
    assert recorder.stored + sum(recorder.dropped.values()) == marked
    shutil.rmtree(path)


def test_a_request_that_the_engine_forgets_is_dropped(tiny_llama: Target, tmp_path: Path) -> None:
    recorder = recorder_of(tiny_llama, tmp_path / "cache")
    recording = Recording(False, D, 512, recorder)
    req = Req("r", [3, 4, 5], SimpleNamespace(custom_params={KEY: True}))
    batch = SimpleNamespace(
        reqs=[req], forward_mode=Mode("extend"), prefix_lens=[0], extend_lens=[3], decoding_reqs=None
    )
    output = Output(torch.zeros(3, D))
    recording.take(batch, output)
    recording.keep(getattr(output, KEY), [0])
    assert (recorder.status()["running"], recorder.status()["memory_used"]) == (1, D * 4)
    del req, batch, output
    assert (recorder.status()["running"], recorder.status()["memory_used"]) == (0, 0)
    assert recorder.dropped == {"aborted": 1}
    recorder.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"origin_input_ids": [3, 1_000_007]}, "images"),
        ({"multimodal_inputs": object()}, "images"),
        ({"lora_id": "adapter"}, "an adapter, embeddings or beam search: not plain text of the target"),
        (
            {"sampling_params": SimpleNamespace(custom_params={KEY: "x"})},
            "unreadable mark (expected true or an object, got str)",
        ),
    ],
)
def test_what_cannot_be_recorded_is_counted_once(
    tiny_llama: Target, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    recorder = recorder_of(tiny_llama, tmp_path / "cache")
    recording = Recording(True, D, 512, recorder)
    req = Req("r", [3, 4, 5], SimpleNamespace(custom_params=None))
    for name, value in change.items():
        setattr(req, name, value)
    for chunk in range(2):
        batch = SimpleNamespace(
            reqs=[req], forward_mode=Mode("extend"), prefix_lens=[chunk], extend_lens=[1], decoding_reqs=None
        )
        recording.take(batch, Output(torch.zeros(1, D)))
    assert recorder.dropped == {reason: 1}
    recorder.close()


def test_states_of_another_shape_end_the_recording_and_not_the_server(tiny_llama: Target, tmp_path: Path) -> None:
    recorder = recorder_of(tiny_llama, tmp_path / "cache")
    recording = Recording(True, D, 512, recorder)
    batch = SimpleNamespace(reqs=[], forward_mode=Mode("extend"), prefix_lens=[], extend_lens=[], decoding_reqs=None)
    with recording.guard():
        recording.take(batch, Output(torch.zeros(3, 3 * D)))
    assert recording.failed
    recorder.close()


# ---- the thread


def test_documents_reach_the_disk_when_the_server_idles(tiny_llama: Target, tmp_path: Path) -> None:
    recorder = recorder_of(tiny_llama, tmp_path / "cache")
    record(recorder, "a")
    wait_for(lambda: recorder.status()["stored"] == 1)
    assert [document.id for document in Cache.open(tmp_path / "cache", check=False).documents] == ["a"]
    record(recorder, "a")  # again: skipped
    record(recorder, "b", answer_length=1)
    status = recorder.status()
    assert (status["known"], status["dropped"]) == (1, {"answer shorter than two tokens": 1})
    recorder.close()
    again = recorder_of(tiny_llama, tmp_path / "cache")
    assert again.begin(Mark(), "a", 3) is None and again.known == 1
    again.close()


def test_a_shard_is_written_when_enough_has_come(tiny_llama: Target, tmp_path: Path) -> None:
    recorder = recorder_of(tiny_llama, tmp_path / "cache", shard_tokens=16, idle_s=60)
    for name in "abcde":
        record(recorder, name)  # 8 tokens each
    wait_for(lambda: recorder.status()["stored"] == 4)
    assert recorder.status()["waiting"] == 1
    recorder.close()
    cache = Cache.open(tmp_path / "cache", check=False)
    assert (len(cache.documents), cache.num_shards) == (5, 3)


def test_a_slow_disk_never_makes_the_caller_wait(
    tiny_llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for six documents, and a disk that stands still: the rest is dropped, what was taken is stored later."""
    open_disk = threading.Event()
    flush = CacheWriter.flush
    monkeypatch.setattr(CacheWriter, "flush", lambda self: (open_disk.wait(20), flush(self))[1])
    size = 6 * D * 4  # of a document's six rows
    recorder = recorder_of(tiny_llama, tmp_path / "cache", memory=6 * size, idle_s=0.01)
    started = time.monotonic()
    for i in range(20):
        record(recorder, f"d{i}")
    assert time.monotonic() - started < 5
    assert recorder.dropped == {"memory full": 14}
    assert recorder.status()["memory_used"] == 6 * size
    open_disk.set()
    wait_for(lambda: recorder.status()["waiting"] == 0)
    assert recorder.status()["memory_used"] == 0
    record(recorder, "d19")
    recorder.close()
    ids = [document.id for document in Cache.open(tmp_path / "cache", check=False).documents]
    assert ids == [*(f"d{i}" for i in range(6)), "d19"]


def test_a_full_disk_is_waited_for(tiny_llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_of(tiny_llama, tmp_path / "cache")
    flush = CacheWriter.flush
    full = [True]

    def failing(self: CacheWriter) -> None:
        if full:
            raise OSError(28, "No space left on device")
        flush(self)

    monkeypatch.setattr("medusa_k25.serving.sglang.recorder.RETRY_S", 0.05)
    monkeypatch.setattr(CacheWriter, "flush", failing)
    record(recorder, "a")
    time.sleep(0.3)
    assert (recorder.status()["stored"], recorder.status()["waiting"]) == (0, 1)
    full.clear()
    wait_for(lambda: recorder.status()["stored"] == 1)
    recorder.close()
    assert len(Cache.open(tmp_path / "cache", check=False).documents) == 1


def test_states_that_are_no_numbers_are_refused(tiny_llama: Target, tmp_path: Path) -> None:
    recorder = recorder_of(tiny_llama, tmp_path / "cache")
    request = recorder.begin(Mark(), "nan", 1)
    assert request is not None
    recorder.keep(request, 0, torch.full((3, D), float("nan")))
    recorder.finish(request, [3], [4, 5, 6], "length", {})
    record(recorder, "good")
    recorder.close()
    assert recorder.dropped == {"refused by the cache": 1}
    assert (recorder.status()["memory_used"], recorder.status()["stored"]) == (0, 1)


# ---- the client


class Server:
    """A recording server without an engine: the target in this process, the recorder behind it, HTTP before it."""

    def __init__(self, target: Target, folder: Path, **changes: Any) -> None:
        self.model = target.load_model(torch.float32)
        self.recorder = recorder_of(target, folder, **changes)
        self.requests: list[Any] = []
        self.faults: list[int] = []  # statuses to answer with, before anything else
        self.refuse: set[str] = set()
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def answer(self, status: int, content: Any) -> None:
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                assert self.path == "/server_info"
                self.answer(200, {"internal_states": [{KEY: server.recorder.status() | {"failed": False}}]})

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    if server.faults:
                        return self.answer(server.faults.pop(0), {"error": "a fault"})
                    self.answer(*server.generate(request))

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def generate(self, request: dict[str, Any]) -> tuple[int, Any]:
        self.requests.append(request)
        mark = Mark.parse(request["sampling_params"]["custom_params"][KEY])
        assert mark.id is not None
        if mark.id in self.refuse:
            return 400, {"error": {"message": "too long"}}
        ids = request["input_ids"]
        recorded = self.recorder.begin(mark, mark.id, len(ids))
        if recorded is not None:
            self.recorder.keep(recorded, 0, self.model.hidden(torch.tensor([ids]))[0])
            self.recorder.finish(recorded, ids, [0], "length", {"mode": "sampled"})
        return 200, {"meta_info": {}}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.recorder.close()


TEXTS = ["Hi", "What is a fox?", "Name three rivers.", "Why?", "Tell me about the sea.", "And then?"]


@pytest.fixture
def answers(tiny_llama: Target, tmp_path: Path) -> Path:
    out = tmp_path / "conversations.jsonl"
    prompts = [Prompt(f"p{i}", "art" if i else None, [{"role": "user", "content": t}]) for i, t in enumerate(TEXTS)]
    empty = Prompt("empty", None, [{"role": "user", "content": ""}])
    Generator(max_new_tokens=24, dtype="float32").run(tiny_llama, [*prompts, empty], out)
    return out


@pytest.fixture
def server(tiny_llama: Target, tmp_path: Path) -> Iterator[Server]:
    server = Server(tiny_llama, tmp_path / "recorded")
    yield server
    server.close()


def same_documents(one: Cache, other: Cache) -> None:
    assert {document.id for document in one.documents} == {document.id for document in other.documents}
    others = {document.id: document for document in other.documents}
    place = {"shard": 0, "start": 0, "row_start": 0, "row_stop": 0}
    for document in one.documents:
        twin = others[document.id]
        assert vars(document) | place == vars(twin) | place
        assert one.token_ids(document).tolist() == other.token_ids(twin).tolist()
        assert one.loss_mask(document).tolist() == other.loss_mask(twin).tolist()
        hidden_MD, positions_M = one.states(document)
        other_MD, other_M = other.states(twin)
        assert positions_M.tolist() == other_M.tolist()
        torch.testing.assert_close(hidden_MD, other_MD, atol=1e-4, rtol=1e-4)


def test_a_replay_gives_what_a_capture_gives(
    tiny_llama: Target, answers: Path, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.faults = [503, 500]
    expected = Capture().run(tiny_llama, answers, tmp_path / "captured")
    report = Replay(server.url, concurrency=3).run(tiny_llama, answers, tmp_path / "recorded")
    same_documents(Cache.open(tmp_path / "recorded", tiny_llama), Cache.open(tmp_path / "captured", tiny_llama))
    for name in ("stored", "skipped", "failed", "short", "states", "tokens", "refused"):
        assert getattr(report, name) == getattr(expected, name)
    assert report.check is not None and report.check.agreement == 1.0
    assert "self-check at" in capsys.readouterr().out
    assert len({request["extra_key"] for request in server.requests}) == 6  # no prefix is shared
    again = Replay(server.url).run(tiny_llama, answers, tmp_path / "recorded")
    assert (again.stored, again.skipped, len(server.requests)) == (0, 6, 6)


def test_what_the_server_drops_is_sent_again(
    tiny_llama: Target, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for two conversations at a time."""
    monkeypatch.setattr("medusa_k25.cache.record_client.POLL_S", 0.02)
    server = Server(tiny_llama, tmp_path / "recorded", memory=50 * D * 4)
    try:
        report = Replay(server.url, concurrency=6, retries=8).run(tiny_llama, answers, tmp_path / "recorded")
        assert server.recorder.dropped["memory full"] > 0
    finally:
        server.close()
    assert (report.stored, len(Cache.open(tmp_path / "recorded", tiny_llama).documents)) == (6, 6)


def test_what_the_server_refuses_is_reported(
    tiny_llama: Target, answers: Path, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuse = {"p2"}
    report = Replay(server.url).run(tiny_llama, answers, tmp_path / "recorded")
    assert (report.stored, report.refused) == (5, 1)
    out = capsys.readouterr().out
    assert "refused by the server: 'p2': 400" in out and "+ 1 refused by the server = 7 conversations" in out


def test_a_folder_on_another_machine(
    tiny_llama: Target, answers: Path, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Replay(server.url).run(tiny_llama, answers, tmp_path / "elsewhere")
    assert (report.stored, report.check) == (6, None)
    assert f"the server wrote to {tmp_path / 'recorded'} on its own machine" in capsys.readouterr().out
    report = Replay(server.url).run(tiny_llama, answers, tmp_path / "elsewhere")
    assert (report.stored, report.skipped) == (0, 6)
    shutil.copytree(tmp_path / "recorded", tmp_path / "elsewhere")
    report = Replay(server.url).run(tiny_llama, answers, tmp_path / "elsewhere")
    assert (report.stored, report.skipped, len(server.requests)) == (0, 6, 12)
    assert report.check is not None


def test_wrong_servers_are_refused(
    tiny_llama: Target, tiny_k25: Target, answers: Path, server: Server, tmp_path: Path
) -> None:
    Capture().run(tiny_llama, answers, tmp_path / "captured")
    with pytest.raises(ValueError, match=r"captured is another cache than the one .* records to, .*recorded there"):
        Replay(server.url).run(tiny_llama, answers, tmp_path / "captured")
    with pytest.raises(ValueError, match="serves tiny-llama, which differs from target tiny_k25 in .*lm_head"):
        Replay(server.url).run(tiny_k25, answers, tmp_path / "recorded")
    with pytest.raises(OSError, match="no answer from http://127.0.0.1:9/server_info: .*run the same command again"):
        Replay("http://127.0.0.1:9", retries=0).run(tiny_llama, answers, tmp_path / "recorded")


def test_a_server_that_does_not_record_is_refused(
    tiny_llama: Target, answers: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replay, "_call", lambda self, path: {"internal_states": [{}]})
    with pytest.raises(ValueError, match="does not record; start it with MEDUSA_K25_RECORD=FOLDER"):
        Replay(server.url).run(tiny_llama, answers, tmp_path / "recorded")
    monkeypatch.setattr(Replay, "_call", lambda self, path: {"internal_states": [{KEY: {"failed": True}}]})
    with pytest.raises(ValueError, match="recording has failed in"):
        Replay(server.url).run(tiny_llama, answers, tmp_path / "recorded")


def test_the_verb_captures_through_a_server(tiny_llama: Target, answers: Path, server: Server, tmp_path: Path) -> None:
    run_dir, cache = tmp_path / "run", tmp_path / "recorded"
    run_dir.mkdir()
    overrides = [f"conversations={answers}", f"cache={cache}", f"run_dir={run_dir}"]
    capture(compose([f"server={server.url}", *overrides], groups=("capture",)), tiny_llama)
    assert len(Cache.open(cache, tiny_llama).documents) == 6
    assert json.loads((run_dir / "report.json").read_text())["capture"]["stored"] == 6


def test_an_address_without_a_scheme_is_refused():
    with pytest.raises(ValueError, match=r"server=127.0.0.1:30000: expected an address such as http://"):
        Replay("127.0.0.1:30000")
