"""Training on a miniature of Kimi-K2.5, in this process: what it prints is what replay and decoding give."""

import csv
import functools
import json
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from medusa_k25 import train as training
from medusa_k25.acceptance import Evaluator, ranks_of
from medusa_k25.cache import Cache, staging
from medusa_k25.cache.staging import Stage
from medusa_k25.checkpoint import SCORE, find_checkpoint, load_heads, read_record
from medusa_k25.config import EXIT_REQUEUE, compose
from medusa_k25.data.labels import IGNORE
from medusa_k25.data.sampler import Share
from medusa_k25.data.splits import SPLITS, Split
from medusa_k25.data.texts import Text, texts_of_cache
from medusa_k25.data.windows import documents_of, in_share, token_counts
from medusa_k25.heads import HEADS, DraftVocabulary, Speculator
from medusa_k25.loss import Teacher
from medusa_k25.module import MedusaModule, warmup_cosine
from medusa_k25.replay import answer_ranks, replay
from medusa_k25.reports.report import read_report, update_report
from medusa_k25.tree import Tree
from tests.tiny import cache_of


@pytest.fixture(scope="module")
def cache(tiny_k25, tmp_path_factory):
    return cache_of(tiny_k25, tmp_path_factory.mktemp("training") / "cache", num_documents=60)


@pytest.fixture(scope="module")
def config_of(cache, tiny_k25):
    """(run folder, overrides...) -> config of a short run"""

    def make(run, *overrides):
        return compose(
            [
                "target=tiny_k25",
                f"target.home={tiny_k25.path.parent}",
                f"cache={cache.path}",
                f"run_dir={run}",
                "draft_vocab_size=300",
                "trainer.max_steps=12",
                "trainer.val_check_interval=5",
                "trainer.log_every_n_steps=1",
                "data.window=16",
                "data.batch_size=4",
                "optimizer.lr=0.01",
                *([] if any(override.startswith("heads=") for override in overrides) else ["heads=residual"]),
                *overrides,
            ]
        )

    return make


@pytest.fixture
def config(config_of, tmp_path):
    """(overrides...) -> config of a short run in tmp_path/run"""
    return functools.partial(config_of, tmp_path / "run")


@pytest.fixture(scope="module")
def whole(config_of, tmp_path_factory):
    """(overrides...) -> the folder of a run that nothing interrupted, trained once for all who read it."""

    @functools.cache
    def folder(*overrides):
        run = tmp_path_factory.mktemp("whole") / "run"
        training.train(config_of(run, *overrides))
        return run

    return folder


OF_THE_MACHINE = {f"train/{name}" for name in ("positions_per_s", "data_wait", "mfu", "memory_GB")}


def weights(run: Path, which: str = "last") -> dict[str, torch.Tensor]:
    return load_heads(find_checkpoint(run / "checkpoints", which)).heads.state_dict()


def metrics(run: Path) -> dict[tuple[int, str], float]:
    """(step, name) -> value; every figure was written once, although steps were trained twice."""
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] not in OF_THE_MACHINE]
    table = {(int(row["step"]), row["metric"]): float(row["value"]) for row in rows}
    assert len(table) == len(rows), "a metric of a step is there twice"
    return table


def assert_same_run(one: Path, other: Path) -> None:
    """Weights bit for bit, and the same table of metrics."""
    expected, found = weights(one), weights(other)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert metrics(one) == metrics(other)


