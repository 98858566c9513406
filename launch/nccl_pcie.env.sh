# NCCL on a box of GPUs without NVLink, such as 8 RTX PRO 6000. Sourced: FABRIC=pcie launch/single_node.sh
# A value that you export yourself wins. Names and values: NVIDIA's NCCL guide, "Environment Variables".
# shellcheck shell=bash

# Say why a call failed; the default says nothing.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# No RDMA device: name TCP sockets as the network, so that NCCL looks for no other. One machine uses none at all.
if ! compgen -G "/sys/class/infiniband/*" >/dev/null && [[ -z ${NCCL_NET_PLUGIN:-} ]]; then
    export NCCL_NET="${NCCL_NET:-Socket}"
fi

# Left to NCCL, because its guide files them under debugging (not for production):
# NCCL_P2P_LEVEL    By itself NCCL copies GPU to GPU below PCIe switches (PXB) and through host memory across CPUs. PHB
#                   or SYS are worth a measurement if `nvidia-smi topo -p2p rw` says OK everywhere; if a run hangs in its
#                   first all-reduce (PCIe ACS or an IOMMU in the way), NCCL_P2P_LEVEL=LOC shows whether that is why.
# NCCL_SHM_DISABLE  Host memory is the way between GPUs that cannot reach each other: never switch it off here. In a
#                   container give /dev/shm room (docker run --shm-size=8g).
# NCCL_ALGO, NCCL_PROTO  Chosen per message; a forced LL128 can corrupt data where the platform does not support it.
# NCCL_NVLS_ENABLE  Has no effect without an NVSwitch.
# Several of these boxes: export NCCL_SOCKET_IFNAME==NAME (exact, after "=") where a node has more than one network.
