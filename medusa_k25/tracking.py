"""Where figures of a run go: metrics.csv always, Weights & Biases when a project is named."""

import csv
import hashlib
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

say = rank_zero_only(print)


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
        new = not self.file.exists()
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
            header, *rows = read_metrics(self.file)
            with self.file.open("w", newline="") as file:
                csv.writer(file).writerows([header, *(row for row in rows if int(row[0]) <= step)])


def build_loggers(run_dir: str, name: str, wandb_project: str | None) -> list[Logger]:
    """metrics.csv always; Weights & Biases too when a project is named, offline where no key is configured."""
    table = MetricsTable(run_dir)
    if wandb_project is None:
        return [table]
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    offline = not os.environ.get("WANDB_MODE") and not wandb.login(prompt=False)
    if offline:
        say("no W&B key found: logging offline; `wandb login`, then `wandb sync` uploads the run")
    # not offline=: Lightning sets a mode for it that newer versions of wandb do not know
    mode: Any = {"mode": "offline"} if offline else {}
    # a fixed id: the same run goes on after a resume
    run_id = hashlib.sha256(str(Path(run_dir).absolute()).encode()).hexdigest()[:12]
    logger = WandbLogger(project=wandb_project, name=name, id=run_id, resume="allow", save_dir=run_dir, **mode)
    return [table, logger]


def read_metrics(file: Path) -> list[list[str]]:
    with file.open(newline="") as opened:
        return list(csv.reader(opened))
