"""Where a label ranks among the logits of its row, and the best k tokens: one tie rule for both.

Offline replay uses the ranks, decoding the best k: a draft is right at choice c exactly if the label's rank is c, so
the two must agree on ties too. The rule: the higher logit first, of equal logits the lower token index.

Letters: N positions, D hidden, V vocabulary, S cut-offs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_k25.data.labels import IGNORE
from medusa_k25.loss import check_labels, matmul_dtype

MISS = 2**31 - 1  # the rank of a label that cannot be drafted: IGNORE, or outside the draft vocabulary
BLOCK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}


@torch.no_grad()
def label_ranks(features_ND: Tensor, lm_head_VD: Tensor, labels_N: Tensor, rows: int | None = None) -> Tensor:
    """Rank of each label (0 = best) among the V logits of its row, int64 [N]; MISS where the label is IGNORE.

        logits_NV = features_ND @ lm_head_VD.T
        rank = #(logit > label's logit) + #(logit == label's logit at a lower index)

    Works on `rows` rows of logits at a time (None: as many as fit into BLOCK_BYTES, at least 64). The logits have the
    dtype of loss.matmul_dtype (lm_head is cast once a call where its dtype differs); decoding must use the same for
    ranks and choices to agree. A label whose logit is NaN is a MISS.
    """
    check_labels(labels_N, len(lm_head_VD))
    dtype = matmul_dtype(features_ND)
    lm_head_VD = lm_head_VD.to(dtype)
    V = len(lm_head_VD)
    R = rows or max(64, BLOCK_BYTES[features_ND.device.type] // (V * dtype.itemsize))
    ranks_N = torch.full_like(labels_N, MISS, dtype=torch.int64)
    token_V = torch.arange(V, device=features_ND.device)
    pairs_M = (labels_N != IGNORE).nonzero().squeeze(1)
    for pairs in pairs_M.split(R):
        logits_RV = features_ND[pairs].to(dtype) @ lm_head_VD.T
        label_R1 = labels_N[pairs, None]
        gold_R1 = logits_RV.gather(1, label_R1)
        before_RV = (logits_RV == gold_R1).logical_and_(token_V < label_R1).logical_or_(logits_RV > gold_R1)
        ranks_N[pairs] = torch.where(gold_R1.isnan(), MISS, before_RV.sum(dim=1, keepdim=True)).squeeze(1)
    return ranks_N


def topk_ids(logits_NV: Tensor, k: int) -> Tensor:
    """The k best tokens of each row, best first, int64 [N, k], with the tie rule of `label_ranks`.

    torch.topk leaves the order of equal logits open; sorting all V would be slow.
    """
    values_NK, ids_NK = ordered_topk(logits_NV, k)
    cut_N = (logits_NV >= values_NK[:, -1:]).sum(dim=1) != k  # the k-th logit occurs again beyond the cut (or is NaN)
    if cut_N.any():
        ids_NK[cut_N] = logits_NV[cut_N].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return ids_NK


def ordered_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices [..., k] of the k largest along the last dimension, of equal ones the lower index first.

    Which of several equal ones at the cut is kept is open (`topk_ids` mends that, at the price of waiting for the
    device).
    """
    ids = logits.topk(k, dim=-1).indices.sort(dim=-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def top_accuracy(ranks: Tensor, counted: Tensor, ks: Sequence[int] = (1, 2, 3, 4, 5)) -> tuple[Tensor, Tensor]:
    """(hits int64 [..., S], count int64 [...]): how many ranks are below each k, of how many counted positions.

    Add both up over batches and ranks of a run, then divide. ranks [..., N] from `label_ranks`; counted bool [..., N]:
    positions that have a label in the target's vocabulary. One of rank MISS (its label is outside the draft vocabulary)
    is a miss for every k.
    """
    ks_S = torch.tensor(ks, device=ranks.device)
    hits = (ranks[..., None] < ks_S) & counted[..., None]
    return hits.sum(dim=-2), counted.sum(dim=-1)
