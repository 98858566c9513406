"""MEDUSA as one of SGLang's speculative algorithms: what it answers the scheduler, and which servers it refuses.

To the scheduler it is n-gram lookup: no draft model with a KV cache of its own, a tree of tokens to verify, and tokens
relayed from one round to the next. Here they are the next round's tree, not the last round's text.
"""

import logging
from pathlib import Path
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from medusa_k25.serving.beside_files import open_beside
from medusa_k25.serving.formats import ServedFolder, open_served, refuse_heads_of_another_target
from medusa_k25.target import Target
from medusa_k25.tree import Tree

logger = logging.getLogger(__name__)

# Attention backends that honour a tree's mask in a verify pass, by the target's kind of attention. fa3 does so where
# speculative_eagle_topk > 1, which `settle` sets; flashinfer ignores the mask on MLA; trtllm_mla, cutedsl_mla and
# flashmla take none.
TREE_BACKENDS = {"MHA": {"triton", "fa3", "flashinfer", "intel_amx"}, "MLA": {"triton", "fa3"}}
PAGED_TREE_BACKENDS = {"flashinfer"}  # those that SGLang itself gives a tree with more than a token a page


class MedusaAlgorithm(CustomSpecAlgo):
    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        """What CustomSpecAlgo leaves out of the built-in algorithms' methods is answered as n-gram lookup does."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(SpeculativeAlgorithm.NGRAM, name)

    def handle_server_args(self, server_args: Any) -> None:
        settle(server_args)


def settle(server_args: Any) -> None:
    """Check the server's settings against the heads, before any weight is loaded, and set what follows from the tree.

    ValueError for whatever MEDUSA would serve wrongly or not at all.
    """
    from medusa_k25.serving.sglang import compat  # only a server that speculates with MEDUSA needs all of this

    a = server_args
    refusals = {
        "--pp-size > 1: the heads draft where the last stage ends, and its drafts do not reach the first": a.pp_size
        > 1,
        # newer versions turn the flag into a size
        "--enable-dp-attention: ranks would verify different batches": a.enable_dp_attention
        or getattr(a, "attn_dp_size", 1) > 1,
        "--disaggregation-mode: the first drafts do not travel with a prefill": a.disaggregation_mode != "null",
        "--enable-watermark: drafts are verified without it": getattr(a, "enable_watermark", False),
        "--enable-two-batch-overlap: a tree is not split": a.enable_two_batch_overlap,
    }
    for reason, given in refusals.items():
        if given:
            raise ValueError(f"MEDUSA does not support {reason}; start the server without it")
    if not a.speculative_draft_model_path:
        raise ValueError("MEDUSA needs --speculative-draft-model-path DIR, a folder that medusa_k25.export wrote")
    served = open_served(
        heads_folder(a.speculative_draft_model_path, a.speculative_draft_model_revision), compat.vocab_size_of(a)
    )
    compare_with_target(served, a.model_path)
    found = open_beside(served, served.file.parent, served.vocab_size)
    tree = tree_to_serve(served, compat.verify_backend(a), compat.uses_mla(a), a.page_size, branches=found is not None)
    beside = found.beside if found is not None and tree is served.tree else None
    if a.speculative_num_draft_tokens not in (None, tree.num_nodes):
        raise ValueError(
            f"--speculative-num-draft-tokens {a.speculative_num_draft_tokens}: the exported tree has {tree.num_nodes} "
            "nodes; leave the option out, or export another tree with num_nodes=... or tree=..."
        )
    a.speculative_num_draft_tokens = tree.num_nodes
    a.speculative_num_steps = max(tree.depth if beside is None else beside.depth, 1)
    # 2 says "a tree" to fa3; the width itself would only make SGLang reserve that much more of the KV cache
    # Beside a chain, too, a continuation makes a tree; the worker looks here whether it is to draft one.
    a.speculative_eagle_topk = 1 if tree.width <= 1 and beside is None else 2
    a.enable_mixed_chunk = False
    if a.max_running_requests is None:
        a.max_running_requests = 48
        logger.warning(
            "--max-running-requests is 48, as for SGLang's other speculative algorithms; set it to change that"
        )


def judge_heads(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Before SGLang handles speculation, and reads DIR's config.json in its own way: is it one to be read at all?"""
    path = server_args.speculative_draft_model_path
    if path and (server_args.speculative_algorithm or "").upper() == "MEDUSA":
        if Path(path).is_dir():
            from medusa_k25.serving.sglang import compat

            served = open_served(Path(path), compat.vocab_size_of(server_args))
            open_beside(served, Path(path), served.vocab_size)
        elif Path(path).exists() or path.startswith(("/", ".", "~")) or path.count("/") > 1:  # no name on the hub
            raise ValueError(
                f"--speculative-draft-model-path {path}: there is no such folder; give one that medusa_k25.export wrote"
            )


def heads_folder(path: str, revision: str | None) -> Path:
    """`path` itself, or where the Hugging Face repository of that name lies after the server has fetched it."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, revision=revision, allow_patterns=["config.json", "*.safetensors"]))


def tree_to_serve(served: ServedFolder, backend: str, mla: bool, page_size: int | None, branches: bool = False) -> Tree:
    """The exported tree itself, or its chain part where the attention backend takes no tree and the export allows
    that. branches: passes verify more than the tree's own paths, even if it is a chain."""
    tree = served.tree
    if tree.width <= 1 and not branches:
        return tree
    attention = "MLA" if mla else "MHA"
    if backend not in TREE_BACKENDS[attention]:
        fault = f"attention backend {backend} takes no tree mask with {attention}"
        fix = f"start with --attention-backend {' or '.join(sorted(TREE_BACKENDS[attention]))}"
    elif (page_size or 1) > 1 and backend not in PAGED_TREE_BACKENDS:
        fault = f"attention backend {backend} takes a tree with one token a page only, --page-size is {page_size}"
        fix = "start with --page-size 1"
    else:
        return tree
    if served.config.get("medusa_tree_fallback") == "chain":
        chain = tree.chain_part
        logger.warning(
            "MEDUSA: %s: serving the chain of %d nodes in the tree of %d", fault, chain.num_nodes, tree.num_nodes
        )
        return chain
    raise ValueError(
        f"MEDUSA: {fault}; {fix}, or serve only the tree's chain: export with medusa_tree_fallback=chain, or write "
        '"medusa_tree_fallback": "chain" into the config.json of the heads'
    )


def compare_with_target(served: ServedFolder, model_path: str) -> None:
    """Refuse heads of another target: of other sizes always, else unless they were exported for this one."""
    try:
        target = Target.open(model_path)
    except ValueError as error:
        logger.warning("MEDUSA: the heads' target is not compared with %s: %s", model_path, error)
        return
    refuse_heads_of_another_target(served, target)
