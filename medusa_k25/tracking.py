"""Where figures of a run go: metrics.csv always, Weights & Biases when a project is named.

Letters: K heads, R best choices of a head.
"""

import csv
import io
import os
import re
import secrets
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from medusa_k25.data.datamodule import VALIDATION_SPLITS
from medusa_k25.reports.pictures import break_even_of, draw_acceptance, draw_heads

if TYPE_CHECKING:
    import wandb
    from matplotlib.figure import Figure

say = rank_zero_only(print)

STEP = "trainer/global_step"  # the x axis of every chart of W&B


class MetricsTable(Logger):
    """metrics.csv: a row "step,metric,value" each. A resumed run continues the file from the step it resumes at."""

    def __init__(self, save_dir: str | Path):
        super().__init__()
        self.file = Path(save_dir) / "metrics.csv"

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> Path:
        return self.file

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass  # config.yaml of the run folder holds them

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        new = not self.file.exists() or not self.file.stat().st_size
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(["step", "metric", "value"])
            writer.writerows([step, name, value] for name, value in metrics.items())

    @rank_zero_only
    def resume(self, step: int) -> None:
        """Drop what a killed run logged after the checkpoint it resumes from."""
        if self.file.exists():
            rows = [row for row in read_metrics(self.file) if len(row) == 3]  # the last one may be torn
            part = self.file.with_suffix(".part")
            with part.open("w", newline="") as file:
                csv.writer(file).writerows(row for row in rows if row[0] == "step" or int(row[0]) <= step)
            part.rename(self.file)


class WandbRun(Logger):
    """The W&B run of a run folder: one, whatever verb, rank or resumed process logs to it. It starts at its first use.

    Its id lies in the folder, as wandb_id, and moves with it. Without a key, without a server or with
    WANDB_MODE=offline it logs offline, and starts with the rows of metrics.csv: each offline folder holds the whole run
    so far, because a killed process may leave an empty one and `wandb sync` may let a later one overwrite the earlier.
    W&B never ends a training: what fails there is said once, and metrics.csv goes on alone.
    """

    def __init__(self, run_dir: str, name: str, project: str):
        super().__init__()
        self.run_dir, self.run_name, self.project = Path(run_dir), name, project
        self.run: wandb.Run | None = None
        self.failed = False

    @property
    def name(self) -> str:
        return self.run_name

    @property
    def version(self) -> str:
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> "wandb.Run | None":
        self._with_run(lambda run: None)
        return self.run

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._with_run(lambda run: run.config.update(dict(params), allow_val_change=True))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._with_run(lambda run: run.log({**metrics, STEP: step}))

    def log_heads(self, metrics: Mapping[str, float], step: int) -> None:
        """Accuracy and acceptance of each head, as a table and a picture. `metrics`: those of a validation."""
        self._with_run(lambda run: run.log({**_heads(metrics), STEP: step}))

    def log_evaluation(self, evaluation: Mapping[str, Any], step: int) -> None:
        """Acceptance length of every predictor and size, as a table and a picture. evaluation: of report.json."""
        self._with_run(lambda run: run.log({**_evaluation(evaluation), STEP: step}))

    def log_folder(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        """The files of an export as an artifact of this run."""
        import wandb

        def log(run: "wandb.Run") -> None:
            name = re.sub(r"[^a-zA-Z0-9_.-]", "-", f"{self.run_name}-heads")
            artifact = wandb.Artifact(name, type="model", metadata=dict(metadata))
            artifact.add_dir(str(folder))
            run.log_artifact(artifact)

        self._with_run(log)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Lightning calls this; a training that succeeded has more to log."""
        if status == "failed":
            self.finish(exit_code=1)

    def finish(self, exit_code: int = 0) -> None:
        if self.run is not None:
            self._with_run(lambda run: run.finish(exit_code=exit_code))
            self.run = None

    def _with_run(self, action: Callable[["wandb.Run"], None]) -> None:
        if self.failed:
            return
        try:
            if self.run is None:
                self.run = self._start()
            action(self.run)
        except Exception as error:  # whatever it is: of no worth beside the training
            self.failed = True
            say(f"W&B failed ({type(error).__name__}: {error}); metrics.csv goes on alone")

    def _start(self) -> "wandb.Run":
        import wandb

        id_file = self.run_dir / "wandb_id"
        if not id_file.exists():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            id_file.write_text(secrets.token_hex(4) + "\n")
        reason = None if os.environ.get("WANDB_MODE") else _why_offline()
        run = wandb.init(
            project=self.project,
            name=self.run_name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(self.run_dir),
            mode=None if reason is None else "offline",
            reinit="create_new",  # nobody else's run
        )
        if reason is not None:
            folder = Path(run.dir).parent
            say(f"{reason}: logging offline; `wandb login`, then `wandb sync {folder}` uploads the run")
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        metrics = self.run_dir / "metrics.csv"
        if run.offline and metrics.exists():
            for step, rows in groupby(read_metrics(metrics)[1:], key=lambda row: row[0]):
                run.log({name: float(value) for _, name, value in rows} | {STEP: int(step)})
        return run


def _why_offline() -> str | None:
    import wandb

    try:
        return None if wandb.login(prompt=False) else "no W&B key found"
    except wandb.Error as error:
        return f"no login at W&B ({error})"


def _heads(metrics: Mapping[str, float]) -> dict[str, Any]:
    import wandb

    K = sum(name.startswith("heldout/accepted_head") for name in metrics)
    R = sum(re.fullmatch(r"heldout/top\d+_head1", name) is not None for name in metrics)
    columns: list[str | int] = ["text", "head", "accepted", *(f"top-{r}" for r in range(1, R + 1))]

    def shares(split: str, k: int) -> list[float]:
        return [metrics[f"{split}/top{r}_head{k}"] for r in range(1, R + 1)]

    def accepted(split: str, k: int) -> float:
        return metrics[f"{split}/accepted_head{k}"]

    heads = range(1, K + 1)
    data = [[split, k, accepted(split, k), *shares(split, k)] for split in VALIDATION_SPLITS for k in heads]
    picture = draw_heads([shares("heldout", k) for k in heads], [accepted("heldout", k) for k in heads])
    return {"heads/table": wandb.Table(columns=columns, data=data), "heads/picture": _image(picture)}


def _evaluation(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    import wandb

    rows = evaluation["rows"]
    columns: list[str | int] = ["predictor", "nodes", "acceptance length", "low", "high", "without loops"]
    data = [
        [row["predictor"], row["num_nodes"], row["every"]["length"], *row["interval"], row["without_loops"]["length"]]
        for row in rows
    ]
    picture = _image(draw_acceptance(rows, break_even_of(evaluation)))
    return {"evaluation/table": wandb.Table(columns=columns, data=data), "evaluation/picture": picture}


def _image(figure: "Figure") -> "wandb.Image":
    import wandb
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return wandb.Image(Image.open(buffer))  # given the figure, wandb would load pyplot


def build_loggers(run_dir: str, name: str, wandb_project: str | None) -> list[Logger]:
    """metrics.csv always; Weights & Biases too when a project is named, offline where no key is configured."""
    table = MetricsTable(run_dir)
    return [table] if wandb_project is None else [table, WandbRun(run_dir, name, wandb_project)]


def read_metrics(file: Path) -> list[list[str]]:
    with file.open(newline="") as opened:
        return list(csv.reader(opened))
