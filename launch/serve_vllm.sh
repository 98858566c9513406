#!/usr/bin/env bash
# Serves Kimi-K2.5 with Medusa heads in vLLM, which drafts a chain of the heads' best choices. Prints the command first.
#
#   python -m medusa_k25.export format=vllm      makes runs/NAME/export
#   HEADS=runs/NAME/export TRUST_REMOTE_CODE=1 launch/serve_vllm.sh [vLLM's own flags ...]
#   DRY_RUN=1 HEADS=runs/NAME/export launch/serve_vllm.sh      prints the command only
#
# HEADS              the folder of an export with format=vllm
# MODEL              a folder or a name on the hub, default moonshotai/Kimi-K2.5
# DRAFTS             tokens drafted a pass, default: one a head; fewer leave the last heads unused
# GPUS_PER_NODE      default: the GPUs that nvidia-smi lists
# TRUST_REMOTE_CODE  1: your word that the checkpoint's own Python code may run; Kimi-K2.5's tokenizer is such code
# PYTHON             default python3, to read HEADS/config.json; `vllm` must be in PATH
#
# The heads share no weights with the target here: every GPU holds them, and its share of a copy of lm_head.
# With four plain heads of Kimi-K2.5 over all its tokens that is 0.41 GB, and 2.35 GB over all GPUs; vLLM holds no
# others.
# For other targets take the command from HEADS/README.md.
#
# Ends with vLLM's status, with 2 when something here is wrong.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ -n ${HEADS:-} ]] || refuse "HEADS=FOLDER is needed; see the top of ${BASH_SOURCE[0]}"
MODEL=${MODEL:-moonshotai/Kimi-K2.5}
count_gpus

# heads, vocabulary, draft vocabulary, and whether all that vLLM reads is there: it does not miss a copy of lm_head when
# a draft vocabulary has it look away (below), and drafts noise then.
facts=$("$PYTHON" - "$HEADS" <<'READ'
import json, pathlib, sys

folder = pathlib.Path(sys.argv[1])
try:
    config = json.loads((folder / "config.json").read_text())
    with (folder / "model.safetensors").open("rb") as file:
        names = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    facts = [int(config[key]) for key in ("num_heads", "vocab_size", "truncated_vocab_size")]
    whole = "lm_head.weight" in names or not config["original_lm_head"]
except (OSError, ValueError, KeyError):
    sys.exit("error: HEADS=" + sys.argv[1] + " is no export; python -m medusa_k25.export format=vllm makes one")
if not whole:
    sys.exit("error: HEADS=" + sys.argv[1] + " has no copy of lm_head, which vLLM needs; export it with format=vllm")
print(*facts)
READ
) || exit 2
read -r heads vocab_size draft_size <<<"$facts"
DRAFTS=${DRAFTS:-$heads}
[[ $DRAFTS =~ ^[1-9][0-9]*$ && $DRAFTS -le $heads ]] || refuse "DRAFTS=$DRAFTS: expected 1 to $heads, the heads there are"

flags=(
    # All GPUs hold a part of every layer. Kimi-K2.5's int4 weights are about 600 GB.
    --tensor-parallel-size "$GPUS_PER_NODE"
    # The heads, and how many tokens they draft a pass.
    --speculative-config "{\"method\": \"medusa\", \"model\": \"$HEADS\", \"num_speculative_tokens\": $DRAFTS}"
    # vLLM looks for the vocabulary's size beside text_config, where Kimi-K2.5's config has none, and fails without it.
    --hf-overrides "{\"vocab_size\": $vocab_size}"
    # Thoughts go into reasoning_content and tool calls into tool_calls, as the model's chat template writes them.
    --reasoning-parser kimi_k2
    --tool-call-parser kimi_k2
    --enable-auto-tool-choice
    # Every GPU has the whole (small) vision encoder and takes its share of the images: no all-reduces in it.
    --mm-encoder-tp-mode data
)
if [[ $draft_size -lt $vocab_size ]]; then
    # vLLM counts the map of a draft vocabulary as a weight that was not loaded, and stops; this has it not count. It
    # counts the target's no more either, so do without this when you change the target.
    flags+=(--model-loader-extra-config '{"enable_weights_track": false}')
fi
if [[ ${TRUST_REMOTE_CODE:-0} == 1 ]]; then
    flags+=(--trust-remote-code)
fi

dry_run || show vllm serve "$MODEL" "${flags[@]}" "$@"
become vllm serve "$MODEL" "${flags[@]}" "$@"
