"""The folder to serve from, in three formats: written, and read again as strictly as if a stranger had written it.

sglang  config.json and model.safetensors. The server shares the target's own lm_head and embeddings, of which no copy
        is shipped; own lm_heads of the heads are here, one tensor a head. `medusa_choices` in the config holds the
        tree as rank paths, `medusa_adaptive` how a server chooses what part of it a cycle verifies. When the heads
        rank a reduced vocabulary, `token_map` int64 [M] names the target token of each draft index. Residual heads
        are in vLLM's layout, where `original_lm_head` false says that they have own lm_heads. Those of other types
        have our own names, and their type and arguments under `medusa_heads`.
vllm    residual heads with the copy of lm_head that vLLM loads. It drafts a chain and reads no tree.
medusa  FasterDecoding's and TGI's, for residual heads: config.json and medusa_lm_head.safetensors, every head with its
        own lm_head over the target's whole vocabulary and with biases, which their loaders take for granted.

The tables of names are here and are read in both directions. What another type of heads has for tensors, its own
constructor tells: nothing here knows the types.

Letters: D hidden, K heads, L blocks of a residual head, M draft vocabulary, V target vocabulary.
"""

import copy
import inspect
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Size, Tensor

from medusa_k25.adaptive import Adaptive
from medusa_k25.heads import HEADS, DraftVocabulary, Heads, ResidualHeads, kind_of
from medusa_k25.serving.untrusted import (
    WEIGHTS,
    Slot,
    boolean,
    integer,
    number,
    printable,
    read_header,
    read_json,
    read_tensor,
)
from medusa_k25.target import Target, refuse_other_target, target_differences
from medusa_k25.tree import Tree

FORMATS = ("sglang", "vllm", "medusa")
FILE, MEDUSA_FILE = "model.safetensors", "medusa_lm_head.safetensors"

# What a folder may ask for: far above any heads in use, and small enough that asking for all of it does no harm.
MAX_HIDDEN, MAX_VOCAB = 1 << 16, 1 << 21
MAX_HEADS, MAX_BLOCKS = 64, 16
# Of the arguments of a type of heads those named num_* count parts of it, the others are sizes.
MAX_PARTS, MAX_SIZE = 64, 1 << 18
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


def shapes_of(heads: Heads) -> dict[str, Size]:
    """Of all tensors by our names, as `tensors_of` has them."""
    return {name: tensor.shape for name, tensor in tensors_of(heads).items()}


def outline(kind: type[Heads], **arguments: Any) -> Heads:
    """Heads without memory, on the meta device: they tell their sizes and what tensors they have."""
    with torch.device("meta"):
        return kind(**arguments)


def empty(heads: Heads, dtype: torch.dtype) -> Heads:
    """Heads like those of an `outline`, whose tensors are allocated and not filled."""
    # a buffer that is not saved would stay unfilled
    assert {name for name, _ in heads.named_buffers()} <= heads.state_dict().keys()
    return copy.deepcopy(heads).to(dtype).to_empty(device="cpu")


def arguments_of(heads: Heads) -> dict[str, Any]:
    """What `medusa_heads` says of heads besides their type: all arguments but those that the config tells elsewhere."""
    return {name: value for name, value in heads.arguments.items() if name not in ("hidden_size", "draft_vocab_size")}


def outline_of_config(config: Mapping[str, Any], hidden_size: int, draft_size: int, file: Path) -> Heads:
    """What `medusa_heads` describes. ValueError unless it names a type and gives exactly its arguments, within bounds.

    An argument is a bool, an int from 1 to MAX_PARTS where its name begins with num_, else to MAX_SIZE, or a float
    from 0 to 1; null where the type's constructor takes None.
    """
    described = config["medusa_heads"]
    if not isinstance(described, dict) or not isinstance(described.get("type"), str):
        raise ValueError(f"{file}: medusa_heads is {reprlib.repr(described)}, expected an object with a type")
    if described["type"] not in HEADS:
        raise ValueError(
            f"{file}: medusa_heads is of type {reprlib.repr(described['type'])}, this version knows "
            f"{', '.join(HEADS)}; use a newer medusa-k25, or export again"
        )
    kind = HEADS[described["type"]]
    parameters = dict(inspect.signature(kind).parameters)
    del parameters["hidden_size"], parameters["draft_vocab_size"]
    if described.keys() != {"type", *parameters}:
        raise ValueError(
            f"{file}: medusa_heads of type {described['type']} gives {printable(', '.join(sorted(described)))}; "
            f"expected type, {', '.join(parameters)}; export again"
        )
    arguments: dict[str, Any] = {"hidden_size": hidden_size, "draft_vocab_size": draft_size}
    for name, parameter in parameters.items():
        wanted = parameter.annotation
        if described[name] is None and wanted in (bool | None, int | None, float | None):
            arguments[name] = None
        elif wanted in (bool, bool | None):
            arguments[name] = boolean(described, name, False, file)
        elif wanted in (int, int | None):
            arguments[name] = integer(described, name, MAX_PARTS if name.startswith("num_") else MAX_SIZE, file)
        else:
            assert wanted in (float, float | None), f"{kind.__name__}: no file can hold an argument {parameter}"
            arguments[name] = number(described, name, file)
    try:
        return outline(kind, **arguments)
    except ValueError as error:  # arguments that do not go together
        raise ValueError(f"{file}: {error}") from None


