"""The folder to serve from, in three formats: written, and read again as strictly as if a stranger had written it.

sglang  config.json and model.safetensors under vLLM's names. The server shares the target's own lm_head, of which no
        copy is shipped, or with `original_lm_head` false the heads' own lm_heads are here, one tensor a head.
        `medusa_choices` in the config holds the tree as rank paths. When the heads rank a reduced vocabulary,
        `token_map` int64 [M] names the target token of each draft index.
vllm    the same with the copy of lm_head that vLLM loads. It drafts a chain and reads no tree.
medusa  FasterDecoding's and TGI's: config.json and medusa_lm_head.safetensors, every head with its own lm_head over
        the target's whole vocabulary and with biases, which their loaders take for granted.

The tables of names are here and are read in both directions.

Letters: D hidden, K heads, L blocks a head, M draft vocabulary, V target vocabulary.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Size, Tensor, nn

from medusa_k25.heads import DraftVocabulary, Heads, ResidualHeads
from medusa_k25.serving.untrusted import (
    WEIGHTS,
    Slot,
    boolean,
    integer,
    printable,
    read_header,
    read_json,
    read_tensor,
)
from medusa_k25.tree import Tree

FORMATS = ("sglang", "vllm", "medusa")
FILE, MEDUSA_FILE = "model.safetensors", "medusa_lm_head.safetensors"

# What a folder may ask for: far above any heads in use, and small enough that asking for all of it does no harm.
MAX_HIDDEN, MAX_VOCAB = 1 << 16, 1 << 21
MAX_HEADS, MAX_BLOCKS = 64, 16
MAX_WEIGHT_BYTES = 64 << 30  # four heads with own lm_heads of Kimi-K2.5 in bf16 are 10 GB
# A verify pass takes every node as a token: tens pay, hundreds do not. A request's tree mask grows with the square of
# the nodes; at this bound it is 1 MB.
MAX_NODES = 1024

MODEL_NAMES = {
    "heads.{head}.{layer}.linear.weight": "blocks.{head}.layers.{layer}.weight",
    "heads.{head}.{layer}.linear.bias": "blocks.{head}.layers.{layer}.bias",
    "lm_heads.{head}.weight": "lm_heads.{head}.weight",
}


def medusa_names(num_blocks: int) -> dict[str, str]:
    """The names of FasterDecoding's files and of TGI's: a head's own lm_head is the layer after its last block."""
    return {
        "heads.{head}.{layer}.linear.weight": "{head}.{layer}.linear.weight",
        "heads.{head}.{layer}.linear.bias": "{head}.{layer}.linear.bias",
        "lm_heads.{head}.weight": f"{{head}}.{num_blocks}.weight",
    }


def rename(name: str, table: Mapping[str, str]) -> str:
    """`name` under the table's other convention; ValueError for a name that the table does not hold."""
    for ours, theirs in table.items():
        pattern = re.escape(ours).replace(r"\{head\}", r"(?P<head>\d+)").replace(r"\{layer\}", r"(?P<layer>\d+)")
        if match := re.fullmatch(pattern, name, re.ASCII):
            return theirs.format(**match.groupdict())
    raise ValueError(f"tensor '{printable(name)}' has no place in this format; known names: {', '.join(table)}")


def tensors_of(heads: Heads) -> dict[str, Tensor]:
    """The heads' tensors by our names, own lm_heads one a head. They are views: what is copied into them is kept."""
    tensors = dict(heads.state_dict())
    own_KMD = tensors.pop("lm_heads.weight", ())
    return tensors | {f"lm_heads.{k}.weight": own_MD for k, own_MD in enumerate(own_KMD)}


