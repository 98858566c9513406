"""The README's map of the files is true, and complete."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def mapped() -> set[str]:
    """Names in the first column of the table of files, relative to the package or to the repository."""
    section = README.split("## The files")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name.removeprefix("medusa_k25/").rstrip("/") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_file_of_the_package_has_its_place_on_the_map():
    package = {path.name for path in (ROOT / "medusa_k25").iterdir() if not path.name.startswith("_")}
    folders = {"bench", "conf", "launch", "notes", "tests"}
    assert mapped() == package | folders


def test_every_command_of_the_readme_names_a_verb_and_an_experiment_that_exist():
    for verb in re.findall(r"python -m medusa_k25\.([a-z_]+)", README):
        assert (ROOT / "medusa_k25" / f"{verb}.py").is_file()
    for name in re.findall(r"\+exp=([a-z0-9_]+)", README):
        assert (ROOT / "conf" / "exp" / f"{name}.yaml").is_file()
    for target in re.findall(r"`?make ([a-z]+)`?", README):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()
