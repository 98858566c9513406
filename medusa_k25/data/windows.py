"""Training windows and whole answers, cut from a cache without copying more than they need.

Only positions whose next token belongs to an answer carry labels; a split's positions, document after document, form
one long row that is cut into windows. Labels never cross a document or an answer (`labels.future_tokens`).

What goes over all documents goes a shard at a time: a cache has a hundred times more documents than shards.

Letters: N rows, W windows, S states of one answer, A its tokens, K heads, D hidden, T tokens, M rows of a shard,
I documents or runs of a shard, P pieces of runs.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medusa_k25.cache import Cache, Document
from medusa_k25.data.labels import IGNORE, future_tokens
from medusa_k25.data.sampler import Share
from medusa_k25.data.splits import SPLITS, Split, share_of, split_of


def documents_of(cache: Cache, split: Split) -> list[Document]:
    """The documents of a split, without those whose prompt another split reports on.

    Two documents with one prompt and different groups may have different splits. The copy in calibration text is left
    out where held-out text has that prompt, the copy in training text where either has it. No document ever moves to
    another split, whatever is added to the cache: it is in its own or left out.
    """
    splits = [split_of(document.group, document.hash) for document in cache.documents]
    reported = SPLITS[SPLITS.index(split) + 1 :]
    elsewhere = {document.hash for document, s in zip(cache.documents, splits, strict=True) if s in reported}
    return [
        document
        for document, s in zip(cache.documents, splits, strict=True)
        if s == split and document.hash not in elsewhere
    ]


def in_share(documents: Sequence[Document], share: float) -> list[Document]:
    """A share of training documents, by the hash of their prompts: those of a smaller share are in every larger."""
    if not 0 < share <= 1:
        raise ValueError(f"data.share={share}: expected a part of the training documents, above 0 and at most 1")
    chosen = [document for document in documents if share_of(document.hash) < share]
    if not chosen:
        raise ValueError(f"data.share={share} of {len(documents)} training documents are none; take a larger share")
    return chosen


def spans(starts_I: Tensor, lengths_I: Tensor) -> Tensor:
    """start, start + 1, .. start + length - 1 of one span after the other, int64."""
    before_I = lengths_I.cumsum(0) - lengths_I
    return (starts_I - before_I).repeat_interleave(lengths_I) + torch.arange(int(lengths_I.sum()))


def token_counts(cache: Cache, documents: Sequence[Document]) -> Tensor:
    """How often each target token occurs in the answers of `documents`, int64 [V]."""
    counts_V = torch.zeros(cache.vocab_size, dtype=torch.long)
    for shard, some in groupby(documents, key=lambda document: document.shard):
        start_I, length_I = torch.tensor([(document.start, document.length) for document in some]).T
        tokens_T = spans(start_I, length_I)
        answer_ids = cache.shard_token_ids(shard)[tokens_T[cache.shard_loss_mask(shard)[tokens_T]]]
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


def all_runs(cache: Cache, documents: Sequence[Document]) -> list[Run]:
    """`runs_of` every document, one after the other."""
    runs: list[Run] = []
    for shard, group in groupby(documents, key=lambda document: document.shard):
        some = list(group)
        start_I, count_I, stop_I = torch.tensor(
            [(d.row_start, d.row_stop - d.row_start, d.start + d.length) for d in some]
        ).T
        rows_N = spans(start_I, count_I)
        positions_N = cache.shard_positions(shard)[rows_N]
        padded_T = torch.cat([cache.shard_loss_mask(shard), torch.zeros(2, dtype=torch.bool)])
        inside_N = positions_N + 2 < stop_I.repeat_interleave(count_I)
        kept = (padded_T[positions_N + 1] & padded_T[positions_N + 2] & inside_N).nonzero().flatten()
        rows, positions = rows_N[kept], positions_N[kept]
        document = torch.arange(len(some)).repeat_interleave(count_I)[kept]
        # no run goes on in the next document: its last row needs two tokens more than itself
        breaks = torch.nonzero((rows.diff() != 1) | (positions.diff() != 1)).flatten() + 1
        first = torch.cat([torch.zeros(min(len(rows), 1), dtype=torch.long), breaks])
        last = torch.cat([first[1:] - 1, torch.full((min(len(rows), 1),), len(rows) - 1)])
        runs += [
            Run(some[i], start, stop + 1)
            for i, start, stop in zip(document[first].tolist(), rows[first].tolist(), rows[last].tolist(), strict=True)
        ]
    return runs


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
        self.runs = all_runs(cache, documents)
        sizes = torch.tensor([run.row_stop - run.row_start for run in self.runs], dtype=torch.long)
        self.ends: list[int] = sizes.cumsum(0).tolist()
        self.num_positions = int(sizes.sum())

    def __len__(self) -> int:
        return -(-self.num_positions // self.window)

    def __getitem__(self, share: Share) -> Batch:
        pieces = []
        for run, start, stop in (piece for window in share.windows for piece in self.pieces(window)):
            # the last label of an answer of S rows is taught by row S, which has no label itself
            teaching = min(stop + self.num_heads, run.row_stop + 1) if self.teacher_states else stop
            pieces.append((run, start, stop, teaching))
        no_row = self.cache.read_rows(self.runs[0].document.shard, 0, 0)
        hidden_ND = no_row.new_empty(sum(teaching - start for _, start, _, teaching in pieces), self.cache.hidden_size)
        future = [torch.empty(0, self.num_heads + 1, dtype=torch.long)]
        row = 0
        for run, start, stop, teaching in pieces:
            self.cache.read_rows(run.document.shard, start, teaching, hidden_ND[row : row + teaching - start])
            future.append(future_of(self.cache, Run(run.document, start, stop), self.num_heads))
            future.append(torch.full((teaching - stop, self.num_heads + 1), IGNORE))
            row += teaching - start
        return Batch(hidden_ND, torch.cat(future), share.count_K)

    def pieces(self, window: int) -> Iterator[tuple[Run, int, int]]:
        """(run, first row, row behind the last) of the parts of answers that make up a window."""
        start, stop = window * self.window, min((window + 1) * self.window, self.num_positions)
        i = bisect_right(self.ends, start)
        while start < stop:
            run, end = self.runs[i], self.ends[i]
            row = run.row_stop - (end - start)
            taken = min(stop, end) - start
            yield run, row, row + taken
            start, i = start + taken, i + 1

    def label_counts(self, draftable_V: Tensor) -> Tensor:
        """Labels of each head in each window, int64 [W, K]. draftable_V bool [V]: tokens that can be a label."""
        ahead_K = torch.arange(1, self.num_heads + 1)
        counts_WK = torch.zeros(len(self), self.num_heads, dtype=torch.long)
        before = 0  # rows of all shards before
        for shard, some in groupby(self.runs, key=lambda run: run.document.shard):
            row_I, count_I = torch.tensor([(run.row_start, run.row_stop - run.row_start) for run in some]).T
            start_I = before + count_I.cumsum(0) - count_I
            stop = before + int(count_I.sum())
            windows = torch.arange(before // self.window + 1, -(-stop // self.window)) * self.window
            start_P = torch.cat([start_I, windows]).unique()  # of pieces that lie in one run and one window
            stop_P = torch.cat([start_P[1:], torch.tensor([stop])])
            run_P = torch.searchsorted(start_I, start_P, right=True) - 1
            root_I = self.cache.shard_positions(shard)[row_I] + 1
            ahead_PK = (root_I - start_I)[run_P, None] + ahead_K
            answer_stop_P1 = (root_I + count_I + 1)[run_P, None]
            first_PK = (start_P[:, None] + ahead_PK).minimum(answer_stop_P1)
            last_PK = (stop_P[:, None] + ahead_PK).minimum(answer_stop_P1)
            draftable_T = draftable_V[self.cache.shard_token_ids(shard)]
            before_T = torch.cat([torch.zeros(1, dtype=torch.long), draftable_T.cumsum(0)])
            counts_WK.index_add_(0, start_P // self.window, before_T[last_PK] - before_T[first_PK])
            before = stop
        return counts_WK
