#!/usr/bin/env bash
# Trains on one machine, a process a GPU.
#
#   launch/single_node.sh cache=FOLDER [key=value ...]
#   FABRIC=pcie EXP=k25_4heads GPUS_PER_NODE=8 launch/single_node.sh cache=FOLDER
#   DRY_RUN=1 launch/single_node.sh cache=FOLDER      prints the command
#
# EXP            experiment, default k25_4heads
# GPUS_PER_NODE  processes, default: the GPUs that nvidia-smi lists
# FABRIC         pcie or nvl8: NCCL settings, default none
# PYTHON         default python3
#
# Expected for Kimi-K2.5, four recurrent heads, 3.5 epochs of 74 M tokens, estimates of `plan`: 7 minutes on 8 RTX PRO
# 6000, 4 on 8 H200, 3 on 8 B200, all waiting for disks of 6 or 12 GB/s. Prints the arithmetic of the run, then one
# progress line; writes runs/NAME/: checkpoints, metrics.csv, report.json.
#
# Ends with 0 when trained (also if it was already), 75 when a signal (TERM, USR1) stopped it after a checkpoint: the
# same command goes on, 130 after Ctrl-C: likewise, 2 when the command is wrong, another status when it failed.
#
# torchrun starts the processes rather than training itself (`trainer.devices=8` would): then a process that fails ends
# all others within 30 seconds and with its own status, where Lightning's launcher kills the first process hard (137),
# also when a process ends with 75 before it.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # what torchrun sets anyway, without its warning
EXP=${EXP:-k25_4heads}
count_gpus

become "$PYTHON" "$LAUNCH/agent.py" --standalone --nproc-per-node "$GPUS_PER_NODE" \
    -m medusa_k25.train "+exp=$EXP" trainer.num_nodes=1 "trainer.devices=$GPUS_PER_NODE" "$@"
