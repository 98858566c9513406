#!/usr/bin/env bash
# Checks on your GPU what this project could prove on CPUs only: MEDUSA in SGLang under CUDA graphs, with a tree mask on
# MLA, and sampling. Nothing is downloaded; the model is a miniature of Kimi-K2.5 with random weights, made on the spot.
#
#   pip install --no-deps medusa-k25        once, into SGLang's environment
#   PYTHON=/path/to/that/python launch/field_check.sh
#   MODEL=FOLDER launch/field_check.sh           on a model of yours: up to about 1 B parameters, it is read by
#                                                transformers on the CPU, too
#   DRY_RUN=1 launch/field_check.sh              prints the command
#
# MODEL   a folder, or a name in the local Hugging Face cache
# OUT     what to send with a report, default field_check.json
# QUICK   1: the plain engine and MEDUSA once; leaves out graphs, overlap, other attention backends and two ranks
# TIME_S  no engine is started after so many seconds, default 480
# PYTHON  default python3
#
# Expected: up to eight engine starts, under 10 minutes (an estimate; without a GPU it takes three starts). Each line is
# a check: ok, FAILED, or - where this machine does not allow it. A check that could not be made never counts as passed.
#
#   the plain engine, MEDUSA ...    the engine starts, answers and ends
#   ...: text                       greedy answers are the plain engine's, but for near ties in bfloat16
#   ...: accept length              verify passes are those of the reference decoder for that text
#   overlap off, graphs off         the same with those settings, and against MEDUSA before
#   graphs: used                    the engine's log says that decode passes ran as graphs
#   sampling at T: token 2, 3       two-sample chi-square test against the plain engine, 4,000 samples each
#   MEDUSA on fa3, two ranks        where the GPU has it, where there are two
#   flashinfer is refused           it ignores a tree's mask on MLA
#
# Ends with 0 when nothing failed, 1 when something did, 2 when the command is wrong. No GPU has run this yet.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

arguments=(--out "${OUT:-field_check.json}" --time-s "${TIME_S:-480}")
if [[ -n ${MODEL:-} ]]; then
    arguments+=(--model "$MODEL")
fi
if [[ ${QUICK:-0} == 1 ]]; then
    arguments+=(--quick)
fi
become "$PYTHON" "$LAUNCH/field_check.py" "${arguments[@]}" "$@"
