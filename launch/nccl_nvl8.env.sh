# NCCL on machines with 8 GPUs behind an NVSwitch (H100, H200, B200, B300), one or several. Sourced:
# FABRIC=nvl8 launch/multi_node.sh. A value that you export yourself wins.
# Names and values: NVIDIA's NCCL guide, "Environment Variables".
# shellcheck shell=bash

# Say why a call failed; the default says nothing.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# Several nodes with InfiniBand or RoCE cards: fail at the start where RDMA does not work, instead of training over TCP
# at a tenth of the speed. A network plugin of the site (NCCL_NET_PLUGIN) decides for itself.
if [[ ${NNODES:-1} -gt 1 && -z ${NCCL_NET_PLUGIN:-} ]] && compgen -G "/sys/class/infiniband/mlx5_*" >/dev/null; then
    export NCCL_NET="${NCCL_NET:-IB}"
fi

# Facts of your site that NCCL cannot know; export them where its choice is wrong (`ibstat`, `nvidia-smi topo -m`):
# NCCL_IB_HCA         e.g. ^=mlx5_2,mlx5_3 leaves out the cards of the storage network ("=" makes the names exact)
# NCCL_SOCKET_IFNAME  e.g. =bond0: the network for the first handshake, where a node has more than one
# NCCL_CROSS_NIC      0 if every card of a node has a switch of its own (rails) with slow links between them; default 2
# NCCL_IB_GID_INDEX   RoCE only, if `show_gids` shows that the automatic choice is wrong
# Left to NCCL, because its guide files them under debugging (not for production):
# NCCL_NVLS_ENABLE    The default, 2, adds numbers up in the NVSwitch where it can, and fails if its resources cannot be
#                     had: then look at the fabric manager; 0 goes on without.
# NCCL_NET_GDR_LEVEL  How far a card may be from a GPU to write to it directly: NCCL reads the topology.
# NCCL_ALGO, NCCL_PROTO  Chosen per message; a forced LL128 can corrupt data where the platform does not support it.
