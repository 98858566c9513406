"""The alignment contract, written once.

h_t is the final hidden state after the final norm, after reading token x_t; lm_head(h_t) predicts x_{t+1}.
Head k (1-based) reads h_t and predicts x_{t+1+k}. At serving time x_{t+1} is the tree's root, the token that the
target itself has just produced, and head k fills depth k.

Letters: N positions, T tokens, K heads.
"""

import torch
from torch import Tensor

IGNORE = -100  # torch's own ignore_index


def future_tokens(ids_T: Tensor, mask_T: Tensor, document_T: Tensor, positions_N: Tensor, num_heads: int) -> Tensor:
    """Tokens x_{t+1} .. x_{t+1+K} after each position t, int64 [N, K+1]; IGNORE where (t, k) is not valid.

    Column 0 is the root x_{t+1}, column k the label of head k. Column k is valid iff x_{t+1} .. x_{t+1+k} are all
    marked in `mask_T` (one answer span) and lie in the document of t.

    ids_T int [T], mask_T bool [T], document_T int [T] the document each token belongs to, positions_N int64 [N].

    Example: ids 10 11 12 13 | 20 21, mask 0 0 1 1 | 0 1, K = 2:
    t=1 -> [12, 13, .], t=2 -> [13, ., .], t=3 -> [., ., .] (the next token is another document's), t=4 -> [21, ., .].
    """
    ahead_NK = positions_N[:, None] + torch.arange(1, num_heads + 2)
    inside_NK = ahead_NK < len(ids_T)
    ahead_NK = ahead_NK.clamp(max=len(ids_T) - 1)
    same_NK = document_T[ahead_NK] == document_T[positions_N][:, None]
    valid_NK = (mask_T[ahead_NK] & same_NK & inside_NK).cumprod(dim=1).bool()
    return torch.where(valid_NK, ids_T[ahead_NK].long(), IGNORE)
