#!/usr/bin/env bash
# A pilot before anything large: 500 prompts answered and captured, heads trained on a quarter, a half and all of them,
# and the learning curve through the three held against the break-even of the planned run.
#
#   SERVER=http://127.0.0.1:30000 PROMPTS=prompts.jsonl launch/pilot.sh hardware=rtx_pro_6000_x8 [key=value ...]
#   CACHE=FOLDER launch/pilot.sh                     states that are there already: no prompts, no server
#   DRY_RUN=1 CACHE=FOLDER launch/pilot.sh           prints the commands
#
# PROMPTS  a .jsonl file; SAMPLES of its lines are drawn once, into runs/NAME/prompts.jsonl
# SERVER   answers, and records the states: launch/serve_sglang.sh with MEDUSA_K25_RECORD; unset: this machine does both
# CACHE    default runs/NAME/cache
# SAMPLES  default 500
# STEPS    of the run on all of the data, default 200; the others take as many fewer: epochs are alike. A step is
#          data.batch_size=2 windows a rank, unless you set it
# NAME     runs/NAME, runs/NAME-0.25, runs/NAME-0.5, runs/NAME-1; default pilot
# plan.samples=N sets the size of what is planned, default 37000, of answers as long as the pilot's
# EXP, GPUS_PER_NODE, FABRIC, PYTHON as in single_node.sh
#
# Expected for Kimi-K2.5 on 8 RTX PRO 6000 (estimates): 0.75 M tokens of answers in 6 minutes, their states in 2, the
# three trainings in minutes. The same command goes on where it was stopped. Prints the plan with its learning curve,
# and leaves it in runs/NAME/plan.md.
#
# Ends with 0 when the plan is written, else with the status of the first step that failed; 2 when the command is wrong.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export EXP=${EXP:-k25_4heads}
NAME=${NAME:-pilot}
SAMPLES=${SAMPLES:-500}
STEPS=${STEPS:-200}
for override in "$@"; do
    case $override in
    name=* | cache=* | run_dir=* | data.share=* | trainer.max_steps=*)
        refuse "$override: set NAME, CACHE and STEPS; all else follows from them"
        ;;
    esac
done
[[ $STEPS -ge 20 ]] || refuse "STEPS=$STEPS: expected at least 20, a quarter of which is five validations"

# Says what it runs, and runs it unless only the commands are wanted.
step() {
    show "$@"
    dry_run || "$@"
}

if [[ -z ${CACHE:-} ]]; then
    [[ -f ${PROMPTS:-} ]] || refuse "PROMPTS=FILE.jsonl is needed, or CACHE=FOLDER; see the top of ${BASH_SOURCE[0]}"
    CACHE=runs/$NAME/cache
    sample=runs/$NAME/prompts.jsonl
    if ! dry_run && [[ ! -f $sample ]]; then
        mkdir -p "runs/$NAME"
        awk 'BEGIN { srand(1) } { print rand() "\t" $0 }' "$PROMPTS" | sort -g | cut -f 2- |
            awk -v most="$SAMPLES" 'NR <= most' >"$sample.part"
        mv "$sample.part" "$sample"
    fi
    from=("+exp=$EXP" "name=$NAME" "prompts=$sample" ${SERVER:+"server=$SERVER"} "$@")
    step "$PYTHON" -m medusa_k25.generate "${from[@]}"
    step "$PYTHON" -m medusa_k25.capture "${from[@]}"
fi

runs=()
for share in 0.25 0.5 1; do
    steps=$(awk -v steps="$STEPS" -v share="$share" 'BEGIN { printf "%d", steps * share }')
    step "$LAUNCH/single_node.sh" data.batch_size=2 "$@" "name=$NAME-$share" "cache=$CACHE" "data.share=$share" \
        "trainer.max_steps=$steps" "trainer.val_check_interval=$((steps / 5))"
    runs+=("runs/$NAME-$share")
done
step "$PYTHON" -m medusa_k25.plan "+exp=$EXP" plan.samples=37000 "$@" "name=$NAME" "pilot=[$(
    IFS=,
    echo "${runs[*]}"
)]"
