"""Two ranks with the real engines, over gloo: DDP and DeepSpeed ZeRO 1 to 3 train what one rank trains, and go on."""

import inspect
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from medusa_k25 import evaluate, export
from medusa_k25 import train as training
from medusa_k25.checkpoint import find_checkpoint, load_heads, read_record
from medusa_k25.config import EXIT_REQUEUE, compose, conf_dir
from medusa_k25.heads import HEADS
from medusa_k25.serving.formats import load_served
from tests.ranks import on_ranks
from tests.test_training import metrics, weights
from tests.tiny import cache_of

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
STEPS = 12
EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "exp").glob("k25_*.yaml"))
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cache(tiny_k25, tmp_path_factory):
    return cache_of(tiny_k25, tmp_path_factory.mktemp("ranks") / "cache", num_documents=62)


@pytest.fixture(scope="module")
def job(cache, tiny_k25):
    """job(run folder, overrides..., kill=, signal=): 12 steps of 16 windows, about 5 an epoch, on 2 ranks."""

    def make(run, *overrides, **what):
        shared = [
            "target=tiny_k25",
            f"target.home={tiny_k25.path.parent}",
            f"cache={cache.path}",
            f"run_dir={run}",
            "draft_vocab_size=300",
            f"trainer.max_steps={STEPS}",
            "trainer.val_check_interval=4",
            "trainer.log_every_n_steps=1",
            "trainer.devices=2",
            "trainer.accumulate_grad_batches=2",
            "data.window=16",
            "data.batch_size=4",
            "optimizer.lr=0.01",
        ]
        if not any(override.startswith("heads=") for override in overrides):
            shared.append("heads=residual")
        return {"overrides": [*shared, *overrides], **what}

    return make


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """Uninterrupted runs of every strategy on 2 ranks, and of 1 rank, all of the same global batch."""
    folder = tmp_path_factory.mktemp("whole")
    uneven = ("strategy=zero3", "data.window=145", "data.batch_size=1", "trainer.accumulate_grad_batches=1")
    on_ranks(
        2, folder, *(job(folder / name, f"strategy={name}") for name in STRATEGIES), job(folder / "uneven", *uneven)
    )
    one = job(folder / "one", "trainer.devices=1", "data.batch_size=8")
    training.train(compose(one["overrides"]))
    return folder


def test_two_ranks_train_what_one_rank_trains(whole):
    """Every figure of every step: losses, gradient norms (before clipping), accuracies, acceptance. Relative 1e-4."""
    one = metrics(whole / "one")
    assert one[STEPS, "train/loss_head1"] < one[1, "train/loss_head1"]
    for name in STRATEGIES:
        two = metrics(whole / name)
        assert two.keys() == one.keys()
        for key, value in one.items():
            assert two[key] == pytest.approx(value, rel=1e-4), (name, key)


def test_two_ranks_train_heads_of_every_type(job, tmp_path):
    """Under ZeRO-3, where a cell's weights are put together and let go again for every head that applies it."""
    kinds = [kind for kind in HEADS if kind != "residual"]
    jobs = {kind: [f"heads={kind}", "trainer.max_steps=4"] for kind in kinds}
    on_ranks(2, tmp_path, *(job(tmp_path / f"two-{kind}", "strategy=zero3", *jobs[kind]) for kind in kinds))
    for kind in kinds:
        one = job(tmp_path / f"one-{kind}", "trainer.devices=1", "data.batch_size=8", *jobs[kind])
        training.train(compose(one["overrides"]))
        expected, found = (metrics(tmp_path / f"{ranks}-{kind}") for ranks in ("one", "two"))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-4), (kind, key)


def test_seven_windows_on_two_ranks_end(whole):
    """The last step of an epoch has nothing for one rank, and validation an odd number of answers, under ZeRO-3."""
    assert max(step for step, _ in metrics(whole / "uneven")) == STEPS


def test_the_optimizer_holds_the_heads_in_fp32_and_nothing_else(whole, tiny_k25):
    parameters = sum(tensor.numel() for tensor in weights(whole / "one").values())
    for name in STRATEGIES:
        facts = json.loads((whole / name / "facts.json").read_text())
        share = parameters if name == "ddp" else parameters // 2
        assert share <= facts["elements"] < share + 64, name  # DeepSpeed pads its shares
        assert facts["dtypes"] == ["torch.float32"]


def test_no_step_sends_lm_head_around(whole, tiny_k25):
    """In units of the gradients' 67 kB, for two ranks together: DDP sums them once a step (2), ZeRO-1 also gathers the
    new weights (3); ZeRO-2 sums them in both micro-batches (5), so does ZeRO-3, which scatters and gathers (5).

    With another broadcast of the buffer they would send its 77 kB more.
    """
    gradient = 4 * sum(tensor.numel() for tensor in weights(whole / "one").values())
    lm_head = 4 * 300 * tiny_k25.hidden_size
    for name, times in (("ddp", 2), ("zero1", 3), ("zero2", 5), ("zero3", 5)):
        facts = json.loads((whole / name / "facts.json").read_text())
        assert times * gradient < facts["bytes_a_step"] < times * gradient + 0.7 * lm_head, name


