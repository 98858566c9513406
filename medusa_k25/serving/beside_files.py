"""What an export folder says about drafting a continuation beside the heads' tree, written and strictly read again.

config.json holds it under "beside": the smaller tree's rank paths as `medusa_choices`, the `chain` of nodes beside it,
the `shortest` and `longest` match in tokens, and its `source`: "lookup", the own text alone, or "answers", which comes
with the table in a file of its own. Without the key the heads draft alone.

Letters: T tokens, P positions of one length of n-gram.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from medusa_k25.ngram.beside import LONGEST, Beside
from medusa_k25.ngram.table import LENGTHS, AnswersTable
from medusa_k25.serving.formats import MAX_NODES, ServedFolder, ServedHeads, checked_tree
from medusa_k25.serving.untrusted import Slot, integer, printable, read_header, read_json, read_tensor

TABLE_FILE = "answers.safetensors"
SOURCES = ("lookup", "answers")
TOKENS = "tokens"
POSITIONS = {n: f"positions.{n}" for n in LENGTHS}
# Of the file: a server keeps up to three times that, and takes several times more for a moment as it sorts. 10 M tokens
# of answers are 150 MB.
MAX_TABLE_BYTES = 4 << 30


def write_beside(folder: Path, beside: Beside | None) -> None:
    """Add it to an export that was just written; None: take away what an earlier export had.

    ValueError for a table that is larger than any that is read.
    """
    where, file = folder / "config.json", folder / TABLE_FILE
    config = read_json(where)
    table = None if beside is None else beside.table
    if beside is None and not file.exists():
        return
    tensors = {}
    if table is not None:
        tensors = {TOKENS: table.tokens_T} | {POSITIONS[n]: each for n, each in table.positions.items()}
    if (total := sum(tensor.nbytes for tensor in tensors.values())) > MAX_TABLE_BYTES:
        raise ValueError(
            f"the table of answers takes {total:,} bytes, a server reads at most {MAX_TABLE_BYTES:,}; "
            "lower corpus_tokens"
        )
    where.unlink()  # a folder with a config is a whole one
    file.unlink(missing_ok=True)
    if tensors:
        file.write_bytes(save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))
    if beside is not None:
        config["beside"] = {
            "medusa_choices": [list(path) for path in beside.smaller.paths],
            "chain": beside.chain,
            "shortest": beside.shortest,
            "longest": beside.longest,
            "source": "lookup" if table is None else "answers",
        }
    part = folder / "config.json.part"
    part.write_text(json.dumps(config, indent=2) + "\n")
    part.rename(where)


def beside_note(beside: Beside) -> str:
    """A sentence for the export's user."""
    where = "in prompt and answer" if beside.table is None else "in prompt and answer, or in the training answers,"
    size = "" if beside.table is None else f" ({beside.table.num_entries:,} n-grams, {beside.table.nbytes:,} bytes)"
    return (
        f"Where the last {beside.shortest} tokens or more stood before {where} {beside.chain} of the "
        f"{beside.tree.num_nodes} nodes of a pass go to what followed there{size}"
    )


@dataclass(frozen=True)
class ServedBeside:
    """Judged by the config and the header of the table, of which no tensor has been read."""

    beside: Beside  # without its table
    file: Path
    slots: Mapping[str, Slot] | None
    vocab_size: int

    def load(self) -> Beside:
        """Read the table. ValueError for tokens or positions that are none."""
        if self.slots is None:
            return self.beside
        tensors: dict[str, Tensor] = {}
        try:
            with self.file.open("rb") as opened:
                for name, slot in self.slots.items():
                    tensors[name] = torch.empty(slot.shape, dtype=slot.dtype)
                    read_tensor(opened, name, slot, tensors[name])
        except OSError as error:
            raise ValueError(f"{self.file} cannot be read: {error.strerror}") from None
        tokens_T = tensors.pop(TOKENS)
        bounds = {TOKENS: (tokens_T, 0, self.vocab_size - 1)} | {
            name: (tensors[name], n, len(tokens_T) - self.beside.reach) for n, name in POSITIONS.items()
        }
        for name, (tensor, least, most) in bounds.items():
            if len(tensor) and not least <= int(tensor.min()) <= int(tensor.max()) <= most:
                raise ValueError(f"{self.file}: {name} holds numbers outside {least} to {most:,}; export again")
        table = AnswersTable(tokens_T, {n: tensors[name] for n, name in POSITIONS.items()})
        beside = self.beside
        return Beside(beside.tree, beside.smaller, beside.shortest, beside.longest, table)


def open_beside(served: ServedFolder | ServedHeads, folder: Path, vocab_size: int) -> ServedBeside | None:
    """What `folder` drafts beside the heads; None: nothing. Every fault is a ValueError."""
    where, file = folder / "config.json", folder / TABLE_FILE
    entry = served.config.get("beside")
    if entry is None:
        return None
    keys = {"medusa_choices", "chain", "shortest", "longest", "source"}
    if not isinstance(entry, dict) or entry.keys() != keys:
        raise ValueError(f"{where}: beside is expected to be an object with the keys {', '.join(sorted(keys))}")
    if entry["source"] not in SOURCES:
        raise ValueError(f"{where}: beside.source is none of {', '.join(SOURCES)}")
    smaller = checked_tree(entry["medusa_choices"], where)
    chain = integer(entry, "chain", MAX_NODES, where)
    shortest, longest = (integer(entry, key, LONGEST, where) for key in ("shortest", "longest"))
    try:
        beside = Beside(served.tree, smaller, shortest, longest)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; export again") from None
    if chain != beside.chain:
        raise ValueError(
            f"{where}: beside.chain is {chain}, a tree of {beside.tree.num_nodes} nodes leaves {beside.chain} beside "
            f"one of {smaller.num_nodes}; export again"
        )
    slots = None
    if entry["source"] == "answers":
        if not file.is_file():
            raise ValueError(f"{folder} lacks {TABLE_FILE}, the answers that it drafts from; export or fetch it again")
        slots = table_slots(file)
    return ServedBeside(beside, file, slots, vocab_size)


def table_slots(file: Path) -> dict[str, Slot]:
    """The header of a table of answers: exactly its tensors, rows of int32, some positions among them."""
    slots = read_header(file)
    names = {TOKENS, *POSITIONS.values()}
    if slots.keys() != names:
        found = ", ".join(printable(name) for name in sorted(slots)[:5])
        raise ValueError(f"{file} holds {found}, expected {', '.join(sorted(names))}; export again")
    for name, slot in slots.items():
        if slot.dtype != torch.int32 or len(slot.shape) != 1:
            raise ValueError(
                f"{file}: {name} is {slot.dtype} {list(slot.shape)}, expected a row of int32; export again"
            )
    if (total := sum(slot.nbytes for slot in slots.values())) > MAX_TABLE_BYTES:
        raise ValueError(f"{file}: {total:,} bytes of answers, expected at most {MAX_TABLE_BYTES:,}")
    if not any(slots[name].nbytes for name in POSITIONS.values()):
        raise ValueError(f"{file} knows no n-gram; export again")
    return slots
