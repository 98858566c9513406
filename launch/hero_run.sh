#!/usr/bin/env bash
# From a cache to heads that can be served: verify the cache, train, evaluate, export. The same command goes on where it
# was stopped, and repeats a step only if what it reads or its overrides have changed since.
#
#   CACHE=FOLDER FABRIC=pcie launch/hero_run.sh [key=value ...]
#   CACHE=FOLDER NAME=mine EXP=k25_4heads launch/hero_run.sh optimizer.lr=5e-4
#   DRY_RUN=1 CACHE=FOLDER launch/hero_run.sh      prints the commands of the steps that are left
#
# CACHE  the states that `python -m medusa_k25.capture` or a recording server wrote
# NAME   the run, in runs/NAME; default: EXP
# EXP, GPUS_PER_NODE, FABRIC, PYTHON as in single_node.sh
# Several machines: NNODES, NODE_RANK, MASTER_ADDR as in multi_node.sh, the same command on each. Machine 0 verifies,
# evaluates and exports; the others wait for it and train (JOIN_TIMEOUT_S, default 14400: longer than verifying takes).
#
# Expected for Kimi-K2.5, four recurrent heads, 74 M tokens (estimates): verifying reads the cache once on one core, 1.06
# TB in an hour; 3.5 epochs take 7 minutes on 8 RTX PRO 6000, 4 on 8 H200, 3 on 8 B200; evaluating and
# exporting, minutes.
# Output: runs/NAME/ with checkpoints, metrics.csv, report.json, report.html and export/.
#
# Ends with 0 when everything is done, else with the status of the first step that was not: 75 when a signal (TERM, USR1)
# stopped training after a checkpoint, 1 for a damaged cache (the shards are named), 2 when the command is wrong.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NNODES=${NNODES:-1}
[[ -n ${CACHE:-} ]] || refuse "CACHE=FOLDER is needed; see the top of ${BASH_SOURCE[0]}"
ABOUT_TARGET=()
for override in "$@"; do
    case $override in
    target=* | target.*) ABOUT_TARGET+=("$override") ;;
    name=* | cache=* | run_dir=* | export_dir=*) refuse "$override: set NAME and CACHE; all else follows from them" ;;
    esac
done

if [[ $NNODES -gt 1 ]]; then
    export EXP=${EXP:-k25_nvl8_multinode} JOIN_TIMEOUT_S=${JOIN_TIMEOUT_S:-14400}
    train=$LAUNCH/multi_node.sh
else
    export EXP=${EXP:-k25_4heads}
    train=$LAUNCH/single_node.sh
fi
NAME=${NAME:-$EXP}
RUN=runs/$NAME

if [[ $NNODES -gt 1 && ${NODE_RANK:-} != 0 ]]; then
    exec "$train" "name=$NAME" "cache=$CACHE" "$@"
fi

# step VERB OUTPUT INPUT...: runs a verb, unless it ended well with these overrides, its output is there, and no input
# is newer than its start. Training needs no such mark: it looks at its checkpoints itself.
step() {
    local verb=$1 output=$2 mark=$RUN/.hero_run/$1
    shift 2
    local wanted="$EXP ${OVERRIDES[*]}"
    if [[ -e $output && -f $mark && $(<"$mark") == "$wanted" && -z $(find -H "$@" -newer "$mark" -print -quit) ]]; then
        echo "# $verb: done before"
    elif dry_run; then
        show "$PYTHON" -m "medusa_k25.$verb" "+exp=$EXP" "${OVERRIDES[@]}"
    else
        echo "# $verb"
        mkdir -p "$RUN/.hero_run"
        echo "$wanted" >"$mark.part"
        "$PYTHON" -m "medusa_k25.$verb" "+exp=$EXP" "${OVERRIDES[@]}"
        mv "$mark.part" "$mark"
    fi
}

OVERRIDES=("name=$NAME" "cache=$CACHE" verify=full "${ABOUT_TARGET[@]}") # what else changes is no reason to verify again
step inspect "$RUN/report.json" "$CACHE"
OVERRIDES=("name=$NAME" "cache=$CACHE" "$@")
echo "# train"
attend "$train" "${OVERRIDES[@]}"
step evaluate "$RUN/report.html" "$CACHE/index" "$RUN"/checkpoints/*/heads.json
step export "$RUN/export" "$CACHE/index" "$RUN"/checkpoints/*/heads.json
dry_run || echo "# done: $RUN/report.html, $RUN/export"
