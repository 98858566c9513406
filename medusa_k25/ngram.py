"""Prompt lookup: the training-free predictor that heads have to beat.

The last tokens (the root included) are looked up earlier in the own prompt and answer; what followed there is drafted
as a chain.
"""

import torch
from torch import Tensor


def ngram_accepted(ids_T: Tensor, first_root: int, num_drafts: int, longest: int = 4, shortest: int = 1) -> Tensor:
    """Drafts accepted at every state of the answer that runs from position `first_root` to the end of `ids_T`.

    int64 [S], S = T - 1 - first_root: state s has the root at position first_root + s, the context ends with that root,
    and the chain holds the `num_drafts` tokens that followed the latest earlier occurrence of the longest matching
    suffix (`longest` down to `shortest` tokens). No match: no draft.
    """
    ids = ids_T.tolist()
    latest: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence before the root
    accepted = []
    for root in range(len(ids) - 1):
        if root >= first_root:
            start = next(
                (
                    latest[gram]
                    for n in range(min(longest, root + 1), shortest - 1, -1)
                    if (gram := tuple(ids[root + 1 - n : root + 1])) in latest
                ),
                None,
            )
            # only tokens known at this moment can be drafted: up to and including the root
            draft = [] if start is None else ids[start : min(start + num_drafts, root + 1)]
            truth = ids[root + 1 :]
            accepted.append(
                next(
                    (i for i, (d, t) in enumerate(zip(draft, truth, strict=False)) if d != t),
                    min(len(draft), len(truth)),
                )
            )
        for n in range(shortest, min(longest, root + 1) + 1):
            latest[tuple(ids[root + 1 - n : root + 1])] = root + 1
    return torch.tensor(accepted, dtype=torch.long)
