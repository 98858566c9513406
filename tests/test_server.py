"""Answers from a server: both dialects, whatever it does wrong, and what is lost when somebody is killed."""

import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_k25.answer_client import PATIENCE
from medusa_k25.config import compose
from medusa_k25.conversations import Generator, read_conversations
from medusa_k25.generate import generate
from medusa_k25.prompts import Prompt, load_prompts
from medusa_k25.server import Refused, Server
from medusa_k25.target import Target
from tests.tiny import greedy_answer

TEXTS = ["Hi", "What is a fox?", "Name three rivers.", "Why?", "Tell me about the sea.", "And then?", "x", "Go on."]
PROMPTS = [Prompt(f"p{i}", None, [{"role": "user", "content": text}], f"label {i % 2}") for i, text in enumerate(TEXTS)]
LIMIT = 12


class Fake:
    """An engine's server whose model is the target: SGLang's endpoints, or vLLM's."""

    def __init__(self, target: Target, dialect: str) -> None:
        self.target, self.dialect, self.tokenizer = target, dialect, target.load_tokenizer()
        self.model = target.load_model(torch.float32)
        self.faults: list[int] = []  # statuses to answer requests for text with, before anything else
        self.edit: Callable[[dict[str, Any]], None] = lambda answer: None  # changes what is sent
        self.instead: dict[str, Any] = {}  # path -> what is sent for it
        self.refuse: Callable[[list[int]], int | None] = lambda ids: None  # a status for some prompts
        self.hang: Callable[[list[int]], bool] = lambda ids: False
        self.server_info = {"version": "0.5.23", "model_path": "/models/tiny", "dtype": "float32", "quantization": None}
        self.model_type = target.model_type
        self.context: int | None = None
        self.missing: set[str] = set()  # paths that it does not know
        self.key: str | None = None
        self.delay_s = 0.0
        self.requests: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.released = threading.Event()
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def respond(self, status: int, content: Any) -> None:
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def handle_any(self, request: dict[str, Any] | None) -> None:
                authorization = self.headers["Authorization"]
                if fake.key is not None and authorization != f"Bearer {fake.key}":
                    self.respond(401, {"error": f"wrong key: {authorization}"})
                elif self.path in fake.missing:
                    self.respond(404, {"detail": "Not Found"})
                else:
                    self.respond(*fake.respond(self.path, request))

            def do_GET(self) -> None:
                self.handle_any(None)

            def do_POST(self) -> None:
                self.handle_any(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        class Http(ThreadingHTTPServer):
            request_queue_size = 64
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that has gone

        self.http = Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def respond(self, path: str, request: Any) -> tuple[int, Any]:
        if path in self.instead:
            return 200, self.instead[path]
        match self.dialect, path:
            case "sglang", "/server_info":
                return 200, self.server_info | {"max_req_input_len": self.context}
            case "sglang", "/model_info":
                return 200, {"model_type": self.model_type}
            case _, "/v1/models":
                owner = "vllm" if self.dialect == "vllm" else "sglang"
                return 200, {"data": [{"id": "tiny", "owned_by": owner, "max_model_len": self.context}]}
            case "vllm", "/version":
                return 200, {"version": "0.32.0"}
            case _, "/tokenize":
                assert request["add_special_tokens"] is False
                return 200, {"tokens": self.tokenizer.encode(request["prompt"], add_special_tokens=False)}
            case ("sglang", "/generate") | ("vllm", "/v1/completions"):
                return self.text(request)
        return 404, {"detail": "Not Found"}

    def text(self, request: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.requests.append(request)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            fault = self.faults.pop(0) if self.faults else None
        try:
            time.sleep(self.delay_s)
            prompt_ids = request["input_ids"] if self.dialect == "sglang" else request["prompt"]
            if self.hang(prompt_ids):
                self.released.wait(20)
            if status := fault or self.refuse(prompt_ids):
                return status, {"error": "a fault"}
            answer = self.sglang(request) if self.dialect == "sglang" else self.vllm(request)
            self.edit(answer)
            return 200, answer
        finally:
            with self.lock:
                self.running -= 1

    def answer(self, prompt_ids: list[int], limit: int) -> tuple[list[int], bool, str]:
        ids = greedy_answer(self.model, prompt_ids, list(self.target.end_ids), limit)
        stopped = ids[-1] in self.target.end_ids
        return ids, stopped, self.tokenizer.decode(ids[:-1] if stopped else ids)

    def sglang(self, request: dict[str, Any]) -> dict[str, Any]:
        sampling = request["sampling_params"]
        ids, stopped, text = self.answer(request["input_ids"], sampling["max_new_tokens"])
        reason = {"type": "stop", "matched": ids[-1]} if stopped else {"type": "length", "length": len(ids)}
        about = {"prompt_tokens": len(request["input_ids"]), "finish_reason": reason}
        return {"text": text, "output_ids": ids, "meta_info": about}

    def vllm(self, request: dict[str, Any]) -> dict[str, Any]:
        assert request["return_token_ids"] and request["model"] == "tiny"
        ids, stopped, text = self.answer(request["prompt"], request["max_tokens"])
        choice = {"text": text, "token_ids": ids, "prompt_token_ids": request["prompt"], "stop_reason": None}
        choice["finish_reason"] = "stop" if stopped else "length"
        return {"choices": [choice], "usage": {"prompt_tokens": len(request["prompt"])}}

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture(scope="module")
def target(tiny_llama: Target) -> Target:
    """Every eighth token ends an answer, so that some end and some are cut."""
    return dataclasses.replace(tiny_llama, end_ids=tuple(range(5, tiny_llama.vocab_size, 8)))


@pytest.fixture(params=["sglang", "vllm"])
def fake(request: pytest.FixtureRequest, target: Target) -> Iterator[Fake]:
    fake = Fake(target, request.param)
    yield fake
    fake.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between tries."""
    monkeypatch.setattr("medusa_k25.server.time", SimpleNamespace(sleep=lambda seconds: None))


def generator(**changes: Any) -> Generator:
    settings: dict[str, Any] = {"max_new_tokens": LIMIT, "dtype": "float32", "concurrency": 4}
    return Generator(**settings | changes)


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in read_conversations(path)}


def prompt_is(fake: Fake, prompt: Prompt) -> Callable[[list[int]], bool]:
    """Whether token ids are this prompt's."""
    text = prompt.messages[-1]["content"]
    return lambda ids: fake.tokenizer.decode(ids).count(f"<|im_middle|>{text}<|im_end|>") == 1


# --- answers


def test_a_server_gives_what_this_process_gives(fake: Fake, target: Target, tmp_path: Path) -> None:
    expected = generator().run(target, PROMPTS, tmp_path / "here.jsonl")
    report = generator().run(target, PROMPTS, tmp_path / "there.jsonl", fake.url)
    here, there = by_id(tmp_path / "here.jsonl"), by_id(tmp_path / "there.jsonl")
    assert {row["finish_reason"] for row in here.values()} == {"stop", "length"}
    dtype = "float32" if fake.dialect == "sglang" else "unknown"
    engine = {"sglang": "sglang 0.5.23", "vllm": "vllm 0.32.0"}[fake.dialect]
    for id, row in here.items():
        assert row["label"] == f"label {int(id[1:]) % 2}"
        origin = {"quantisation": "none", "thinking": True, "tools": False, "ids": "generated"}
        assert row["origin"].pop("engine").startswith("transformers ")
        assert row["origin"] == origin
        assert there[id] == row | {"dtype": dtype, "origin": {"engine": engine} | origin}
    assert (report.success, report.failed, report.tokens) == (8, 0, expected.tokens)


def test_answers_come_side_by_side_in_any_order(fake: Fake, target: Target, tmp_path: Path) -> None:
    fake.delay_s = 0.1
    generator(concurrency=4).run(target, PROMPTS, tmp_path / "some.jsonl", fake.url)
    assert 2 <= fake.most_running <= 4
    fake.delay_s = fake.most_running = 0
    generator(concurrency=1).run(target, PROMPTS[::-1], tmp_path / "one.jsonl", fake.url)
    assert fake.most_running == 1
    assert by_id(tmp_path / "some.jsonl") == by_id(tmp_path / "one.jsonl")


def test_what_is_asked(fake: Fake, target: Target, tmp_path: Path) -> None:
    """Sampling, a seed a prompt, and nothing left to a generation config that the server has read."""
    generator(temperature=0.7, top_p=0.9).run(target, PROMPTS, tmp_path / "a.jsonl", fake.url)
    generator(temperature=0.7, top_p=0.9).run(target, PROMPTS[::-1], tmp_path / "b.jsonl", fake.url)
    generator().run(target, PROMPTS[:1], tmp_path / "c.jsonl", fake.url)
    asked = [request.get("sampling_params", request) for request in fake.requests]
    seed, limit = ("sampling_seed", "max_new_tokens") if fake.dialect == "sglang" else ("seed", "max_tokens")
    seeds = [request[seed] for request in asked[:16]]
    assert len(set(seeds[:8])) == 8 and sorted(seeds[:8]) == sorted(seeds[8:])
    assert (asked[0]["temperature"], asked[0]["top_p"], asked[0][limit]) == (0.7, 0.9, LIMIT)
    assert (asked[0]["top_k"], asked[0]["repetition_penalty"], asked[0]["min_p"]) == (-1, 1.0, 0.0)
    assert asked[0]["stop_token_ids"] == list(target.end_ids)
    assert asked[16]["temperature"] == 0 and seed not in asked[16]
    row = read_conversations(tmp_path / "a.jsonl")[0]
    assert row["sampling"] == {"mode": "sampled", "temperature": 0.7, "top_p": 0.9}


def test_tools_and_labels_travel(tiny_k25: Target, tmp_path: Path) -> None:
    call = {"id": "functions.sum:0", "type": "function", "function": {"name": "sum", "arguments": '{"a": 2}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "reasoning_content": "add", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.sum:0", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    rows = [
        {"id": "a", "messages": messages, "tools": [{"name": "sum"}], "label": "agent"},
        {"id": "b", "prompt": "Hi"},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts(str(tmp_path / "p.jsonl"))
    assert prompts[0].messages == [messages[0], {k: v for k, v in messages[1].items() if v is not None}, messages[2]]
    fake = Fake(tiny_k25, "sglang")
    try:
        generator(template={"thinking": False}).run(tiny_k25, prompts, tmp_path / "there.jsonl", fake.url)
    finally:
        fake.close()
    generator(template={"thinking": False}).run(tiny_k25, prompts, tmp_path / "here.jsonl")
    for path in ("there.jsonl", "here.jsonl"):
        first, second = (by_id(tmp_path / path)[id] for id in "ab")
        assert (first["label"], first["origin"]["tools"], first["origin"]["thinking"]) == ("agent", True, False)
        assert (second["label"], second["origin"]["tools"]) == (None, False)
        text = fake.tokenizer.decode(first["prompt_ids"])
        assert text.startswith('<|im_system|>tool_declare<|im_middle|>[{"name": "sum"}]<|im_end|>')
        assert text.endswith(
            "<|im_system|>tool<|im_middle|>4<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>"
        )
        assert first["messages"] == prompts[0].messages


def test_text_alone_is_rendered_and_says_so(target: Target, tmp_path: Path) -> None:
    """A server that knows no token ids; one of the end tokens is the tokenizer's own, and ends what ended."""
    end = target.load_tokenizer().eos_token_id
    target = dataclasses.replace(target, end_ids=(*target.end_ids, end))
    fake = Fake(target, "vllm")
    fake.missing = {"/version", "/tokenize"}

    def text_only(answer: dict[str, Any]) -> None:
        for key in ("token_ids", "prompt_token_ids", "stop_reason"):
            del answer["choices"][0][key]

    fake.edit = text_only
    try:
        generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
        again = generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    finally:
        fake.close()
    assert again.skipped == 8
    for row in read_conversations(tmp_path / "c.jsonl"):
        _, stopped, text = fake.answer(row["prompt_ids"], LIMIT)
        assert row["answer_ids"] == fake.tokenizer.encode(text, add_special_tokens=False) + [end] * stopped
        assert (row["answer"], row["finish_reason"]) == (text, "stop" if stopped else "length")
        assert (row["origin"]["engine"], row["origin"]["ids"]) == ("vllm", "rendered")


def test_an_end_token_that_was_left_out_is_put_back(fake: Fake, tmp_path: Path) -> None:
    """Several end tokens: SGLang says which. One: there is no other."""
    target = fake.target
    if fake.dialect == "vllm":
        ends = [ids[-1] for ids, stopped, _ in (fake.answer(ids, LIMIT) for ids in prompt_ids(target)) if stopped]
        target = fake.target = dataclasses.replace(target, end_ids=(ends[0],))
    generator().run(target, PROMPTS, tmp_path / "here.jsonl")

    def leave_out(answer: dict[str, Any]) -> None:
        ids = answer["output_ids"] if fake.dialect == "sglang" else answer["choices"][0]["token_ids"]
        if ids[-1] in target.end_ids:
            ids.pop()

    fake.edit = leave_out
    generator().run(target, PROMPTS, tmp_path / "there.jsonl", fake.url)
    here, there = by_id(tmp_path / "here.jsonl"), by_id(tmp_path / "there.jsonl")
    assert any(row["finish_reason"] == "stop" for row in here.values())
    assert {id: row["answer_ids"] for id, row in here.items()} == {id: row["answer_ids"] for id, row in there.items()}


def prompt_ids(target: Target) -> list[list[int]]:
    tokenizer = target.load_tokenizer()
    return [
        tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
        for prompt in PROMPTS
    ]


def test_an_end_token_that_nobody_can_know_fails(target: Target, tmp_path: Path) -> None:
    target = dataclasses.replace(target, end_ids=(6, 14))  # several, none of them the tokenizer's own
    fake = Fake(target, "vllm")
    fake.edit = lambda answer: answer["choices"][0].update(finish_reason="stop", token_ids=[3, 4])
    try:
        report = generator().run(target, PROMPTS[:2], tmp_path / "c.jsonl", fake.url)
    finally:
        fake.close()
    assert (report.success, report.failed) == (0, 2)
    assert "does not say which of the end tokens" in read_conversations(tmp_path / "c.jsonl")[0]["error"]


def test_the_servers_context_counts(fake: Fake, target: Target, tmp_path: Path) -> None:
    lengths = {prompt.id: len(ids) for prompt, ids in zip(PROMPTS, prompt_ids(target), strict=True)}
    fake.context = max(lengths.values())
    fake.target = target = dataclasses.replace(target, end_ids=(0,))  # comes never
    report = generator(max_new_tokens=9).run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    assert report.failed == sum(length == fake.context for length in lengths.values()) >= 1
    for request in fake.requests:
        ids = request.get("input_ids") or request["prompt"]
        limit = request.get("max_tokens") or request["sampling_params"]["max_new_tokens"]
        assert limit == min(9, fake.context - len(ids))


# --- what servers do wrong


def test_failing_for_a_while_is_no_failure(fake: Fake, target: Target, tmp_path: Path, impatient: None) -> None:
    fake.faults = [500, 429, 503, 502]
    report = generator(concurrency=1).run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    assert (report.success, report.failed, len(fake.requests)) == (8, 0, 12)


def test_a_prompt_that_the_server_refuses_becomes_an_error(fake: Fake, target: Target, tmp_path: Path) -> None:
    is_it = prompt_is(fake, PROMPTS[2])
    fake.refuse = lambda ids: 400 if is_it(ids) else None
    report = generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    assert (report.success, report.failed, report.skipped) == (7, 1, 0)
    assert by_id(tmp_path / "c.jsonl")["p2"] == {
        "id": "p2",
        "group": None,
        "messages": PROMPTS[2].messages,
        "error": '400 {"error": "a fault"}',
        "origin": {},
    }
    report = generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    assert (report.success, report.failed, report.skipped, len(fake.requests)) == (0, 0, 8, 8)


def test_a_prompt_that_hangs_becomes_an_error(fake: Fake, target: Target, tmp_path: Path) -> None:
    fake.hang = prompt_is(fake, PROMPTS[0])
    report = generator(timeout_s=1.0).run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    assert (report.success, report.failed) == (7, 1)
    assert "nothing came for 1 s" in by_id(tmp_path / "c.jsonl")["p0"]["error"]
    assert len(fake.requests) == 8  # not tried again


@pytest.mark.parametrize("status", [400, 500])
def test_a_server_that_answers_nobody_stops_the_run(
    fake: Fake, target: Target, tmp_path: Path, impatient: None, status: int
) -> None:
    """It is there, but whatever is wrong is not the prompts' fault: they are asked again."""
    prompts = [Prompt(f"p{i}", None, [{"role": "user", "content": str(i)}]) for i in range(3 * PATIENCE)]
    fake.refuse = lambda ids: status
    with pytest.raises(OSError, match=f"is there, but did not answer {PATIENCE} prompts in a row: .*{status} .*again"):
        generator().run(target, prompts, tmp_path / "c.jsonl", fake.url)
    assert not (tmp_path / "c.jsonl").exists()
    # after a good start: refusals are then the prompts' own
    first = prompt_is(fake, prompts[0])
    fake.refuse = lambda ids: None if first(ids) else status
    if status == 400:
        report = generator(concurrency=1).run(target, prompts, tmp_path / "c.jsonl", fake.url)
        assert (report.success, report.failed) == (1, 3 * PATIENCE - 1)
    else:
        with pytest.raises(OSError, match="did not answer"):
            generator(concurrency=1).run(target, prompts, tmp_path / "c.jsonl", fake.url)
        assert len(read_conversations(tmp_path / "c.jsonl")) == 1


def test_a_server_that_is_slow_names_the_limit(fake: Fake, target: Target, tmp_path: Path) -> None:
    fake.hang = lambda ids: True
    with pytest.raises(OSError, match=r"in a row: .*nothing came for 0.5 s.*raise generate.timeout_s") as slow:
        generator(timeout_s=0.5, concurrency=8).run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    assert len(PROMPTS) == PATIENCE and "did not answer 8 prompts" in str(slow.value)
    assert not (tmp_path / "c.jsonl").exists()
    fake.hang, fake.refuse = (lambda ids: False), (lambda ids: 400)
    with pytest.raises(OSError, match="in a row") as refused:
        generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    assert "timeout_s" not in str(refused.value)


def test_a_server_that_goes_stops_the_run(fake: Fake, target: Target, tmp_path: Path, impatient: None) -> None:
    answered = []

    def go(answer: dict[str, Any]) -> None:
        answered.append(1)
        if len(answered) == 3:
            threading.Thread(target=fake.close).start()
            time.sleep(0.2)

    fake.edit = go
    with pytest.raises(OSError, match="no answer from .*; when it is there, run the same command again"):
        generator(concurrency=1).run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    assert 2 <= len(read_conversations(tmp_path / "c.jsonl")) <= 3
    with pytest.raises(OSError, match="no answer from"):
        generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ({"type": "stop", "matched": "NaN happened"}, "ended the answer at 'NaN happened', which is no end token"),
        ({"type": "abort", "message": "out of memory"}, "the server aborted the answer: out of memory"),
        ({"type": "other"}, "ended the answer with 'other'"),
        ({"type": "length"}, "cut the answer after 2 of 12 tokens; it needs a longer context"),
    ],
)
def test_what_is_not_a_whole_answer_fails(target: Target, tmp_path: Path, reason: dict[str, Any], message: str) -> None:
    fake = Fake(target, "sglang")

    def spoil(answer: dict[str, Any]) -> None:
        answer["meta_info"]["finish_reason"] = reason
        answer["output_ids"] = [3, 4]

    fake.edit = spoil
    try:
        report = generator().run(target, PROMPTS[:2], tmp_path / "c.jsonl", fake.url)
    finally:
        fake.close()
    assert (report.success, report.failed) == (0, 2)
    assert message in read_conversations(tmp_path / "c.jsonl")[0]["error"]


ENDED = {"type": "stop", "matched": 5}
CUT = {"type": "length"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": {"type": "stop", "matched": [5]}}, "ended the answer at [5], which is no end token"),
        ({"finish_reason": {"type": "stop", "matched": 10**9}}, "ended the answer at 1000000000, which is no end"),
        ({"finish_reason": {"type": "stop", "matched": 4}}, "ended the answer at 4, which is no end token"),
        ({"finish_reason": {"type": "stop", "matched": 5.0}}, "ended the answer at 5.0, which is no end token"),
        ({"finish_reason": CUT, "output_ids": [3] * 13}, "answered 13 tokens, expected 1 to 12"),
        ({"finish_reason": ENDED, "output_ids": [3] * 12}, "answered 13 tokens, expected 1 to 12"),
        ({"finish_reason": CUT, "output_ids": [3, 13, *[3] * 10]}, "went on after the end token 13"),
        ({"finish_reason": ENDED, "output_ids": [3, 13]}, "went on after the end token 13"),
        ({"finish_reason": CUT, "output_ids": [7.5] * 12}, "token id 7.5, expected an integer"),
        ({"finish_reason": CUT, "output_ids": [True] * 12}, "token id True, expected an integer"),
        ({"finish_reason": CUT, "output_ids": ["7"] * 12}, "token id '7', expected an integer"),
        ({"finish_reason": CUT, "output_ids": [[3] * 12]}, "token id [3, 3, 3, 3, 3, 3, ...], expected an integer"),
        ({"finish_reason": ENDED, "output_ids": [3, 5.0]}, "token id 5.0, expected an integer"),
        ({"output_ids": 7}, "token ids 7 and text "),
        ({"output_ids": "7"}, "token ids '7' and text "),
        ({"output_ids": None, "text": None}, "token ids None and text None, expected a list or text"),
        ({"output_ids": None, "text": "", "finish_reason": CUT}, "answered 0 tokens, expected 1 to 12"),
        ({"finish_reason": None}, "answered None, expected an object as finish_reason"),
        ({"finish_reason": "length"}, "answered 'length', expected an object as finish_reason"),
        ({"finish_reason": {}}, "ended the answer with None, expected 'stop' or 'length'"),
        ({"meta_info": None}, "answered None, expected an object as meta_info"),
        ({"prompt_tokens": 7.5}, "it read 7.5, expected the prompt's tokens or their number"),
    ],
)
def test_a_lie_of_sglangs_fails_its_prompt(
    target: Target, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    target = dataclasses.replace(target, end_ids=(5, 13))
    fake = Fake(target, "sglang")

    def lie(answer: dict[str, Any]) -> None:
        for key, value in change.items():
            (answer["meta_info"] if key in ("finish_reason", "prompt_tokens") else answer)[key] = value

    fake.edit = lie
    require_failed(fake, target, tmp_path / "c.jsonl", message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": []}, "answered [], expected a list of one as choices"),
        ({"choices": None}, "answered None, expected a list of one as choices"),
        ({"choices": [None]}, "answered None, expected an object in choices"),
        ({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}, "token ids None and text None"),
        ({"choices": [{"text": "abc"}]}, "ended the answer with None, expected 'stop' or 'length'"),
        ({"usage": "much"}, "answered 'much', expected an object as usage"),
    ],
)
def test_a_lie_of_vllms_fails_its_prompt(target: Target, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    fake = Fake(target, "vllm")
    fake.edit = lambda answer: answer.update(change)
    require_failed(fake, target, tmp_path / "c.jsonl", message)


@pytest.mark.parametrize("answer", [None, [], 5, "text"])
def test_what_is_no_answer_fails_its_prompt(fake: Fake, target: Target, tmp_path: Path, answer: Any) -> None:
    fake.instead = {"/generate": answer, "/v1/completions": answer}
    require_failed(fake, target, tmp_path / "c.jsonl", f"answered {answer!r}, expected an answer")


def require_failed(fake: Fake, target: Target, out: Path, message: str) -> None:
    try:
        report = generator().run(target, PROMPTS[:2], out, fake.url)
    finally:
        fake.close()
    assert (report.success, report.failed) == (0, 2)
    for row in read_conversations(out):
        assert message in row["error"]


def test_an_end_token_at_the_limit_ends_the_answer(target: Target, tmp_path: Path) -> None:
    """SGLang looks at the limit first."""
    fake = Fake(target, "sglang")

    def end(answer: dict[str, Any]) -> None:
        answer["output_ids"] = [3] * (LIMIT - 1) + [5]
        answer["meta_info"]["finish_reason"] = {"type": "length", "length": LIMIT}

    fake.edit = end
    try:
        generator().run(target, PROMPTS[:1], tmp_path / "c.jsonl", fake.url)
    finally:
        fake.close()
    (row,) = read_conversations(tmp_path / "c.jsonl")
    assert (row["finish_reason"], row["answer_ids"]) == ("stop", [3] * (LIMIT - 1) + [5])


@pytest.mark.parametrize(
    ("dialect", "path", "facts", "message"),
    [
        ("sglang", "/server_info", None, "/server_info says None, expected an object"),
        ("sglang", "/server_info", 5, "/server_info says 5, expected an object"),
        ("sglang", "/server_info", {"version": 1, "model_path": "m"}, "says version=1, expected str"),
        ("sglang", "/server_info", {"version": "1", "model_path": ["m"]}, r"says model_path=\['m'\], expected str"),
        ("sglang", "/model_info", [], r"/model_info says \[\], expected an object"),
        ("vllm", "/v1/models", None, "/v1/models says None, expected an object"),
        ("vllm", "/v1/models", {}, "/v1/models says None as data, expected a list of models"),
        ("vllm", "/v1/models", {"data": []}, r"/v1/models says \[\] as data, expected a list of models"),
        ("vllm", "/v1/models", {"data": [{"foo": 1}]}, "as data, expected a list of models, each with an id"),
        ("vllm", "/v1/models", {"data": [{"id": 1}]}, "/v1/models says id=1, expected str"),
        ("vllm", "/v1/models", {"data": [{"id": "m", "owned_by": 1}]}, "says owned_by=1, expected str"),
        ("vllm", "/version", {"version": 1}, "/version says version=1, expected str"),
    ],
)
def test_a_server_that_describes_itself_wrongly_is_refused(
    target: Target, tmp_path: Path, dialect: str, path: str, facts: Any, message: str
) -> None:
    fake = Fake(target, dialect)
    fake.instead = {path: facts}
    try:
        with pytest.raises(ValueError, match=message):
            generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    finally:
        fake.close()


@pytest.mark.parametrize("context", ["x", 7.5, True])
def test_a_context_that_is_no_number_is_refused(fake: Fake, target: Target, tmp_path: Path, context: Any) -> None:
    fake.context = context
    with pytest.raises(ValueError, match=f"says max_.*_len='?{context}'?, expected int or null"):
        generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)


def test_ids_of_another_vocabulary_stop_the_run(fake: Fake, target: Target, tmp_path: Path) -> None:
    def other(answer: dict[str, Any]) -> None:
        ids = answer["output_ids"] if fake.dialect == "sglang" else answer["choices"][0]["token_ids"]
        ids[0] = 512

    fake.edit = other
    with pytest.raises(ValueError, match="answered with token id 512, target tiny-llama has 0 to 511; pick the target"):
        generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    assert not (tmp_path / "c.jsonl").exists()


def test_another_tokenizer_is_refused_before_anything_is_asked(fake: Fake, target: Target, tmp_path: Path) -> None:
    fake.tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(letter) for letter in text])
    with pytest.raises(ValueError, match="tokenises text otherwise than target tiny-llama"):
        generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    assert not fake.requests


