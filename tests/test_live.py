"""Heads on a running server, measured by `evaluate server=`, on servers whose passes take and emit a known amount."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any, cast

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from medusa_k25.config import compose
from medusa_k25.data.texts import Text
from medusa_k25.evaluate import on_server
from medusa_k25.replay import replay
from medusa_k25.serving.comparing import compare_speeds, replayed_parts
from medusa_k25.serving.control import Order, Status, give_order, last_order, write_status
from medusa_k25.serving.live import Round, Streamed, Switch
from medusa_k25.target import Target
from medusa_k25.tree import Tree

LIMIT, PASS_S = 19, 0.004  # an answer is longer than a warm-up's 16 tokens
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Fake:
    """An SGLang server. Its answers are LIMIT tokens that follow from the prompt; a pass with heads emits `accepts` of
    the prompt's ids, one without heads emits one token."""

    def __init__(self, target: Target, heads: str | None) -> None:
        self.tokenizer, self.heads, self.asked = target.load_tokenizer(), heads, list[dict[str, Any]]()
        self.facts: dict[str, Any] = {
            "version": "0.5.23",
            "model_path": "/models/tiny",
            "max_total_num_tokens": 9000 if heads else 10000,
            "internal_states": [{"effective_max_running_requests_per_dp": 8}],
        }
        if heads:
            self.facts |= {"speculative_algorithm": "MEDUSA", "speculative_num_draft_tokens": 9}
            self.facts["speculative_draft_model_path"] = heads
        self.accepts: Callable[[str], int] = lambda text: 3 if "plus" in text else 2
        self.answer: Callable[[list[int]], list[int]] = lambda ids: [7 + (sum(ids) + i) % 300 for i in range(LIMIT)]
        self.edit: Callable[[dict[str, Any]], None] = lambda event: None
        self.control: Path | None = None  # the folder that it looks at
        self.before: Callable[[dict[str, Any]], None] = lambda request: None
        self.parsed: Any = {"normal_text": "", "calls": []}
        self.ends = True
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def respond(self, content: Any) -> None:
                text = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                known = {"/server_info": fake.facts, "/model_info": {"model_type": target.model_type}}
                self.respond(known.get(self.path, {}))

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    self.respond({"tokens": fake.tokenizer.encode(request["prompt"], add_special_tokens=False)})
                elif self.path == "/parse_function_call":
                    assert request["tool_call_parser"] == "qwen" and request["tools"][0]["type"] == "function"
                    self.respond(fake.parsed)
                else:
                    self.send_response(200)
                    self.end_headers()  # without a length: the connection's end is the stream's
                    for event in fake.events(request):
                        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                    if fake.ends:
                        self.wfile.write(b"data: [DONE]\n\n")

        class Http(ThreadingHTTPServer):
            request_queue_size = 64
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that has gone

        self.http = Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def events(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert request["stream"] and request["sampling_params"]["temperature"] in (0.0, 0.6)
        self.before(request)
        drafts = self.drafts()
        self.asked.append(request)
        limit = request["sampling_params"]["max_new_tokens"]
        ids, passes, known = self.answer(request["input_ids"])[:limit], 0, 1
        step = self.accepts(self.tokenizer.decode(request["input_ids"])) if drafts else 1
        time.sleep(2 * PASS_S)  # prefill
        while True:
            about: dict[str, Any] = {"prompt_tokens": len(request["input_ids"]), "completion_tokens": known}
            about |= {"cached_tokens": 0, "finish_reason": None}
            if known == len(ids):
                about["finish_reason"] = {"type": "length", "length": known}
                about |= (
                    {"spec_verify_ct": passes, "medusa_nodes": [0, *[9 if drafts else 1] * passes]}
                    if self.heads
                    else {}
                )
            event = {"text": "", "output_ids": ids[:known], "meta_info": about}
            self.edit(event)
            yield event
            if known == len(ids):
                return
            time.sleep(PASS_S)
            passes, known = passes + 1, min(known + step, len(ids))

    def drafts(self) -> bool:
        if self.control is None or (order := last_order(self.control)) is None:
            return self.heads is not None
        text = json.loads((self.control / "control.json").read_text())
        drafts = order.drafting != "off"
        write_status(self.control, Status("on" if drafts else "off", "as ordered", order.heads or "", None, text))
        return drafts

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def heads(tiny_llama: Target) -> Iterator[Fake]:
    fake = Fake(tiny_llama, "/some/export")
    yield fake
    fake.close()


@pytest.fixture
def plain(tiny_llama: Target) -> Iterator[Fake]:
    fake = Fake(tiny_llama, None)
    yield fake
    fake.close()


@pytest.fixture(scope="module")
def base() -> DictConfig:
    return compose([], groups=("evaluate", "generate"))


ROWS: list[dict[str, Any]] = [
    *({"id": f"sum-{i}", "topic": "sums", "label": "short", "prompt": f"{i} plus {i}?"} for i in range(3)),
    *({"id": f"sea-{i}", "topic": "sea", "prompt": f"What is sea {i}?"} for i in range(2)),
]


@pytest.fixture
def run(tmp_path: Path, tiny_llama: Target, base: DictConfig) -> Callable[..., dict[str, Any]]:
    """run(server, overrides..., rows=ROWS) -> the section of report.json."""

    def evaluate(server: Fake, *overrides: str, rows: list[dict[str, Any]] = ROWS) -> dict[str, Any]:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = [f"run_dir={tmp_path}/run", f"prompts={prompts}", f"server={server.url}", "rounds=2"]
        settings += [f"cache={tmp_path}/none", "concurrency=[1,4]", f"generate.max_new_tokens={LIMIT}", *overrides]
        config = cast(DictConfig, OmegaConf.merge(base, OmegaConf.from_dotlist(settings)))
        on_server(config, tiny_llama, instantiate(config.evaluate))
        return json.loads((tmp_path / "run" / "report.json").read_text())["server"]

    return evaluate


def measured(fake: Fake) -> list[dict[str, Any]]:
    """The requests that were no warm-up (their answers are as short as a look at the control file)."""
    return [request for request in fake.asked if request["sampling_params"]["max_new_tokens"] == LIMIT]


def test_two_servers_are_compared(
    run: Any, heads: Fake, plain: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = run(heads, f"baseline={plain.url}")
    low, high = section["levels"]
    assert (low["concurrency"], high["concurrency"]) == (1, 4)
    for level in section["levels"]:
        assert level["ratio"][1] <= level["ratio"][0] <= level["ratio"][2]
        for speed in level["speeds"].values():
            assert speed["first_ms"] >= 2000 * PASS_S
            assert speed["tokens"] == speed["answers"] * LIMIT
    slow, fast = low["speeds"]["without"], low["speeds"]["with heads"]
    # of a busy machine nothing is certain but what takes at least a sleep
    assert slow["token_ms"] >= 1000 * PASS_S and slow["tok_s"] < 1 / PASS_S
    assert fast["token_ms"] < slow["token_ms"] and low["ratio"][0] > 1
    assert high["speeds"]["without"]["tok_s"] > 1.5 * slow["tok_s"]  # together, of four at a time

    # 18 tokens behind that of the prefill: six passes of three, nine of two
    lengths = {part["name"]: (part["length"], part["documents"]) for part in section["acceptance"]}
    assert lengths["sums"] == (3.0, 3) and lengths["sea"] == (2.0, 2)
    every = section["acceptance"][0]
    assert every["name"] == "all" and every["interval"][0] < every["length"] < every["interval"][1]

    equality = section["equality"]
    assert equality["answers"] == equality["equal"] == len(measured(heads)) == len(measured(plain))
    assert equality["of_itself"] == equality["of_itself_equal"] > 0
    assert section["kv_tokens"] == {"with heads": 9000, "without": 10000}
    assert section["tools"] == "no prompt has tools"
    assert section["cycles"] == {"known": every["passes"], "plain": 0, "nodes": 9 * every["passes"]}
    said = capsys.readouterr().out
    assert "5 prompts; 2 rounds of 3 at concurrency 1, 8 at concurrency 4; with heads and without: 44 answers" in said
    assert "9,000 tokens with heads, 10,000 without: 10.0% lost" in said and "there is no cache" in said
    page = (tmp_path / "run" / "server.html").read_text()
    assert "10.0% lost" in page and page.count("<svg") == 2 and "http" not in page.split("<body>")[1].split("<p")[0]
    assert {file.name for file in (tmp_path / "run" / "server_pictures").iterdir()} == {"speed.png", "acceptance.png"}


def test_both_sides_get_the_same_requests_in_turns_and_none_is_cached(run: Any, heads: Fake, plain: Fake) -> None:
    order: list[str] = []
    heads.before = lambda request: order.append("heads")
    plain.before = lambda request: order.append("plain")
    run(heads, f"baseline={plain.url}", "concurrency=[1]")
    assert [each["input_ids"] for each in heads.asked] == [each["input_ids"] for each in plain.asked]
    assert len({each["extra_key"] for each in heads.asked + plain.asked}) == len(heads.asked + plain.asked)
    # a warm-up and a round of each, then the other way round
    assert order == ["heads"] * 4 + ["plain"] * 4 + ["plain"] * 3 + ["heads"] * 3
    assert {tuple(each["input_ids"]) for each in measured(heads)} == {tuple(e["input_ids"]) for e in measured(plain)}
    assert len({tuple(each["input_ids"]) for each in measured(heads)}) == 5


def test_other_answers_are_counted_and_named(
    run: Any, heads: Fake, plain: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    right = plain.answer

    def other(ids: list[int]) -> list[int]:
        answer = right(ids)
        return answer[:5] + [6] + answer[6:] if "sea 1" in plain.tokenizer.decode(ids) else answer

    heads.answer = other
    equality = run(heads, f"baseline={plain.url}")["equality"]
    wrong = [each for each in measured(heads) if other(each["input_ids"]) != right(each["input_ids"])]
    assert 0 < len(wrong) == equality["answers"] - equality["equal"]
    assert equality["differing"][0] == ["sea-1", 1, 5]
    assert "so much is rounding" in capsys.readouterr().out


def test_sampled_answers_are_not_held_against_each_other(run: Any, heads: Fake, plain: Fake) -> None:
    section = run(heads, f"baseline={plain.url}", "evaluate.temperature=0.6", "generate.top_p=0.95", "concurrency=[2]")
    assert section["equality"] is None and section["temperature"] == 0.6
    assert {each["sampling_params"]["top_p"] for each in heads.asked} == {0.95}


def test_without_another_side_nothing_is_compared(run: Any, heads: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    section = run(heads, "concurrency=[2]")
    assert section["levels"][0]["ratio"] is None and section["equality"] is None and section["kv_tokens"] is None
    said = capsys.readouterr().out
    assert "Nothing was compared" in said and "known with baseline=URL alone" in said


# --- the server's own switch


@pytest.fixture
def control(heads: Fake, tmp_path: Path) -> Path:
    heads.control = tmp_path / "control"
    heads.control.mkdir()
    return heads.control


@pytest.mark.parametrize("before", [None, Order("on", "/some/export"), Order("auto"), Order("off", "/other")])
def test_drafting_is_switched_off_and_on_and_left_as_it_was(
    run: Any, heads: Fake, control: Path, before: Order | None
) -> None:
    if before is not None:
        give_order(control, before)
    section = run(heads, f"control={control}", "concurrency=[2]")
    assert section["acceptance"][0]["length"] > 2
    assert section["equality"]["answers"] == section["equality"]["equal"] > 0
    assert last_order(control) == (before or Order())
    assert f"switched off in {control}" in section["described"]


def test_a_server_that_had_given_up_is_told_anew(run: Any, heads: Fake, control: Path) -> None:
    """It carries out each text once: the same one again would not make it draft."""
    give_order(control, Order("auto"))
    write_status(control, Status("off", "1.1 tokens a pass", "", None, {"drafting": "auto"}))
    texts, drafts, gave_up = list[str](), heads.drafts, [True]

    def once() -> bool:
        text = (control / "control.json").read_text()
        if texts[-1:] != [text]:
            texts.append(text)
            gave_up[0] = len(texts) == 1
        return drafts() and not gave_up[0]

    heads.drafts = once  # type: ignore[method-assign]
    section = run(heads, f"control={control}", "concurrency=[2]")
    assert section["acceptance"][0]["length"] > 2 and last_order(control) == Order("auto")
    assert any("had switched drafting off by itself (1.1 tokens a pass)" in note for note in section["notes"])


@pytest.mark.parametrize("how", ["interrupt", "terminated", "gone"])
def test_whatever_happens_the_operators_order_stands_again(
    run: Any, heads: Fake, control: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("medusa_k25.server.time", type("", (), {"sleep": staticmethod(lambda seconds: None)}))
    give_order(control, Order("on", "/some/export"))
    orders, happened = list[Order | None](), threading.Event()

    def fail(request: dict[str, Any]) -> None:
        orders.append(last_order(control))
        if orders[-1] == Order("off", "/some/export") and len(measured(heads)) > 2 and not happened.is_set():
            happened.set()
            if how == "gone":
                heads.http.socket.close()
            else:
                os.kill(os.getpid(), signal.SIGINT if how == "interrupt" else signal.SIGTERM)
        if happened.is_set():
            raise ConnectionError

    heads.before = fail
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes from what it runs in the background
    handler = signal.getsignal(signal.SIGTERM)
    expected = {"interrupt": KeyboardInterrupt, "terminated": SystemExit, "gone": OSError}[how]
    with pytest.raises(expected):
        run(heads, f"control={control}", "concurrency=[2]")
    assert happened.is_set() and last_order(control) == Order("on", "/some/export")
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_server_that_switched_itself_off_is_said(run: Any, heads: Fake, control: Path) -> None:
    drafts, one_at_a_time = heads.drafts, threading.Lock()

    def gives_up() -> bool:
        with one_at_a_time:  # two requests at once, of a server that has one scheduler
            on = drafts()
            if on and (order := last_order(control)) is not None:
                text = json.loads((control / "control.json").read_text())
                write_status(control, Status("off", "1.1 tokens a pass do not pay", order.heads or "", None, text))
        return False

    heads.drafts = gives_up  # type: ignore[method-assign]
    heads.accepts = lambda text: 1
    section = run(heads, f"control={control}", "concurrency=[2]")
    assert section["cycles"]["plain"] == section["cycles"]["known"] == section["acceptance"][0]["passes"]
    assert section["notes"][-1] == "the server switched drafting off by itself: 1.1 tokens a pass do not pay"


def test_a_server_that_does_not_heed_or_refuses(
    run: Any, heads: Fake, control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="no such folder; name the one that the server has as MEDUSA_K25_CONTROL"):
        run(heads, f"control={tmp_path}/nowhere")
    monkeypatch.setattr(Switch.__init__, "__defaults__", (0.1,))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ValueError, match=r"did not heed .*control.json within 0.1 s"):
        run(heads, f"control={other}")
    assert last_order(other) == Order()

    def refuse() -> bool:
        text = json.loads((control / "control.json").read_text())
        write_status(control, Status("on", "as before", "", "no such folder", text))
        return True

    heads.drafts = refuse  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the server refuses .*no such folder"):
        run(heads, f"control={control}")


def test_drafts_on_the_side_without_are_found(run: Any, heads: Fake, control: Path) -> None:
    drafts = heads.drafts
    heads.drafts = lambda: drafts() or True  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="have accepted drafts, though it should have drafted nothing"):
        run(heads, f"control={control}")


# --- tool calls

TOOLS = [{"name": "add", "parameters": {"type": "object"}}]


@pytest.mark.parametrize(
    ("text", "calls", "expected"),
    [
        (CALL, [{"name": "add", "parameters": '{"a": 1}'}], (1, 1)),
        (CALL + CALL, [{"name": "add", "parameters": '{"a": 1}'}], (2, 1)),  # the parser passes over one
        (CALL, [{"name": "add", "parameters": '{"a": '}], (1, 0)),
        (CALL, [{"name": "add", "parameters": "[1]"}], (1, 0)),
        (CALL, [{"name": "subtract", "parameters": "{}"}], (1, 0)),
        ("<tool_call>{", [], (1, 0)),
        ("Four.", [], (0, 0)),
    ],
)
def test_tool_calls_are_counted_and_parsed(
    run: Any, heads: Fake, text: str, calls: list[dict[str, str]], expected: tuple[int, int]
) -> None:
    ids = heads.tokenizer.encode(text, add_special_tokens=False)
    heads.answer = lambda prompt: ids
    heads.facts["tool_call_parser"] = "qwen"
    heads.parsed = {"normal_text": "", "calls": calls}
    rows = [{"id": "t", "prompt": "What is 1 plus 1?", "tools": TOOLS}, {"id": "u", "prompt": "Hi"}]
    limit = f"generate.max_new_tokens={len(ids)}"
    counts = run(heads, "concurrency=[1]", "rounds=1", limit, rows=rows)["tools"]["with heads"]
    assert (counts["calls"], counts["parsed"]) == expected
    assert counts["answers"] == 1 and counts["calling"] == (expected[0] > 0)


def test_what_cannot_be_parsed_is_said(run: Any, heads: Fake) -> None:
    rows = [{"prompt": "What is 1 plus 1?", "tools": TOOLS}]
    assert "has no --tool-call-parser" in run(heads, "concurrency=[1]", rows=rows)["tools"]
    heads.facts["tool_call_parser"] = "qwen"
    heads.parsed = {"detail": "nothing"}
    assert "nothing was parsed" in run(heads, "concurrency=[1]", rows=rows)["tools"]


# --- replay


def test_replays_parts_are_those_of_replay() -> None:
    generator = torch.Generator().manual_seed(0)
    tree = Tree([[0], [1], [0, 0]])
    texts = [
        Text(torch.arange(20 + i, dtype=torch.int32), 4, f"d{i}", "ab"[i % 2], ["x", None][i % 2], 0.0)
        for i in range(6)
    ]
    ranks = [torch.randint(0, 3, (text.num_states, 2), generator=generator) for text in texts]
    for label, of in (("topic", lambda text: text.group), ("label", lambda text: text.label)):
        parts = replayed_parts(texts, ranks, tree, None, label)
        for part in parts:
            some = [each for text, each in zip(texts, ranks, strict=True) if part.name in ("all", of(text))]
            assert (part.passes, part.emitted) == ((expected := replay(some, tree)).passes, expected.emitted)
            assert part.interval[0] <= part.length <= part.interval[1] and part.documents == len(some)
        assert [part.name for part in parts] == (["all", "a", "b"] if label == "topic" else ["all", "x"])


# --- speed


def rounds_of(seconds: list[float], first_s: list[float], tokens: int) -> list[Round]:
    """A round of two answers for each of the seconds."""
    answers = [
        Streamed(
            list(range(tokens)), "length", first_s=s, token_s=s / 10, passes=1, emitted=tokens - 1, cached=0, nodes=[]
        )
        for s in first_s
    ]
    return [Round(4, each, [(0, answers[0]), (1, answers[1]), (2, "failed")]) for each in seconds]


@pytest.mark.parametrize(
    ("seconds", "outcome"),
    [([1.0, 2.0, 1.0], "faster"), ([3.0, 3.0, 9.0], "slower"), ([1.0, 3.0, 2.5], "too close to call")],
)
def test_speeds_are_medians_and_ratios_are_of_the_same_round(seconds: list[float], outcome: str) -> None:
    rounds = {"with heads": rounds_of(seconds, [0.5, 0.1], 10), "without": rounds_of([2.0, 2.1, 2.2], [0.3, 0.3], 10)}
    [level] = compare_speeds(rounds)
    ratios = [2.0 / seconds[0], 2.1 / seconds[1], 2.2 / seconds[2]]
    assert level.ratio == pytest.approx((median(ratios), min(ratios), max(ratios))) and level.outcome == outcome
    ours = level.speeds["with heads"]
    assert ours.tok_s == pytest.approx(20 / median(seconds)) and ours.low_tok_s == pytest.approx(20 / max(seconds))
    assert (ours.first_ms, ours.token_ms) == pytest.approx((300, 30)) and (ours.answers, ours.tokens) == (6, 60)
    [one] = compare_speeds({name: some[:1] for name, some in rounds.items()})
    assert one.outcome == "one round, not judged"


# --- what is asked, and faults


def test_a_dry_run_asks_nothing(run: Any, heads: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError):  # there is no report
        run(heads, "dry_run=true")
    assert not heads.asked and not (tmp_path / "run").exists()
    assert "22 answers of at most 19 tokens" in capsys.readouterr().out


def test_what_is_left_out_is_said(run: Any, heads: Fake) -> None:
    rows = [{"id": "only", "prompt": "Hi"}, {"id": "long", "prompt": "word " * 2000}, {"id": "empty", "prompt": " "}]
    notes = run(heads, "concurrency=[1,8,32]", rows=rows)["notes"]
    assert any("concurrency 32 is left out" in note and "runs 8 requests at a time" in note for note in notes)
    assert any("prompt long is left out" in note for note in notes)
    assert any("prompt empty is left out: the prompt is empty" in note for note in notes)
    assert any("no prompt has a topic" in note for note in notes)
    assert any("1 prompts for concurrency 8: some are asked several times at once" in note for note in notes)


def test_shipped_prompts_are_the_held_out_ones(run: Any, heads: Fake) -> None:
    section = run(heads, "prompts=package", "concurrency=[8]", "generate.max_new_tokens=2", "rounds=1")
    assert section["prompts"] == 48 and len(section["acceptance"]) == 4


def test_an_answer_that_fails_is_said_and_the_others_count(run: Any, heads: Fake, plain: Fake) -> None:
    def cut(event: dict[str, Any]) -> None:
        if event["meta_info"]["finish_reason"] and event["output_ids"][0] == broken:
            event["meta_info"]["finish_reason"] = {"type": "odd"}

    broken = 0
    asked = run(heads, f"baseline={plain.url}", "concurrency=[1]")["equality"]["answers"]
    broken = heads.answer(measured(heads)[3]["input_ids"])[0]
    heads.edit = cut
    section = run(heads, f"baseline={plain.url}", "concurrency=[1]")
    assert any("with heads: " in note and "have no answer" in note for note in section["notes"])
    assert section["equality"]["answers"] == section["equality"]["equal"] < asked


def test_a_server_that_streams_new_tokens_alone(run: Any, heads: Fake, plain: Fake) -> None:
    sent = dict[int, int]()

    def only_new(event: dict[str, Any]) -> None:
        about = event["meta_info"]
        thread = threading.get_ident()
        event["output_ids"] = event["output_ids"][sent.get(thread, 0) :]
        sent[thread] = 0 if about["finish_reason"] else about["completion_tokens"]

    heads.edit = only_new
    heads.facts["incremental_streaming_output"] = True
    equality = run(heads, f"baseline={plain.url}", "concurrency=[2]")["equality"]
    assert equality["equal"] == equality["answers"] > 0


@pytest.mark.parametrize(
    ("prepare", "overrides", "message"),
    [
        (lambda a, b: a.facts.pop("speculative_algorithm"), (), "serves no heads, its speculative algorithm is None"),
        (lambda a, b: a.facts.update(speculative_algorithm="NGRAM"), (), "its speculative algorithm is NGRAM"),
        (lambda a, b: a.close(), (), "no answer from"),
        (lambda a, b: b.facts.update(model_path="other"), (), "serves other, .*expected the same model"),
        (
            lambda a, b: b.facts.update(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4),
            (),
            "speculates, too; name a server without",
        ),
        (lambda a, b: None, ("control=.",), "both are without heads; name one"),
        (lambda a, b: None, ("label=kind",), "label=kind: expected topic or label"),
        (lambda a, b: None, ("concurrency=[0]",), "concurrency=.0.*at least 1"),
        (lambda a, b: None, ("rounds=0",), "rounds=0: expected whole numbers"),
        (lambda a, b: None, ("concurrency=[9]",), "no concurrency is left.*runs 8 requests at a time"),
        (lambda a, b: setattr(a, "ends", False), (), "the stream ended too early"),
        (lambda a, b: setattr(a, "edit", lambda e: e.pop("output_ids")), (), "expected output_ids and meta_info"),
        (lambda a, b: setattr(a, "edit", lambda e: e["meta_info"].pop("spec_verify_ct", 0)), (), "no verify passes"),
    ],
)
def test_faults(
    run: Any,
    heads: Fake,
    plain: Fake,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Fake, Fake], Any],
    overrides: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr("medusa_k25.server.time", type("", (), {"sleep": staticmethod(lambda seconds: None)}))
    prepare(heads, plain)
    with pytest.raises((ValueError, OSError), match=message):
        run(heads, f"baseline={plain.url}", *overrides)
