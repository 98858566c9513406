"""What SGLang calls when it starts: entry point group `sglang.srt.plugins`, in every process of a server.

It works in SGLang's own environment (`pip install --no-deps medusa-k25`): nothing here imports a training package.
"""

import logging
import os
import pkgutil
import sys
from typing import Any

from transformers import AutoConfig, PretrainedConfig

logger = logging.getLogger(__name__)


def register() -> None:
    """Add MEDUSA to SGLang's speculative algorithms, and recording where MEDUSA_K25_RECORD names a folder.

    SGLang only logs what a plugin raises and serves on without it, so a failure ends the process here.
    """
    try:
        register_medusa()
        if "MEDUSA_K25_RECORD" in os.environ:
            from medusa_k25.serving.sglang import record

            record.install()
    except Exception as error:
        logger.exception("medusa_k25 could not register with SGLang")
        sys.exit(
            f"error: medusa_k25 could not register with SGLang: {error}; mend that, or uninstall medusa-k25 to start "
            "the server without it"
        )


def register_medusa() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from medusa_k25.serving.sglang.algorithm import MedusaAlgorithm, judge_heads
    from medusa_k25.serving.sglang.graphs import RUNNER, capture_states_for_medusa

    AutoConfig.register("medusa", MedusaConfig, exist_ok=True)

    @SpeculativeAlgorithm.register("MEDUSA", supports_overlap=True, spec_class=MedusaAlgorithm)
    def worker_class(server_args: Any) -> type:
        from medusa_k25.serving.sglang.worker import MedusaWorker

        return MedusaWorker

    for function, hook, kind in (
        ("sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding", judge_heads, HookType.BEFORE),
        (RUNNER, capture_states_for_medusa, HookType.AFTER),
        (
            "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
            room_for_two_trees,
            HookType.AFTER,
        ),
    ):
        pkgutil.resolve_name(function)  # the registry would only log that a name is missing
        HookRegistry.register(function, hook, kind)


def room_for_two_trees(extra: int) -> int:
    """Slots that a request's row has beyond the longest context.

    A round reserves two trees, for this round and one that is not yet counted. SGLang's rows hold but one where pages
    are single tokens: near the context's end the second would run into the next request's row.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec

    return max(extra, get_alloc_reserve_per_decode()) if get_spec().speculative_algorithm == "MEDUSA" else extra


class MedusaConfig(PretrainedConfig):
    """SGLang reads the config of a draft model with transformers, which must know its type."""

    model_type = "medusa"