def refuse_unless_whole(file: Path, found: Mapping[str, Sequence[int]], shapes: Mapping[str, Size]) -> None:
    """ValueError unless the tensors `found` in `file`, given by their shapes, are exactly those of `shapes`."""
    faults = [f"lacks '{name}'" for name in shapes if name not in found]
    faults += [f"'{printable(name)}' has no place" for name in found if name not in shapes]
    faults += [
        f"'{name}' is {list(found[name])}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if faults:
        more = f" and {len(faults) - 5} more faults" if len(faults) > 5 else ""
        raise ValueError(f"{file} holds no whole heads: {'; '.join(faults[:5])}{more}; write or fetch it again")


@dataclass(frozen=True)
class Sizes:
    """The sizes of residual heads, which fix the name and shape of every tensor. own_rows: M of own lm_heads."""

    hidden_size: int
    num_heads: int
    num_blocks: int
    bias: bool
    own_rows: int | None

    @property
    def shapes(self) -> dict[str, Size]:
        """By our names, as `tensors_of` has them."""
        D = self.hidden_size
        layers = [f"heads.{k}.{i}.linear" for k in range(self.num_heads) for i in range(self.num_blocks)]
        shapes = {f"{layer}.weight": Size((D, D)) for layer in layers}
        if self.bias:
            shapes |= {f"{layer}.bias": Size((D,)) for layer in layers}
        if self.own_rows is not None:
            shapes |= {f"lm_heads.{k}.weight": Size((self.own_rows, D)) for k in range(self.num_heads)}
        return shapes

    def empty_heads(self, dtype: torch.dtype) -> ResidualHeads:
        """Heads whose tensors are allocated and not filled."""
        with torch.device("meta"):  # initialising Kimi-K2.5's would take seconds
            heads = ResidualHeads(
                self.hidden_size,
                self.num_heads,
                self.num_blocks,
                bias=self.bias,
                own_lm_head=self.own_rows is not None,
                draft_vocab_size=self.own_rows,
            )
        return heads.to(dtype).to_empty(device="cpu")


def sizes_of(file: Path, found: Mapping[str, Sequence[int]], names: Mapping[str, str]) -> Sizes:
    """The sizes that the tensors of `file` have, given by their shapes under the names of the table's right side.

    ValueError unless they are all tensors of such heads, and nothing else.
    """
    theirs = {theirs: ours for ours, theirs in names.items()}
    try:
        shapes = {rename(name, theirs): shape for name, shape in found.items()}
    except ValueError as error:
        raise ValueError(f"{file}: {error}; it must hold the tensors of Medusa heads alone") from None
    blocks = [name.split(".") for name in shapes if name.startswith("heads.")]
    if len(shapes.get("heads.0.0.linear.weight", ())) != 2:
        raise ValueError(f"{file} lacks the first block of the first head; fetch it again")
    K, L = (1 + max(int(parts[place]) for parts in blocks) for place in (1, 2))
    if K > MAX_HEADS or L > MAX_BLOCKS:
        raise ValueError(f"{file}: {K} heads of {L} blocks, expected at most {MAX_HEADS} of {MAX_BLOCKS}")
    sizes = Sizes(
        hidden_size=shapes["heads.0.0.linear.weight"][1],
        num_heads=K,
        num_blocks=L,
        bias=any(name.endswith(".bias") for name in shapes),
        own_rows=next((shape[0] for name, shape in shapes.items() if name.startswith("lm_heads.") and shape), None),
    )
    refuse_unless_whole(file, found, {rename(name, names): shape for name, shape in sizes.shapes.items()})
    return sizes


def checked_tree(choices: Any, file: Path) -> Tree:
    """A tree from JSON. ValueError for anything but a list of fewer than MAX_NODES rank paths, each there once."""
    if not isinstance(choices, list) or len(choices) >= MAX_NODES:
        found = f"{len(choices):,} paths" if isinstance(choices, list) else reprlib.repr(choices)
        raise ValueError(f"{file}: medusa_choices is {found}, expected a list of at most {MAX_NODES - 1} rank paths")
    for path in choices:
        if (
            not isinstance(path, list)
            or not 1 <= len(path) <= MAX_HEADS
            or any(type(rank) is not int or not 0 <= rank < MAX_VOCAB for rank in path)
        ):
            raise ValueError(
                f"{file}: medusa_choices holds {reprlib.repr(path)}, expected a list of 1 to {MAX_HEADS} ranks, "
                f"integers from 0 to {MAX_VOCAB - 1:,}"
            )
    tree = Tree(choices)
    if len(tree.paths) < len(choices):
        raise ValueError(f"{file}: medusa_choices holds {len(choices) - len(tree.paths)} paths more than once")
    return tree


@dataclass(frozen=True)
class ServedHeads:
    """What an export folder holds."""

    heads: ResidualHeads
    vocabulary: DraftVocabulary
    tree: Tree
    config: dict[str, Any]


@dataclass(frozen=True)
class ServedFolder:
    """An export folder by its config and the header of its tensors: all is judged, no tensor has been read."""

    file: Path
    config: dict[str, Any]
    names: Mapping[str, str]  # our names -> the file's
    slots: Mapping[str, Slot]
    sizes: Sizes
    vocab_size: int
    draft_size: int
    tree: Tree

    def load(self) -> ServedHeads:
        """Read the tensors. ValueError for NaN, for infinity, and for a draft vocabulary that is none."""
        try:
            with self.file.open("rb") as opened:
                token_ids_M = torch.arange(self.draft_size)
                if slot := self.slots.get("token_map"):
                    token_ids_M = torch.empty(slot.shape, dtype=slot.dtype)
                    read_tensor(opened, "token_map", slot, token_ids_M)
                if token_ids_M.min() < 0 or token_ids_M.max() >= self.vocab_size:
                    raise ValueError(f"{self.file}: token_map holds ids outside 0 to {self.vocab_size - 1:,}")
                vocabulary = DraftVocabulary(token_ids_M, self.vocab_size)
                heads = self.sizes.empty_heads(self.slots[rename("heads.0.0.linear.weight", self.names)].dtype)
                for name, place in tensors_of(heads).items():
                    theirs = rename(name, self.names)
                    read_tensor(opened, theirs, self.slots[theirs], place)
        except OSError as error:
            raise ValueError(f"{self.file} cannot be read: {error.strerror}") from None
        return ServedHeads(heads, vocabulary, self.tree, self.config)


def lm_head_fingerprint(config: Mapping[str, Any]) -> str | None:
    """`Target.fingerprints["lm_head"]` of the target that the heads of `config` were trained for; None: not known."""
    node: Any = config
    for key in ("medusa_k25", "target", "fingerprints", "lm_head"):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, str) else None