def test_training_learns_and_prints_the_acceptance_that_replay_gives(config, cache, tiny_k25, tmp_path, capsys):
    training.train(config())
    run = tmp_path / "run"
    out = capsys.readouterr().out
    checkpoint = load_heads(find_checkpoint(run / "checkpoints", "best"))
    lm_head_MD = checkpoint.vocabulary.rows(tiny_k25.lm_head).float()
    tree = Tree(checkpoint.record["tree"])
    for split in ("calibration", "heldout"):
        ranks = answer_ranks(
            Speculator(checkpoint.heads, checkpoint.vocabulary, lm_head_MD), cache, documents_of(cache, split)
        )
        assert checkpoint.record["metrics"][f"{split}/acceptance_tree"] == replay(ranks, tree).length
        assert checkpoint.record["metrics"][f"{split}/acceptance_chain"] == replay(ranks, Tree.chain(4)).length
    assert f"{checkpoint.record['metrics']['heldout/acceptance_tree']:.3f}" in out
    table = metrics(run)
    assert table[12, "train/loss_head1"] < table[1, "train/loss_head1"]
    assert {step for step, metric in table if metric == "heldout/acceptance_tree"} == {5, 10, 12}
    assert {path.name for path in (run / "checkpoints").iterdir()} <= {"step-000005", "step-000010", "step-000012"}
    record = json.loads((checkpoint.path / "heads.json").read_text())
    assert record["cache_fingerprint"] == cache.fingerprint
    assert record["target"]["fingerprints"] == tiny_k25.fingerprints
    assert record["config"]["seed"] == 1
    assert (run / "config.yaml").exists()


def test_the_first_loss_is_the_targets_own(config, cache, tiny_k25):
    """At step 0 head k's logits are lm_head(h_t), so its loss is the cross-entropy of the target's own logits."""
    built = training.build(config("+exp=smol_4heads", "target=tiny_k25"), tiny_k25, cache)
    batch = built.data.windows[Share([0], torch.ones(4))]
    hidden_ND, future_NK, _ = batch
    logits = hidden_ND @ built.module.lm_head_MD.T
    labels_KN = built.module.vocabulary.to_draft(future_NK[:, 1:]).T
    features_KND, _ = built.module.features_and_labels(batch)
    _, sum_K = built.module.loss(features_KND, built.module.lm_head_MD, labels_KN, torch.ones(4))
    expected = [torch.nn.functional.cross_entropy(logits, y, ignore_index=IGNORE, reduction="sum") for y in labels_KN]
    torch.testing.assert_close(sum_K, torch.stack(expected), rtol=1e-4, atol=1e-4)


class StopAt(Callback):
    """What a kill at a step leaves behind: nothing after it."""

    def __init__(self, step: int, how: Callable[[], None]):
        self.step, self.how = step, how

    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step == self.step and not index % trainer.accumulate_grad_batches:
            self.how()


class Killed(Exception):
    pass


def kill():
    raise Killed


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


def terminate():
    for _ in range(2):  # schedulers repeat themselves
        signal.raise_signal(signal.SIGTERM)


def with_callback(monkeypatch: pytest.MonkeyPatch, callback: Callback) -> None:
    build = training.build

    def build_with_callback(*args):
        built = build(*args)
        built.trainer.callbacks.append(callback)  # type: ignore[attr-defined]
        return built

    monkeypatch.setattr(training, "build", build_with_callback)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(config, whole, tmp_path, monkeypatch, workers):
    """12 steps at once equal 5, a kill in step 8, and 7 more: weights bit for bit, and the same table of metrics."""
    options = (f"data.num_workers={workers}", "data.window=8")
    with monkeypatch.context() as patch:
        with_callback(patch, StopAt(8, kill))
        with pytest.raises(Killed):
            training.train(config(*options))
    assert find_checkpoint(tmp_path / "run/checkpoints", "last").name == "step-000005"
    training.train(config(*options))
    assert_same_run(whole("data.window=8"), tmp_path / "run")  # which needed no worker


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind != "residual"])
def test_a_killed_run_of_every_type_goes_on_and_starts_another_one(config_of, tmp_path, monkeypatch, kind, capsys):
    options = (f"heads={kind}", "trainer.max_steps=5", "trainer.val_check_interval=2", "data.window=8")
    training.train(config_of(tmp_path / "whole", *options))
    with monkeypatch.context() as patch:
        with_callback(patch, StopAt(4, kill))
        with pytest.raises(Killed):
            training.train(config_of(tmp_path / "run", *options))
    training.train(config_of(tmp_path / "run", *options))
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    first = find_checkpoint(tmp_path / "run/checkpoints", "last")
    frozen = (f"warm_start={first}", "trainer.max_steps=1", "optimizer.lr=0.0", "optimizer.weight_decay=0")
    training.train(config_of(tmp_path / "warm", f"heads={kind}", *frozen))
    assert f"{kind} heads copied" in capsys.readouterr().out
    before, warm = weights(tmp_path / "run"), weights(tmp_path / "warm")
    assert all(torch.equal(before[name], warm[name]) for name in before)


