"""Answers batches of prompts in a vLLM engine of its own process and counts what it accepted.

python answer.py JOB.json: {"model", "options", "batches": [{"prompts", "max_tokens"}], "end_ids", "answers": FILE}.
FILE then holds, a batch, the answers' ids and vLLM's own counters: drafts, and accepted ones by their position.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Vector


def counters(llm: LLM) -> dict[str, list[int]]:
    found = {}
    for metric in llm.get_metrics():
        if isinstance(metric, Counter):
            found[metric.name] = [int(metric.value)]
        elif isinstance(metric, Vector):
            found[metric.name] = [int(value) for value in metric.values]
    names = {"drafts": "num_drafts", "accepted": "num_accepted_tokens_per_pos"}
    return {short: found[f"vllm:spec_decode_{name}"] for short, name in names.items()}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        job["model"],
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # without the statistics there are no counters
        **job["options"],
    )
    results, before = [], counters(llm)
    for batch in job["batches"]:
        sampling = SamplingParams(temperature=0, max_tokens=batch["max_tokens"], stop_token_ids=job["end_ids"])
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch["prompts"]], sampling, use_tqdm=False)
        after = counters(llm)
        counted = {name: [a - b for a, b in zip(after[name], before[name], strict=True)] for name in after}
        results.append({"answers": [list(output.outputs[0].token_ids) for output in outputs], **counted})
        before = after
    Path(job["answers"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
