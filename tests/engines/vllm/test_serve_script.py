"""vLLM's own parser takes the command of launch/serve_vllm.sh."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from medusa_k25.heads import DraftVocabulary, ResidualHeads
from medusa_k25.serving.formats import export_heads
from medusa_k25.tree import Tree

SCRIPT = Path(__file__).parents[3] / "launch" / "serve_vllm.sh"


def test_vllm_knows_every_flag(tmp_path: Path) -> None:
    heads, vocabulary = ResidualHeads(8, 3), DraftVocabulary(torch.arange(20), 32)
    export_heads(tmp_path, heads, vocabulary, Tree.chain(3), torch.bfloat16, {}, "vllm", torch.zeros(32, 8))
    own = {"HEADS": str(tmp_path), "DRY_RUN": "1", "GPUS_PER_NODE": "8", "TRUST_REMOTE_CODE": "1"}
    env = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    line = subprocess.run(["bash", SCRIPT], env=env | own, capture_output=True, text=True, check=True).stdout
    _, _, *arguments = shlex.split(line)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    assert parsed.tensor_parallel_size == 8
    assert parsed.speculative_config == {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 3}
    assert parsed.hf_overrides == {"vocab_size": 32}
    assert parsed.model_loader_extra_config == {"enable_weights_track": False}
    assert (parsed.reasoning_parser, parsed.tool_call_parser) == ("kimi_k2", "kimi_k2")
