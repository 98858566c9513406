"""Lets vLLM answer prompts and write the hidden states of what it read; in a process of its own.

python extract.py JOB.json: {"model", "layers", "folder", "prompts", "max_tokens", "end_ids", "answers": FILE}. The
states go to `folder`, a file a request; FILE then holds the answers' ids.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
sys.path.insert(0, str(Path(__file__).parent))  # for the connector

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        job["model"],
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": job["layers"]}},
        },
        kv_transfer_config={
            "kv_connector": "CpuHiddenStatesConnector",
            "kv_connector_module_path": "cpu_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": job["folder"]},
        },
    )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=job["max_tokens"],
        stop_token_ids=job["end_ids"],
        extra_args={"kv_transfer_params": {"include_output_tokens": True}},
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    for _ in range(
        100
    ):  # in one process, nobody else makes the steps after the last answer, in which states are written
        if len(list(Path(job["folder"]).glob("*.safetensors"))) == len(outputs):
            break
        llm.llm_engine.step()
        time.sleep(0.1)
    Path(job["answers"]).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main()
