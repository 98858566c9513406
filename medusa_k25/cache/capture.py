"""Run the target over its own answers and store the final hidden states.

Letters: B batch, T tokens, M rows with a state, D hidden.
"""

import fcntl
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from medusa_k25.cache.alignment import SelfCheck, self_check
from medusa_k25.cache.manifest import STORAGE_DTYPES
from medusa_k25.cache.reader import Cache
from medusa_k25.cache.writer import CacheWriter
from medusa_k25.conversations import choose_dtype, default_device, dtype_name, ends_in_loop, read_conversations
from medusa_k25.target import Target, TargetModel

STORAGE = ("answers", "all")
FILTERS = ("loop", "cut")
Row = dict[str, Any]  # of conversations.jsonl


@dataclass(frozen=True)
class CaptureReport:
    stored: int  # documents
    skipped: int  # in the cache before
    failed: int  # rows of prompts that were not answered
    short: int  # answers of fewer than two tokens
    left_out: int  # by `leave_out`
    loops: int  # answers that end in a repetition loop, among all that could be stored
    cut: int  # by the length limit, among all that could be stored
    states: int
    tokens: int
    seconds: float
    check: SelfCheck | None  # of the whole cache; None: it lies on another machine, or is empty
    refused: int = 0  # by the server that was to record them
    unfinished: int = 0  # files that another engine is still writing
    placeholders: int = 0  # tokens of images, which an engine had written as ids of its own
    faults: dict[str, str] = field(default_factory=dict)  # of files and texts that were left out, by their name

    def __str__(self) -> str:
        total = self.stored + self.skipped + self.failed + self.short + self.left_out + self.refused + len(self.faults)
        left_out = f" + {self.left_out} left out" if self.left_out else ""
        refused = f" + {self.refused} refused by the server" if self.refused else ""
        faults = f" + {len(self.faults)} faulty" if self.faults else ""
        unfinished = f"; {self.unfinished} files are still being written" if self.unfinished else ""
        images = f"; {self.placeholders:,} tokens are of images" if self.placeholders else ""
        counts = (
            f"{self.stored} stored + {self.skipped} stored before + {self.failed} failed + {self.short} with an answer "
            f"of one token{left_out}{refused}{faults} = {total} conversations; {self.states:,} states of "
            f"{self.tokens:,} tokens in {self.seconds:.0f} s; {self.loops} answers end in a loop, {self.cut} are cut "
            f"by the length limit{images}{unfinished}"
        )
        if self.check is None:
            return counts
        blind = (
            "\nno document says at which temperature its text was sampled: states of an earlier layer would not show "
            "in this check; conversations=FILE says it"
        )
        return (
            f"{counts}\n"
            f"self-check at {self.check.positions} positions: the states predict the next token "
            f"{self.check.agreement:.1%} of the time (the current one {self.check.agreement_with_current:.1%}, the one "
            f"after the next {self.check.agreement_with_second:.1%}; with one norm less "
            f"{self.check.agreement_other_norm:.1%}){blind if self.check.expected_agreement is None else ''}"
        )


