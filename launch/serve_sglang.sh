#!/usr/bin/env bash
# Serves Kimi-K2.5 in SGLang, with Medusa heads that draft a tree, or without, to compare. Prints the command first.
#
#   pip install --no-deps medusa-k25             once, into SGLang's environment
#   HEADS=runs/NAME/export TRUST_REMOTE_CODE=1 launch/serve_sglang.sh [SGLang's own flags ...]
#   TRUST_REMOTE_CODE=1 launch/serve_sglang.sh   the same server without speculation: the baseline
#   DRY_RUN=1 HEADS=runs/NAME/export launch/serve_sglang.sh      prints the command only
#
# HEADS              the folder of an export with format=sglang, or its name on the hub; the tree's size is in it
# MODEL              a folder or a name on the hub, default moonshotai/Kimi-K2.5
# ATTENTION          attention backend, default fa3 on compute capability 9.0 (H100, H200), elsewhere triton: those two
#                    verify trees on MLA. trtllm_mla, SGLang's fast one on a B200, takes a chain only: export with
#                    medusa_tree_fallback=chain to serve that. Compare with the baseline on its fastest backend, too.
# GPUS_PER_NODE      default: the GPUs that nvidia-smi lists
# TRUST_REMOTE_CODE  1: your word that the checkpoint's own Python code may run; Kimi-K2.5's tokenizer is such code
# MEDUSA_K25_RECORD  a folder on this machine's disk: requests that ask for it are recorded there as a cache to train
#                    on, with heads or without. MEDUSA_K25_RECORD_ALL=1 records all of them.
# MEDUSA_K25_CONTROL a folder on this machine's disk, by whose files drafting is switched while the server runs: README,
#                    "Switch it on safely"
# PYTHON             default python3, that of SGLang's environment
#
# A flag that you add wins over the one that stands here. Tokens a pass: sglang:spec_accept_length at /metrics, and
# meta_info of each answer. These flags have been parsed by SGLang 0.5.23; no GPU has run them yet.
#
# Ends with SGLang's status, with 2 when something here is wrong.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-moonshotai/Kimi-K2.5}
count_gpus
if [[ -z ${ATTENTION:-} ]]; then
    capability=$( (nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true) | sort -u)
    [[ $capability == 9.0 ]] && ATTENTION=fa3 || ATTENTION=triton
fi

flags=(
    # All GPUs hold a part of every layer. Kimi-K2.5's int4 weights are about 600 GB.
    --tp-size "$GPUS_PER_NODE"
    # One backend for prefill, decoding and verifying.
    --attention-backend "$ATTENTION"
    # Share of a GPU's memory for weights, heads and KV cache; the rest is for activations and CUDA graphs. On GPUs of
    # 96 GB the weights alone take 0.78. Lower it if capturing graphs runs out of memory.
    --mem-fraction-static 0.9
    # Requests that decode together. CUDA graphs are captured for batches up to this size.
    --max-running-requests 48
    # Thoughts go into reasoning_content and tool calls into tool_calls, as the model's chat template writes them.
    --reasoning-parser kimi_k2
    --tool-call-parser kimi_k2
    # Prometheus metrics at /metrics.
    --enable-metrics
)
if [[ $ATTENTION == fa3 || $ATTENTION == triton ]]; then
    flags+=(--page-size 1) # a token a page: nodes of a tree need it, and the baseline is to be the same server
fi
if [[ -n ${HEADS:-} ]]; then
    flags+=(--speculative-algorithm MEDUSA --speculative-draft-model-path "$HEADS")
fi
if [[ ${TRUST_REMOTE_CODE:-0} == 1 ]]; then
    flags+=(--trust-remote-code)
fi
command=("$PYTHON" -m sglang.launch_server --model-path "$MODEL" "${flags[@]}")
if [[ -n ${MEDUSA_K25_RECORD:-} ]]; then
    settings=()
    for name in $(compgen -e MEDUSA_K25_RECORD); do
        settings+=("$name=${!name}")
    done
    # Tokens that the prefix cache holds are not computed again, and so have no states to record.
    command=(env "${settings[@]}" "${command[@]}" --disable-radix-cache)
fi

dry_run || show "${command[@]}" "$@"
become "${command[@]}" "$@"
