# Sourced by the recipes: what they share. Needs bash.
# shellcheck shell=bash

PYTHON=${PYTHON:-python3}
LAUNCH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export DRY_RUN=${DRY_RUN:-0}

refuse() {
    echo "error: $*" >&2
    exit 2
}

# FABRIC=pcie or nvl8 adds NCCL settings; without it NCCL decides alone.
case ${FABRIC:=} in
"") ;;
pcie)
    # shellcheck source=launch/nccl_pcie.env.sh
    . "$LAUNCH/nccl_pcie.env.sh"
    ;;
nvl8)
    # shellcheck source=launch/nccl_nvl8.env.sh
    . "$LAUNCH/nccl_nvl8.env.sh"
    ;;
*) refuse "FABRIC=$FABRIC: expected pcie (GPUs without NVLink) or nvl8 (8 GPUs on an NVSwitch)" ;;
esac

dry_run() {
    [[ $DRY_RUN == 1 ]]
}

# Prints a command with the environment that the recipe gives it, to be pasted into a shell.
show() {
    local name line=
    for name in $(compgen -e OMP_NUM_THREADS || true) $(compgen -e NCCL_ || true); do
        line+="$name=$(printf %q "${!name}") "
    done
    line+=$(printf '%q ' "$@")
    echo "${line% }"
}

# Becomes the command, so that signals and status are its own.
become() {
    if dry_run; then
        show "$@"
    else
        exec "$@"
    fi
}

# Runs a command and returns its status. TERM and USR1 sent to this script reach it as USR1 (TERM would make srun kill
# its tasks); Ctrl-C reaches it from the terminal.
attend() {
    local child signalled=1 status
    "$@" &
    child=$!
    # shellcheck disable=SC2064 # the child of now
    trap "signalled=1; kill -USR1 $child 2>/dev/null || true" TERM USR1
    trap 'signalled=1' INT
    while [[ -n $signalled ]]; do # a trapped signal ends `wait`, not the command
        signalled=
        status=0
        wait "$child" || status=$?
    done
    trap - TERM USR1 INT
    return "$status"
}

# Sets GPUS_PER_NODE to the GPUs of this machine, unless it is set.
count_gpus() {
    GPUS_PER_NODE=${GPUS_PER_NODE:-$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)}
    [[ $GPUS_PER_NODE -gt 0 ]] || refuse "nvidia-smi lists no GPU; set GPUS_PER_NODE to the processes you want (CPU: 1)"
}