@dataclass(frozen=True)
class Capture:
    """How states are computed and stored.

    storage: "answers" keeps the positions from an answer's last prompt token to its last token but one, which are all
    that heads are trained on and that a server drafts from; "all" keeps every position but a document's final one.
    storage_dtype: float32, bfloat16 or float8_e4m3fn (a scale a token). compute_dtype: of the target, or "auto".
    batch_tokens: of a forward pass, padding included. shard_tokens: a shard is written when so many have come; what a
    killed run had not written yet is computed again.
    leave_out: answers that are counted but not stored: "loop" (ends in a repetition), "cut" (by the length limit).
    part: "2/8" takes every eighth conversation from the second on, as a writer of its own: eight processes or machines
    with one file system fill one cache.
    """

    storage: str = "answers"
    storage_dtype: str = "float32"
    compute_dtype: str = "float32"
    batch_tokens: int = 4096
    shard_tokens: int = 8192
    leave_out: Sequence[str] = ()
    part: str = "1/1"

    def __post_init__(self) -> None:
        if self.storage not in STORAGE:
            raise ValueError(f"storage is {self.storage!r}, expected one of {', '.join(STORAGE)}")
        if self.storage_dtype not in STORAGE_DTYPES:
            raise ValueError(f"storage_dtype is {self.storage_dtype!r}, expected one of {', '.join(STORAGE_DTYPES)}")
        if isinstance(self.leave_out, str) or (set(self.leave_out) - set(FILTERS)):
            raise ValueError(f"leave_out is {self.leave_out}, expected a list of some of {', '.join(FILTERS)}: [loop]")
        if self.batch_tokens < 1 or self.shard_tokens < 1:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens} and shard_tokens {self.shard_tokens}, expected 1 or more"
            )
        part_of(self.part)

    def plan(self, target: Target, conversations: Path, cache: Path) -> tuple["Answers", list[Row]]:
        """(what the file holds, the rows that `cache` lacks); prints what those take, and writes nothing.

        Raises ValueError when token ids are not the target's or when the disk is too small.
        """
        answers = read_answers(conversations, target, self.leave_out, *part_of(self.part))
        stored = stored_ids(cache)
        todo = [row for row in answers.rows if row["id"] not in stored]
        if todo:
            require_space(cache, target.hidden_size, self.storage_dtype, todo, self.storage)
        return answers, todo

    def run(self, target: Target, conversations: Path, cache: Path) -> CaptureReport:
        """Store every conversation that `cache` lacks, check the cache against the target, and print the counts.

        Left out are prompts that failed, and answers of fewer than two tokens: a server makes no verify pass for them.
        Raises ValueError when token ids are not the target's, when the disk is too small or when the check fails.
        """
        started = time.perf_counter()
        refuse_other_parts(cache, part_of(self.part)[1])
        answers, todo = self.plan(target, conversations, cache)
        device = default_device()
        dtype = choose_dtype(self.compute_dtype, device)
        engine = f"transformers {transformers.__version__}, {dtype_name(dtype)}"
        name = writer_name(*part_of(self.part))
        with CacheWriter.open(cache, target, self.storage_dtype, engine, name, self.shard_tokens) as writer:
            if todo:
                model = target.load_model(dtype, device)
                bar = tqdm(total=sum(map(row_length, todo)), desc="capture", unit=" tok", unit_scale=True, smoothing=0)
                for batch in self._batches(todo):
                    for row, hidden_MD, positions_M in self._states(model, batch):
                        P, T = len(row["prompt_ids"]), row_length(row)
                        writer.add(
                            id=row["id"],
                            group=row["group"],
                            token_ids_T=torch.tensor(row["prompt_ids"] + row["answer_ids"]),
                            loss_mask_T=torch.arange(T) >= P,
                            hidden_MD=hidden_MD,
                            positions_M=positions_M,
                            prompt_length=P,
                            finish_reason=row["finish_reason"],
                            sampling=row["sampling"],
                            dtype=row["dtype"],
                            label=row["label"],
                            origin=row["origin"],
                        )
                    bar.update(sum(map(row_length, batch)))
                bar.close()
        filled = Cache.open(cache, target, check=False)
        report = CaptureReport(
            stored=len(todo),
            skipped=len(answers.rows) - len(todo),
            **answers.counts,
            states=sum(row_length(row) - 1 - first_state(row, self.storage) for row in todo),
            tokens=sum(map(row_length, todo)),
            seconds=time.perf_counter() - started,
            check=self_check(filled, target) if filled.documents else None,
        )
        print(f"{report}\n-> {cache}")
        return report

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Conversations of similar length together, at most `batch_tokens` with padding but at least one; the longest
        first, so that memory runs out at the start or never."""
        batch: list[Row] = []
        for row in sorted(rows, key=row_length, reverse=True):
            if batch and (len(batch) + 1) * row_length(batch[0]) > self.batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        yield batch

    @torch.inference_mode()
    def _states(self, model: TargetModel, batch: Sequence[Row]) -> Iterator[tuple[Row, Tensor, Tensor]]:
        """(row, hidden [M, D], positions int64 [M]) of every row. No mask: nothing looks at padding on the right."""
        inputs = [torch.tensor((row["prompt_ids"] + row["answer_ids"])[:-1]) for row in batch]
        hidden_BTD = model.hidden(pad_sequence(inputs, batch_first=True).to(model.device))
        for row, input_ids_T, hidden_TD in zip(batch, inputs, hidden_BTD, strict=True):
            positions_M = torch.arange(first_state(row, self.storage), len(input_ids_T))
            yield row, hidden_TD[positions_M[0] : len(input_ids_T)], positions_M


@dataclass(frozen=True)
class Answers:
    """The conversations of a file that can be captured, and how many of the others there are."""

    rows: list[Row]
    counts: dict[str, Any]  # ints: failed, short, left_out, loops and cut of a CaptureReport


def read_answers(
    conversations: Path, target: Target, leave_out: Sequence[str] = (), index: int = 0, parts: int = 1
) -> Answers:
    """Every `parts`-th conversation from `index` on.

    ValueError when there is none to capture, or when token ids are not the target's.
    """
    rows = read_conversations(conversations)[index::parts]
    answered = [row for row in rows if "error" not in row]
    usable = [row for row in answered if len(row["answer_ids"]) >= 2]
    if not usable and (rows or parts == 1):  # a part of few conversations may have none
        raise ValueError(
            f"{conversations} holds no answer of two tokens or more ({len(rows)} rows, {len(rows) - len(answered)} "
            "of them failed prompts); generate more conversations"
        )
    for row in usable:
        _require_ids_of(target, row, conversations)
    loops = {row["id"] for row in usable if ends_in_loop(row["answer_ids"])}
    cut = {row["id"] for row in usable if row["finish_reason"] == "length"}
    kept = [
        row
        for row in usable
        if not ("loop" in leave_out and row["id"] in loops) and not ("cut" in leave_out and row["id"] in cut)
    ]
    return Answers(
        kept,
        {
            "failed": len(rows) - len(answered),
            "short": len(answered) - len(usable),
            "left_out": len(usable) - len(kept),
            "loops": len(loops),
            "cut": len(cut),
        },
    )


def refuse_other_parts(cache: Path, parts: int) -> None:
    """ValueError while another command fills the cache in other parts: both would store the same documents."""
    for file in (cache / "index").glob("*.jsonl"):
        own = re.fullmatch(r"main|part-[0-9]+-of-([0-9]+)", file.stem)
        if own is None or int(own[1] or 1) == parts:
            continue
        if is_locked(file):
            raise ValueError(
                f"another command is filling {cache} in {own[1] or 1} parts, this one would in {parts}: both would "
                "store the same documents; wait for it, or give all of them the same number of parts"
            )


def is_locked(lock: Path) -> bool:
    """Whether a process holds the lock file; one that is gone or that nobody holds is no lock."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def part_of(part: str) -> tuple[int, int]:
    """(index from 0, number of parts) of a text such as "2/8"."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", str(part))  # Hydra makes a number of "2"
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"part is {part!r}, expected I/N with I from 1 to N, such as 2/8")
    return int(match[1]) - 1, int(match[2])


def writer_name(index: int, parts: int) -> str:
    return "main" if parts == 1 else f"part-{index + 1}-of-{parts}"


def stored_ids(cache: Path) -> set[str]:
    """Ids of the documents in the cache; none where there is no cache yet."""
    if not (cache / "manifest.json").exists():
        return set()
    return {document.id for document in Cache.open(cache, check=False).documents}


def first_state(row: Row, storage: str) -> int:
    return 0 if storage == "all" else len(row["prompt_ids"]) - 1


def require_space(cache: Path, hidden_size: int, storage_dtype: str, rows: Sequence[Row], storage: str) -> None:
    """Print what the states of `rows` take; ValueError if the disk of `cache` has less."""
    states = sum(row_length(row) - 1 - first_state(row, storage) for row in rows)
    tokens = sum(map(row_length, rows))
    require_room(cache, hidden_size, storage_dtype, f"{len(rows):,} conversations,", states, tokens)


def require_room(cache: Path, hidden_size: int, storage_dtype: str, what: str, states: int, tokens: int) -> None:
    """Print what so many states of so many tokens take; ValueError if the disk of `cache` has less."""
    state_bytes = hidden_size * STORAGE_DTYPES[storage_dtype].itemsize + 12  # position and scale
    needed = states * state_bytes + 5 * tokens  # id and loss mask
    folder = next(folder for folder in (cache.absolute(), *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    print(f"{what} {states:,} states x {state_bytes:,} bytes: {needed / 1e9:,.3f} GB, {free / 1e9:,.1f} GB are free")
    if needed > free:
        raise ValueError(
            f"{cache} needs {needed / 1e9:,.3f} GB for {states:,} states of {state_bytes:,} bytes, its disk has "
            f"{free / 1e9:,.3f} GB free; make room, store fewer conversations, or take a smaller storage_dtype"
        )


def row_length(row: Row) -> int:
    return len(row["prompt_ids"]) + len(row["answer_ids"])


def _require_ids_of(target: Target, row: Row, conversations: Path) -> None:
    if not row["prompt_ids"]:
        raise ValueError(f"{conversations}: conversation {row['id']!r} has no prompt; generate it again")
    ids = row["prompt_ids"] + row["answer_ids"]
    if min(ids) < 0 or max(ids) >= target.vocab_size:
        raise ValueError(
            f"{conversations}: conversation {row['id']!r} has token ids from {min(ids)} to {max(ids)}, target "
            f"{target.name} has 0 to {target.vocab_size - 1}; the text is another target's: generate with this one"
        )