def test_a_changed_prompt_is_refused(fake: Fake, target: Target, tmp_path: Path) -> None:
    """As by a server that adds a beginning-of-text token or cuts what is long. vLLM says which tokens it read."""

    def one_more(answer: dict[str, Any]) -> None:
        if fake.dialect == "sglang":
            answer["meta_info"]["prompt_tokens"] += 1
        else:
            answer["choices"][0]["prompt_token_ids"].append(1)

    def another(answer: dict[str, Any]) -> None:
        answer["choices"][0]["prompt_token_ids"][0] += 1

    for change in (one_more, another)[: 1 if fake.dialect == "sglang" else 2]:
        fake.edit = change
        with pytest.raises(ValueError, match="read .* tokens of a prompt of .*: it must neither add, cut nor change"):
            generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)


def test_another_model_is_refused(target: Target, tmp_path: Path) -> None:
    fake = Fake(target, "sglang")
    fake.model_type = "qwen3"
    try:
        with pytest.raises(ValueError, match="serves /models/tiny, a qwen3 model; target tiny-llama is llama"):
            generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
    finally:
        fake.close()


def test_what_is_no_engine_is_refused(fake: Fake, target: Target, tmp_path: Path) -> None:
    fake.missing = {"/server_info", "/v1/models"}
    with pytest.raises(ValueError, match="has neither SGLang's /server_info nor models at /v1/models"):
        generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)