@pytest.mark.parametrize(("how", "status"), [(press_ctrl_c, KeyboardInterrupt), (terminate, SystemExit)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_signal_saves_and_the_same_command_goes_on(config, whole, tmp_path, monkeypatch, how, status, accumulate):
    options = (f"trainer.accumulate_grad_batches={accumulate}", "data.batch_size=2")
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with monkeypatch.context() as patch:
        with_callback(patch, StopAt(7, how))
        with pytest.raises(status) as ended:
            training.train(config(*options))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
    if status is SystemExit:
        assert ended.value.code == EXIT_REQUEUE
    assert find_checkpoint(tmp_path / "run/checkpoints", "last").name == "step-000008"
    assert find_checkpoint(tmp_path / "run/checkpoints", "best").name == "step-000005"  # the other was not validated
    training.train(config(*options))
    assert_same_run(whole(*options), tmp_path / "run")


def test_a_signal_at_a_validation_waits_for_it(config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        with_callback(patch, StopAt(9, terminate))
        with pytest.raises(SystemExit):
            training.train(config())
    last = find_checkpoint(tmp_path / "run/checkpoints", "last")
    assert last.name == "step-000010"
    assert "heldout/acceptance_tree" in read_record(last)["metrics"]


def validate_as(monkeypatch: pytest.MonkeyPatch, speeds: dict[int, float]) -> None:
    """Validations find these speeds on calibration text, by step."""
    validate = MedusaModule.on_validation_epoch_end

    def scripted(module: MedusaModule) -> None:
        validate(module)
        module.validation_metrics[SCORE] = speeds[module.trainer.global_step]

    monkeypatch.setattr(MedusaModule, "on_validation_epoch_end", scripted)


def test_a_run_ends_when_validations_stay_behind_the_best_and_goes_on_with_more_patience(
    config, config_of, tmp_path, monkeypatch, capsys
):
    validate_as(monkeypatch, {2: 1.0, 4: 1.2, 6: 1.1, 8: 1.15, 10: 1.19, 12: 1.18, 14: 1.2, 16: 1.0})
    options = ("trainer.val_check_interval=2", "trainer.max_steps=16")
    training.train(config(*options, "patience=2"))
    checkpoints = tmp_path / "run/checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"step-000004", "step-000008"}  # the best and the last
    assert "for 2 validations: ended at step 8 of 16" in capsys.readouterr().out
    before = weights(tmp_path / "run")
    training.train(config(*options, "patience=2"))
    assert "run ended early, at step 8 of 16; raise patience to go on" in capsys.readouterr().out
    assert all(torch.equal(before[name], found) for name, found in weights(tmp_path / "run").items())
    training.train(config(*options, "patience=5"))  # at step 14 as fast as the best: it counts anew
    assert {path.name for path in checkpoints.iterdir()} == {"step-000014", "step-000016"}
    training.train(config_of(tmp_path / "without", *options))
    assert_same_run(tmp_path / "without", tmp_path / "run")


def test_a_killed_run_remembers_for_how_long_it_has_waited(config, tmp_path, monkeypatch):
    options = ("trainer.val_check_interval=2", "trainer.max_steps=12", "patience=2")
    with monkeypatch.context() as patch:
        validate_as(patch, {2: 1.2, 4: 1.1})
        with_callback(patch, StopAt(5, kill))
        with pytest.raises(Killed):
            training.train(config(*options))
    validate_as(monkeypatch, {6: 1.0})
    training.train(config(*options))
    assert find_checkpoint(tmp_path / "run/checkpoints", "last").name == "step-000006"


@pytest.mark.parametrize("setting", ["patience=0", "patience=0.5", "patience=soon"])
def test_patience_is_a_number_of_validations(config, setting):
    with pytest.raises(ValueError, match=f"{setting}: expected a number of validations, at least 1, or null"):
        training.train(config(setting))


@pytest.mark.parametrize("options", [(), ("loss=distillation",), ("loss=mix", "heads.own_lm_head=true")], ids=str)
def test_micro_batches_and_windows_of_other_sizes_train_the_same(config, whole, tmp_path, options):
    """One division by the labels of the step: 2 micro-batches of 2 windows are 1 of 4, to 1e-4 in every figure."""
    training.train(config(*options, "data.batch_size=2", "trainer.accumulate_grad_batches=2"))
    one, run = metrics(whole(*options)), metrics(tmp_path / "run")
    assert run.keys() == one.keys()
    for key, value in one.items():
        assert run[key] == pytest.approx(value, rel=1e-4), key


def test_the_first_distillation_loss_is_the_distance_to_the_teacher(config, cache, tiny_k25):
    """At step 0 head k's logits are lm_head(h_t), its teacher's lm_head(h_{t+k})."""
    built = training.build(config("loss=distillation"), tiny_k25, cache)
    batch = built.data.windows[Share([0, 1], torch.ones(4))]
    logits = (batch.hidden_ND @ built.module.lm_head_MD.T).log_softmax(dim=1)
    features_KND, labels_KN = built.module.features_and_labels(batch)
    teacher = Teacher(batch.hidden_ND, built.module.lm_head_MD)
    _, sum_K = built.module.loss(features_KND, built.module.lm_head_MD, labels_KN, torch.ones(4), teacher)
    for k in range(4):
        rows = (labels_KN[k] != IGNORE).nonzero().flatten()
        kl = torch.nn.functional.kl_div(logits[rows], logits[rows + k + 1], log_target=True, reduction="sum")
        torch.testing.assert_close(sum_K[k], kl, rtol=1e-3, atol=1e-3)


def test_a_warm_start_begins_where_the_other_run_ended(config, whole, tmp_path, capsys):
    first = find_checkpoint(whole() / "checkpoints", "last")
    training.train(config(f"warm_start={first}", "trainer.max_steps=1", "optimizer.lr=0.0", "optimizer.weight_decay=0"))
    assert "300 of 300" in capsys.readouterr().out
    before, warm = weights(whole()), weights(tmp_path / "run")
    assert all(torch.equal(before[name], warm[name]) for name in before)


def test_a_rank_without_a_window_is_refused_before_the_start(config, tmp_path):
    with pytest.raises(ValueError, match="7 training windows for 8 ranks: a rank would have nothing to do"):
        training.train(config("trainer.devices=8", "data.window=145"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["trainer.max_steps=abc", "trainer.max_steps=-1", "trainer.num_nodes=0.5"])
def test_numbers_that_cannot_be_meant_are_refused(config, setting):
    with pytest.raises(ValueError, match=f"{setting}: expected a whole number, at least 1"):
        training.train(config(setting))


@pytest.mark.parametrize("setting", ["data.batch_size=0", "data.window=0", "data.num_workers=-1"])
def test_data_settings_that_cannot_be_meant_are_refused(config, setting):
    with pytest.raises(ValueError, match=r"expected data\.window and data\.batch_size of at least 1"):
        training.train(config(setting))


@pytest.mark.parametrize("devices", ["-1", "0", "[0,1]", "'0,1'"])
def test_devices_are_a_number(config, devices):
    with pytest.raises(ValueError, match="expected a number of devices, or auto"):
        training.train(config(f"trainer.devices={devices}"))


def test_the_arithmetic_of_short_epochs(config, tiny_k25, cache):
    """A step never crosses an epoch, so a step of more windows than there are is an epoch."""
    built = training.build(config("data.batch_size=1000"), tiny_k25, cache)
    assert "12 steps, 1 an epoch: 12.0 epochs of 1,012 positions; 3 validations of" in built.summary


def test_a_prompt_that_another_split_reports_on_is_left_out_and_counted(config, tiny_k25, cache):
    assert "left out" not in training.build(config(), tiny_k25, cache).summary
    copy = Cache.open(cache.path)
    train, heldout = documents_of(copy, "train"), documents_of(copy, "heldout")
    for document, reported in zip(train[:2], heldout, strict=False):
        # the group keeps it in training text, whatever its prompt
        copy.documents[copy.documents.index(document)] = replace(document, group=document.hash, hash=reported.hash)
    built = training.build(config(), tiny_k25, copy)
    assert f"documents: {len(train) - 2} train, " in built.summary
    assert "; 2 left out, their prompts are in a split that is reported on" in built.summary
    assert {run.document.id for run in built.data.windows.runs} == {document.id for document in train[2:]}


def test_a_staged_run_is_the_same_run_and_says_what_is_staged(config, whole, cache, tiny_k25, tmp_path, capsys):
    assert "stage  " not in training.build(config(), tiny_k25, cache).summary
    stage = f"data.stage_dir={tmp_path / 'stage'}"
    training.train(config(stage, "data.stage_gb=0.5"))
    out = capsys.readouterr().out
    folder = f"{tmp_path / 'stage' / cache.fingerprint[:16]}: "
    assert f"stage       {folder}0 of {cache.num_shards} shards, 0.00 GB of" in out
    assert f"staged in {folder}{cache.num_shards} of {cache.num_shards} shards" in out
    assert metrics(tmp_path / "run") == metrics(whole())
    training.train(config(stage))  # where shards are copied to is not what makes a run
    out = capsys.readouterr().out
    assert f"stage       {folder}{cache.num_shards} of {cache.num_shards} shards" in out
    assert f"{cache.num_shards} of them from an earlier run (at most 500.00 GB); not copying\n" in out
    with pytest.raises(ValueError, match="expected more than 0"):
        training.train(config(stage, "data.stage_gb=0"))


@pytest.mark.parametrize("how", [kill, terminate])
def test_staging_ends_with_the_run(config, tmp_path, monkeypatch, how):
    real, stop, stopping = staging.blocks, Stage.stop, threading.Event()

    def slow(path):
        for block in real(path):
            assert stopping.wait(60)
            yield block

    def stop_in_the_middle(stage):
        stage._stopping.set()
        stopping.set()
        stop(stage)

    monkeypatch.setattr(staging, "blocks", slow)
    monkeypatch.setattr(Stage, "stop", stop_in_the_middle)
    with_callback(monkeypatch, StopAt(3, how))
    with pytest.raises((Killed, SystemExit)):
        training.train(config(f"data.stage_dir={tmp_path / 'stage'}"))
    assert not any(thread.name == "stage" for thread in threading.enumerate())
    assert [path for path in (tmp_path / "stage").rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_folders_of_the_user_are_neither_read_nor_dropped(config, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("best", "last"):
        (tmp_path / name).mkdir()
    shutil.copytree(whole(), tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"
    shutil.copytree(find_checkpoint(checkpoints, "last"), checkpoints / "step-000012-mine")
    training.train(config("trainer.max_steps=13"))
    assert find_checkpoint(checkpoints, "last").name == "step-000013"
    assert (checkpoints / "step-000012-mine").is_dir()


def test_what_a_kill_leaves_behind_is_mended(config, tmp_path):
    """A half-written checkpoint, a torn table, a report that was not written any more, another version's config."""
    run = tmp_path / "run"
    training.train(config("trainer.max_steps=5"))
    (run / "checkpoints/step-000006.part").mkdir()
    with (run / "metrics.csv").open("a") as file:
        file.write("6,train/lo")
    config_file = run / "config.yaml"
    config_file.write_text(config_file.read_text().replace("# medusa_k25 ", "# medusa_k25 0.0.0.", 1))
    training.train(config())
    assert not list((run / "checkpoints").glob("*.part"))
    assert metrics(run)[12, "heldout/acceptance_tree"] >= 1
    (run / "report.json").unlink()
    training.train(config())
    assert "train" in json.loads((run / "report.json").read_text())
    (run / "metrics.csv").write_text("")
    training.train(config("trainer.max_steps=13"))
    assert max(step for step, _ in metrics(run)) == 13


def test_head_weights_for_other_heads_are_refused_before_the_start(config, tmp_path):
    with pytest.raises(ValueError, match=r"loss\.head_weights has 3 numbers for 4 heads"):
        training.train(config("loss.head_weights=[1,1,1]"))
    assert not (tmp_path / "run").exists()


def test_resuming_can_be_forbidden(config):
    training.train(config("trainer.max_steps=5", "resume=never"))
    with pytest.raises(ValueError, match=r"resume=never, but .* holds step-000005; choose another name="):
        training.train(config("resume=never"))
    with pytest.raises(ValueError, match="resume=yes: expected auto or never"):
        training.train(config("resume=yes"))


def test_a_damaged_checkpoint_is_named(config, whole, tmp_path):
    shutil.copytree(whole(), tmp_path / "run")
    last = find_checkpoint(tmp_path / "run/checkpoints", "last")
    shutil.rmtree(last / "trainer.ckpt", ignore_errors=True)
    (last / "trainer.ckpt").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"step-000012 has no trainer\.ckpt to go on from; remove that folder"):
        training.train(config("trainer.max_steps=13"))
    (last / "heads.json").write_text("")
    with pytest.raises(ValueError, match=r"step-000012/heads\.json is damaged"):
        training.train(config("trainer.max_steps=13"))


def test_a_loss_that_is_no_number_ends_the_training(config):
    with pytest.raises(ValueError, match="training has diverged; lower optimizer.lr"):
        training.train(config("optimizer.lr=1e30"))


def test_other_steps_are_said(config, capsys):
    training.train(config("trainer.max_steps=5"))
    training.train(config("data.batch_size=2"))
    assert "a step takes 2 windows from here on, not 4; to keep it, choose" in capsys.readouterr().out


def test_a_run_that_was_moved_goes_on(config, whole, tmp_path):
    shutil.copytree(whole(), tmp_path / "run")
    training.train(config("trainer.max_steps=13", "data.num_workers=1"))
    assert find_checkpoint(tmp_path / "run/checkpoints", "last").name == "step-000013"


def test_a_sweep_over_several_devices_is_refused_with_the_way_to_do_it(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "--multirun", "seed=1,2", "trainer.devices=2"])
    with pytest.raises(SystemExit) as ended:
        training.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "every rank would start the whole sweep again. Run the settings one after another" in said
    assert "Traceback" not in said


def test_a_finished_run_is_left_alone_and_can_be_prolonged(config, whole, tmp_path):
    shutil.copytree(whole(), tmp_path / "run")
    before = weights(tmp_path / "run")
    training.train(config())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), weights(tmp_path / "run").values(), strict=True))
    training.train(config("trainer.max_steps=14"))
    assert find_checkpoint(tmp_path / "run/checkpoints", "last").name == "step-000014"


def test_a_run_folder_of_another_configuration_is_refused(config):
    training.train(config("trainer.max_steps=1"))
    with pytest.raises(ValueError, match=r"another run .*lr: 0\.02.*another name="):
        training.train(config("optimizer.lr=0.02"))


def test_a_refused_command_leaves_the_run_folder_free(config):
    with pytest.raises(ValueError, match="draft_vocab_size=9999"):
        training.train(config("draft_vocab_size=9999"))
    with pytest.raises(ValueError, match="max_width >= 1"):
        training.train(config("max_width=0"))
    training.train(config("trainer.max_steps=1"))


def test_a_killed_capture_is_finished_before_training(config, cache, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(cache.path, run / "cache")
    made = []
    monkeypatch.setattr(training, "make_inputs", lambda cfg, target: made.append(cfg.cache))
    overrides = (f"cache={run / 'cache'}", f"conversations={run / 'conversations.jsonl'}", "trainer.max_steps=1")
    training.train(config(*overrides))  # a cache without conversations was brought along
    assert made == []
    (run / "conversations.jsonl").touch()
    training.train(config(*overrides))
    assert made == [str(run / "cache")]
    update_report(run, "capture", {})
    training.train(config(*overrides))
    assert len(made) == 1


def test_missing_inputs_name_the_commands_that_make_them(config, tmp_path):
    with pytest.raises(ValueError, match=r"no cache at .*medusa_k25\.generate.*medusa_k25\.capture"):
        training.train(config("make_missing_inputs=false", f"cache={tmp_path / 'none'}"))


def test_a_cache_of_another_target_is_refused(config, tiny_llama, tmp_path):
    other = cache_of(tiny_llama, tmp_path / "other", num_documents=3)
    with pytest.raises(ValueError, match="was made for target tiny-llama"):
        training.train(config(f"cache={other.path}"))


def test_a_cache_without_a_split_is_refused(config, tiny_k25, tmp_path):
    small = cache_of(tiny_k25, tmp_path / "small", num_documents=2)
    with pytest.raises(ValueError, match="documents among 2; capture more conversations"):
        training.train(config(f"cache={small.path}"))


def test_checkpoints_hold_neither_lm_head_nor_anything_frozen(config, tmp_path, tiny_k25):
    training.train(config("trainer.max_steps=2"))
    state = torch.load(find_checkpoint(tmp_path / "run/checkpoints", "last") / "trainer.ckpt", weights_only=True)[
        "state_dict"
    ]
    assert set(state) == {f"heads.heads.{k}.0.linear.{part}" for k in range(4) for part in ("weight", "bias")}


def test_trained_heads_beat_untrained_ones_in_the_report(config, cache, tiny_k25, tmp_path):
    training.train(config("trainer.max_steps=40"))
    best = load_heads(find_checkpoint(tmp_path / "run/checkpoints", "best"))
    lm_head_MD = best.vocabulary.rows(tiny_k25.lm_head).float()

    def evaluate(heads):
        evaluator = Evaluator([2, 3, 5], 8, 4, 10_000, None, 1, 1024, None)
        texts: dict[Split, list[Text]] = {split: texts_of_cache(cache, split) for split in SPLITS}
        replayed = evaluator.replayed(texts)
        del texts["train"]
        ranks = ranks_of(Speculator(heads, best.vocabulary, lm_head_MD), cache, texts)
        one = texts["heldout"][-1]
        assert ranks_of(Speculator(heads, best.vocabulary, lm_head_MD), cache, {"heldout": [one]})[one].equal(
            ranks[one]
        )
        return evaluator.run(replayed, evaluator.predictors([], replayed, ranks), ranks)

    evaluation, untrained = evaluate(best.heads), evaluate(type(best.heads)(tiny_k25.hidden_size))
    trained, before = evaluation.row("heads, tree", 5), untrained.row("heads, tree", 5)
    assert trained.every.length > before.every.length > 1
    assert evaluation.row("heads, chain", 5).every.emitted == trained.every.emitted
    for predictor in ("heads, tree", "n-gram lookup"):
        lengths = [evaluation.row(predictor, n).every.length for n in (2, 3, 5)]
        assert lengths == sorted(lengths)
    assert all(head == sorted(head) for head in evaluation.accuracy_KR)


def test_a_run_on_a_share_learns_from_that_alone_and_is_judged_on_the_same_text(config, cache, tiny_k25, tmp_path):
    whole, half = (training.build(config(f"data.share={share}"), tiny_k25, cache) for share in (1.0, 0.5))
    chosen = in_share(whole.data.documents["train"], 0.5)
    assert 0 < len(chosen) < len(whole.data.documents["train"])
    assert half.data.documents["train"] == chosen
    assert {run.document.id for run in half.data.windows.runs} == {document.id for document in chosen}
    for split in ("calibration", "heldout"):
        assert half.data.documents[split] == whole.data.documents[split]
    counts_V = token_counts(cache, chosen)
    assert torch.equal(half.module.vocabulary.token_ids_M, DraftVocabulary.most_frequent(counts_V, 300).token_ids_M)
    training.train(config("data.share=0.5", "trainer.max_steps=2"))
    assert read_report(tmp_path / "run")["train"]["positions"] == half.data.windows.num_positions


def test_the_schedule_rises_and_falls():
    factor = warmup_cosine(0.1, 0.05, max_steps=100)
    assert [round(factor(step), 3) for step in (0, 9, 10, 55, 100, 200)] == [0.1, 1.0, 1.0, 0.525, 0.05, 0.05]
    with pytest.raises(ValueError, match="warmup_fraction"):
        warmup_cosine(1.5, 0.05, 100)


def test_lightning_is_the_version_without_the_malicious_upload():
    major, minor, patch = (int(part) for part in L.__version__.split(".")[:3])
    assert (major, minor, patch) >= (2, 6, 4)