def load_served(folder: Path, vocab_size: int | None = None) -> ServedHeads:
    """Read an export folder, strictly: every tensor must have its place and its shape, and the tree must fit."""
    return open_served(folder, vocab_size).load()


def open_served(folder: Path, vocab_size: int | None = None) -> ServedFolder:
    """Judge an export folder, of any of the three formats and of any producer, without reading its tensors.

    `vocab_size`: the target's, for FasterDecoding's files that share the target's lm_head; the others tell it.
    A folder without a tree has the chain of all its heads. Every fault is a ValueError.
    """
    file = folder / FILE
    if file.is_file():
        missing = [] if (folder / "config.json").is_file() else ["config.json"]
    elif (folder / MEDUSA_FILE).is_file():
        return _open_medusa(folder / MEDUSA_FILE, vocab_size)
    elif (folder / "medusa_lm_head.pt").is_file():
        raise ValueError(
            f"{folder / 'medusa_lm_head.pt'} is a pickle, which may run code and is not read; write it anew with: "
            f"from safetensors.torch import save_file; import torch; "
            f"save_file(torch.load('medusa_lm_head.pt', weights_only=True), '{MEDUSA_FILE}')"
        )
    else:
        missing = [name for name in ("config.json", FILE) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} is no export folder, it lacks {' and '.join(missing)}; run medusa_k25.export first")

    where = folder / "config.json"
    config, slots = read_json(where), read_header(file)
    V = integer(config, "vocab_size", MAX_VOCAB, where)
    M = integer(config, "truncated_vocab_size", V, where, default=V)
    shares = boolean(config, "original_lm_head", False, where)
    D = integer(config, "hidden_size", MAX_HIDDEN, where)
    sizes = Sizes(
        hidden_size=D,
        num_heads=integer(config, "num_heads", MAX_HEADS, where),
        num_blocks=integer(config, "num_hidden_layers", MAX_BLOCKS, where),
        bias=boolean(config, "medusa_fc_bias", False, where),
        own_rows=None if shares else M,
    )
    found = {name: slot.shape for name, slot in slots.items()}
    token_map = found.pop("token_map", None)
    if token_map is not None and slots["token_map"].dtype.is_floating_point:
        raise ValueError(f"{file}: token_map holds {slots['token_map'].dtype}, expected integers; export again")
    if token_map is not None and token_map != (M,):
        mapped = f"maps {token_map[0]} draft tokens" if len(token_map) == 1 else f"has a token_map of {list(token_map)}"
        raise ValueError(f"{file} {mapped}, its config says {M}; export again")
    if token_map is None and M < V:
        raise ValueError(f"{file} lacks 'token_map', the target tokens of its {M:,} draft tokens; export again")
    if shares:  # the server has the rows of a shipped copy already
        for name in ("lm_head.weight", "lm_heads.0.weight"):
            if found.get(name) in ((M, D), (V, D)):
                del found[name]
    refuse_unless_whole(file, found, {rename(name, MODEL_NAMES): shape for name, shape in sizes.shapes.items()})
    return _checked(ServedFolder(file, config, MODEL_NAMES, slots, sizes, V, M, _tree_of(config, sizes, where)))


