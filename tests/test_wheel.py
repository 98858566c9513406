"""The wheel, installed away from the checkout, carries conf/ and the prompts and runs."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from medusa_k25.target import Target
from tests.tiny import cache_of

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def run(*command: str | Path, cwd: Path) -> str:
    """The command's output; it does not see the checkout through PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["WANDB_MODE"] = "disabled"
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the wheel, and this environment's libraries but not its editable install."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    run(*PIP, "--python", folder, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # A path in a .pth file is appended to sys.path; the .pth files in that folder (an editable install) are not read.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def test_the_wheel_carries_the_config_and_the_prompts(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder, inside in ((ROOT / "conf", "medusa_k25/conf"), (ROOT / "medusa_k25", "medusa_k25")):
        for path in folder.rglob("*"):
            if path.suffix in (".yaml", ".py", ".jsonl"):
                assert f"{inside}/{path.relative_to(folder).as_posix()}" in names
    assert {name.split("/")[0] for name in names} == {"medusa_k25", wheel.name.rsplit("-", 3)[0] + ".dist-info"}


def test_the_installed_package_is_used_and_finds_its_config(python: Path, tmp_path: Path) -> None:
    code = "import medusa_k25, medusa_k25.config as c; print(medusa_k25.__file__); print(c.conf_dir())"
    for line in run(python, "-c", code, cwd=tmp_path).split():
        assert Path(line).is_relative_to(python.parents[1])
    assert "train" in run(python, "-m", "medusa_k25", cwd=tmp_path)


# One after another in one process: what takes long is importing.
VERBS = """
import os, runpy, sys
for verb, *arguments in ({verbs}):
    sys.argv[1:] = arguments
    try:
        runpy.run_module(f"medusa_k25.{{verb}}", run_name="__main__")
    except SystemExit as end:
        assert not end.code
    if arguments == ["--help"]:
        assert os.listdir() == ["cache"]
"""


def test_the_installed_package_shows_its_help_and_trains_the_k25_experiment_on_a_miniature(
    python: Path, tmp_path: Path, tiny_k25: Target
) -> None:
    """+exp=k25_4heads with ZeRO-2 and W&B, whose target alone is replaced; then evaluate, export and decode."""
    cache_of(tiny_k25, tmp_path / "cache", num_documents=40, end_ids=tiny_k25.end_ids)
    common = [
        "+exp=k25_4heads",
        "target=tiny_k25",
        f"target.home={tiny_k25.path.parent}",
        "draft_vocab_size=null",
        "cache=cache",
        "max_width=4",
        "generate.max_new_tokens=24",
    ]
    train = ["train", *common, "trainer.max_steps=3", "data.num_workers=0"]
    verbs = (["train", "--help"], train, *([verb, *common] for verb in ("evaluate", "export", "decode")))
    shown = run(python, "-c", VERBS.format(verbs=verbs), cwd=tmp_path)
    assert "exp: k25_4heads, k25_4heads_kd, k25_nvl8_multinode, smol_4heads, study" in shown
    assert "acceptance length on held-out text" in shown
    run_dir = tmp_path / "runs" / "k25_4heads"
    assert (run_dir / "checkpoints" / "step-000003" / "trainer.ckpt").is_dir()  # DeepSpeed's are folders
    assert "answers equal greedy decoding token for token" in shown
    assert {"train", "evaluate", "export", "decode"} <= set(json.loads((run_dir / "report.json").read_text()))
    assert (run_dir / "report.html").stat().st_size > 10_000