def test_the_heads_beside_a_checkpoint_are_whole_under_any_strategy(whole):
    one = weights(whole / "one")
    for name in STRATEGIES:
        two = weights(whole / name)
        assert {key: tensor.shape for key, tensor in two.items()} == {key: tensor.shape for key, tensor in one.items()}
        for key, tensor in one.items():
            torch.testing.assert_close(
                two[key], tensor, rtol=0, atol=2e-3
            )  # AdamW's first steps are as long as the learning rate, 0.01


def test_no_checkpoint_holds_lm_head(whole, tiny_k25):
    """Bytes on disk: weights, moments and a fp32 copy; the frozen rows would show (they are larger than all of it)."""
    parameters = sum(tensor.numel() for tensor in weights(whole / "one").values())
    for name in STRATEGIES:
        trainer = find_checkpoint(whole / name / "checkpoints", "last") / "trainer.ckpt"
        files = [file for file in (trainer, *trainer.rglob("*")) if file.is_file()]
        names = b"".join(file.read_bytes() for file in files)
        assert b"lm_head" not in names
        assert len(names) < 6 * 4 * parameters


@pytest.fixture(scope="module")
def resumed(job, whole, tmp_path_factory):
    """Runs that were killed in the middle of step 7, or told to stop there, and went on with the same command."""
    folder = tmp_path_factory.mktemp("resumed")

    def of(name, *overrides, strategy=None, **what):
        options = ("data.num_workers=2", f"data.stage_dir={folder / 'stage'}")
        return job(folder / name, f"strategy={strategy or name}", *options, *overrides, **what)

    def last(name):
        return find_checkpoint(folder / name / "checkpoints", "last").name

    one_rank = ("trainer.devices=1", "data.batch_size=8")
    on_ranks(2, folder, of("ddp", kill=[0, 6]), succeed=False)
    out = on_ranks(2, folder, of("zero3", signal=[1, 6]), of("zero2", kill=[1, 6]), succeed=False)
    assert f"{folder / 'zero3'} ended with status 75" in out
    assert (last("ddp"), last("zero3"), last("zero2")) == ("step-000004", "step-000007", "step-000004")
    (folder / "zero2/checkpoints/step-000008.part").mkdir()  # what a kill during a checkpoint leaves
    for name in ("zero2", "zero3"):
        shutil.copytree(folder / name, folder / f"{name}-then-1-rank")
    on_ranks(
        1,
        folder,
        of("zero2-then-1-rank", *one_rank, strategy="zero2"),
        of("zero3-then-1-rank", *one_rank, strategy="zero3"),
        of("zero1-then-2-ranks", *one_rank, strategy="zero1", signal=[0, 6]),
        of("one", *one_rank, strategy="auto", kill=[0, 6]),
        succeed=False,
    )
    assert last("one") == "step-000004"
    training.train(compose(of("one", *one_rank, strategy="auto")["overrides"]))
    assert last("zero1-then-2-ranks") == "step-000007"
    out = on_ranks(
        2,
        folder,
        *(of(name) for name in ("ddp", "zero2", "zero3")),
        of("zero1-then-2-ranks", strategy="zero1"),
        of("validating", strategy="ddp", signal_in_validation=[1, 4]),
    )
    assert f"{folder / 'validating'} ended with status 75" in out
    assert last("validating") == "step-000005"  # one rank alone cannot stop: both do, after the next step
    return folder


@pytest.mark.parametrize("name", ["one", "ddp", "zero2", "zero3"])
def test_a_killed_run_goes_on_bit_for_bit(whole, resumed, name):
    """12 steps of 2 micro-batches over 3 epochs; the resumed runs load a staged cache with 2 workers, the whole ones
    the cache itself with none."""
    assert metrics(resumed / name) == metrics(whole / name)
    a, b = weights(whole / name), weights(resumed / name)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_ranks_share_one_stage(cache, resumed):
    [copies] = (resumed / "stage").glob("*/shards")
    assert copies.parent.name == cache.fingerprint[:16]
    for shard in range(cache.num_shards):
        assert (copies / cache.shard_path(shard).name).read_bytes() == cache.shard_path(shard).read_bytes()


@pytest.mark.parametrize("name", ["zero2-then-1-rank", "zero3-then-1-rank", "zero1-then-2-ranks"])
def test_a_run_goes_on_with_other_ranks(whole, resumed, name):
    """Through DeepSpeed's universal checkpoint; the global batch is the same, and so is every figure, to 1e-3."""
    run, one = metrics(resumed / name), metrics(whole / "one")
    assert run.keys() == one.keys()
    for key, value in one.items():
        assert run[key] == pytest.approx(value, rel=1e-3), key


