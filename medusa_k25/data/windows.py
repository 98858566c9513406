"""Training windows and whole answers, cut from a cache without copying more than they need.

Only positions whose next token belongs to an answer carry labels; a split's positions, document after document, form
one long row that is cut into windows. Labels never cross a document or an answer (`labels.future_tokens`).

Letters: N positions of a window, S states of one answer, K heads, D hidden, T tokens, M rows of a shard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medusa_k25.cache import Cache, Document
from medusa_k25.data.labels import future_tokens
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


class Windows(Dataset):
    """The labelled positions of a split, cut into windows of `window` positions; the last one may be shorter."""

    def __init__(self, cache: Cache, documents: Sequence[Document], window: int, num_heads: int):
        self.cache, self.window, self.num_heads = cache, window, num_heads
        self.runs = [run for document in documents for run in runs_of(cache, document)]
        sizes = torch.tensor([run.row_stop - run.row_start for run in self.runs], dtype=torch.long)
        self.ends = sizes.cumsum(0)
        self.num_positions = int(sizes.sum())

    def __len__(self) -> int:
        return -(-self.num_positions // self.window)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(hidden [N, D], future tokens [N, K+1])"""
        start, stop = index * self.window, min((index + 1) * self.window, self.num_positions)
        hidden, future = [], []
        i = int(torch.searchsorted(self.ends, start, right=True))
        while start < stop:
            run, end = self.runs[i], int(self.ends[i])
            skip = start - (end - (run.row_stop - run.row_start))
            taken = min(stop, end) - start
            part = Run(run.document, run.row_start + skip, run.row_start + skip + taken)
            hidden.append(self.cache.read_rows(run.document.shard, part.row_start, part.row_stop))
            future.append(future_of(self.cache, part, self.num_heads))
            start, i = start + taken, i + 1
        return torch.cat(hidden), torch.cat(future)
