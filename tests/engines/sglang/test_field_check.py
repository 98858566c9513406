"""launch/field_check.py: its verdicts, and one run beside real engines, which is what it can do without a GPU."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_k25.tree import Tree

field_check = importlib.import_module("launch.field_check")
Answer, Session = field_check.Answer, field_check.Session


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The script's report, exit status, and what its engines gave."""
    out = tmp_path_factory.mktemp("field") / "field_check.json"
    sessions = []
    run_engine = field_check.run_engine

    def spy(*arguments: Any) -> Any:
        sessions.append(run_engine(*arguments))
        return sessions[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field_check, "run_engine", spy)
        status = field_check.main(["--quick", "--out", str(out)])
    return {"status": status, "report": json.loads(out.read_text()), "sessions": sessions}


def verdicts(report: dict[str, Any]) -> dict[str, bool | None]:
    return {check["name"]: check["passed"] for check in report["checks"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU can check")
def test_on_a_cpu_what_needs_a_gpu_is_left_open_and_the_rest_passes(run: dict[str, Any]) -> None:
    report = run["report"]
    assert (run["status"], report["complete"]) == (0, True)
    passed = ("the plain engine", "MEDUSA", "MEDUSA: text", "MEDUSA: accept length")
    open_ones = {"sampling at 0.6", "sampling at 1.0", "overlap off", "graphs off", "two ranks"}
    open_ones |= {"MEDUSA on triton", "MEDUSA on fa3", "flashinfer is refused for a tree"}
    assert verdicts(report) == dict.fromkeys(passed, True) | dict.fromkeys(open_ones, None)
    reasons = {check["name"]: check["why"] for check in report["checks"]}
    assert reasons["graphs off"] == reasons["two ranks"] == "needs a CUDA GPU"
    assert "QUICK=1" in reasons["overlap off"]
    (accepted,) = (check["figures"] for check in report["checks"] if check["name"] == "MEDUSA: accept length")
    assert accepted["accept_length"] == accepted["accept_length_of_reference"] > 1.5
    assert report["machine"]["gpu"] is None
    assert report["machine"]["versions"]["sglang"].startswith("0.5.")
    assert all(value > 0 for value in report["speed"].values())


def test_heads_that_were_exported_with_another_tree_fail(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines' answers again, held against a reference that walks a chain."""
    sessions = iter(run["sessions"])
    monkeypatch.setattr(field_check, "run_engine", lambda *arguments: next(sessions))
    monkeypatch.setattr(field_check, "TREE", Tree.chain(3))
    status = field_check.main(["--quick", "--out", str(tmp_path / "out.json")])
    found = verdicts(json.loads((tmp_path / "out.json").read_text()))
    assert (status, found["MEDUSA: text"], found["MEDUSA: accept length"]) == (1, True, False)


@pytest.mark.parametrize("sound", [True, False])
def test_what_two_gpus_would_answer_is_judged(
    sound: bool, run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way that only a GPU goes, on the greedy answers of the engines above and invented samples and logs.

    Where it is not `sound`, graphs are never used, MEDUSA's samples lean to one token, fa3 ignores the tree's mask, two
    ranks stand still, and flashinfer is not refused.
    """
    greedy = {"plain": run["sessions"][0].answers, "medusa": run["sessions"][1].answers}
    generator = torch.Generator().manual_seed(0)

    def run_engine(work: Path, server: dict[str, Any], calls: list[dict[str, Any]]) -> Any:
        medusa, backend = "speculative_algorithm" in server, server["attention_backend"]
        answers = greedy["medusa" if medusa else "plain"][: len(calls)]
        if medusa and backend == "flashinfer" and sound:
            raise field_check.EngineFailed("ValueError: flashinfer takes no tree mask with MLA; start with ...")
        if medusa and not sound and "tp_size" in server:
            raise field_check.EngineFailed("no answer within 240 s; ...")
        if medusa and not sound and backend == "fa3":
            answers = [[Answer([id ^ 1 for id in each.ids], each.passes) for each in call] for call in answers]
        weights = torch.ones(20)
        weights[0] = 2 if medusa and not sound else 1
        for call in calls[4:]:
            shape = (len(call["input_ids"]), 3)
            samples = torch.multinomial(weights, shape[0] * 3, replacement=True, generator=generator).view(shape)
            answers = [*answers, [Answer(ids) for ids in samples.tolist()]]
        graphs = sound and not server.get("disable_cuda_graph", False)
        return Session(answers, [0.1, 0.2, 0.1, 0.2], log(40, 0).log if graphs else log(0, 40).log)

    passes = {tuple(answer.ids): answer.passes for answer in greedy["medusa"][0]}

    def train_heads(check: Any, answers: list[Any]) -> None:
        """They and the reference are those of the run before."""
        check.heads_folder = tmp_path
        check.reference_passes = lambda prompt, text: passes.get(text, 1)

    monkeypatch.setattr(field_check.FieldCheck, "_train_heads", train_heads)
    monkeypatch.setattr(field_check.Machine, "here", lambda: field_check.Machine((9, 0), 2))
    monkeypatch.setattr(field_check.Machine, "facts", lambda machine: {})
    monkeypatch.setattr(field_check, "drafting_time", lambda *arguments: 0.5)
    monkeypatch.setattr(field_check, "run_engine", run_engine)
    status = field_check.main(["--out", str(tmp_path / "out.json")])
    found = verdicts(json.loads((tmp_path / "out.json").read_text()))
    assert status == (0 if sound else 1)
    doubtful = {f"sampling at {t}: token {place}" for t in (0.6, 1.0) for place in (2, 3)}
    doubtful |= {"graphs: used", "MEDUSA on fa3: text", "two ranks", "flashinfer is refused for a tree"}
    assert doubtful < found.keys()
    failed = {name for name, passed in found.items() if not passed}
    assert failed - {"MEDUSA on fa3: accept length"} == (set() if sound else doubtful)


def test_an_engine_that_does_not_start_fails_its_check_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise field_check.EngineFailed("the engine's log ends with: ...\nno such kernel")

    monkeypatch.setattr(field_check, "run_engine", fail)
    assert field_check.main(["--out", str(tmp_path / "out.json")]) == 1
    (check,) = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert (check["passed"], "no such kernel" in check["why"]) == (False, True)


def test_a_fault_of_the_script_leaves_what_was_found_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field_check, "run_engine", lambda *arguments: Session([[]], [1.0], ""))
    monkeypatch.setattr(field_check, "accepting_heads", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        field_check.main(["--out", str(tmp_path / "out.json")])
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["complete"], verdicts(report)) == (False, {"the plain engine": True})


def test_no_time_left_is_no_failure_and_no_success(tmp_path: Path) -> None:
    assert field_check.main(["--time-s", "0", "--out", str(tmp_path / "out.json")]) == 0
    assert verdicts(json.loads((tmp_path / "out.json").read_text())) == {"the plain engine": None}


@pytest.mark.parametrize(("script", "why"), [("exit 3", "^the engine's log"), ("sleep 60", "^no answer within 1 s")])
def test_a_process_that_dies_or_hangs_is_reported_with_its_log(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho no such kernel >&2\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(field_check, "PATIENCE_S", 1)
    with pytest.raises(field_check.EngineFailed, match=why) as failed:
        field_check.run_engine(tmp_path, {}, [])
    assert str(failed.value).endswith("no such kernel\n")


def answers(*texts: str, gap: float = 0.01, passes: int = 1) -> list[Any]:
    return [Answer([ord(letter) for letter in text], passes, [gap] * len(text)) for text in texts]


@pytest.mark.parametrize(
    ("got", "gap", "exact", "passed"),
    [
        (["abcdefgh"] * 4, 9.0, True, True),
        (["abcdefgh"] * 3 + ["abcdefgx"], 0.01, True, False),  # float32 allows none
        (["abcdefgh"] * 3 + ["abcdefgx"], 0.01, False, True),  # 1 in 32 tokens
        (["abcdefgh"] * 3 + ["abcdefgx"], 0.21, False, False),  # no tie
        (["abcdefgh"] * 2 + ["abcdefgx"] * 2, 0.01, False, False),  # 2 in 32: too many
        (["abcdefgh"] * 3 + ["xbcdefgh"] * 2, 0.01, False, False),  # 2 in 26: what follows is not compared
        (["xbcdefgh"] * 4, 0.01, False, False),
    ],
)
def test_texts_may_part_seldom_and_at_ties(got: list[str], gap: float, exact: bool, passed: bool) -> None:
    expected = answers(*["abcdefgh"] * len(got), gap=gap)
    assert field_check.same_text("", expected, answers(*got), exact).passed is passed


@pytest.mark.parametrize(
    ("passes", "exact", "passed"),
    [([20] * 4, True, True), ([20, 20, 19, 21], True, False), ([20, 20, 19, 21], False, True)]
    + [([20, 20, 21, 21], False, True), ([20, 20, 20, 23], False, False), ([0] * 4, False, False)],
)
def test_passes_are_the_references(passes: list[int], exact: bool, passed: bool) -> None:
    got = [Answer([1] * 50, count) for count in passes]
    assert field_check.same_passes("", [20] * 4, got, exact).passed is passed


def test_heads_that_are_always_wrong_prove_nothing() -> None:
    assert field_check.same_passes("", [49], [Answer([1] * 50, 49)], True).passed is False


def test_samples_of_one_distribution_pass_and_of_two_fail() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = 0.7 ** torch.arange(40.0)
    shifted = weights.clone()
    shifted[:2] = weights[:2] * torch.tensor([0.8, 1.2])

    def draw(weights: torch.Tensor) -> list[int]:
        return torch.multinomial(weights, 4000, replacement=True, generator=generator).tolist()

    found = [field_check.same_distribution("", draw(weights), draw(weights)) for _ in range(200)]
    assert all(check.passed for check in found)
    p = torch.tensor([check.figures["p"] for check in found])
    assert 0.4 < p.mean() < 0.6  # uniform, if it is a p-value
    assert field_check.same_distribution("", draw(weights), draw(shifted)).passed is False
    assert field_check.same_distribution("", [1] * 4000, [1] * 4000).passed is None  # nothing to tell apart


def log(graphs: int, others: int) -> Any:
    lines = ["Decode batch, #running-req: 1, cuda graph: True, x"] * graphs
    lines += ["Decode batch, #running-req: 1, cuda graph: False, x"] * others
    return Session([], [], "\n".join(["Prefill batch, cuda graph: True, x", *lines]))


@pytest.mark.parametrize(
    ("with_graphs", "without", "passed"),
    [
        (log(40, 2), log(0, 40), True),
        (log(0, 40), log(0, 40), False),
        (log(20, 20), log(0, 40), False),
        (log(40, 0), log(40, 0), False),
        (log(0, 0), log(0, 0), False),
    ],
)
def test_graphs_count_as_used_where_the_log_says_so(with_graphs: Any, without: Any, passed: bool) -> None:
    assert field_check.graphs_were_used("", with_graphs, without).passed is passed
