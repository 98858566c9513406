"""The folder to serve from: config.json and model.safetensors under vLLM's names.

The server shares the target's own lm_head, of which no copy is shipped, or with `original_lm_head` false the heads'
own lm_heads are here, one tensor a head. `medusa_choices` in the config holds the tree as rank paths. (vLLM itself
takes neither a tree nor, so far, heads without a copy of lm_head.) When the heads rank a reduced vocabulary,
`token_map` int64 [M] names the target token of each draft index.

The tables of names are here, for this format and for FasterDecoding's, and are read in both directions.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Size, Tensor, nn

from medusa_k25.heads import DraftVocabulary, Heads, ResidualHeads
from medusa_k25.tree import Tree

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
        if match := re.fullmatch(pattern, name):
            return theirs.format(**match.groupdict())
    raise ValueError(f"tensor '{name}' has no place in this format; known names: {', '.join(table)}")


def tensors_of(heads: Heads) -> dict[str, Tensor]:
    """The heads' tensors by our names, own lm_heads one a head. They are views: what is copied into them is kept."""
    tensors = dict(heads.state_dict())
    own_KMD = tensors.pop("lm_heads.weight", ())
    return tensors | {f"lm_heads.{k}.weight": own_MD for k, own_MD in enumerate(own_KMD)}


def refuse_unless_whole(file: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, Size]) -> None:
    """ValueError unless the tensors of `file` are exactly those of `shapes`."""
    faults = [f"lacks '{name}'" for name in shapes if name not in tensors]
    faults += [f"'{name}' has no place" for name in tensors if name not in shapes]
    faults += [
        f"'{name}' is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if faults:
        more = f" and {len(faults) - 5} more faults" if len(faults) > 5 else ""
        raise ValueError(f"{file} holds no whole heads: {'; '.join(faults[:5])}{more}; write or fetch it again")


@dataclass(frozen=True)
class ServedHeads:
    """What an export folder holds."""

    heads: ResidualHeads
    vocabulary: DraftVocabulary
    tree: Tree
    config: dict[str, Any]


def export_heads(
    folder: Path,
    heads: nn.Module,
    vocabulary: DraftVocabulary,
    tree: Tree,
    dtype: torch.dtype,
    provenance: Mapping[str, Any],
) -> ServedHeads:
    """Write `folder`, read it again and compare every tensor bit for bit. Returns what was read.

    `provenance` (target, revision, fingerprints, checkpoint, ...) goes into config.json under "medusa_k25".
    """
    if not isinstance(heads, ResidualHeads):
        raise ValueError(f"this format holds residual heads only, got {type(heads).__name__}")
    tree.refuse_unless_fits(heads.num_heads, len(vocabulary))
    reduced = len(vocabulary) < vocabulary.vocab_size
    tensors = {
        rename(name, MODEL_NAMES): tensor.to("cpu", dtype).contiguous() for name, tensor in tensors_of(heads).items()
    }
    if reduced:
        tensors["token_map"] = vocabulary.token_ids_M
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
        "torch_dtype": str(dtype).removeprefix("torch."),
        "medusa_choices": [list(path) for path in tree.paths],
        "medusa_k25": dict(provenance),
    }
    folder.mkdir(parents=True, exist_ok=True)
    # the config last and by rename: a folder with a config is a whole one
    # (not save_file: its files are readable by their owner alone, and a server may be another user)
    (folder / "model.safetensors.part").write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / "config.json").unlink(missing_ok=True)
    (folder / "model.safetensors.part").rename(folder / "model.safetensors")
    (folder / "config.json.part").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "config.json.part").rename(folder / "config.json")

    served = load_served(folder)
    for name, tensor in tensors_of(served.heads).items():
        if not torch.equal(tensor, tensors[rename(name, MODEL_NAMES)]):
            raise OSError(f"{folder}: tensor '{name}' reads back differently from what was written; export again")
    if served.tree != tree or not torch.equal(served.vocabulary.token_ids_M, vocabulary.token_ids_M):
        raise OSError(f"{folder}: the tree or the draft vocabulary reads back differently; export again")
    return served


def load_served(folder: Path) -> ServedHeads:
    """Read an export folder, strictly: every tensor must have its place and its shape, and the tree must fit."""
    missing = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} is no export folder, it lacks {' and '.join(missing)}; run medusa_k25.export first")
    file = folder / "model.safetensors"
    try:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(file)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{folder} is damaged ({error}); run medusa_k25.export again") from None
    try:
        vocab_size, draft_size = config["vocab_size"], config["truncated_vocab_size"]
        heads = ResidualHeads(
            config["hidden_size"],
            config["num_heads"],
            config["num_hidden_layers"],
            bias=config["medusa_fc_bias"],
            own_lm_head=not config["original_lm_head"],
            draft_vocab_size=draft_size,
        )
        heads = heads.to(getattr(torch, config["torch_dtype"]))
        tree = Tree(config["medusa_choices"])
    except KeyError as error:
        raise ValueError(f"{folder / 'config.json'} lacks {error}; run medusa_k25.export again") from None
    token_map = tensors.pop("token_map", None)
    vocabulary = DraftVocabulary(torch.arange(vocab_size) if token_map is None else token_map, vocab_size)
    if len(vocabulary) != draft_size:
        raise ValueError(f"{file} maps {len(vocabulary)} draft tokens, its config says {draft_size}; export again")
    places = {rename(name, MODEL_NAMES): tensor for name, tensor in tensors_of(heads).items()}
    refuse_unless_whole(file, tensors, {name: place.shape for name, place in places.items()})
    for name, place in places.items():
        place.copy_(tensors[name])
    tree.refuse_unless_fits(heads.num_heads, len(vocabulary))
    return ServedHeads(heads, vocabulary, tree, config)
