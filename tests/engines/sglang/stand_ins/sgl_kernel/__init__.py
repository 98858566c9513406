"""The operations of sgl-kernel that the engine calls on the CPU when it speculates, in plain torch.

They write into tensors that the caller made; names and orders of arguments are the caller's.
Letters: B requests, N nodes a request, L places of a request's row, S steps down a tree plus one.
"""

import ctypes

from absent import absent
from torch import Tensor

__version__ = "0"
__getattr__ = absent(__name__)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, slots: Tensor, row: int
) -> None:
    """Write `slots`, packed request after request, to places start..end of each request's row of `req_to_token`."""
    used = 0
    for pool_index, start, end in _rows(req_pool_indices, start_offset, end_offset):
        req_to_token[pool_index, start:end] = slots[used : used + end - start].to(req_to_token.dtype)
        used += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, slots: Tensor, row: int
) -> None:
    """The way back: read places start..end of each request's row of `req_to_token` into `slots`, packed."""
    used = 0
    for pool_index, start, end in _rows(req_pool_indices, start_offset, end_offset):
        slots[used : used + end - start] = req_to_token[pool_index, start:end].to(slots.dtype)
        used += end - start


def _rows(*columns_B: Tensor) -> zip:
    return zip(*(column_B.tolist() for column_B in columns_B), strict=True)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """The slots of the accepted nodes, packed; `accept_index` pads with -1."""
    accepted = out_cache_loc[accept_index[accept_index >= 0].long()]
    accept_out_cache_loc[: len(accepted)] = accepted


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk down from each root while a child holds the token that the target predicts after its parent.

    `retrive_index` [B, N] numbers the nodes over all requests; first child and next sibling [B, N] are places in their
    own request, -1 where there is none. Written are: the nodes walked through (`accept_index` [B, S], root first),
    their count without the root (`accept_token_num` [B]), and in `predicts` what the target says after each of them.
    """
    said = target_predict.flatten()
    for b in range(len(candidates)):
        node, depth = 0, 0
        while True:
            number = int(retrive_index[b, node])
            accept_index[b, depth] = number
            predicts[number] = said[number]
            child = int(retrive_next_token[b, node]) if depth + 1 < accept_index.shape[1] else -1
            while child >= 0 and candidates[b, child] != said[number]:
                child = int(retrive_next_sibling[b, child])
            if child < 0:
                break
            node, depth = child, depth + 1
        accept_token_num[b] = depth


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, target: Tensor, source: Tensor) -> None:
    """Copy slots `source` to slots `target` in every buffer, given by its address and the bytes of a slot.

    All slots are read before one is written: the two lists may overlap.
    """
    targets, sources = target.tolist(), source.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(address + place * size, size) for place in sources]
        for place, slot in zip(targets, slots, strict=True):
            ctypes.memmove(address + place * size, slot, size)
