#!/usr/bin/env bash
# Trains on several machines with the same folders (cache and runs/ on a shared file system): the same command on each.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=HOST FABRIC=nvl8 launch/multi_node.sh cache=FOLDER [key=value ...]
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=HOST FABRIC=nvl8 launch/multi_node.sh cache=FOLDER [key=value ...]
#   DRY_RUN=1 NNODES=2 ... prints the command
#
# NNODES         machines
# NODE_RANK      this one, 0 to NNODES-1
# MASTER_ADDR    name or address of machine 0
# MASTER_PORT    a free port of machine 0, default 29500; the only one that has to be known
# GPUS_PER_NODE  processes a machine, default: the GPUs that nvidia-smi lists
# EXP            experiment, default k25_nvl8_multinode
# JOIN_TIMEOUT_S how long to wait for the other machines, default 900
# FABRIC, PYTHON as in single_node.sh
#
# Expected for Kimi-K2.5, four recurrent heads: the minutes of single_node.sh (estimates) divided by the machines at best,
# and no faster than the cache is read; gradients of 0.15 GB cross the network every step.
# Output: the one run folder runs/NAME, written by machine 0.
#
# Ends as single_node.sh does: 0 trained, 75 stopped after a checkpoint, 130 Ctrl-C, 2 wrong command, else failed. A
# signal to one machine is enough to stop all. When a machine is lost, the others end with an error; the same command on
# all machines goes on from the last whole checkpoint. Nothing restarts by itself: whoever starts the machines does that.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # what torchrun sets anyway, without its warning
EXP=${EXP:-k25_nvl8_multinode}
for name in NNODES NODE_RANK MASTER_ADDR; do
    [[ -n ${!name:-} ]] || refuse "$name is needed; see the top of ${BASH_SOURCE[0]}"
done
count_gpus

# A static rendezvous: ranks follow NODE_RANK, so machine 0 is the one that writes, and no machine joins a run halfway.
become "$PYTHON" "$LAUNCH/agent.py" --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS_PER_NODE" \
    --rdzv-backend static --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    --rdzv-conf "timeout=${JOIN_TIMEOUT_S:-900}" \
    -m medusa_k25.train "+exp=$EXP" "trainer.num_nodes=$NNODES" "trainer.devices=$GPUS_PER_NODE" "$@"
