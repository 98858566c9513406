"""What speculation costs a server besides the target's passes: MEDUSA and SGLang's own n-gram lookup, side by side.

make bench-engines. Real engines on the CPU, float32, SmolLM2 and the demo's heads, the same prompts and the same number
of nodes a pass. Timed in CPU seconds of the scheduler's thread, so that what else runs on the machine matters less.
Then a server with MEDUSA that is switched off against one without it, in turn: all that its scheduler does for a pass.
Last the first question for Kimi-K2.5 on eight GPUs, by arithmetic.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).parents[1]
RUN = ROOT / "runs" / "smol_4heads"
SPENT = "MEDUSA_K25_BENCH_SPENT"  # where a scheduler writes what it has measured
TIMED = {
    "target": "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
    "round": "medusa_k25.serving.sglang.worker.MedusaWorker.forward_batch_generation",
    "n-gram round": "sglang.srt.speculative.ngram_worker.NGRAMWorker.forward_batch_generation",
    "drafting": "medusa_k25.serving.sglang.drafting.EngineHeads.draft",
}
PROMPTS, TOKENS = 16, 48
OFF_ROUNDS = 4


def register() -> None:
    """A plugin of SGLang, for the time of the bench: time the functions of TIMED in decode rounds."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    spent: dict[str, float] = defaultdict(float)
    decoding = False

    def timer(name: str) -> Callable[..., Any]:
        def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal decoding
            outermost = name.endswith("round")
            if outermost:
                decoding = args[1].forward_mode.is_decode()
            started = time.thread_time()
            result = original(*args, **kwargs)
            if decoding:
                spent[name] += time.thread_time() - started
                if outermost:
                    spent["rounds"] += 1
            if name == "target":  # from pass to pass: everything that the thread does
                spent["first"] = spent["first"] or time.thread_time()
                spent["last"], spent["passes"] = time.thread_time(), spent["passes"] + 1
            Path(os.environ[SPENT]).write_text(json.dumps(spent))
            return result

        return timed

    for name, function in TIMED.items():
        HookRegistry.register(function, timer(name), HookType.AROUND)


def measure(batch: int, **arguments: Any) -> tuple[dict[str, float], float]:
    """(CPU seconds by name of TIMED and "rounds", tokens a pass) of one engine with `batch` requests at a time."""
    import sglang

    from medusa_k25.cache import Cache
    from medusa_k25.data.windows import documents_of
    from medusa_k25.target_builders import smollm2

    target = smollm2()
    cache = Cache.open(RUN / "cache", target)
    documents = documents_of(cache, "heldout")[:PROMPTS]
    prompts = [cache.token_ids(d).tolist()[: d.prompt_length] for d in documents]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        os.environ[SPENT] = file.name
        engine = sglang.Engine(
            model_path=str(target.path),
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            max_total_tokens=4096,
            max_running_requests=batch,
            log_level="error",
            **arguments,
        )
        try:
            rows = engine.generate(
                input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
            )
        finally:
            engine.shutdown()
        spent = json.loads(Path(file.name).read_text() or "{}")
    passes = sum(row["meta_info"].get("spec_verify_ct", len(row["output_ids"]) - 1) for row in rows)
    return spent, sum(len(row["output_ids"]) - 1 for row in rows) / passes


def main() -> None:
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    config = json.loads((RUN / "export" / "config.json").read_text())
    nodes = len(config["medusa_choices"]) + 1
    medusa = {"speculative_algorithm": "MEDUSA", "speculative_draft_model_path": str(RUN / "export")}
    ngram = {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": nodes,
        "speculative_ngram_max_bfs_breadth": 4,
    }
    with tempfile.TemporaryDirectory() as folder, as_plugin(Path(folder)):
        print(f"{PROMPTS} prompts, {TOKENS} tokens each; CPU seconds a round of {nodes} nodes a request")
        print("requests  algorithm  tokens a pass  verify pass  drafting  of a pass  all else")
        for batch in (1, 4):
            for name, arguments in (("MEDUSA", medusa), ("NGRAM", ngram)):
                spent, tokens = measure(batch, **arguments)
                drafting = spent.get("drafting", 0.0)
                total = spent["round"] if name == "MEDUSA" else spent["n-gram round"]
                a_round = 1000 / spent["rounds"]
                print(
                    f"{batch:8}  {name:9}  {tokens:13.3f}  {spent['target'] * a_round:8.2f} ms  "
                    + (f"{drafting * a_round:5.2f} ms  {drafting / spent['target']:9.1%}" if drafting else " " * 19)
                    + f"  {(total - spent['target'] - drafting) * a_round:5.2f} ms",
                    flush=True,
                )
        switched_off(medusa, Path(folder))
    kimi_k25()


def switched_off(medusa: dict[str, Any], folder: Path, batches: Sequence[int] = (1, 4)) -> None:
    """What a server pays for MEDUSA while it is off, with so many requests at a time."""
    from medusa_k25.serving.control import CONTROL_FOLDER, Order, give_order

    os.environ[CONTROL_FOLDER] = str(folder)
    give_order(folder, Order("off"))
    for batch in batches:
        took: dict[str, list[float]] = {"without": [], "off": []}
        for _ in range(OFF_ROUNDS):
            for name, arguments in (("without", {}), ("off", medusa)):
                spent, tokens = measure(batch, **arguments)
                assert tokens == 1
                took[name].append(1000 * (spent["last"] - spent["first"]) / (spent["passes"] - 1))
        without, off = (statistics.median(each) for each in took.values())
        print(
            f"{batch:8}  CPU ms from pass to pass: without MEDUSA {without:.2f}, switched off {off:.2f}: "
            f"{off / without - 1:+.1%} (in {OFF_ROUNDS} turns {min(took['off']) / max(took['without']) - 1:+.1%} to "
            f"{max(took['off']) / min(took['without']) - 1:+.1%})",
            flush=True,
        )


def kimi_k25() -> None:
    """Drafting on the users' machine, by arithmetic: four heads of every type over the whole vocabulary."""
    from medusa_k25.costs.cycle import CycleModel
    from medusa_k25.costs.hardware import hardware
    from medusa_k25.costs.served import KIMI_K25
    from medusa_k25.heads import ResidualHeads

    figures = yaml.safe_load((ROOT / "conf" / "hardware" / "rtx_pro_6000_x8.yaml").read_text())
    machine = hardware(**{name: value for name, value in figures.items() if not name.startswith("_")})
    with torch.device("meta"):
        heads = ResidualHeads(KIMI_K25.hidden_size, 4)
    passes = CycleModel(machine, KIMI_K25)
    for kind in passes.types(heads, KIMI_K25.vocab_size):
        for size in kind.sizes:
            print(f"Kimi-K2.5 on {machine.name}, {kind.name} heads: {size.drafting.text(size.pass_ms)}")


class as_plugin:
    """SGLang finds plugins by installed distributions: this is one, for a while."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> None:
        info = self.folder / "medusa_k25_bench-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: medusa-k25-bench\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nmedusa_k25_bench = bench.serving:register\n")
        sys.path.append(str(self.folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [os.environ.get("PYTHONPATH"), str(self.folder), str(ROOT)])
        )

    def __exit__(self, *error: object) -> None:
        sys.path.remove(str(self.folder))


if __name__ == "__main__":
    main()
