"""What a cache holds: its documents and answers counted, by split, by label and by origin.

Everything is read once, shard by shard, from the ids and masks alone: states are not touched.

Letters: N documents, A answers, T tokens.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from medusa_k25.cache import Cache, Document
from medusa_k25.cache.check import one_thread
from medusa_k25.conversations import LIMIT
from medusa_k25.data.splits import SPLITS, split_of
from medusa_k25.data.windows import documents_of

LOOP_TAIL = 56  # tokens of an answer that decide whether it ends in a loop: 32 of a pattern and 24 that repeat it
MOST_VALUES = 20  # of one aspect of the origin that are shown; the rest is added up
BARS = 24  # of a histogram


@dataclass(frozen=True)
class Contents:
    """Of some documents. An answer is a run of tokens that the loss mask marks: a chat of several turns has several."""

    documents: int = 0
    tokens: int = 0
    answers: int = 0
    answer_tokens: int = 0
    states: int = 0
    bytes: int = 0  # of the states
    loops: int = 0  # answers that end in a repetition loop
    short: int = 0  # answers of one token: nothing but their end
    cut: int = 0  # documents whose last answer ended at the length limit


@dataclass(frozen=True)
class Lengths:
    """Of answers or documents, in tokens."""

    median: int
    p95: int
    max: int

    @classmethod
    def of(cls, lengths: Tensor) -> "Lengths":
        if len(lengths) == 0:
            return cls(0, 0, 0)
        ordered = lengths.sort().values
        return cls(*(int(ordered[round(share * (len(ordered) - 1))]) for share in (0.5, 0.95, 1.0)))


@dataclass(frozen=True)
class Histogram:
    """counts[i]: how many lie in i * width .. (i + 1) * width - 1."""

    width: int
    counts: list[int]

    @classmethod
    def of(cls, lengths: Tensor) -> "Histogram":
        width = 1 + int(lengths.max()) // BARS if len(lengths) else 1
        return cls(width, torch.bincount(lengths // width).tolist())


@dataclass(frozen=True)
class Duplicates:
    """Documents that begin with the same prompt, token for token."""

    prompts: int  # different ones
    documents: int  # whose prompt another document has, too
    left_out: int  # by `documents_of`, because another split reports on their prompt


class Census:
    """One pass over the ids and masks of a cache; `of` then adds up any choice of documents."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.documents = cache, cache.documents
        state_bytes = cache.hidden_size * cache.storage_dtype.itemsize
        if cache.storage_dtype == torch.float8_e4m3fn:
            state_bytes += 4  # its scale
        self.state_bytes = state_bytes
        self.splits_N = [split_of(document.group, document.hash) for document in self.documents]
        self.lengths_N = torch.tensor([document.length for document in self.documents], dtype=torch.long)
        self.prompts_N = torch.tensor([document.prompt_length for document in self.documents], dtype=torch.long)
        self.states_N = torch.tensor([d.row_stop - d.row_start for d in self.documents], dtype=torch.long)
        self.cut_N = torch.tensor([document.finish_reason == LIMIT for document in self.documents])

        with one_thread():
            parts = list(self._shards())
        empty_A = torch.empty(0, dtype=torch.long)
        owners, lengths, loops = zip((empty_A, empty_A, empty_A.bool()), *parts, strict=True)
        self.owners_A, self.answers_A, self.loops_A = torch.cat(owners), torch.cat(lengths), torch.cat(loops)

    def _shards(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of every answer of a shard: the number of its document, its length, whether it ends in a loop; [A] each."""
        first = 0
        for shard, some in groupby(self.documents, key=lambda document: document.shard):
            borders = torch.tensor([(document.start, document.start + document.length) for document in some])
            starts_A, stops_A = answer_spans(self.cache.shard_loss_mask(shard), borders.flatten())
            owners_A = torch.searchsorted(borders[:, 0].contiguous(), starts_A, right=True) - 1
            inside_A = (owners_A >= 0) & (starts_A < borders[owners_A, 1])  # not in the second copy of a document
            starts_A, stops_A, owners_A = starts_A[inside_A], stops_A[inside_A], owners_A[inside_A]
            loops_A = end_in_loop(tails(self.cache.shard_token_ids(shard), starts_A, stops_A))
            yield first + owners_A, stops_A - starts_A, loops_A
            first += len(borders)

    def of(self, chosen_N: Tensor) -> Contents:
        """Of the documents that chosen_N, bool [N], marks."""
        chosen_A = chosen_N[self.owners_A]
        states = int(self.states_N[chosen_N].sum())
        return Contents(
            documents=int(chosen_N.sum()),
            tokens=int(self.lengths_N[chosen_N].sum()),
            answers=int(chosen_A.sum()),
            answer_tokens=int(self.answers_A[chosen_A].sum()),
            states=states,
            bytes=states * self.state_bytes,
            loops=int(self.loops_A[chosen_A].sum()),
            short=int((self.answers_A[chosen_A] == 1).sum()),
            cut=int(self.cut_N[chosen_N].sum()),
        )

    def total(self) -> Contents:
        return self.of(torch.ones(len(self.documents), dtype=torch.bool))

    def by_split(self) -> dict[str, Contents]:
        return self._by(SPLITS, self.splits_N)

    def by_label(self) -> dict[str, Contents]:
        labels_N = [document.label or "(no label)" for document in self.documents]
        return self._by(sorted(set(labels_N)), labels_N)

    def _by(self, names: Sequence[str], names_N: Sequence[str]) -> dict[str, Contents]:
        number = {name: i for i, name in enumerate(names)}
        numbers_N = torch.tensor([number[name] for name in names_N], dtype=torch.long)
        return {name: self.of(numbers_N == i) for name, i in number.items()}

    def duplicates(self) -> Duplicates:
        count = Counter(document.hash for document in self.documents)
        return Duplicates(
            prompts=len(count),
            documents=sum(number for number in count.values() if number > 1),
            left_out=len(self.documents) - sum(len(documents_of(self.cache, split)) for split in SPLITS),
        )

    def origins(self) -> dict[str, dict[str, int]]:
        """Aspect of how the text was made -> value -> number of documents, the most frequent first."""
        counts: dict[str, Counter[str]] = {}
        for document in self.documents:
            for aspect, value in origin_of(document).items():
                counts.setdefault(aspect, Counter())[value] += 1
        shown = {}
        for aspect, count in counts.items():
            shown[aspect] = dict(count.most_common(MOST_VALUES))
            if rest := count.total() - sum(shown[aspect].values()):
                shown[aspect]["(others)"] = rest
        return shown


def origin_of(document: Document) -> dict[str, str]:
    origin = document.origin
    return {
        "engine": str(origin.get("engine") or "unknown"),
        "quantisation": str(origin.get("quantisation") or "unknown"),
        "dtype": document.dtype,
        "mode": _either(origin.get("thinking"), "thinking", "instant", "unknown, or has none"),
        "tools": _either(origin.get("tools"), "with tools", "without tools", "unknown"),
        "token ids": str(origin.get("ids") or "unknown"),
        "sampling": sampling_of(document),
        "finish reason": document.finish_reason,
    }


def _either(flag: bool | None, yes: str, no: str, unknown: str) -> str:
    return unknown if flag is None else yes if flag else no


def sampling_of(document: Document) -> str:
    temperature, top_p = document.sampling.get("temperature"), document.sampling.get("top_p")
    if temperature is None:
        return "unknown"
    return "greedy" if temperature == 0 else f"temperature {temperature}, top-p {top_p}"


def answer_spans(mask_T: Tensor, borders: Tensor) -> tuple[Tensor, Tensor]:
    """First token of every answer of a shard and the token behind its last, int64 [A] each.

    mask_T bool [T]: True on answer tokens; borders int64: where documents start and end, which no answer crosses.
    """
    edge_T = torch.zeros(len(mask_T) + 1, dtype=torch.bool)  # between a token and the one before it
    edge_T[borders] = True
    edge_T[1:-1] |= mask_T[1:] != mask_T[:-1]
    edge_T[-1] = True
    edges = edge_T.nonzero().flatten()
    starts, stops = edges[:-1], edges[1:]
    answers = mask_T[starts]
    return starts[answers], stops[answers]


def tails(ids_T: Tensor, starts_A: Tensor, stops_A: Tensor) -> Tensor:
    """The last LOOP_TAIL tokens of each answer, [A, LOOP_TAIL]; before its first token numbers that equal no other."""
    columns = torch.arange(LOOP_TAIL)
    places = stops_A[:, None] - LOOP_TAIL + columns
    return torch.where(places >= starts_A[:, None], ids_T[places.clamp(min=0)].long(), -1 - columns)


def end_in_loop(tails_AT: Tensor) -> Tensor:
    """`conversations.ends_in_loop` of many answers at once, given by their `tails`; bool [A]."""
    loops_A = torch.zeros(len(tails_AT), dtype=torch.bool)
    for period in range(1, 33):
        repeated = max(min(3 * period, 24), 24 - period)
        loops_A |= (tails_AT[:, -repeated:] == tails_AT[:, -repeated - period : -period]).all(dim=1)
    return loops_A


def first_answer(cache: Cache, document: Document, before: int = 64, after: int = 96) -> tuple[list[int], list[bool]]:
    """Ids and mask around the start of a document's first answer: at most `before` tokens of the prompt and `after`
    tokens from the answer's first on."""
    mask_T = cache.loss_mask(document)
    answer = int(mask_T.int().argmax())
    start, stop = max(answer - before, 0), answer + after
    return cache.token_ids(document)[start:stop].tolist(), mask_T[start:stop].tolist()
