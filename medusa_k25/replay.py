"""Acceptance without a server: walk the target's own text as a draft-and-verify server would.

On text that the target generated itself, what a verify pass accepts is already decided: drafts are accepted as long as
they equal the text. So the number of passes is known to the integer. tests/test_decode.py and the `decode` verb hold
this against a real draft-and-verify loop.

The words: a pass verifies a tree below the root, the token that the target produced last. It emits the accepted drafts
and one token of the target's own. Acceptance length = tokens emitted by passes / passes; the token that prefill emits
is not counted, and drafts beyond the answer's end do not count.

Letters: S states of one answer, K heads, D hidden, M draft vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_k25.cache import Cache, Document
from medusa_k25.data.windows import answers_of
from medusa_k25.heads import DraftVocabulary, Heads
from medusa_k25.metrics import label_ranks
from medusa_k25.tree import Tree


@dataclass(frozen=True)
class Acceptance:
    """Counters of verify passes over answers that needed any. `accepted[a]` = passes that accepted exactly a drafts."""

    answers: int = 0
    passes: int = 0
    emitted: int = 0
    accepted: dict[int, int] = field(default_factory=dict)

    @property
    def length(self) -> float:
        """Tokens emitted a pass (1 when nothing was ever accepted); nan without passes."""
        return self.emitted / self.passes if self.passes else float("nan")

    @property
    def passes_saved(self) -> float:
        """Share of the target's decode passes that speculation saves."""
        return 1 - self.passes / self.emitted if self.emitted else float("nan")

    def __add__(self, other: "Acceptance") -> "Acceptance":
        accepted = {
            a: self.accepted.get(a, 0) + other.accepted.get(a, 0) for a in sorted({*self.accepted, *other.accepted})
        }
        return Acceptance(
            self.answers + other.answers, self.passes + other.passes, self.emitted + other.emitted, accepted
        )


def walk(accepted_S: Sequence[int]) -> Acceptance:
    """One answer, from prefill to its last token.

    `accepted_S[s]` = drafts that a pass accepts when it was drafted from the answer's state s. An answer of A tokens
    has S = A - 1 such states: state 0 is the last prompt token's, whose root is answer token 0; state s has root
    answer token s, and S - s tokens follow that root.
    """
    state, passes, emitted = 0, 0, 0
    histogram: dict[int, int] = {}
    while state < len(accepted_S):
        left = len(accepted_S) - state
        accepted = min(accepted_S[state], left)
        step = min(accepted + 1, left)  # a draft that is the answer's last token leaves no place for the target's own
        state, passes, emitted = state + step, passes + 1, emitted + step
        histogram[accepted] = histogram.get(accepted, 0) + 1
    return Acceptance(1, passes, emitted, histogram)


def walks(ranks: Iterable[Tensor], tree: Tree) -> list[Acceptance]:
    """One walk an answer, each answer given by the ranks [S, K] of its labels (see `answer_ranks`)."""
    return [walk(tree.accepted(ranks_SK).tolist()) for ranks_SK in ranks]


def replay(ranks: Iterable[Tensor], tree: Tree) -> Acceptance:
    """The sum of `walks`: acceptance of `tree` over all answers."""
    return sum(walks(ranks, tree), Acceptance())


@torch.no_grad()
def answer_ranks(
    heads: Heads, lm_head_MD: Tensor, vocabulary: DraftVocabulary, cache: Cache, documents: Iterable[Document]
) -> list[Tensor]:
    """For every answer in `documents` the rank of head k's label at each of its states, int64 [S, K].

    The rank is the place of the true token among the head's logits (0 = best). MISS stands for a label outside the
    draft vocabulary or beyond the answer's end.
    """
    parameter = next(heads.parameters())
    return [
        future_ranks(heads, lm_head_MD, vocabulary, hidden_SD.to(parameter.device, parameter.dtype), future_SK)
        for document in documents
        for hidden_SD, future_SK in answers_of(cache, document, heads.num_heads)
    ]


@torch.no_grad()
def future_ranks(
    heads: Heads, lm_head_MD: Tensor, vocabulary: DraftVocabulary, hidden_SD: Tensor, future_SK: Tensor
) -> Tensor:
    """Ranks [S, K], on the CPU, of the labels in `future_SK` (see `labels.future_tokens`) at the states hidden_SD."""
    future_SK = future_SK.to(hidden_SD.device)
    features_KSD = heads(hidden_SD, future_SK[:, :-1])
    labels_KS = vocabulary.to_draft(future_SK[:, 1:]).T

    def ranks_of(lm_head: Tensor) -> Tensor:
        lm_heads_KMD = lm_head.expand(heads.num_heads, -1, -1)
        return torch.stack([label_ranks(*each) for each in zip(features_KSD, lm_heads_KMD, labels_KS, strict=True)])

    return heads.with_lm_head(lm_head_MD, ranks_of).T.cpu()


def best_tree(calibration: Sequence[Tensor], num_nodes: int, max_width: int) -> Tree:
    """`Tree.best` on the answers of calibration text, each given by its ranks [S, K] (see `answer_ranks`)."""
    if not calibration:
        raise ValueError("there is no answer in the calibration split to choose a tree on; capture more conversations")
    return Tree.best(torch.cat(list(calibration)), num_nodes, max_width)


def interval(walks: Sequence[Acceptance], samples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of the acceptance length, resampling whole answers."""
    counts = torch.tensor([(walk.emitted, walk.passes) for walk in walks], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(counts), (samples, len(counts)), generator=generator)
    emitted, passes = counts[drawn].sum(dim=1).unbind(dim=1)
    low, high = (emitted / passes).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