# --- keys


def test_a_key_is_sent_and_never_shown(
    fake: Fake, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.key = "right-secret"
    for key in (None, "wrong-secret"):
        if key:
            monkeypatch.setenv("MEDUSA_K25_API_KEY", key)
        with pytest.raises(ValueError, match="wants another key than MEDUSA_K25_API_KEY holds: 401") as refusal:
            generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url)
        assert "secret" not in str(refusal.value)
    monkeypatch.setenv("MEDUSA_K25_API_KEY", "right-secret")
    assert generator().run(target, PROMPTS, tmp_path / "c.jsonl", fake.url).success == 8
    assert "secret" not in capsys.readouterr().out + (tmp_path / "c.jsonl").read_text()


@pytest.mark.parametrize("url", ["http://me:secret@127.0.0.1:1", "http://127.0.0.1:1/?key=secret"])
def test_an_address_with_a_secret_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="put a key into MEDUSA_K25_API_KEY") as refusal:
        Server(url)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://127.0.0.1", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected an address such as http://"):
        Server(url)


def test_half_an_answer_is_tried_again(impatient: None) -> None:
    tries = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            tries.append(1)
            self.send_response(200)
            self.send_header("Content-Length", "8")
            self.end_headers()
            self.wfile.write(b'{"a": 1}' if len(tries) == 3 else b'{"a"')

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        assert Server(f"http://127.0.0.1:{http.server_port}/").call("/") == {"a": 1}
    finally:
        http.shutdown()
        http.server_close()
    assert len(tries) == 3