def test_the_record_says_how_many_ranks_wrote_it(whole, resumed):
    for run, ranks in ((whole / "one", 1), (resumed / "zero2", 2), (resumed / "zero2-then-1-rank", 1)):
        assert read_record(find_checkpoint(run / "checkpoints", "last"))["world_size"] == ranks


@pytest.fixture(scope="module")
def experiments(cache, tiny_k25, tmp_path_factory):
    """Every experiment for Kimi-K2.5 on its miniature: 2 ranks, its own strategy, precision, loss and heads."""
    folder = tmp_path_factory.mktemp("experiments")
    jobs = [
        {
            "overrides": [
                f"+exp={name}",
                "target=tiny_k25",
                f"target.home={tiny_k25.path.parent}",
                f"cache={cache.path}",
                f"run_dir={folder / name}",
                "draft_vocab_size=300",
                "logger=csv",
                "trainer.devices=2",
                "trainer.max_steps=2",
                "trainer.log_every_n_steps=1",
                "data.window=16",
                "data.batch_size=4",
                "data.num_workers=0",
            ]
        }
        for name in EXPERIMENTS
    ]
    own = [*jobs[0]["overrides"], "strategy=zero3", "heads.own_lm_head=true", "loss=mix", f"run_dir={folder / 'own'}"]
    on_ranks(2, folder, *jobs, {"overrides": own})
    return folder


@pytest.mark.parametrize("name", [*EXPERIMENTS, "own"])
def test_every_experiment_trains_on_two_ranks_in_bf16_with_fp32_masters(experiments, name):
    facts = json.loads((experiments / name / "facts.json").read_text())
    assert facts["multiplied_in"] == "torch.bfloat16"
    assert facts["dtypes"] == ["torch.float32"]
    checkpoint = load_heads(find_checkpoint(experiments / name / "checkpoints", "last"))
    tensors = checkpoint.heads.state_dict()
    assert facts["elements"] == pytest.approx(sum(tensor.numel() for tensor in tensors.values()) / 2, abs=64)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    # beside the checkpoint lie the masters, not what they were rounded to
    assert any((tensor != tensor.bfloat16().float()).any() for tensor in tensors.values())
    assert metrics(experiments / name)[2, "heldout/acceptance_tree"] >= 1


def test_own_lm_heads_are_trained_and_whole_under_zero3(experiments, tiny_k25):
    checkpoint = load_heads(find_checkpoint(experiments / "own" / "checkpoints", "last"))
    rows_MD = checkpoint.vocabulary.rows(tiny_k25.lm_head).float()
    weight_KMD = checkpoint.heads.state_dict()["lm_heads.weight"]
    assert weight_KMD.shape == (4, *rows_MD.shape)
    moved_K = (weight_KMD - rows_MD).abs().amax(dim=(1, 2))
    assert (moved_K > 0).all() and (moved_K < 0.1).all()


def test_the_command_is_killed_goes_on_evaluates_and_exports(cache, tiny_k25, tmp_path, capsys):
    """As a user types it: two ranks under ZeRO-2, started by the first one, which is killed between checkpoints."""
    shared = ["+exp=k25_4heads", "target=tiny_k25", f"target.home={tiny_k25.path.parent}", f"cache={cache.path}"]
    shared += [f"run_dir={tmp_path / 'run'}", "logger=csv", "num_nodes=5", "heads=residual", "draft_vocab_size=null"]
    few = ["trainer.devices=2", "trainer.max_steps=60", "trainer.val_check_interval=10", "data.window=16"]
    few += ["data.num_workers=1"]  # not eight new processes at every validation

    def train() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "medusa_k25.train", *shared, *few]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ended(process: subprocess.Popen[str]) -> str:
        out, _ = process.communicate(timeout=200)  # not before the second rank has let go of the pipe, too
        return out

    def last() -> str:
        return find_checkpoint(tmp_path / "run/checkpoints", "last").name

    first = train()
    while not (tmp_path / "run/checkpoints/step-000010").exists() and first.poll() is None:
        time.sleep(0.02)
    first.terminate()
    out = ended(first)
    assert first.returncode == EXIT_REQUEUE, out
    stopped = last()
    second = train()
    while last() == stopped and second.poll() is None:
        time.sleep(0.02)
    second.kill()
    out = ended(second)
    assert second.returncode == -signal.SIGKILL, out
    assert last() < "step-000060"
    out = ended(train())
    assert "going on from" in out and "acceptance length on held-out text" in out, out
    assert max(step for step, _ in metrics(tmp_path / "run")) == 60
    for name in (evaluate, export):
        inspect.unwrap(name.main)(compose(shared))
    assert "heads, tree" in capsys.readouterr().out
    served = load_served(tmp_path / "run/export")
    assert served.heads.num_heads == 4 and served.tree.num_nodes == 5