def residual_outline(file: Path, found: Mapping[str, Sequence[int]], names: Mapping[str, str]) -> ResidualHeads:
    """The residual heads of the tensors of `file`, given by their shapes under the names of the table's right side.

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
    D = shapes["heads.0.0.linear.weight"][1]
    own_rows = next((shape[0] for name, shape in shapes.items() if name.startswith("lm_heads.") and shape), None)
    if not 1 <= D <= MAX_HIDDEN or not 1 <= (1 if own_rows is None else own_rows) <= MAX_VOCAB:
        rows = "" if own_rows is None else f"{own_rows:,} tokens and "
        raise ValueError(
            f"{file}: {rows}hidden size {D:,}, expected at most {MAX_VOCAB:,} tokens and a hidden size of at most "
            f"{MAX_HIDDEN:,}, and no 0"
        )
    bias = any(name.endswith(".bias") for name in shapes)
    heads = residual(D, K, L, bias, own_rows)
    refuse_unless_whole(file, found, {rename(name, names): shape for name, shape in shapes_of(heads).items()})
    return heads


def residual(hidden_size: int, num_heads: int, num_blocks: int, bias: bool, own_rows: int | None) -> ResidualHeads:
    """An outline. own_rows: M of own lm_heads."""
    heads = outline(
        ResidualHeads,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_blocks=num_blocks,
        bias=bias,
        own_lm_head=own_rows is not None,
        draft_vocab_size=own_rows,
    )
    assert isinstance(heads, ResidualHeads)
    return heads


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

    heads: Heads
    vocabulary: DraftVocabulary
    tree: Tree
    config: dict[str, Any]
    adaptive: Adaptive | None = None


@dataclass(frozen=True)
class ServedFolder:
    """An export folder by its config and the header of its tensors: all is judged, no tensor has been read."""

    file: Path
    config: dict[str, Any]
    names: Mapping[str, str]  # our names -> the file's, of all tensors
    slots: Mapping[str, Slot]
    heads: Heads  # an outline
    vocab_size: int
    draft_size: int
    tree: Tree
    adaptive: Adaptive | None = None  # None: the whole tree is verified in every cycle

    @property
    def dtype(self) -> torch.dtype:
        return self.slots[next(iter(self.names.values()))].dtype

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
                heads = empty(self.heads, self.dtype)
                for name, place in tensors_of(heads).items():
                    read_tensor(opened, self.names[name], self.slots[self.names[name]], place)
        except OSError as error:
            raise ValueError(f"{self.file} cannot be read: {error.strerror}") from None
        return ServedHeads(heads, vocabulary, self.tree, self.config, self.adaptive)


def targets_of(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The `Target.identity` that an export's heads were trained for, and the one that they were exported for all the
    same (allow_target_mismatch=true). Empty where nothing is known; a stranger's export may say anything."""
    ours = config.get("medusa_k25")
    found = []
    for key in ("target", "also_for"):
        node = ours.get(key) if isinstance(ours, Mapping) else None
        prints = node.get("fingerprints") if isinstance(node, Mapping) else None
        if isinstance(node, Mapping) and isinstance(prints, Mapping) and isinstance(prints.get("lm_head"), str):
            facts = {name: printable(str(node.get(name, ""))) for name in ("name", "revision", "quantisation")}
            found.append({**facts, "fingerprints": dict(prints)})
    return found


