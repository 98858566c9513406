"""Bring files of states that other engines wrote into a cache.

Letters: T tokens, M positions with a state, D hidden.
"""

import os
import re
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from medusa_k25.cache.alignment import RMS_RANGE, rms_of, self_check
from medusa_k25.cache.capture import (
    Capture,
    CaptureReport,
    Row,
    is_locked,
    part_of,
    refuse_other_parts,
    require_room,
    writer_name,
)
from medusa_k25.cache.check import one_thread, spread
from medusa_k25.cache.producers import ANY_FAULT, PRODUCERS, Producer, Sample, Unfinished, damage
from medusa_k25.cache.reader import Cache, Document
from medusa_k25.cache.shard import as_bytes
from medusa_k25.cache.writer import CacheWriter
from medusa_k25.chat import ChatMarks, answer_mask
from medusa_k25.conversations import ends_in_loop, read_conversations
from medusa_k25.target import Target

FIRST_PLACEHOLDER = 1_000_000  # SGLang writes an image as ids from here on: this number plus a hash of the image
SAMPLED_TEXTS = 100
SAMPLED_TOKENS = 64  # of an answer: enough for the check
LOOKED_AT = 32  # positions of a text that tell whether its states are those of its tokens
FEWEST_TELLING = 8  # of them; fewer say nothing
COMPARED_FILES = 8  # of those that were imported before
TEXTS_AHEAD = 3
NORM_ROWS = 64  # at a time: they stay in the CPU's cache, which is three times as fast as all rows at once


@dataclass(frozen=True)
class Text:
    """What became of a text in a file."""

    name: str
    bytes: int  # of the file, that it took
    document: dict[str, Any] | None = None  # arguments of CacheWriter.add
    why_not: str | None = None  # "skipped" (stored before), "short" (answer), "left_out" (by a filter), "unfinished"
    fault: str | None = None
    suspect: str | None = None  # why the states of the document cannot be those of its tokens
    loops: bool = False
    cut: bool = False
    placeholders: int = 0
    tokens: int = 0  # of the document
    states: int = 0


@dataclass(frozen=True)
class Plan:
    files: list[Path]  # in the order of their numbers, without those that were imported before
    skipped: int  # files that were
    unfinished: int  # files that are still being written
    reading: "Reading"
    sample: list[Text]


@dataclass(frozen=True)
class Stored:
    """What was imported before."""

    cache: Cache | None
    documents: dict[str, Document]  # by the name of the text


