"""Attention of a tree's nodes to the text before it and to their ancestors.

Letters: N nodes, T tokens with them, P tokens before them, H heads, G heads of keys and values, C channels.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def tree_attention(query_NHC: Tensor, key_TGC: Tensor, value_TGC: Tensor, mask_NN: Tensor, scale: float) -> Tensor:
    """[N, H, channels of a value]: the last N of T tokens are the tree's nodes, which also see all tokens before it."""
    N, T = len(query_NHC), len(key_TGC)
    mask_NT = torch.cat((mask_NN.new_ones(N, T - N), mask_NN), dim=1)
    query, key, value = (x.transpose(0, 1)[None] for x in (query_NHC, key_TGC, value_TGC))
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask_NT, scale=scale, enable_gqa=True)
    return attended[0].transpose(0, 1)
