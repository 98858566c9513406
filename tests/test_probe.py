"""Cycles measured on servers whose passes take a known time."""

import inspect
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from medusa_k25 import probe as verb
from medusa_k25.config import compose
from medusa_k25.costs.cycle import CycleModel
from medusa_k25.costs.probing import MARK, Probe
from medusa_k25.costs.served import KIMI_K25


class Fake:
    """An SGLang server with a clock of its own: a pass takes `pass_ms(batch)`, a prefill and HTTP 50 ms."""

    def __init__(self, nodes: int, model: str = "/models/SmolLM2-135M-Instruct") -> None:
        self.facts: dict[str, Any] = {
            "version": "0.5.23",
            "model_path": model,
            "max_req_input_len": 3000,
            "max_total_num_tokens": 20000,
            "max_running_requests": 16,
        }
        if nodes > 1:
            self.facts |= {"speculative_algorithm": "MEDUSA", "speculative_num_draft_tokens": nodes}
        self.nodes, self.now_s, self.accepts = nodes, 0.0, 1.0  # accepts: tokens a pass
        self.requests: list[dict[str, Any]] = []
        self.edit = lambda row: None
        self.missing: set[str] = set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def respond(self, content: Any) -> None:
                text = json.dumps(content).encode()
                self.send_response(404 if self.path in fake.missing else 200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                self.respond(fake.facts if self.path == "/server_info" else {})

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.respond({"tokens": list(range(5, 300))} if self.path == "/tokenize" else fake.generate(request))

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def pass_ms(self, batch: int) -> float:
        return 10 + 2 * self.nodes + batch

    def generate(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        self.requests.append(request)
        prompts, tokens = request["input_ids"], request["sampling_params"]["max_new_tokens"]
        passes = round((tokens - 1) / self.accepts)
        self.now_s += 0.050 + passes * self.pass_ms(len(prompts)) / 1000
        about = {"completion_tokens": tokens} | ({"spec_verify_ct": passes} if self.nodes > 1 else {})
        rows = [{"output_ids": [1] * tokens, "meta_info": dict(about)} for _ in prompts]
        for row in rows:
            self.edit(row["meta_info"])
        return rows

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def plain() -> Iterator[Fake]:
    fake = Fake(1)
    yield fake
    fake.close()


@pytest.fixture
def blank() -> Iterator[Fake]:
    fake = Fake(9)
    fake.accepts = 1.5
    yield fake
    fake.close()


@pytest.fixture(scope="module")
def base() -> DictConfig:
    return compose([], groups=("hardware", "probe"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Fake, blank: Fake, base: DictConfig) -> Any:
    """run(overrides...) -> the section of report.json; time is the fakes'."""
    monkeypatch.setattr(Probe.run, "__defaults__", (lambda: plain.now_s + blank.now_s,))
    monkeypatch.setattr("medusa_k25.server.time", SimpleNamespace(sleep=lambda seconds: None))

    def probe(*overrides: str) -> dict[str, Any]:
        config = OmegaConf.merge(base, OmegaConf.from_dotlist([f"run_dir={tmp_path}/run", *overrides]))
        inspect.unwrap(verb.main)(config)
        return json.loads((tmp_path / "run" / "report.json").read_text())["probe"]

    return probe


SMALL = ("probe.contexts=[1024,32768]", "probe.batches=[1,4]", "probe.rounds=2")


def test_cycles_are_measured_and_become_a_hardware_file(run: Any, plain: Fake, blank: Fake, tmp_path: Path) -> None:
    report = run(f"server={plain.url}", f"blank=[{blank.url}]", *SMALL)
    for each in report["points"]:
        point = each["point"]
        assert point["ms"] == pytest.approx((blank if point["nodes"] == 9 else plain).pass_ms(point["batch"]), rel=1e-3)
    # 3000 tokens, less an answer of 80 and two trees
    places = {(p["point"]["nodes"], p["point"]["batch"], p["point"]["context"]) for p in report["points"]}
    contexts = {1: (1024, 3000 - 82), 9: (1024, 3000 - 98)}
    assert places == {(n, batch, context) for n, both in contexts.items() for batch in (1, 4) for context in both}
    assert {p["point"]["temperature"] for p in report["points"]} == {0.0, 0.6, 1.0}
    assert any("context 32,768 is cut to 2,918" in note for note in report["notes"])

    path = Path(report["file"])
    assert path == tmp_path / "run" / "conf" / "hardware" / "cpu_measured.yaml"
    machine = instantiate(OmegaConf.create(yaml.safe_load(path.read_text())))
    assert machine.name == "cpu_measured" and len(machine.cycles) == 24 and machine.baseline_tok_s is None
    assert CycleModel(machine, KIMI_K25).cycle(9, 4, 1024, 0.6).basis == "measured"
    assert "SGLang 0.5.23, top-p 0.95" in next(p.source for p in machine.cycles if p.temperature == 0.6)


def test_a_machine_that_does_other_things_too_is_measured(
    run: Any, plain: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    """All calls but one short and one long answer are held up, the warm-up, too."""
    held_up = iter([1.0, 0.4, 0.3, 0.0, 0.0, 0.7, 0.2])

    def edit(about: dict[str, Any]) -> None:
        plain.now_s += next(held_up)

    plain.edit = edit
    small = ("probe.contexts=[64]", "probe.batches=[1]", "probe.sampling=[{temperature: 0.0, top_p: 1.0}]")
    [measured] = run(f"server={plain.url}", *small)["points"]
    assert measured["point"]["ms"] == pytest.approx(plain.pass_ms(1))
    expected = [plain.pass_ms(1) + 1000 * more / 64 for more in (-0.1, 0.0, -0.5)]
    assert (measured["low_ms"], measured["high_ms"]) == pytest.approx((min(expected), max(expected)))


def test_what_is_asked_is_bounded_and_said_before(run: Any, plain: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"server={plain.url}", *SMALL)
    said = capsys.readouterr().out
    assert "12 places x 5 calls: 150 requests of up to 80 tokens" in said
    assert len(plain.requests) == 60 and sum(len(request["input_ids"]) for request in plain.requests) == 150
    assert [r["sampling_params"]["max_new_tokens"] for r in plain.requests[:5]] == [2, 16, 80, 16, 80]
    assert all(r["sampling_params"]["ignore_eos"] for r in plain.requests)
    batch = next(r["input_ids"] for r in plain.requests if len(r["input_ids"]) == 4)
    assert len({tuple(ids[:8]) for ids in batch}) == 4  # no two share a prefix
    temperatures = {(r["sampling_params"]["temperature"], r["sampling_params"]["top_p"]) for r in plain.requests}
    assert temperatures == {(0.0, 1.0), (0.6, 0.95), (1.0, 1.0)}


def test_a_dry_run_asks_nothing(run: Any, plain: Fake, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):  # there is no report
        run(f"server={plain.url}", "dry_run=true")
    assert not plain.requests and not (tmp_path / "run").exists()


def test_servers_can_be_measured_one_after_another(run: Any, plain: Fake, blank: Fake) -> None:
    small = ("probe.contexts=[64]", "probe.batches=[1]", "probe.sampling=[{temperature: 0.0, top_p: 1.0}]")
    run(f"server={plain.url}", *small)
    plain.pass_ms = lambda batch: 40.0  # type: ignore[method-assign]
    run(f"server={blank.url}", *small)
    report = run(f"server={plain.url}", *small)
    cycles = yaml.safe_load(Path(report["file"]).read_text())["cycles"]
    assert [(cycle["nodes"], cycle["ms"]) for cycle in cycles] == [(1, 40.0), (9, blank.pass_ms(1))]


def test_what_one_server_has_shown_is_kept_when_the_next_fails(
    run: Any, plain: Fake, blank: Fake, tmp_path: Path
) -> None:
    blank.missing.add("/generate")
    with pytest.raises(ValueError, match="/generate: 404"):
        run(f"server={plain.url}", f"blank=[{blank.url}]", f"probe_file={tmp_path}/new.yaml", *SMALL)
    assert {cycle["nodes"] for cycle in yaml.safe_load((tmp_path / "new.yaml").read_text())["cycles"]} == {1}


def test_other_files_are_left_alone(run: Any, plain: Fake, tmp_path: Path) -> None:
    other = tmp_path / "mine.yaml"
    other.write_text("name: mine\n")
    with pytest.raises(ValueError, match="mine.yaml is not a file that probe wrote"):
        run(f"server={plain.url}", f"probe_file={other}")
    assert other.read_text() == "name: mine\n" and not plain.requests
    written = Path(run(f"server={plain.url}", f"probe_file={tmp_path}/new.yaml", *SMALL)["file"])
    assert written == tmp_path / "new.yaml" and written.read_text().startswith(MARK)


def test_what_does_not_fit_is_said(run: Any, plain: Fake) -> None:
    plain.facts["max_total_num_tokens"] = 5000
    report = run(f"server={plain.url}", "probe.contexts=[1024]", "probe.batches=[1,8,32]", "probe.rounds=1")
    assert {p["point"]["batch"] for p in report["points"]} == {1}
    assert any("batch 32 is left out, it runs 16 requests at a time" in note for note in report["notes"])
    assert any("batch 8 with context 1,024 is left out, it needs 8,848" in note for note in report["notes"])


def test_a_batch_that_shrinks_is_said(run: Any, blank: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests end after different numbers of passes, as their drafts are accepted."""
    count = iter(range(10**6))

    def edit(about: dict[str, Any]) -> None:
        about["spec_verify_ct"] = about["spec_verify_ct"] if next(count) % 4 == 0 else about["spec_verify_ct"] // 2 + 1

    blank.edit = edit
    report = run(f"server={blank.url}", "probe.contexts=[64]", "probe.batches=[4]", "probe.rounds=1")
    for each in report["points"]:  # the batch takes as many passes as the request that needs most
        assert each["point"]["ms"] == pytest.approx(blank.pass_ms(4), rel=1e-3)
    assert "of 4 requests ran, the others had ended" in capsys.readouterr().out


def test_another_model_is_said(run: Any, plain: Fake) -> None:
    plain.facts["model_path"] = "moonshotai/Kimi-K2.5"
    small = ("probe.contexts=[64]", "probe.batches=[1]", "probe.rounds=1")
    assert any("serves moonshotai/Kimi-K2.5" in note for note in run(f"server={plain.url}", *small)["notes"])
    assert run(f"server={plain.url}", "hardware.target=moonshotai/Kimi-K2.5", *small)["notes"] == []


def fault(fake: Fake, **facts: Any) -> Fake:
    fake.facts = {key: value for key, value in (fake.facts | facts).items() if value is not None}
    return fake


@pytest.mark.parametrize(
    ("prepare", "overrides", "message"),
    [
        (lambda a, b: None, ("server=null",), "server=URL: give the address of a running SGLang server"),
        (lambda a, b: a.missing.add("/server_info"), (), "/server_info: 404.*expected the address of an SGLang server"),
        (lambda a, b: fault(a, version=None), (), "names no version and model_path"),
        (lambda a, b: fault(b, speculative_num_draft_tokens=None), (), "does not say with how many tokens"),
        (lambda a, b: fault(b, model_path="other"), (), "serves other, .* probe one of them"),
        (lambda a, b: fault(b, speculative_algorithm=None), (), "two servers verify 1 nodes"),
        (lambda a, b: fault(a, max_req_input_len=40), (), "takes 40 tokens, no room for an answer of 80"),
        (lambda a, b: [fault(each, max_running_requests=0) for each in (a, b)], (), "nothing is left"),
        (lambda a, b: setattr(b, "edit", lambda m: m.pop("spec_verify_ct")), (), "says nothing of its verify passes"),
        (lambda a, b: setattr(a, "edit", lambda m: m.update(completion_tokens=1)), (), "was asked for 2 tokens"),
        (lambda a, b: setattr(a, "pass_ms", lambda batch: 0.0), (), "took no longer than 16; the machine is too busy"),
        (lambda a, b: setattr(b, "edit", lambda m: m.update(spec_verify_ct=7)), (), "80 tokens took 7 passes"),
        (lambda a, b: a.missing.add("/generate"), (), "/generate: 404"),
        (lambda a, b: a.missing.add("/tokenize"), (), "start the server with its tokenizer"),
        (lambda a, b: None, ("probe.batches=[0]",), "batches .0.*expected numbers above 0"),
        (lambda a, b: None, ("probe.long=20",), "long=20, short=16: expected an answer at least twice as long"),
    ],
)
def test_faults(run: Any, plain: Fake, blank: Fake, prepare: Any, overrides: tuple[str, ...], message: str) -> None:
    prepare(plain, blank)
    small = ("probe.contexts=[64]", "probe.batches=[1]", "probe.rounds=1")
    with pytest.raises(Exception, match=message):
        run(f"server={plain.url}", f"blank=[{blank.url}]", *small, *overrides)


def test_the_command_line_takes_lists_of_addresses() -> None:
    config = compose(["blank=[http://127.0.0.1:30001,http://gpu-2:30002]", "hardware=h200_x8"], groups=("probe",))
    assert config.blank == ["http://127.0.0.1:30001", "http://gpu-2:30002"]


def test_no_server(run: Any, plain: Fake) -> None:
    plain.close()
    started = time.monotonic()
    with pytest.raises(OSError, match="no answer from"):
        run(f"server={plain.url}")
    assert time.monotonic() - started < 5