@dataclass(frozen=True)
class Import:
    """source: who wrote the files, a name in PRODUCERS. path: a folder with them, at any depth, or one file.

    capture: what is stored, and how. Its `part` takes a share of the files that depends on their names alone, so that
    it stays the same while files are added.
    conversations: the texts that the states were computed from, found by their token ids: they know what a document is
    to say about itself. Without them it is named after its file, and answers are found by the file's loss mask, or by
    the target's chat format where the source writes none.
    """

    source: str
    path: Path
    capture: Capture
    conversations: Path | None = None

    def __post_init__(self) -> None:
        if self.source not in PRODUCERS:
            raise ValueError(f"source is {self.source!r}, expected one of {', '.join(PRODUCERS)}")

    @property
    def producer(self) -> Producer:
        return PRODUCERS[self.source]

    def plan(self, target: Target, cache: Path) -> Plan:
        """What there is to import; prints what it takes, and writes nothing.

        A sample of the files is read for it. ValueError when there are no files, when none of the sample can be
        imported, when the disk is too small, or when the cache has other texts under the names of these files.
        """
        files, unfinished = self._files(cache)
        stored = Stored(None, {})
        if (cache / "manifest.json").exists():
            opened = Cache.open(cache, target, check=False)
            mine = [document for document in opened.documents if document.origin.get("source") == self.source]
            stored = Stored(opened, {document.origin["file"]: document for document in mine})
        todo = [file for file in files if self.name_of(file) not in stored.documents]
        if not files and not unfinished:
            print(f"part {self.capture.part} has none of the files in {self.path}: nothing to do")
        elif not todo and not stored.documents:
            raise ValueError(f"nothing to import from {self.path} yet: {unfinished} files are still being written")
        rows = None if self.conversations is None else rows_by_ids(self.conversations)
        reading = Reading(self, target, stored, rows)
        reading.require_same_texts(files)
        sample = list(reading.sample(todo))
        if todo and not stored.documents and not any(text.document for text in sample):
            faults = {text.name: text.fault for text in sample if text.fault is not None}
            raise ValueError(
                f"none of {len(sample)} texts from {self.path} can be imported as {self.source} writes them: "
                f"{first_of(faults) or 'they have no answers of two tokens or more that leave_out keeps'}"
            )
        if sample:
            size = sum(map(size_of, todo))
            scale = size / max(1, sum(text.bytes for text in sample))
            states, tokens = (round(scale * sum(getattr(text, of) for text in sample)) for of in ("states", "tokens"))
            what = f"{len(todo):,} files of {size / 1e9:,.3f} GB, about"
            require_room(cache, target.hidden_size, self.capture.storage_dtype, what, states, tokens)
        return Plan(todo, len(files) - len(todo), unfinished, reading, sample)

    def run(self, target: Target, cache: Path) -> CaptureReport:
        """Store every text that `cache` lacks, check the cache against the target, and print the counts.

        A sample is checked first: nothing is stored when its states are not what the source is known to write. Faulty
        files and texts are left out and named in the report; files that are still being written are left for the next
        run. ValueError as in `plan`, and when a check fails.
        """
        started = time.perf_counter()
        plan = self.plan(target, cache)
        if not (plan.files or plan.skipped or plan.unfinished):
            seconds = time.perf_counter() - started
            return CaptureReport(0, 0, 0, 0, 0, 0, 0, 0, 0, seconds, check=None)
        refuse_other_parts(cache, part_of(self.capture.part)[1])
        self._check(target, plan)
        name = writer_name(*part_of(self.capture.part))
        size = sum(map(size_of, plan.files))
        with (
            tqdm(total=size, desc="import", unit="B", unit_scale=True) as bar,
            self._writer(cache, target, name) as writer,
        ):
            counts, faults = store_texts(plan.reading, plan.files, writer, bar.update)
        counts.update(skipped=plan.skipped, unfinished=plan.unfinished)
        report = CaptureReport(
            stored=counts["stored"],
            skipped=counts["skipped"],
            failed=0,
            short=counts["short"],
            left_out=counts["left_out"],
            loops=counts["loops"],
            cut=counts["cut"],
            states=counts["states"],
            tokens=counts["tokens"],
            seconds=time.perf_counter() - started,
            check=self_check(Cache.open(cache, target, check=False), target),
            unfinished=counts["unfinished"],
            placeholders=counts["placeholders"],
            faults=faults,
        )
        print(f"{report}\n-> {cache}")
        return report

    def name_of(self, file: Path) -> str:
        """Below the imported folder."""
        return file.name if file == self.path else file.relative_to(self.path).as_posix()

    def _files(self, cache: Path) -> tuple[list[Path], int]:
        """(this part's files in the order of their numbers, how many more are still being written)

        What lies in `cache` has such names, too, and is none of them.
        """
        if not self.path.exists():
            raise ValueError(f"{self.path} does not exist; name the folder that {self.source} wrote to: path=FOLDER")
        files, unfinished, others = [], 0, 0
        index, parts = part_of(self.capture.part)
        folder = (self.path.parent if self.path.is_file() else self.path).resolve()
        own_folder = cache.resolve()
        for file in [self.path] if self.path.is_file() else sorted(self.path.rglob("*"), key=numerically):
            is_lock = file.suffix == ".lock"
            data = file.with_suffix("") if is_lock else file
            if file.suffix != ".tmp" and not self.producer.pattern.fullmatch(data.name):
                continue
            if (folder / self.name_of(file)).is_relative_to(own_folder):
                continue
            if zlib.crc32(os.fsencode(self.name_of(data))) % parts != index:
                others += 1
            elif file.suffix == ".tmp" or (is_lock and is_locked(file)):
                unfinished += 1  # a file's lock is there before the file, and stays
            elif not is_lock and not is_locked(file.with_name(f"{file.name}.lock")):
                files.append(file)
        if not (files or unfinished or others):
            names = ", ".join(f"{producer.pattern.pattern} ({name})" for name, producer in PRODUCERS.items())
            raise ValueError(f"{self.path} holds no files of {self.source}; expected names such as {names}")
        return files, unfinished

    def _writer(self, cache: Path, target: Target, name: str = "main") -> CacheWriter:
        engine = f"files of {self.source}"
        return CacheWriter.open(cache, target, self.capture.storage_dtype, engine, name, self.capture.shard_tokens)

    def _check(self, target: Target, plan: Plan) -> None:
        """ValueError unless the states of the sample are what the source is known to write.

        A few texts that are unlike the others are no reason to stop, they will be left out; when most are suspect, it
        is the convention that is another, and all of them tell which.
        """
        sampled = [text for text in plan.sample if text.document is not None]
        sound = [text for text in sampled if text.suspect is None]
        # of a folder that was imported before, the suspects are what is left
        few_suspects = 2 * len(sound) >= len(sampled) or (sound and plan.reading.stored.documents)
        checked = [text.document for text in (sound if few_suspects else sampled) if text.document is not None]
        documents = {document["id"]: document for document in checked}
        with TemporaryDirectory() as folder:
            faults, cache = {}, Path(folder) / "cache"
            with self._writer(cache, target) as writer:
                for id, document in documents.items():
                    try:
                        writer.add(**document)
                    except ValueError as error:
                        faults[id] = str(error)
            if not writer.ids and plan.reading.stored.documents:
                return  # what is left over is faulty, and will be named
            if not writer.ids:
                raise ValueError(f"none of {len(documents)} texts from {self.path} can be stored: {first_of(faults)}")
            try:
                self_check(Cache.open(cache, target, check=False), target)
            except ValueError as error:
                found = str(error).removeprefix(f"{cache}: ")
                raise ValueError(
                    f"nothing was imported from {self.path}: {len(writer.ids)} of its texts, such as "
                    f"{checked[0]['origin']['file']}, were read as {self.source} writes them "
                    f"({self.producer.known}), but {found}"
                ) from None


