"""Everything of SGLang that the plugin touches, and the one place that knows its versions (0.5.20 to 0.5.23).

A server is judged by what it offers, not by its version number: the imports here are the names that MEDUSA needs, and
one that is missing is named. The rest of the plugin takes them from here.
"""

from typing import Any

try:
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.distributed.parallel_state import get_tp_group
    from sglang.srt.layers.logprob_processor import compute_spec_logprobs
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import GenerationBatchResult
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardMode,
        get_server_return_hidden_states_mode,
    )
    from sglang.srt.runtime_context import get_device, get_observability, get_spec
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
    from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode, eagle_sample
    from sglang.srt.speculative.ngram_info import NgramVerifyInput
    from sglang.srt.speculative.spec_utils import (
        GrammarTree,
        build_grammar_vocab_mask,
        commit_mamba_states_after_verify,
        move_accept_tokens_to_target_kvcache,
        prepare_mamba_track_for_verify,
        record_stream_for_v2_verify,
    )
except ImportError as error:
    from importlib.metadata import version

    raise ValueError(
        f"SGLang {version('sglang')} does not offer what MEDUSA needs ({error}); "
        "use one of 0.5.20 to 0.5.23, or a newer medusa-k25"
    ) from error

__all__ = [
    "AttentionArch",
    "BaseSpecWorker",
    "CaptureHiddenMode",
    "ForwardMode",
    "GenerationBatchResult",
    "GrammarTree",
    "NgramVerifyInput",
    "ScheduleBatch",
    "TpModelWorker",
    "TreeMaskMode",
    "assign_extend_cache_locs_func",
    "attention_backends_of",
    "build_grammar_vocab_mask",
    "commit_mamba_states_after_verify",
    "compute_spec_logprobs",
    "default_tree_mask_mode",
    "eagle_sample",
    "get_alloc_reserve_per_decode",
    "get_device",
    "get_observability",
    "get_server_return_hidden_states_mode",
    "get_spec",
    "get_tp_group",
    "model_config_of",
    "move_accept_tokens_to_target_kvcache",
    "prepare_mamba_track_for_verify",
    "record_stream_for_v2_verify",
]


def verify_backend(server_args: Any) -> str:
    """Name of the attention backend that verify passes run on."""
    prefill, decode = attention_backends_of(server_args)
    return str(decode if server_args.speculative_attention_mode == "decode" else prefill)


def vocab_size_of(server_args: Any) -> int:
    return int(model_config_of(server_args).vocab_size)


def uses_mla(server_args: Any) -> bool:
    return bool(model_config_of(server_args).attention_arch == AttentionArch.MLA)