def _open_medusa(file: Path, vocab_size: int | None) -> ServedFolder:
    where = file.parent / "config.json"
    config, slots = read_json(where) if where.is_file() else {}, read_header(file)
    names = medusa_names(len({name.split(".")[1] for name in slots if name.endswith(".linear.weight")}))
    sizes = sizes_of(file, {name: slot.shape for name, slot in slots.items()}, names)
    for key, held in (("medusa_num_heads", sizes.num_heads), ("medusa_num_layers", sizes.num_blocks)):
        # the first published configs count fewer heads than their files hold
        if key in config and integer(config, key, MAX_HEADS, where) > held:
            raise ValueError(f"{file} holds {held}, its config.json promises {key}={config[key]}; fetch it again")
    V = vocab_size if sizes.own_rows is None else sizes.own_rows
    if V is None:
        raise ValueError(f"{file}: its heads share the target's lm_head, so the target's vocab_size must be given")
    if not 1 <= V <= MAX_VOCAB or not 1 <= sizes.hidden_size <= MAX_HIDDEN:
        raise ValueError(
            f"{file}: {V:,} tokens and hidden size {sizes.hidden_size:,}, expected at most {MAX_VOCAB:,} "
            f"and {MAX_HIDDEN:,}, and no 0"
        )
    return _checked(ServedFolder(file, config, names, slots, sizes, V, V, _tree_of(config, sizes, where)))


def _tree_of(config: Mapping[str, Any], sizes: Sizes, file: Path) -> Tree:
    if "medusa_choices" not in config:
        return Tree.chain(sizes.num_heads)
    return checked_tree(config["medusa_choices"], file)


def _checked(folder: ServedFolder) -> ServedFolder:
    folder.tree.refuse_unless_fits(folder.sizes.num_heads, folder.draft_size)
    slots = {name: folder.slots[name] for name in (rename(ours, folder.names) for ours in folder.sizes.shapes)}
    dtype = next(iter(slots.values())).dtype
    for name, slot in slots.items():
        if slot.dtype not in WEIGHTS or slot.dtype != dtype:
            raise ValueError(
                f"{folder.file}: '{name}' is {slot.dtype}, expected {dtype if dtype in WEIGHTS else 'floating point'} "
                "like all weights; export again"
            )
    if (total := sum(slot.nbytes for slot in slots.values())) > MAX_WEIGHT_BYTES:
        raise ValueError(f"{folder.file}: {total:,} bytes of weights, expected at most {MAX_WEIGHT_BYTES:,}")
    return folder


