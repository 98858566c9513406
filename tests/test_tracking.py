"""What a run leaves in metrics.csv and in the folders of an offline W&B run, read back from their files."""

import inspect
import json
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from medusa_k25 import __version__, evaluate, export
from medusa_k25 import train as training
from medusa_k25.checkpoint import find_checkpoint, load_heads, read_record
from medusa_k25.config import compose
from medusa_k25.data.splits import Split
from medusa_k25.data.windows import documents_of
from medusa_k25.replay import answer_ranks, replay
from medusa_k25.reports.report import read_report
from medusa_k25.tracking import MetricsTable, WandbRun
from medusa_k25.tree import Tree
from tests.ranks import on_ranks
from tests.test_training import OF_THE_MACHINE, metrics
from tests.tiny import cache_of

SPLITS: tuple[Split, ...] = ("calibration", "heldout", "train")
BREAK_EVEN = 1.25
BASELINE = 100.0  # tokens/s


def machine(break_even):
    """Overrides: a machine that serves the target, on which a pass of the tree takes as much longer."""
    point = "{{nodes: {}, batch: 1, context: 1024, temperature: 0.0, ms: {}, basis: measured, source: a test}}"
    points = ", ".join(point.format(nodes, ms) for nodes, ms in ((1, 10.0), (9, 10 * break_even)))
    return ["hardware.target=tiny_k25", f"hardware.cycles=[{points}]", "num_nodes=9"]


