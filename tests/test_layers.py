"""The layers of the package, as data: imports point left, and the heavy libraries stay where they belong."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Left to right. "" is the package itself, `cache` the package's __init__. A module may import its own layer and those
# to the left of it; conversations are made from a target, and a capture reads them.
LAYERS = {
    "package": ["", "data.splits"],  # data.splits: one hash, which generation asks too
    "target": ["target", "target_builders", "chat", "server", "answer_client", "prompts", "conversations"],
    "cache": [
        "cache",
        *(f"cache.{name}" for name in ("manifest", "shard", "check", "alignment", "reader", "staging", "writer")),
        *(f"cache.{name}" for name in ("capture", "record_client", "producers", "imports")),
    ],
    "data": [
        *("data", "data.labels", "data.windows", "data.texts", "data.contents", "data.sampler", "data.datamodule"),
    ],
    "heads": [
        *("heads", "heads.lm_heads", "heads.base", "heads.embeddings", "heads.vocabulary", "heads.speculator"),
        *("heads.residual", "heads.residual_root", "heads.hydra", "heads.recurrent"),
    ],
    "maths": [
        *("loss", "metrics", "tree", "adaptive", "replay", "acceptance", "designs", "breakdown", "fp8_cost"),
        *("ngram", "ngram.lookup", "ngram.engine", "ngram.corpus", "ngram.table", "ngram.beside"),
        *(
            "costs",
            "costs.hardware",
            "costs.served",
            "costs.drafting",
            "costs.cycle",
            "costs.drafters",
            "costs.verdict",
            "costs.new_target",
        ),
        *("costs.training", "costs.planning", "costs.learning_curve", "costs.calibration"),
    ],
    "serving": [
        *("serving", "serving.untrusted", "serving.formats", "serving.blank", "serving.card", "serving.decode"),
        *("serving.ngram_corpus", "serving.beside_files", "serving.adaptive_fit", "serving.control", "costs.probing"),
        *("serving.live", "serving.comparing"),
    ],
    "plugin": [
        *("serving.sglang", "serving.sglang.graphs"),
        *(f"serving.sglang.{name}" for name in ("drafting", "beside", "algorithm", "compat", "plugin")),
        *(f"serving.sglang.{name}" for name in ("worker", "switch", "meter")),
        *(f"serving.sglang.{name}" for name in ("recorder", "recording", "record")),
    ],
    "training": [
        *("module", "strategy", "checkpoint", "warm_start", "callbacks", "tracking"),
        "reports",
        *(
            f"reports.{name}"
            for name in ("page", "pictures", "report", "evaluation", "study", "plan", "cache", "server")
        ),
    ],
    "entry points": [
        *("config", "plan", "generate", "capture", "inspect", "preflight", "train", "evaluate", "export", "decode"),
        *("study", "probe", "__main__"),
    ],
}
LAYER_OF = {module: layer for layer, modules in enumerate(LAYERS.values()) for module in modules}

ENTRY_POINTS = {*LAYERS["entry points"]}
LIGHTNING = {"module", "strategy", "callbacks", "checkpoint", "tracking", "data.datamodule", "preflight", "train"}
ALLOWED = {
    "hydra": ENTRY_POINTS,
    "omegaconf": ENTRY_POINTS,
    "lightning": LIGHTNING,
    "pytorch_lightning": set[str](),
    "deepspeed": {"strategy", "callbacks", "checkpoint"},
    "wandb": {"tracking"},
    "sglang": {f"serving.sglang.{name}" for name in ("algorithm", "compat", "graphs", "plugin", "record")},
    "vllm": set[str](),
}


def modules() -> dict[str, Path]:
    """Name inside the package -> file, for every file there is."""
    package = ROOT / "medusa_k25"
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(source: str, module: str, is_package: bool) -> set[str]:
    """Absolute names that a module's source imports, anywhere in it; `from a import b` gives a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ["medusa_k25", *filter(None, module.split("."))]
                kept = len(here) - node.level + is_package
                base = ".".join([*here[:kept], *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def own_module(name: str) -> str | None:
    """The module of this package that an imported name lies in: medusa_k25.cache.Cache -> cache."""
    first, *parts = name.split(".")
    if first != "medusa_k25":
        return None
    while parts and ".".join(parts) not in LAYER_OF:
        parts.pop()
    return ".".join(parts)


def faults(module: str, imported: set[str]) -> list[str]:
    wrong = []
    for name in sorted(imported):
        own = own_module(name)
        if own is not None and LAYER_OF[own] > LAYER_OF[module]:
            wrong.append(f"{module or 'medusa_k25'} imports {own}, which lies to the right of it")
        elif own == "config" and module not in ENTRY_POINTS:
            wrong.append(f"{module} imports config, which is for entry points only")
        library = name.partition(".")[0]
        if library in ALLOWED and module not in ALLOWED[library]:
            wrong.append(f"{module or 'medusa_k25'} imports {library}, which belongs in {sorted(ALLOWED[library])}")
    return wrong


def test_every_module_has_a_layer() -> None:
    assert modules().keys() == LAYER_OF.keys()


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_left(module: str) -> None:
    path = modules()[module]
    assert not faults(module, imports_of(path.read_text(), module, path.name == "__init__.py"))


def test_the_package_itself_imports_nothing() -> None:
    assert not imports_of((ROOT / "medusa_k25" / "__init__.py").read_text(), "", True)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("loss", "import medusa_k25.module"),
        ("loss", "from medusa_k25 import module"),
        ("tree", "def f():\n    from hydra.utils import instantiate"),
        ("replay", "import lightning as L"),
        ("target", "from .cache import Cache"),
        ("cache.reader", "from ..data.windows import Windows"),
        ("serving.formats", "import sglang.srt"),
        ("reports.report", "from medusa_k25.config import verb"),
        ("", "from . import target"),
    ],
)
def test_the_check_finds_a_fault(module: str, source: str) -> None:
    assert len(faults(module, imports_of(source, module, module == ""))) == 1