def over_whole_vocabulary(
    heads: ResidualHeads, vocabulary: DraftVocabulary, lm_head_VD: Tensor, dtype: torch.dtype
) -> ResidualHeads:
    """The same heads with biases and with own lm_heads [V, D] each, in `dtype`.

    The row of a token outside the draft vocabulary repeats that of the first draft token: it ties with it wherever it
    is drafted, and so what the heads drafted before they draft still.
    """
    V, M = vocabulary.vocab_size, len(vocabulary)
    whole = Sizes(heads.hidden_size, heads.num_heads, heads.num_blocks, bias=True, own_rows=V).empty_heads(dtype)
    row_V = torch.zeros(V, dtype=torch.long)
    row_V[vocabulary.token_ids_M] = torch.arange(M)
    given = tensors_of(heads)
    for name, place in tensors_of(whole).items():
        if name.startswith("lm_heads."):
            place.copy_((given[name] if heads.own_lm_head else vocabulary.rows(lm_head_VD))[row_V])
        elif name in given:
            place.copy_(given[name])
        else:
            place.zero_()
    return whole


def remarks(heads: ResidualHeads, vocabulary: DraftVocabulary, format: str) -> list[str]:
    """What an export in `format` does to these heads that its user may not expect, a sentence each."""
    M, V = len(vocabulary), vocabulary.vocab_size
    lines = []
    if format == "vllm" and M < V and not heads.own_lm_head:
        lines.append(
            f"vLLM loads the draft vocabulary of {M:,} tokens only with --model-loader-extra-config "
            "'{\"enable_weights_track\": false}'"
        )
    if (format == "vllm" and M < V and heads.own_lm_head) or format == "medusa":
        why = "vLLM loads no draft vocabulary with own lm_heads" if format == "vllm" else "This format knows no sharing"
        copied = "" if heads.own_lm_head else ", copies of the target's rows"
        lines.append(f"{why}: every head has an own lm_head over all {V:,} tokens{copied}")
        if M < V:
            lines.append(
                f"The {V - M:,} tokens outside the draft vocabulary repeat the row of its first token: they are never "
                "better than it, so the heads draft what they drafted before"
            )
    if format == "vllm":
        lines.append("vLLM drafts a chain of the heads' best choices; the tree in the config is for SGLang")
    if format == "medusa" and heads.num_blocks > 1:
        lines.append(
            f"FasterDecoding's own code shares one block among the {heads.num_blocks} of a head and would use the last "
            "alone; TGI and SGLang take them as they are"
        )
    return lines


