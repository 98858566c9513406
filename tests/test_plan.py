"""The verb plan: it needs an experiment and a hardware file, no checkpoint, cache or GPU."""

import inspect
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from medusa_k25 import plan
from medusa_k25.config import VERBS, ConfigError, compose, conf_dir
from medusa_k25.conversations import prompt_key
from medusa_k25.costs.served import KIMI_K25, KIMI_K25_CONFIG
from medusa_k25.data.splits import SPLITS, split_of
from medusa_k25.heads import HEADS
from medusa_k25.target_builders import find_checkpoint

EXPERIMENTS = sorted(file.stem for file in (conf_dir() / "exp").glob("*.yaml"))
K25 = "+exp=k25_4heads"
NOWHERE = "target.path=no/such-model"


@pytest.fixture
def planned(tmp_path, capsys):
    """(overrides...) -> the plan's section of report.json, what was printed, and plan.md"""

    def run(*overrides):
        groups = ("plan", "hardware", "heads", "loss", "optimizer")
        inspect.unwrap(plan.main)(compose([f"run_dir={tmp_path / 'run'}", *overrides], groups=groups))
        report = json.loads((tmp_path / "run" / "report.json").read_text())
        return report["plan"], capsys.readouterr().out, (tmp_path / "run" / "plan.md").read_text()

    return run


@pytest.fixture
def smollm2_like(tmp_path):
    """Overrides: a target of SmolLM2's sizes whose checkpoint is its config.json."""
    folder = tmp_path / "small"
    folder.mkdir()
    sizes = {"hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({**sizes, "intermediate_size": 128, "tie_word_embeddings": True}))
    return ["+exp=k25_4heads", "hardware=cpu", "trainer=cpu", "strategy=auto", f"target.path={folder}"]


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name.startswith("k25")])
def test_every_experiment_plans_without_a_checkpoint(planned, name):
    report, out, markdown = planned(f"+exp={name}", NOWHERE, "alternative=h200_x8")
    assert report["data"]["samples"] == 37_000
    assert all(machine["memory_fits"] for machine in report["machines"])
    assert all(hours > 0 for machine in report["machines"] for hours in machine["hours"].values())
    assert report["recommendation"] in out
    for heading in ("## Data", "## Capture", "## Vocabulary", "## Training settings", "## Commands", "## Deployment"):
        assert heading in markdown


def test_the_embedded_default_plans(planned, tiny_llama):
    report, out, _ = planned("target=local", f"target.path={tiny_llama.path}")
    assert report["machines"][0]["hardware"] == "cpu"
    assert (report["ways"], report["recommendation"], report["serving"]) == ([], None, {})
    assert "cpu has the rates of smollm2-135m-instruct, not of local: no break-even" in out


def test_kimi_k25_is_what_its_sizes_say(planned):
    report, out, markdown = planned(K25, NOWHERE, "alternative=b200_nvl8")
    home, rented = report["machines"]
    assert report["training"]["trained_parameters"] == pytest.approx(77.1e6, rel=1e-3)
    assert home["positions_per_s"] == pytest.approx(499e3, rel=0.01)
    assert home["hours"]["generate"] == pytest.approx(7.7, abs=0.05)
    assert report["cache_bytes"]["all, bfloat16"] == pytest.approx(1.06e12, rel=2e-3)
    assert (home["price_per_hour"], rented["price_per_hour"]) == (None, 40)
    four = next(one for one in report["serving"]["rtx_pro_6000_x8"] if one["nodes"] == 4)
    assert four["length"] == pytest.approx(2.46, abs=0.005)
    assert re.search(r"with 4 nodes they pay on rtx_pro_6000_x8 from 2\.46 on and on b200_nvl8 from 1\.\d\d on", out)
    assert "tokens a pass on, of the 5" not in out
    eight = planned(K25, NOWHERE, "num_nodes=8")[1]
    assert "on rtx_pro_6000_x8 num_nodes=8 pays from 4.68 tokens a pass on, of the 5 that 4 heads" in eight
    for said in (
        "generate_tok_s 2000 (assumed",
        "own machine is worth $15 (assumed",
        "extrapolated",
        "that it verified 4 tokens is assumed",
    ):
        assert said in out and said in markdown


def test_the_types_of_heads_are_compared_before_training(planned):
    """The recipe drafts in 6% of a pass at most, whatever its size; plain heads are two options away."""
    report, out, markdown = planned(K25, NOWHERE)
    types = {kind["served"]["name"]: kind for kind in report["types"]}
    assert list(types) == list(HEADS)
    assert [name for name, kind in types.items() if kind["served"]["chosen"]] == ["recurrent"]
    for size in types["recurrent"]["served"]["sizes"]:
        assert size["drafting"]["ms"] < 0.06 * size["pass_ms"]
        assert size["drafting"]["collectives"] == 1
    own = types["recurrent"]
    assert own["hours"] == pytest.approx(report["machines"][0]["hours"]["train"])
    assert own["flops_per_position"] == report["flops_per_position"]
    usual = own["served"]["sizes"][0]
    row = f"{usual['drafting']['ms'] / usual['pass_ms']:.1%} | {usual['break_even']:.2f} | "
    assert "## Types of heads on rtx_pro_6000_x8" in markdown and row in markdown
    assert "recurrent (this plan)" in out and "recurrent heads: 77.1 M parameters" in out
    plain, out, _ = planned(K25, NOWHERE, "heads=residual", "draft_vocab_size=null")
    assert plain["training"]["trained_parameters"] == pytest.approx(205.5e6, rel=1e-3)
    assert plain["machines"][0]["positions_per_s"] == pytest.approx(92e3, rel=0.01)
    assert "residual (this plan)" in out