def refuse_heads_of_another_target(served: ServedFolder, target: Target, allow_mismatch: bool = False) -> list[str]:
    """How the target of these heads differs from `target`; a warning where that was allowed, here or at the export.

    Else ValueError, and always for other sizes. Heads that name no target are compared by size alone.
    """
    folder = served.file.parent
    for what, theirs, ours in (
        ("hidden size", served.heads.hidden_size, target.hidden_size),
        ("vocabulary size", served.vocab_size, target.vocab_size),
    ):
        if theirs != ours:
            raise ValueError(
                f"{folder}: the heads have {what} {theirs}, {target.path} has {ours}; use their own target"
            )
    if not (known := targets_of(served.config)):
        return []
    exported_for_it = any(not target_differences(other, target.identity) for other in known[1:])
    return refuse_other_target(str(folder), known[0], target, allow_mismatch or exported_for_it)


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
    D = integer(config, "hidden_size", MAX_HIDDEN, where)
    if "medusa_heads" in config:
        heads = outline_of_config(config, D, M, where)
        shares, names = False, {name: name for name in shapes_of(heads)}
    else:
        shares = boolean(config, "original_lm_head", False, where)
        heads = residual(
            D,
            num_heads=integer(config, "num_heads", MAX_HEADS, where),
            num_blocks=integer(config, "num_hidden_layers", MAX_BLOCKS, where),
            bias=boolean(config, "medusa_fc_bias", False, where),
            own_rows=None if shares else M,
        )
        names = {name: rename(name, MODEL_NAMES) for name in shapes_of(heads)}
    found = {name: slot.shape for name, slot in slots.items()}
    token_map = found.pop("token_map", None)
    if token_map is not None and slots["token_map"].dtype.is_floating_point:
        raise ValueError(f"{file}: token_map holds {slots['token_map'].dtype}, expected integers; export again")
    if token_map is not None and token_map != (M,):
        mapped = f"maps {token_map[0]} draft tokens" if len(token_map) == 1 else f"has a token_map of {list(token_map)}"
        raise ValueError(f"{file} {mapped}, its config says {M}; export again")
    if token_map is None and M < V:
        raise ValueError(f"{file} lacks 'token_map', the target tokens of its {M:,} draft tokens; export again")
    if shares:  # the server has the rows already of which vLLM's layout ships a copy
        for name in ("lm_head.weight", "lm_heads.0.weight"):
            if found.get(name) in ((M, D), (V, D)):
                del found[name]
    refuse_unless_whole(file, found, {names[name]: shape for name, shape in shapes_of(heads).items()})
    tree = _tree_of(config, heads, where)
    adaptive = _adaptive_of(config, tree, where)
    return _checked(ServedFolder(file, config, names, slots, heads, V, M, tree, adaptive))


def _open_medusa(file: Path, vocab_size: int | None) -> ServedFolder:
    where = file.parent / "config.json"
    config, slots = read_json(where) if where.is_file() else {}, read_header(file)
    table = medusa_names(len({name.split(".")[1] for name in slots if name.endswith(".linear.weight")}))
    heads = residual_outline(file, {name: slot.shape for name, slot in slots.items()}, table)
    for key, held in (("medusa_num_heads", heads.num_heads), ("medusa_num_layers", heads.num_blocks)):
        # the first published configs count fewer heads than their files hold
        if key in config and integer(config, key, MAX_HEADS, where) > held:
            raise ValueError(f"{file} holds {held}, its config.json promises {key}={config[key]}; fetch it again")
    V = heads.draft_vocab_size if heads.own_lm_head else vocab_size
    if V is None:
        raise ValueError(f"{file}: its heads share the target's lm_head, so the target's vocab_size must be given")
    names = {name: rename(name, table) for name in shapes_of(heads)}
    return _checked(ServedFolder(file, config, names, slots, heads, V, V, _tree_of(config, heads, where)))


def _tree_of(config: Mapping[str, Any], heads: Heads, file: Path) -> Tree:
    if "medusa_choices" not in config:
        return Tree.chain(heads.num_heads)
    return checked_tree(config["medusa_choices"], file)


def _adaptive_of(config: Mapping[str, Any], tree: Tree, file: Path) -> Adaptive | None:
    if "medusa_adaptive" not in config:
        return None
    try:
        return Adaptive.from_json(config["medusa_adaptive"], tree)
    except ValueError as error:
        raise ValueError(f"{file}: {error}; export again") from None


def _checked(folder: ServedFolder) -> ServedFolder:
    folder.tree.refuse_unless_fits(folder.heads.num_heads, folder.draft_size)
    slots, dtype = {name: folder.slots[name] for name in folder.names.values()}, folder.dtype
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
    whole = empty(residual(heads.hidden_size, heads.num_heads, heads.num_blocks, bias=True, own_rows=V), dtype)
    assert isinstance(whole, ResidualHeads)
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


def remarks(heads: Heads, vocabulary: DraftVocabulary, format: str) -> list[str]:
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
    if format == "medusa" and isinstance(heads, ResidualHeads) and heads.num_blocks > 1:
        lines.append(
            f"FasterDecoding's own code shares one block among the {heads.num_blocks} of a head and would use the last "
            "alone; TGI and SGLang take them as they are"
        )
    return lines