def export_heads(
    folder: Path,
    heads: nn.Module,
    vocabulary: DraftVocabulary,
    tree: Tree,
    dtype: torch.dtype,
    provenance: Mapping[str, Any],
    format: str = "sglang",
    lm_head_VD: Tensor | None = None,
    base_model: str | None = None,
    tree_fallback: str | None = None,
) -> ServedHeads:
    """Write `folder`, read it again and compare every tensor bit for bit. Returns what was read.

    `provenance` (target, revision, fingerprints, checkpoint, ...) goes into config.json under "medusa_k25".
    lm_head_VD: the target's, of which format=vllm and format=medusa ship rows. `base_model`: the target's name, for
    those that look for the target by the heads. tree_fallback="chain": a server whose attention backend takes no tree
    may verify the tree's chain; None: it refuses. An export that the folder holds already is replaced.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format}: expected one of {', '.join(FORMATS)}")
    if tree_fallback not in (None, "chain"):
        raise ValueError(f"medusa_tree_fallback={tree_fallback}: expected null or chain")
    if not isinstance(heads, ResidualHeads):
        raise ValueError(f"format={format} holds residual heads only, got {type(heads).__name__}")
    if dtype not in WEIGHTS:
        raise ValueError(f"export_dtype: expected bfloat16, float16 or float32, got {dtype}")
    if tree.num_nodes > MAX_NODES:
        raise ValueError(f"the tree has {tree.num_nodes:,} nodes, a server takes at most {MAX_NODES:,}")
    tree.refuse_unless_fits(heads.num_heads, len(vocabulary))
    assert format == "sglang" or lm_head_VD is not None
    if format == "medusa" or (format == "vllm" and heads.own_lm_head and len(vocabulary) < vocabulary.vocab_size):
        assert lm_head_VD is not None
        heads = over_whole_vocabulary(heads, vocabulary, lm_head_VD, dtype)
        vocabulary = DraftVocabulary(torch.arange(vocabulary.vocab_size), vocabulary.vocab_size)

    names = medusa_names(heads.num_blocks) if format == "medusa" else MODEL_NAMES
    tensors = {rename(name, names): tensor.to("cpu", dtype).contiguous() for name, tensor in tensors_of(heads).items()}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"'{name}' of these heads holds NaN or infinity in {dtype}; choose another checkpoint")
    written = dict(tensors)
    if len(vocabulary) < vocabulary.vocab_size:
        written["token_map"] = vocabulary.token_ids_M
    if format == "vllm" and not heads.own_lm_head:
        assert lm_head_VD is not None
        written["lm_head.weight"] = vocabulary.rows(lm_head_VD).to("cpu", dtype).contiguous()
    config: dict[str, Any]
    if format == "medusa":  # "architectures" here would make TGI look for another kind of speculator
        config = {
            "model_type": "medusa",  # SGLang reads no config without it
            "medusa_num_heads": heads.num_heads,
            "medusa_num_layers": heads.num_blocks,
            "base_model_name_or_path": base_model,
            "version": "2",
            "hidden_size": heads.hidden_size,
            "vocab_size": vocabulary.vocab_size,
        }
    else:
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": heads.hidden_size,
            "vocab_size": vocabulary.vocab_size,
            "truncated_vocab_size": len(vocabulary),
            "num_heads": heads.num_heads,
            "num_hidden_layers": heads.num_blocks,
            "medusa_fc_bias": heads.bias,
            "original_lm_head": not heads.own_lm_head,
        }
    config |= {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "medusa_choices": [list(path) for path in tree.paths],
        "medusa_k25": dict(provenance),
    }
    if tree_fallback is not None:
        config["medusa_tree_fallback"] = tree_fallback
    _write(folder, MEDUSA_FILE if format == "medusa" else FILE, save(written, metadata={"format": "pt"}), config)

    served = load_served(folder)
    for name, tensor in tensors_of(served.heads).items():
        if not torch.equal(tensor, tensors[rename(name, names)]):
            raise OSError(f"{folder}: tensor '{name}' reads back differently from what was written; export again")
    if served.tree != tree or not torch.equal(served.vocabulary.token_ids_M, vocabulary.token_ids_M):
        raise OSError(f"{folder}: the tree or the draft vocabulary reads back differently; export again")
    return served


def _write(folder: Path, name: str, content: bytes, config: Mapping[str, Any]) -> None:
    """The config last and by rename: a folder with a config is a whole one."""
    folder.mkdir(parents=True, exist_ok=True)
    # not save_file: its files are readable by their owner alone, and a server may be another user
    (folder / f"{name}.part").write_bytes(content)
    (folder / "config.json").unlink(missing_ok=True)
    for other in {FILE, MEDUSA_FILE} - {name}:  # an earlier export in another format
        (folder / other).unlink(missing_ok=True)
    (folder / f"{name}.part").rename(folder / name)
    (folder / "config.json.part").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "config.json.part").rename(folder / "config.json")
