"""Cycles of the real SmolLM2, without speculation and with untrained heads of nine nodes, are what passes take."""

import time
from pathlib import Path

import torch

from medusa_k25.costs.probing import Measured, Probe
from medusa_k25.heads import DraftVocabulary
from medusa_k25.serving.blank import blank_heads, made_up_tree
from medusa_k25.target import Target
from tests.engines.sglang.accepting import serve_from
from tests.engines.sglang.engine import serving

NODES, LIMIT = 9, 40


def probed(target: Target, folder: Path, **arguments: str) -> tuple[list[Measured], float]:
    """What probe measures, and milliseconds a pass of one long answer, prefill included, the least of three."""
    probe = Probe([1, 4], [48], [{"temperature": 0.0}], short=8, long=32, rounds=2, timeout_s=300)
    with serving(target, folder / "log", **arguments) as (url, _):
        server = probe.open(url)
        places, notes = probe.places([server])
        assert notes == [] and len(places) == 2
        measured = probe.run(places)
        request = {"temperature": 0, "max_new_tokens": LIMIT, "ignore_eos": True}
        whole_ms = []
        for _ in range(3):
            started = time.perf_counter()
            row = server.http.call("/generate", {"input_ids": list(range(100, 148)), "sampling_params": request})
            passes = row["meta_info"].get("spec_verify_ct", LIMIT - 1)
            whole_ms.append(1000 * (time.perf_counter() - started) / passes)
    return measured, min(whole_ms)


def test_passes_cost_what_answers_take(smollm2: Target, tmp_path: Path) -> None:
    vocabulary = DraftVocabulary.most_frequent(torch.zeros(smollm2.vocab_size), 8192)
    tree = made_up_tree(NODES, None, 10)
    heads = blank_heads(smollm2.hidden_size, len(vocabulary), tree)
    folder = serve_from(tmp_path / "blank", smollm2, heads, vocabulary, tree)
    blank = {"speculative_algorithm": "MEDUSA", "speculative_draft_model_path": str(folder)}
    for nodes, arguments in ((1, {}), (NODES, blank)):
        measured, whole_ms = probed(smollm2, tmp_path, **arguments)
        points = [each.point for each in measured]
        assert [(point.nodes, point.batch, point.context) for point in points] == [(nodes, 1, 48), (nodes, 4, 48)]
        assert all("SGLang 0.5" in point.source for point in points)
        print(
            f"{nodes} nodes: {', '.join(f'batch {p.batch} {p.ms:.1f} ms' for p in points)}; answers {whole_ms:.1f} ms"
        )
        # a machine that does other things, too; counting tokens for passes, or rows for batches, is far off
        assert 0.4 * whole_ms < points[0].ms < 2 * whole_ms
        assert points[1].ms < 4 * points[0].ms