def export_heads(
    folder: Path,
    heads: Heads,
    vocabulary: DraftVocabulary,
    tree: Tree,
    dtype: torch.dtype,
    provenance: Mapping[str, Any],
    format: str = "sglang",
    lm_head_VD: Tensor | None = None,
    base_model: str | None = None,
    tree_fallback: str | None = None,
    adaptive: Adaptive | None = None,
) -> ServedHeads:
    """Write `folder`, read it again and compare every tensor bit for bit. Returns what was read.

    `provenance` (target, revision, fingerprints, checkpoint, ...) goes into config.json under "medusa_k25".
    lm_head_VD: the target's, of which format=vllm and format=medusa ship rows. `base_model`: the target's name, for
    those that look for the target by the heads. tree_fallback="chain": a server whose attention backend takes no tree
    may verify the tree's chain; None: it refuses. adaptive: for format=sglang alone; None: every cycle verifies the
    whole tree. An export that the folder holds already is replaced.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format}: expected one of {', '.join(FORMATS)}")
    if tree_fallback not in (None, "chain"):
        raise ValueError(f"medusa_tree_fallback={tree_fallback}: expected null or chain")
    if format != "sglang" and not isinstance(heads, ResidualHeads):
        raise ValueError(
            f"format={format} holds residual heads alone, these are {kind_of(heads)} heads, with which its servers "
            "could not draft; export them with format=sglang, which holds every type, or train with heads=residual"
        )
    if dtype not in WEIGHTS:
        raise ValueError(f"export_dtype: expected bfloat16, float16 or float32, got {dtype}")
    if tree.num_nodes > MAX_NODES:
        raise ValueError(f"the tree has {tree.num_nodes:,} nodes, a server takes at most {MAX_NODES:,}")
    tree.refuse_unless_fits(heads.num_heads, len(vocabulary))
    assert format == "sglang" or (lm_head_VD is not None and adaptive is None)
    if format == "medusa" or (format == "vllm" and heads.own_lm_head and len(vocabulary) < vocabulary.vocab_size):
        assert lm_head_VD is not None and isinstance(heads, ResidualHeads)
        heads = over_whole_vocabulary(heads, vocabulary, lm_head_VD, dtype)
        vocabulary = DraftVocabulary(torch.arange(vocabulary.vocab_size), vocabulary.vocab_size)

    shapes = shapes_of(heads)
    if isinstance(heads, ResidualHeads):
        table = medusa_names(heads.num_blocks) if format == "medusa" else MODEL_NAMES
        names = {name: rename(name, table) for name in shapes}
    else:
        names = {name: name for name in shapes}
    tensors = {names[name]: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors_of(heads).items()}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"'{name}' of these heads holds NaN or infinity in {dtype}; choose another checkpoint")
    written = dict(tensors)
    if len(vocabulary) < vocabulary.vocab_size:
        written["token_map"] = vocabulary.token_ids_M
    if format == "vllm" and not heads.own_lm_head:
        assert lm_head_VD is not None
        written["lm_head.weight"] = vocabulary.rows(lm_head_VD).to("cpu", dtype).contiguous()
    sizes = {"hidden_size": heads.hidden_size, "vocab_size": vocabulary.vocab_size}
    config: dict[str, Any] = {"model_type": "medusa"}  # SGLang reads no config without it
    if not isinstance(heads, ResidualHeads):
        config |= sizes | {"truncated_vocab_size": len(vocabulary)}
        config["medusa_heads"] = {"type": kind_of(heads), **arguments_of(heads)}
    elif format == "medusa":  # "architectures" here would make TGI look for another kind of speculator
        config |= {
            "medusa_num_heads": heads.num_heads,
            "medusa_num_layers": heads.num_blocks,
            "base_model_name_or_path": base_model,
            "version": "2",
            **sizes,
        }
    else:
        config = {"architectures": ["MedusaModel"], **config, **sizes}
        config |= {
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
    if adaptive is not None:
        config["medusa_adaptive"] = adaptive.as_json()
    _write(folder, MEDUSA_FILE if format == "medusa" else FILE, save(written, metadata={"format": "pt"}), config)

    served = load_served(folder)
    for name, tensor in tensors_of(served.heads).items():
        if not torch.equal(tensor, tensors[names[name]]):
            raise OSError(f"{folder}: tensor '{name}' reads back differently from what was written; export again")
    if (served.tree, served.adaptive) != (tree, adaptive) or not torch.equal(
        served.vocabulary.token_ids_M, vocabulary.token_ids_M
    ):
        raise OSError(f"{folder}: tree, adaptive rule or draft vocabulary read back differently; export again")
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