def test_a_refusal_keeps_its_status(fake: Fake) -> None:
    with pytest.raises(Refused, match="404 .*Not Found") as refusal:
        Server(fake.url).call("/nothing")
    assert refusal.value.status == 404


# --- interruption


KILLED = """
import signal
import sys
from dataclasses import replace
from pathlib import Path
from medusa_k25.conversations import Generator
from medusa_k25.prompts import load_prompts
from medusa_k25.target import Target

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
target = replace(Target.open(sys.argv[1]), end_ids=tuple(range(5, 512, 8)))
Generator(max_new_tokens=12, concurrency=4).run(target, load_prompts("package")[:40], Path(sys.argv[2]), sys.argv[3])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_loses_what_was_in_flight(target: Target, tmp_path: Path, how: signal.Signals) -> None:
    fake = Fake(target, "sglang")
    fake.delay_s = 0.05
    out, prompts = tmp_path / "c.jsonl", load_prompts("package")[:40]
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(target.path), str(out), fake.url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not out.exists() or out.read_bytes().count(b"\n") < 10:
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.002)
        if how == signal.SIGINT:
            fake.hang = lambda ids: True  # nobody waits for these
            time.sleep(0.2)
        process.send_signal(how)
        process.wait(5)
        kept = out.read_bytes()
        finished, asked = kept.count(b"\n"), len(fake.requests)
        assert 10 <= finished < 40 and asked - finished <= 8
        fake.hang, fake.delay_s = lambda ids: False, 0.0
        report = generator(concurrency=4).run(target, prompts, out, fake.url)
    finally:
        fake.close()
    assert (report.success, report.skipped) == (40 - finished, finished)
    assert len(fake.requests) - asked == 40 - finished
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert sorted(by_id(out)) == sorted(prompt.id for prompt in prompts)
    generator().run(target, prompts, tmp_path / "here.jsonl")
    answers = {id: row["answer_ids"] for id, row in by_id(tmp_path / "here.jsonl").items()}
    assert {id: row["answer_ids"] for id, row in by_id(out).items()} == answers


# --- the verb


def test_the_verb_asks_the_server(fake: Fake, target: Target, tmp_path: Path, capsys: Any) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    run_dir = tmp_path / "run"
    overrides = [f"prompts={prompts}", f"run_dir={run_dir}", f"server={fake.url}", "generate.max_new_tokens=5"]
    generate(compose([*overrides, "dry_run=true"], groups=("generate",)), target)
    assert not run_dir.exists() and not fake.requests
    shown = capsys.readouterr().out
    assert "answers 8 of 8 prompts (greedy, at most 5 tokens each, 40 in all)" in shown
    assert f"at {fake.url}" in shown and "dry run: nothing was written" in shown
    generate(compose(overrides, groups=("generate",)), target)
    assert json.loads((run_dir / "report.json").read_text())["generate"]["success"] == 8
    assert len(by_id(run_dir / "conversations.jsonl")) == 8


def test_a_dry_run_in_this_process_writes_nothing(tiny_llama: Target, tmp_path: Path) -> None:
    generate(compose([f"run_dir={tmp_path / 'run'}", "dry_run=true"], groups=("generate",)), tiny_llama)
    assert not (tmp_path / "run").exists()