@pytest.fixture(scope="module")
def cache(tiny_k25, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracking") / "cache"
    return cache_of(tiny_k25, folder, num_documents=60, labels=("code", "talk, small", None))


@pytest.fixture(scope="module")
def overrides_of(cache, tiny_k25):
    """(run folder, overrides...) -> the overrides of a run of 8 steps in 3 epochs"""

    def make(run, *overrides):
        return [
            "target=tiny_k25",
            f"target.home={tiny_k25.path.parent}",
            f"cache={cache.path}",
            f"run_dir={run}",
            "name=short run",
            "logger=wandb",
            *machine(BREAK_EVEN),
            "draft_vocab_size=300",
            "strategy=ddp",
            "trainer.max_steps=8",
            "trainer.val_check_interval=3",
            "trainer.log_every_n_steps=1",
            "trainer.accumulate_grad_batches=2",
            "data.window=16",
            "data.batch_size=4",
            "optimizer.lr=0.01",
            *overrides,
        ]

    return make


@pytest.fixture(scope="module", autouse=True)
def no_key(tmp_path_factory):
    """No W&B key is to be found, and what W&B writes outside the run folder goes into a temporary one."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "WANDB_API_KEY"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(home / "no-netrc"))
        for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(home))
        yield home


def records(folder: Path) -> Iterator[Record]:
    """Of the .wandb file of an offline run: a LevelDB log behind 7 bytes."""
    (file,) = folder.glob("*.wandb")
    data, block_size = file.read_bytes(), 32768
    assert data[:4] == b":W&B"
    offset, parts = 7, b""
    while offset + 7 <= len(data):
        if block_size - offset % block_size < 7:  # no place for another header
            offset += block_size - offset % block_size
            continue
        length, kind = struct.unpack("<HB", data[offset + 4 : offset + 7])
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def items(protos: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for proto in protos:
        *path, last = proto.nested_key or [proto.key]
        node = found
        for part in path:
            node = node.setdefault(part, {})
        node[last] = json.loads(proto.value_json)
    return found


class OfflineRun:
    """What the .wandb file of an offline folder holds. history: {metric: [(step, value), ...]}"""

    def __init__(self, folder: Path):
        self.folder = folder
        self.history: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        self.config: dict[str, Any] = {}
        self.artifacts: dict[str, Any] = {}
        self.x_axes: dict[str, str] = {}
        self.ended = False
        for record in records(folder):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.id, self.project, self.name = record.run.run_id, record.run.project, record.run.display_name
            elif kind == "config":
                self.config |= items(record.config.update)
            elif kind == "history":
                row = items(record.history.item)
                for metric, value in row.items():
                    self.history[metric].append((row["trainer/global_step"], value))
            elif kind == "artifact":
                self.artifacts[record.artifact.type] = record.artifact
            elif kind == "metric":
                self.x_axes[record.metric.glob_name] = record.metric.step_metric
            self.ended |= kind == "exit"

    @classmethod
    def newest(cls, run: Path) -> "OfflineRun":
        """Of a run folder; W&B's own process writes it, and may need a moment more."""
        for _ in range(100):
            found = cls(max((run / "wandb").glob("offline-run-*")))
            if found.ended:
                return found
            time.sleep(0.1)
        raise AssertionError(f"{found.folder} was not finished")

    def figures(self) -> dict[tuple[int, str], float]:
        """All but W&B's own, as tests.test_training.metrics gives those of metrics.csv; none twice."""
        rows = [
            ((step, metric), value)
            for metric, series in self.history.items()
            for step, value in series
            if isinstance(value, int | float) and not metric.startswith("_") and metric != "trainer/global_step"
        ]
        assert len(dict(rows)) == len(rows)
        return {key: value for key, value in rows if key[1] not in OF_THE_MACHINE}

    def media(self, metric: str) -> Path:
        ((_, logged),) = self.history[metric]
        return self.folder / "files" / logged["path"]


@pytest.fixture(scope="module")
def run(overrides_of, tmp_path_factory):
    """A run on 2 ranks that was killed in step 6 and moved, went on there on one rank, was evaluated and exported."""
    folder = tmp_path_factory.mktemp("run")
    job = {"overrides": overrides_of(folder / "first", "trainer.devices=2", "data.batch_size=2"), "kill": [0, 5]}
    out = on_ranks(2, folder, job, succeed=False)
    assert out.count("no W&B key found: logging offline") == 1
    run = folder / "moved"
    (folder / "first").rename(run)
    overrides = overrides_of(run)
    training.train(compose(overrides))
    for verb in (evaluate, export):
        inspect.unwrap(verb.main)(compose([*overrides, "evaluate.num_nodes=[2,9]"]))
    return run


def at_the_end_of_training(run: Path) -> OfflineRun:
    _, resumed, _ = sorted((run / "wandb").glob("offline-run-*"))
    return OfflineRun(resumed)


def test_one_run_for_all_ranks_and_verbs_before_and_after_a_kill(run):
    folders = list((run / "wandb").glob("offline-run-*"))
    assert len(folders) == 3  # killed, resumed, export
    run_id = (run / "wandb_id").read_text().strip()
    assert {folder.name.rpartition("-")[2] for folder in folders} == {run_id}
    found = OfflineRun.newest(run)
    assert (found.project, found.id, found.name) == ("medusa-k25", run_id, "short run")


def test_the_newest_folder_holds_every_figure_of_every_step_once(run):
    """It alone is the whole run, as metrics.csv is."""
    found = OfflineRun.newest(run)
    table = metrics(run)
    assert found.figures() == table
    per_step = {f"train/loss_head{k}" for k in range(1, 5)} | OF_THE_MACHINE
    per_step |= {"train/grad_norm", "train/learning_rate"}
    validated = {f"{split}/acceptance_{shape}" for split in SPLITS for shape in ("tree", "chain")}
    validated |= {f"{split}/top{r}_head{k}" for split in SPLITS for r in range(1, 6) for k in range(1, 5)}
    validated |= {f"{split}/accepted_head{k}" for split in SPLITS for k in range(1, 5)}
    validated |= {f"heldout/acceptance_{s}/{label}" for s in ("tree", "chain") for label in ("code", "talk, small")}
    validated |= {f"{split}/{name}" for split in SPLITS for name in ("tokens_per_s", "speedup")}
    validated |= {"num_nodes", "break_even"}
    for names, steps in ((per_step, range(1, 9)), (validated, (3, 6, 8))):
        for metric in names:
            assert [step for step, _ in found.history[metric]] == list(steps), metric
    assert {metric for _, metric in table} == (per_step | validated) - OF_THE_MACHINE
    assert found.x_axes["*"] == "trainer/global_step"
    assert {value for _, value in found.history["break_even"]} == {BREAK_EVEN}
    lengths = dict(found.history["heldout/acceptance_tree"])
    for step, tokens_per_s in found.history["heldout/tokens_per_s"]:
        assert tokens_per_s == pytest.approx(lengths[step] * BASELINE / BREAK_EVEN)


def test_the_figures_are_those_of_an_undisturbed_run_on_one_rank(run, overrides_of, tmp_path):
    training.train(compose(overrides_of(tmp_path / "whole", "logger=csv")))
    assert metrics(run) == pytest.approx(metrics(tmp_path / "whole"), rel=1e-3)


def test_the_config_names_code_target_and_cache(run, cache, tiny_k25):
    for found in (OfflineRun.newest(run), at_the_end_of_training(run)):
        assert found.config["code_version"] == __version__
        assert found.config["cache_fingerprint"] == cache.fingerprint
        assert found.config["target"]["name"] == tiny_k25.name
        assert found.config["target"]["fingerprints"] == tiny_k25.fingerprints
        assert found.config["config"]["optimizer"]["lr"] == 0.01
        assert found.config["config"]["data"]["batch_size"] == 4  # since it goes on with one rank


def test_tables_and_pictures_show_heads_and_trees(run):
    best = read_record(find_checkpoint(run / "checkpoints", "best"))["metrics"]
    found = OfflineRun.newest(run)
    table = json.loads(found.media("heads/table").read_text())
    assert table["columns"] == ["text", "head", "accepted", "top-1", "top-2", "top-3", "top-4", "top-5"]
    assert table["data"] == [
        [split, k, best[f"{split}/accepted_head{k}"], *(best[f"{split}/top{r}_head{k}"] for r in range(1, 6))]
        for split in SPLITS
        for k in range(1, 5)
    ]
    table = json.loads(found.media("evaluation/table").read_text())
    lengths = {(predictor, nodes): length for predictor, nodes, length, *_ in table["data"]}
    rows = read_report(run)["evaluate"]["rows"]
    assert lengths == {(row["predictor"], row["num_nodes"]): row["every"]["length"] for row in rows}
    for name in ("heads/picture", "evaluation/picture"):
        assert found.media(name).read_bytes().startswith(b"\x89PNG")
    assert at_the_end_of_training(run).media("heads/picture").exists()


def test_the_export_is_an_artifact_with_its_provenance(run, cache, tiny_k25):
    artifact = OfflineRun.newest(run).artifacts["model"]
    checkpoint = read_record(find_checkpoint(run / "checkpoints", "best"))
    assert artifact.name == "short-run-heads"
    files = {entry.path: entry.size for entry in artifact.manifest.contents}
    assert files == {file.name: file.stat().st_size for file in (run / "export").iterdir()}
    metadata = json.loads(artifact.metadata)
    assert metadata["tree"] == checkpoint["tree"]
    assert metadata["step"] == checkpoint["step"]
    assert metadata["cache_fingerprint"] == cache.fingerprint
    assert metadata["target"]["fingerprints"] == tiny_k25.fingerprints
    for metric in ("heldout/acceptance_tree", "heldout/acceptance_chain", "heldout/acceptance_tree/code"):
        assert metadata["acceptance"][metric] == checkpoint["metrics"][metric]


def test_acceptance_by_label_and_on_training_text_is_that_of_replay(run, cache, tiny_k25):
    best = load_heads(find_checkpoint(run / "checkpoints", "best"))
    speculator = best.speculator(tiny_k25)
    documents = {split: documents_of(cache, split) for split in SPLITS}

    def accepted(some, tree):
        return replay(answer_ranks(speculator, cache, some), tree)

    for name, tree in (("tree", Tree(best.record["tree"])), ("chain", Tree.chain(4))):
        for label in ("code", "talk, small"):
            labelled = [document for document in documents["heldout"] if document.label == label]
            reported = best.record["metrics"][f"heldout/acceptance_{name}/{label}"]
            assert reported == accepted(labelled, tree).length
    tree = Tree(best.record["tree"])
    counted = accepted(documents["heldout"], tree)
    for k in range(1, 5):
        passes = sum(count for drafts, count in counted.accepted.items() if drafts >= k)
        assert best.record["metrics"][f"heldout/accepted_head{k}"] == passes / counted.passes


def test_training_text_is_sampled_fairly(cache, tiny_k25, overrides_of, tmp_path):
    built = training.build(compose(overrides_of(tmp_path / "run")), tiny_k25, cache)
    built.data.trainer = built.trainer

    def validated() -> list[list[str]]:
        loaders: list[Any] = built.data.val_dataloader()
        return [[run.document.id for run in loader.dataset.runs] for loader in loaders]

    calibration, heldout, train = validated()
    documents = {split: [document.id for document in documents_of(cache, split)] for split in SPLITS}
    assert sorted(calibration) == sorted(documents["calibration"])
    assert sorted(heldout) == sorted(documents["heldout"])
    assert len(train) == len(set(train)) == len(heldout) < len(documents["train"]) / 2
    places = sorted(documents["train"].index(one) / len(documents["train"]) for one in train)
    assert places[0] < 1 / 3 and places[-1] > 2 / 3  # not the first ones
    assert validated() == [calibration, heldout, train]


def test_the_last_line_says_whether_speculation_pays(overrides_of, tmp_path, capsys):
    def last_line(*overrides):
        training.train(compose(overrides_of(tmp_path / "run", "logger=csv", "trainer.max_steps=1", *overrides)))
        return capsys.readouterr().out.splitlines()[-1]

    line = last_line()
    assert "nodes, below the break-even of 1.25 on cpu: " in line
    assert "tokens/s expected, 100.0 without)" in line
    metrics_csv = tmp_path / "run" / "metrics.csv"
    assert "1,break_even,1.25" in metrics_csv.read_text()
    found = metrics(tmp_path / "run")
    for split in SPLITS:  # the best checkpoint is the one with the most speed against none
        length = float(found[1, f"{split}/acceptance_tree"])
        assert float(found[1, f"{split}/speedup"]) == pytest.approx(length / 1.25)
        assert float(found[1, f"{split}/tokens_per_s"]) == pytest.approx(1000 * length / 12.5)
    # another machine's break-even is no other run
    assert "nodes, above the break-even of 0.90 on" in last_line("trainer.max_steps=2", *machine(0.9))


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_its_table_anew(overrides_of, tmp_path):
    run = tmp_path / "run"
    MetricsTable(run).log_metrics({"train/loss_head1": 9.0}, 1)
    training.train(compose(overrides_of(run, "logger=csv", "trainer.max_steps=1")))
    assert metrics(run)[1, "train/loss_head1"] != 9.0  # which refuses a metric that is there twice


@pytest.mark.parametrize("fault", ["start", "log"])
def test_training_goes_on_with_its_own_table_where_wandb_fails(fault, overrides_of, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    if fault == "start":
        run.mkdir()
        (run / "wandb").touch()  # not a folder
    else:
        monkeypatch.setattr("wandb.sdk.wandb_run.Run.log", broken)
    training.train(compose(overrides_of(run)))
    out = capsys.readouterr().out
    assert out.count("W&B failed") == 1
    assert out.count("metrics.csv goes on alone") == 1
    assert {step for step, metric in metrics(run) if metric == "train/loss_head1"} == set(range(1, 9))
    assert (8, "heldout/acceptance_tree") in metrics(run)


def broken(*args, **kwargs):
    raise BrokenPipeError("no service")


def test_a_key_that_the_server_does_not_take_means_offline(tmp_path, monkeypatch, capsys):
    def login(prompt):
        raise wandb.errors.AuthenticationError("no such host")

    monkeypatch.setattr(wandb, "login", login)
    logger = WandbRun(str(tmp_path), "a", "b")
    logger.log_metrics({"x": 1.0}, 1)
    logger.finish()
    assert "no login at W&B (no such host): logging offline" in capsys.readouterr().out
    assert OfflineRun.newest(tmp_path).history["x"] == [(1, 1.0)]


def test_every_run_folder_has_an_id_of_its_own(tmp_path):
    """Not one that follows from the path: elsewhere, or after the folder was removed, it is another run."""
    ids = set()
    for i in range(2):
        logger = WandbRun(str(tmp_path / "run"), "a", "b")
        assert logger.experiment.id == (tmp_path / "run" / "wandb_id").read_text().strip()
        ids.add(logger.experiment.id)
        logger.finish()
        (tmp_path / "run").rename(tmp_path / f"old{i}")
    assert len(ids) == 2
