"""Training windows and whole answers, cut from a cache without copying more than they need.

Only positions whose next token belongs to an answer carry labels; a split's positions, document after document, form
one long row that is cut into windows. Labels never cross a document or an answer (`labels.future_tokens`).

Letters: N rows, W windows, S states of one answer, A answer tokens, K heads, D hidden, T tokens, M rows of a shard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medusa_k25.cache import Cache, Document
from medusa_k25.data.labels import IGNORE, future_tokens
from medusa_k25.data.sampler import Share
from medusa_k25.data.splits import Split, split_of


def documents_of(cache: Cache, split: Split) -> list[Document]:
    return [document for document in cache.documents if split_of(document.group, document.hash) == split]


def token_counts(cache: Cache, documents: Sequence[Document]) -> Tensor:
    """How often each target token occurs in the answers of `documents`, int64 [V]."""
    counts_V = torch.zeros(cache.vocab_size, dtype=torch.long)
    for document in documents:
        answer_ids = cache.token_ids(document)[cache.loss_mask(document)].long()
        counts_V += torch.bincount(answer_ids, minlength=cache.vocab_size)
    return counts_V


@dataclass(frozen=True)
class Run:
    """Consecutive positions of one answer, consecutive rows of its shard too, each with a label for head 1 at least.

    A whole answer of A tokens is a run of S = A - 1 rows: from the state of the last prompt token on; the state whose
    root is the answer's last token has nothing left to predict.
    """

    document: Document
    row_start: int
    row_stop: int


def runs_of(cache: Cache, document: Document) -> list[Run]:
    """One run for every answer of `document` that has at least two tokens."""
    positions_M = cache.shard_positions(document.shard)[document.row_start : document.row_stop] - document.start
    padded_T = torch.cat([cache.loss_mask(document), torch.zeros(2, dtype=torch.bool)])
    labelled_M = padded_T[positions_M + 1] & padded_T[positions_M + 2]
    rows = torch.nonzero(labelled_M).flatten()
    breaks = torch.nonzero((rows.diff() != 1) | (positions_M[rows].diff() != 1)).flatten() + 1
    return [
        Run(document, document.row_start + int(part[0]), document.row_start + int(part[-1]) + 1)
        for part in rows.tensor_split(breaks)
        if len(part)
    ]


def future_of(cache: Cache, run: Run, num_heads: int) -> Tensor:
    """`labels.future_tokens` of a run's rows, int64 [rows, K+1]."""
    document = run.document
    positions_N = cache.shard_positions(document.shard)[run.row_start : run.row_stop] - document.start
    ids_T = cache.token_ids(document)
    one_document_T = torch.zeros(document.length, dtype=torch.int)
    return future_tokens(ids_T, cache.loss_mask(document), one_document_T, positions_N, num_heads)


def answers_of(cache: Cache, document: Document, num_heads: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Every answer of a document that a server would speculate on: (hidden [S, D], future tokens [S, K+1])."""
    for run in runs_of(cache, document):
        yield cache.read_rows(document.shard, run.row_start, run.row_stop), future_of(cache, run, num_heads)


class Batch(NamedTuple):
    """What a training step reads: rows of states, `labels.future_tokens` of each, and how many labels the step has.

    With teacher states, row n+k is the state h_{t+k} wherever head k has a label at row n: behind the rows of an answer
    follow those that only teach, whose tokens are all IGNORE.
    """

    hidden_ND: Tensor
    future_NK: Tensor  # int64 [N, K+1]
    count_K: Tensor  # int64, labels of each head over all micro-batches and ranks of the step


class Windows(Dataset):
    """The labelled positions of a split, cut into windows of `window` positions; the last one may be shorter."""

    def __init__(
        self, cache: Cache, documents: Sequence[Document], window: int, num_heads: int, teacher_states: bool = False
    ):
        self.cache, self.window, self.num_heads = cache, window, num_heads
        self.teacher_states = teacher_states
        self.runs = [run for document in documents for run in runs_of(cache, document)]
        sizes = torch.tensor([run.row_stop - run.row_start for run in self.runs], dtype=torch.long)
        self.ends = sizes.cumsum(0)
        self.num_positions = int(sizes.sum())

    def __len__(self) -> int:
        return -(-self.num_positions // self.window)

    def __getitem__(self, share: Share) -> Batch:
        first = self.runs[0].document.shard
        hidden = [self.cache.read_rows(first, 0, 0)]
        future = [torch.empty(0, self.num_heads + 1, dtype=torch.long)]
        for run, start, stop in (piece for window in share.windows for piece in self.pieces(window)):
            # the last label of an answer of S rows is taught by row S, which has no label itself
            teaching = min(stop + self.num_heads, run.row_stop + 1) if self.teacher_states else stop
            hidden.append(self.cache.read_rows(run.document.shard, start, teaching))
            future.append(future_of(self.cache, Run(run.document, start, stop), self.num_heads))
            future.append(torch.full((teaching - stop, self.num_heads + 1), IGNORE))
        return Batch(torch.cat(hidden), torch.cat(future), share.count_K)

    def pieces(self, window: int) -> Iterator[tuple[Run, int, int]]:
        """(run, first row, row behind the last) of the parts of answers that make up a window."""
        start, stop = window * self.window, min((window + 1) * self.window, self.num_positions)
        i = int(torch.searchsorted(self.ends, start, right=True))
        while start < stop:
            run, end = self.runs[i], int(self.ends[i])
            row = run.row_stop - (end - start)
            taken = min(stop, end) - start
            yield run, row, row + taken
            start, i = start + taken, i + 1

    def label_counts(self, draftable_V: Tensor) -> Tensor:
        """Labels of each head in each window, int64 [W, K]. draftable_V bool [V]: tokens that can be a label."""
        K = self.num_heads
        counts_NK = torch.zeros(len(self) * self.window, K, dtype=torch.bool)
        row = 0
        for run in self.runs:
            rows = run.row_stop - run.row_start
            first = int(self.cache.shard_positions(run.document.shard)[run.row_start]) - run.document.start
            answer_A = draftable_V[self.cache.token_ids(run.document)[first + 1 : first + 2 + rows].long()]
            for k in range(1, min(K, rows) + 1):  # head k at row n is to say answer_A[n + k]
                counts_NK[row : row + len(answer_A) - k, k - 1] = answer_A[k:]
            row += rows
        return counts_NK.view(len(self), self.window, K).sum(dim=1)