@dataclass(frozen=True)
class Reading:
    """Turns files into documents."""

    importing: Import
    target: Target
    stored: Stored
    rows: dict[bytes, Row] | None  # of conversations, by `key_of` their token ids
    # states of documents that are stored: to fill new memory for each would take as long as the disk does
    spare: deque[Tensor] = field(default_factory=lambda: deque(maxlen=TEXTS_AHEAD + 2))

    def sample(self, files: Sequence[Path]) -> Iterator[Text]:
        """Beginnings of some texts from files all over the folder; tokens and states are those of the whole texts."""
        sampled = [files[i] for i in spread(len(files), SAMPLED_TEXTS)]
        for file in sampled:
            new = (text for text in self.texts([file], SAMPLED_TOKENS) if text.why_not != "skipped")
            yield from islice(new, -(-SAMPLED_TEXTS // len(sampled)))

    def require_same_texts(self, files: Sequence[Path]) -> None:
        """ValueError if some files hold other texts than the documents that were imported under their names."""
        importing, documents, cache = self.importing, self.stored.documents, self.stored.cache
        known = [file for file in files if {name := importing.name_of(file), f"{name}:1"} & documents.keys()]
        for file in (known[i] for i in spread(len(known), COMPARED_FILES)):
            try:
                name, _, read = next(importing.producer.texts(file, importing.name_of(file)))
                ids_T, _ = self._mapped(read().ids_T)
            except (StopIteration, Unfinished, *ANY_FAULT):
                continue  # it has been damaged since, but what it held is stored
            if name not in documents:
                continue  # the first text was left out
            assert cache is not None
            stored_T = cache.token_ids(documents[name])
            common = min(len(ids_T), len(stored_T))  # a file may lack the last token, the cache what follows the answer
            if not torch.equal(ids_T[:common].int(), stored_T[:common]):
                raise ValueError(
                    f"{file} holds another text than the document that {cache.path} has of {name}: was another folder "
                    "imported before? Import several from the folder above them, or each into a cache of its own"
                )

    def texts(self, files: Sequence[Path], most_tokens: int | None = None) -> Iterator[Text]:
        """All texts of the files; of each document the beginning, with `most_tokens` of its answer."""
        for file in files:
            file_name = self.importing.name_of(file)
            if file_name != (printable := os.fsencode(file_name).decode(errors="backslashreplace")):
                yield Text(printable, size_of(file), fault="its name is not UTF-8, and names documents; rename it")
                continue
            try:
                for name, size, read in self.importing.producer.texts(file, file_name):
                    if name in self.stored.documents:
                        yield Text(name, size, why_not="skipped")
                        continue
                    try:
                        text = self._text(read(), size, most_tokens)
                    except ANY_FAULT as error:
                        text = Text(name, size, fault=said(error))
                    yield text
            except Unfinished:
                yield Text(file_name, 0, why_not="unfinished")
            except ANY_FAULT as error:
                yield Text(file_name, 0, fault=said(error))

    def _text(self, sample: Sample, size: int, most_tokens: int | None) -> Text:
        """The document of a text, or why it is none."""
        capture, target = self.importing.capture, self.target
        if sample.hidden_MD.shape[1] != target.hidden_size:
            raise ValueError(
                f"states of D={sample.hidden_MD.shape[1]}, target {target.name} has D={target.hidden_size}; pick the "
                "target that they were computed with"
            )
        ids_T, is_image_T = self._mapped(sample.ids_T)
        outside_T = (ids_T < 0) | (ids_T >= target.vocab_size)
        if outside_T.any():
            t = int(outside_T.nonzero()[0])
            raise ValueError(
                f"token id {int(ids_T[t])} at position {t}, expected 0 to {target.vocab_size - 1}; the text is another "
                "target's"
            )
        row: Row = {}
        if self.rows is not None:
            row = self._row(ids_T, sample.mask_T)
            ids_T = torch.tensor(row["prompt_ids"] + row["answer_ids"])
            mask_T = torch.arange(len(ids_T)) >= len(row["prompt_ids"])
        else:
            mask_T = answer_mask(ids_T, self._marks) if sample.mask_T is None else sample.mask_T
            if mask_T.shape != ids_T.shape or mask_T.all():
                raise ValueError(
                    f"a loss mask of {len(mask_T)} flags, {int(mask_T.sum())} of them set, for {len(ids_T)} tokens; "
                    "expected a flag a token, set on the tokens of answers alone"
                )
            mask_T = mask_T & ~is_image_T
        placeholders = int(is_image_T.sum())
        answer_ids = ids_T[mask_T].tolist()
        if len(answer_ids) < 2:
            return Text(sample.name, size, why_not="short")

        # What follows the last answer is left away: padding, or text that nothing can be trained on.
        first, last = mask_T.nonzero().flatten()[[0, -1]].tolist()
        ended = any(int(id) in target.end_ids for id in ids_T[last : last + 2])  # some masks leave the end token out
        finish_reason = row.get("finish_reason") or sample.finish_reason or ("stop" if ended else "length")
        loops, cut = ends_in_loop(answer_ids), finish_reason == "length"
        if ("loop" in capture.leave_out and loops) or ("cut" in capture.leave_out and cut):
            return Text(sample.name, size, why_not="left_out", loops=loops, cut=cut)
        stored_T = mask_T[1 : last + 1] if capture.storage == "answers" else torch.ones(last, dtype=torch.bool)
        length, states = last + 1, int(stored_T.sum())
        if most_tokens is not None:
            length = min(length, first + most_tokens)
        positions_M = stored_T[: length - 1].nonzero().flatten()
        origin = {
            "engine": None,
            "quantisation": None,
            "thinking": None,
            "tools": None,
            "ids": self.importing.producer.ids,
        }
        hidden_MD = self._states(sample, positions_M)
        document = {
            "id": row.get("id", f"{self.importing.source}/{sample.name}"),
            "group": row.get("group"),
            "token_ids_T": ids_T[:length],
            "loss_mask_T": mask_T[:length],
            "hidden_MD": hidden_MD,
            "positions_M": positions_M,
            "prompt_length": first,
            "finish_reason": finish_reason,
            "sampling": row.get("sampling", {"mode": "unknown", "temperature": None, "top_p": None}),
            "dtype": row.get("dtype", "unknown"),
            "label": row.get("label"),
            "origin": origin | row.get("origin", {}) | {"source": self.importing.source, "file": sample.name},
        }
        return Text(
            sample.name,
            size,
            document,
            suspect=self._suspect(ids_T[:length], mask_T[:length], hidden_MD, positions_M),
            loops=loops,
            cut=cut,
            placeholders=placeholders,
            tokens=last + 1,
            states=states,
        )

    def _mapped(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """(ids with an engine's own ids of images replaced by the target's placeholder, where they were)"""
        ids_T = ids_T.long()
        is_image_T = ids_T >= FIRST_PLACEHOLDER
        if is_image_T.any():
            if self.target.placeholder_id is None:
                raise ValueError(
                    f"token id {int(ids_T[is_image_T][0])} is an image in SGLang, and config.json of target "
                    f"{self.target.name} names no placeholder for images; the text is another target's"
                )
            ids_T = ids_T.masked_fill(is_image_T, self.target.placeholder_id)
        return ids_T, is_image_T

    def _row(self, ids_T: Tensor, mask_T: Tensor | None) -> Row:
        """The conversation with these ids; padding behind the last answer is no part of it."""
        assert self.rows is not None
        row = self.rows.get(key_of(ids_T))
        if row is None and mask_T is not None and mask_T.any():
            # some masks leave the end token out, and a row is known without its last id, too
            row = self.rows.get(key_of(ids_T[: int(mask_T.nonzero()[-1]) + 1]))
        if row is not None:
            return row
        raise ValueError(
            f"no answered conversation of {self.importing.conversations} has its {len(ids_T)} token ids; import it "
            "with the conversations that it was computed from, or without any"
        )

    @cached_property
    def _marks(self) -> ChatMarks:
        return ChatMarks.of(self.target)

    @cached_property
    def _norm_weight_D(self) -> Tensor:
        return self.target.norm_weight.float()

    @cached_property
    def _lm_head_VD(self) -> Tensor:
        return self.target.lm_head

    def _suspect(self, ids_T: Tensor, mask_T: Tensor, hidden_MD: Tensor, positions_M: Tensor) -> str | None:
        """Why these states cannot be those of the text, or None; a glance at a few, which costs next to nothing.

        lm_head(h_t) must prefer x_{t+1} to x_t and x_{t+2} at half of some positions at least, and the states must have
        the size that the final norm gives them. The self-check knows more; it needs many texts, and lm_head as a whole.
        """
        states_ND = hidden_MD[spread(len(positions_M), LOOKED_AT)].float()
        if not states_ND.isfinite().all():
            return None  # which the writer names
        rms_N = rms_of(states_ND, self._norm_weight_D)
        low, high = RMS_RANGE
        sized = int(((rms_N >= low) & (rms_N <= high)).sum())
        if 2 * sized < len(rms_N):
            return (
                f"its states are not those of its tokens: RMS(h / norm weight) is {float(rms_N.median()):.3g}, "
                f"expected {low} to {high}; compute it again"
            )
        rows = (positions_M + 2 < len(ids_T)).nonzero().flatten()
        tokens_N3 = torch.stack([ids_T[positions_M[rows] + offset] for offset in range(3)], dim=1)
        differ_N = (tokens_N3 != tokens_N3.roll(1, dims=1)).all(dim=1)
        usable = (mask_T[positions_M[rows] + 1] & differ_N).nonzero().flatten()
        usable = usable[spread(len(usable), LOOKED_AT)]
        if len(usable) < FEWEST_TELLING:
            return None
        scores_N3 = torch.einsum(
            "nd,ncd->nc", hidden_MD[rows[usable]].float(), self._lm_head_VD[tokens_N3[usable]].float()
        )
        wins_3 = scores_N3.argmax(dim=1).bincount(minlength=3).tolist()
        if 2 * wins_3[1] < len(usable):
            return (
                f"its states are not those of its tokens: of x_t, x_{{t+1}} and x_{{t+2}}, h_t prefers x_{{t+1}} at "
                f"{wins_3[1]} of {len(usable)} positions (x_t at {wins_3[0]}, x_{{t+2}} at {wins_3[2]}), expected at "
                "most of them; are they shifted, or another text's? Compute it again"
            )
        return None

    def _states(self, sample: Sample, positions_M: Tensor) -> Tensor:
        """The states at these positions after the final norm, [M, D]."""
        capture = self.importing.capture
        if self.importing.producer.normed:
            return sample.hidden_MD[positions_M]
        M, dtype = len(positions_M), torch.bfloat16 if capture.storage_dtype == "bfloat16" else torch.float32
        memory = self.spare.popleft() if self.spare else torch.empty(0, dtype=dtype)
        out_MD = memory.resize_(M, self.target.hidden_size)  # keeps the memory where there is enough
        normed(sample.hidden_MD, sample.scales_M1, positions_M, self._norm_weight_D, self.target.norm_eps, out_MD)
        return out_MD


def store_texts(
    reading: Reading, files: Sequence[Path], writer: CacheWriter, progress: Callable[[int], object] = bool
) -> tuple[Counter[str], dict[str, str]]:
    """(how many texts became what, faults by the name of the text); `progress` gets the bytes of each text."""
    counts, faults = Counter[str](), dict[str, str]()
    with one_thread(), closing(read_ahead(reading.texts(files))) as texts:
        for text in texts:
            progress(text.bytes)
            counts.update(loops=int(text.loops), cut=int(text.cut), placeholders=text.placeholders)
            fault, why_not = text.fault, text.why_not
            if text.document is not None and text.suspect is not None:
                fault = text.suspect
                reading.spare.append(text.document["hidden_MD"])
            elif text.document is not None and text.document["id"] in writer.ids:
                why_not = "skipped"  # the same conversation from another file
            elif text.document is not None:
                try:
                    writer.add(**text.document)
                except ValueError as error:
                    fault = str(error)
                reading.spare.append(text.document["hidden_MD"])
            if fault is not None:
                faults[text.name] = fault
            elif why_not is not None:
                counts[why_not] += 1
            else:
                counts.update(stored=1, states=text.states, tokens=text.tokens)
    return counts, faults


def normed(
    hidden_TD: Tensor, scales_T1: Tensor | None, positions_M: Tensor, weight_D: Tensor, eps: float, out_MD: Tensor
) -> None:
    """RMS norm of hidden * scale at some positions, into out_MD; computed in float32, a few rows at a time."""
    buffer_RD = torch.empty(NORM_ROWS, len(weight_D))
    for start in range(0, len(positions_M), NORM_ROWS):
        at = positions_M[start : start + NORM_ROWS]
        rows_RD = buffer_RD[: len(at)]
        if int(at[-1]) - int(at[0]) == len(at) - 1:  # a view
            rows_RD.copy_(hidden_TD[int(at[0]) : int(at[-1]) + 1])
        else:
            rows_RD.copy_(torch.stack([hidden_TD[position] for position in at.tolist()]))
        if scales_T1 is not None:
            rows_RD *= scales_T1[at]
        # the norm, rather than the mean of squares: that would store the squares, in a third of the time
        mean_square_R1 = torch.linalg.vector_norm(rows_RD, dim=1, keepdim=True).square_().div_(len(weight_D))
        out_MD[start : start + NORM_ROWS] = rows_RD.mul_(mean_square_R1.add_(eps).rsqrt_()).mul_(weight_D)


def said(error: Exception) -> str:
    """A ValueError speaks for itself; what a library says, of a file that is like no other, needs an introduction."""
    return str(error) if isinstance(error, ValueError) else damage(error)


def size_of(file: Path) -> int:
    """In bytes; 0 for one that cannot be read, which will be named."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def rows_by_ids(conversations: Path) -> dict[bytes, Row]:
    """The answered conversations, by their token ids with and without the last: engines may not compute its state."""
    rows: dict[bytes, Row] = {}
    for row in read_conversations(conversations):
        if "error" not in row:
            ids_T = torch.tensor(row["prompt_ids"] + row["answer_ids"])
            rows |= {key_of(ids_T[:-1]): row, key_of(ids_T): row}
    return rows


def key_of(ids_T: Tensor) -> bytes:
    return sha256(as_bytes(ids_T.int())).digest()


def numerically(file: Path) -> list[str | int]:
    """A key that sorts numbers in a path by their value: data_2 before data_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", file.as_posix())]


def first_of(faults: dict[str, str], count: int = 3) -> str:
    return "; ".join(f"{name}: {fault}" for name, fault in list(faults.items())[:count])


def read_ahead(texts: Iterator[Text]) -> Generator[Text, None, None]:
    """The same texts, read by a thread while those before them are stored."""
    with ThreadPoolExecutor(1) as pool:
        coming: deque[Future[Text | None]] = deque(pool.submit(next, texts, None) for _ in range(TEXTS_AHEAD))
        try:
            while (text := coming.popleft().result()) is not None:
                coming.append(pool.submit(next, texts, None))
                yield text
        finally:
            pool.shutdown(cancel_futures=True)