def test_hero_data_are_dearer_at_home_than_a_rented_machine(planned):
    report, out, _ = planned(K25, NOWHERE, "alternative=b200_nvl8", "plan.samples=200000")
    assert report["ways"][0]["hours"] > 40
    assert "it is worth renting" in report["recommendation"]
    assert "scaled from 37,000 samples" in out
    assert "are 0.65 epochs of this data; two are trainer.max_steps=" in out


def test_a_checkpoint_that_is_there_gives_the_sizes(tmp_path, capsys):
    text = {**KIMI_K25_CONFIG["text_config"], "num_hidden_layers": 31}
    (tmp_path / "config.json").write_text(json.dumps({**KIMI_K25_CONFIG, "text_config": text}))
    served = plan.served_of(compose([K25, f"target.path={tmp_path}"]).target)
    assert served.layers == 31
    assert "WARNING" not in capsys.readouterr().out
    assert plan.served_of(compose([K25, NOWHERE]).target) == KIMI_K25
    assert "WARNING: target.path=no/such-model is not there (" in capsys.readouterr().out


def write_conversations(path: Path, count: int) -> None:
    rows = [
        {
            "id": f"{i}",
            "group": None,
            "messages": [],
            "prompt_ids": [i, i + 1, i + 2],
            "answer_ids": list(range(5 + i % 3)),
            "answer": "",
            "finish_reason": "stop",
            "sampling": {"mode": "greedy", "temperature": 0.0, "top_p": 1.0},
            "dtype": "float32",
            "label": None,
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_conversations_are_counted(planned, tmp_path):
    file = tmp_path / "answers.jsonl"
    write_conversations(file, 60)
    data = planned(K25, NOWHERE, f"conversations={file}")[0]["data"]
    assert (data["samples"], data["prompt_tokens"], data["answer_tokens"]) == (60, 180, 360)
    assert (data["longest_answer"], data["source"]) == (7, f"counted in {file}")
    splits = [split_of(None, prompt_key([i, i + 1, i + 2])) for i in range(60)]
    for split in SPLITS:
        states = sum(4 + i % 3 for i in range(60) if splits[i] == split)
        assert data[split] == {"answers": splits.count(split), "states": states}


def test_messages_are_counted_with_a_tokenizer_alone(planned, tiny_llama, tmp_path):
    file = tmp_path / "messages.jsonl"
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "its answer"}]
    file.write_text("".join(json.dumps({"id": f"{i}", "messages": turns}) + "\n" for i in range(3)))
    data = planned(K25, NOWHERE, f"conversations={file}", f"tokenizer={tiny_llama.path}")[0]["data"]
    assert data["samples"] == 3
    assert data["answer_tokens"] >= 3 * len(tiny_llama.load_tokenizer()("its answer")["input_ids"])
    file.write_text(json.dumps({"id": "0", "messages": turns}) + "\n" + json.dumps({"id": "1", "messages": 3 * turns}))
    both = planned(K25, NOWHERE, f"conversations={file}", f"tokenizer={tiny_llama.path}")[0]["data"]
    per_answer = (data["prompt_tokens"] + data["answer_tokens"]) / 3
    assert both["samples"] == 4
    # what was said before an answer is counted once, as it is captured once
    assert both["prompt_tokens"] + both["answer_tokens"] == pytest.approx(4 * per_answer, rel=0.1)
    with pytest.raises(ValueError, match="name the target's tokenizer, tokenizer=FOLDER"):
        planned(K25, NOWHERE, f"conversations={file}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["alternative=b200_nvl"], r"conf/hardware has no 'b200_nvl'; did you mean 'b200_nvl8'\? \(it has b200_nvl8, "),
        (["alternative=rtx_pro_6000_x8"], "alternative=rtx_pro_6000_x8 is the machine that hardware= names"),
        (["conversations=no/such.jsonl"], "no conversations at .*no/such.jsonl"),
        (["hardware.generate_tok_s=null"], "generate_tok_s is null.* in conf/hardware/rtx_pro_6000_x8.yaml"),
        (["hardware.train_share.value=1.5"], "train_share: value is 1.5, expected a number above 0, at most 1"),
        (["plan.own_hour=-1"], "plan.own_hour=-1: expected 0 or more"),
        (["calibrate=true"], r"times this machine \(GPU: none\), but hardware rtx_pro_6000_x8 has GPU: RTX PRO 6000"),
        (["pilot=[no/such]"], "pilot: no/such is no trained run"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_error(planned, overrides, message, tmp_path):
    with pytest.raises(Exception, match=message) as raised:
        planned(K25, NOWHERE, *overrides)
    assert isinstance(raised.value.__cause__ or raised.value, ValueError | ConfigError)
    assert not (tmp_path / "run").exists()


def test_calibration_replaces_the_rate_of_the_file(planned, smollm2_like, monkeypatch):
    monkeypatch.setattr(plan, "CALIBRATION_S", 0.2)
    settings = [*smollm2_like, "draft_vocab_size=256", "data.window=16", "data.batch_size=4"]
    assumed = planned(*settings)[0]["machines"][0]
    report, out, _ = planned(*settings, "calibrate=true")
    measured = report["machines"][0]
    assert 1e2 < measured["positions_per_s"] < 1e8
    assert measured["positions_per_s"] != assumed["positions_per_s"]
    assert f"timed {measured['positions_per_s']:,.0f} positions/s" in out


def trained_run(
    folder: Path, positions: int, speed: float, hardware: str = "b200_nvl8", cache: str = "runs/a/cache"
) -> str:
    folder.mkdir(parents=True)
    metrics = {"heldout/acceptance_tree": 1.4 * speed, "heldout/speedup": speed, "num_nodes": 8}
    (folder / "report.json").write_text(json.dumps({"train": {"positions": positions, "metrics": metrics}}))
    (folder / "config.yaml").write_text(f"hardware: {{name: {hardware}}}\ncache: {cache}\n")
    return str(folder)


def test_a_pilot_says_whether_its_heads_will_pay(planned, tmp_path):
    def said(name, *speeds):
        runs = [trained_run(tmp_path / f"{name}{i}", 10**5 * 2**i, speed) for i, speed in enumerate(speeds)]
        report, out, _ = planned(K25, NOWHERE, f"pilot=[{','.join(reversed(runs))}]", "hardware=b200_nvl8")
        pilot = report["pilot"]
        assert pilot["interval"][0] <= pilot["expected_speed"] <= pilot["interval"][1]
        assert [point["value"] for point in pilot["points"]] == list(speeds)
        assert pilot["verdict"] in out
        return pilot["verdict"]

    assert "WARNING: these heads will not reach break-even on b200_nvl8 (8 nodes)" in said("flat", 0.7, 0.7, 0.7)
    assert "expected to reach break-even" in said("good", 1.3, 1.35, 1.38)
    assert "too close to call" in said("close", 0.8, 0.9, 0.95)
    assert "too close to call" in said("unsure", 1.1, 1.1, 1.1)  # as the cycle is: it was put together from parts
    with pytest.raises(ValueError, match="chose its tree for hardware=cpu, this plan is for rtx_pro_6000_x8"):
        planned(K25, NOWHERE, f"pilot=[{trained_run(tmp_path / 'other', 10, 1.5, 'cpu')}]")
    elsewhere = [trained_run(tmp_path / f"on{i}", 10 + i, 1.5, cache=f"cache{i}") for i in range(2)]
    with pytest.raises(ValueError, match="runs on cache0, cache1 are judged on different text"):
        planned(K25, NOWHERE, f"pilot=[{','.join(elsewhere)}]", "hardware=b200_nvl8")


def test_the_commands_of_a_plan_exist(planned, tmp_path, monkeypatch, capsys):
    """From the command line, which knows the experiment's name."""
    arguments = ["plan", K25, NOWHERE, "alternative=b200_nvl8", f"run_dir={tmp_path}", "name=mine"]
    monkeypatch.setattr(sys, "argv", arguments)
    plan.main()
    assert f"wrote {tmp_path / 'plan.md'}" in capsys.readouterr().out
    commands = (tmp_path / "plan.md").read_text().partition("```sh\n")[2].partition("```")[0].splitlines()
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        if words[0] == "python":
            assert words[2].removeprefix("medusa_k25.") in VERBS
            compose(words[3:])
        else:
            assert words[:3] == ["NAME=mine", "EXP=k25_4heads", "CACHE=runs/mine/cache"]
            assert (Path(__file__).parents[1] / words[3]).exists()


def test_a_model_that_is_not_there_is_really_not_there():
    with pytest.raises(ValueError, match="neither a folder nor in the local"):
        find_checkpoint("no/such-model")


def test_the_commands_of_the_next_steps_exist():
    root = Path(__file__).parents[1]
    lines = (root / "notes" / "next-steps-k25.md").read_text().splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("    ") and line.strip()]
    assert len(commands) >= 10
    for words in commands:
        if words[0] == "python":
            assert words[2].removeprefix("medusa_k25.") in VERBS, words
            compose(words[3:])
        else:
            recipe = next(word for word in words if word.startswith("launch/"))
            assert (root / recipe).exists()
            compose(words[words.index(recipe) + 1 :])
