"""sgl_kernel.speculative: a tree's links from its mask. Letters: B requests, N nodes a request."""

import torch
from absent import absent
from torch import Tensor

__getattr__ = absent(__name__)


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """From masks of B x N x N (row i: the ancestors of node i and itself), parents before children.

    Written, B x N each: the node's position in the text, its number over all requests, its first child and its next
    sibling (places in the request, -1 where there is none; a root has no sibling).
    """
    B, N = batch_size, draft_token_num
    place_N = torch.arange(N)
    ancestor_BNN = tree_mask.view(B, N, N).bool().tril(-1)
    parent_BN = torch.where(ancestor_BNN, place_N, -1).amax(-1)
    later_NN = place_N[None, :] > place_N[:, None]
    child_BNN = parent_BN[:, None, :] == place_N[:, None]
    sibling_BNN = (parent_BN[:, None, :] == parent_BN[:, :, None]) & later_NN & (parent_BN >= 0)[:, :, None]

    def first(of_BNN: Tensor) -> Tensor:
        place_BN = torch.where(of_BNN, place_N, N).amin(-1)
        return torch.where(place_BN < N, place_BN, -1)

    for written, value_BN in (
        (positions, verified_seq_len[:, None] + ancestor_BNN.sum(-1)),
        (retrive_index, torch.arange(B * N)),
        (retrive_next_token, first(child_BNN)),
        (retrive_next_sibling, first(sibling_BNN)),
    ):
        written.copy_(value_BN.view(written.shape))
