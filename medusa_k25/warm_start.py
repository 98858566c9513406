"""Start new heads from trained ones: of ours, or residual ones of FasterDecoding (or TGI) or in vLLM's layout.

Rows of a draft vocabulary are matched by the token of the target that they stand for, never by their place: heads that
were trained for another draft vocabulary start almost from nothing, and look as if they had not.

Letters: V target vocabulary, M draft vocabulary (of the new heads), R rows (of the source's), D hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError  # what torch.load raises for a file that it does not take for weights
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from medusa_k25.checkpoint import find_checkpoint, load_heads
from medusa_k25.heads import DraftVocabulary, Heads, ResidualHeads, kind_of
from medusa_k25.serving.formats import (
    MODEL_NAMES,
    arguments_of,
    load_served,
    medusa_names,
    rename,
    residual_outline,
    targets_of,
    tensors_of,
)
from medusa_k25.serving.untrusted import read_json
from medusa_k25.target import target_differences

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


@dataclass(frozen=True)
class Source:
    """Heads of ours, or residual heads of any producer. `tensors` have the names of `formats.tensors_of`."""

    origin: str
    kind: str  # a name in HEADS
    tensors: Mapping[str, Tensor]
    num_heads: int
    hidden_size: int
    token_ids_R: Tensor | None  # the target token of each row; None: all of them, in their order
    target: Mapping[str, Any] = field(default_factory=dict)  # `Target.identity` of whose states it learned; {}: unknown

    @property
    def num_blocks(self) -> int:
        """Of residual heads."""
        return 1 + max(int(name.split(".")[2]) for name in self.tensors if name.startswith("heads."))

    @property
    def has_bias(self) -> bool:
        return "heads.0.0.linear.bias" in self.tensors

    @property
    def has_own_lm_heads(self) -> bool:
        return "lm_heads.0.weight" in self.tensors


@torch.no_grad()
def warm_start(
    heads: Heads,
    vocabulary: DraftVocabulary,
    source: Path,
    min_match: float,
    identity: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Copy what `source` holds into freshly built heads, whose lm_heads were initialised; returns what was done.

    source: a run folder (its best checkpoint), a checkpoint or an export of ours, or a folder of other producers.
    Residual blocks are copied head by head and layer by layer; what the source lacks keeps its identity start. Heads of
    other types are copied whole. Rows of own lm_heads are copied where the source has own rows of that token; the
    others stay the target's. identity: of the target that they are to learn from now (`Target.identity`): another one
    than the source's is no fault, and is said.
    Raises ValueError where less than `min_match` (0 to 1) of the draft vocabulary is known to the source, for another
    type or hidden size, for heads of other sizes where they are copied whole, for biases that would be lost, and for
    files that are damaged or not understood.
    """
    if not 0 <= min_match <= 1:
        raise ValueError(f"warm_start_min_match={min_match}: expected a share between 0 and 1")
    given, kind = read_source(source), kind_of(heads)
    if given.kind != kind:
        raise ValueError(
            f"warm start from {source}: it holds {given.kind} heads, these are {kind}; choose {kind} heads, or train "
            f"with heads={given.kind}"
        )
    if given.hidden_size != heads.hidden_size:
        raise ValueError(
            f"warm start from {source}: its hidden size is {given.hidden_size}, the target's {heads.hidden_size}; "
            "choose heads of this target"
        )
    row_M = rows_of(given.token_ids_R, vocabulary)
    known_M = row_M >= 0
    known, total = int(known_M.sum()), len(vocabulary)
    found = f"{known:,} of {total:,} draft tokens ({known / total:.1%})"
    if known / total < min_match:
        raise ValueError(
            f"warm start from {source}: it knows only {found}, and warm_start_min_match={min_match} asks for more. "
            "Its heads were trained for another draft vocabulary. Choose another source or draft_vocab_size, or lower "
            "warm_start_min_match to start from it all the same"
        )

    places = tensors_of(heads)
    lines = [f"warm start  {source}: {given.origin}"]
    if differs := target_differences(given.target, identity):
        lines.append(f"of another target, which differs from this one in: {', '.join(differs)}; training adapts them")
    if isinstance(heads, ResidualHeads):
        lines.append(copy_blocks(given, heads, places))
    else:
        lines.append(copy_whole(given, heads, places))
    lines.append(f"it knows {found}, matched by target token id")
    if heads.own_lm_head and given.has_own_lm_heads:
        K = min(heads.num_heads, given.num_heads)
        for k in range(K):
            name = f"lm_heads.{k}.weight"
            places[name][known_M] = given.tensors[name][row_M[known_M]].to(places[name].dtype)
        rest = f"; heads {K + 1} to {heads.num_heads} keep the target's" if K < heads.num_heads else ""
        lines.append(f"own lm_heads: {known:,} rows each copied, {total - known:,} stay the target's{rest}")
    elif heads.own_lm_head:
        lines.append("own lm_heads: all rows stay the target's, for the source has no own lm_heads")
    elif given.has_own_lm_heads:
        lines.append(
            "WARNING: the source's own lm_heads are DROPPED, for these heads share the target's: its weights were "
            "trained for other logits; heads.own_lm_head=true keeps them"
        )
    return "\n            ".join(lines)


def rows_of(token_ids_R: Tensor | None, vocabulary: DraftVocabulary) -> Tensor:
    """The source's row of each draft token, int64 [M]; -1 where it has none."""
    if token_ids_R is None:
        return vocabulary.token_ids_M
    row_V = torch.full((vocabulary.vocab_size,), -1)
    inside_R = token_ids_R < vocabulary.vocab_size
    row_V[token_ids_R[inside_R]] = torch.arange(len(token_ids_R))[inside_R]
    return row_V[vocabulary.token_ids_M]


def copy_whole(given: Source, heads: Heads, places: Mapping[str, Tensor]) -> str:
    """All tensors but own lm_heads."""
    parts = [
        {name: tensor for name, tensor in each.items() if not name.startswith("lm_heads.")}
        for each in (places, given.tensors)
    ]
    wanted, found = ({name: list(tensor.shape) for name, tensor in part.items()} for part in parts)
    if wanted != found:
        name = next(name for name in [*wanted, *found] if wanted.get(name) != found.get(name))
        raise ValueError(
            f"warm start: {given.kind} heads are copied whole, and the source's have other sizes: '{name}' is "
            f"{found.get(name, 'not there')}, expected {wanted.get(name, 'none')}; choose a source with the arguments "
            f"of these heads ({', '.join(f'{key}={value}' for key, value in arguments_of(heads).items())})"
        )
    for name, place in parts[0].items():
        place.copy_(parts[1][name])
    return f"{len(wanted)} tensors of {given.num_heads} {given.kind} heads copied"


def copy_blocks(given: Source, heads: ResidualHeads, places: Mapping[str, Tensor]) -> str:
    K, L = min(heads.num_heads, given.num_heads), min(heads.num_blocks, given.num_blocks)
    notes = [f"{K} heads x {L} blocks copied"]
    for what, new, old in (("heads", heads.num_heads, given.num_heads), ("blocks", heads.num_blocks, given.num_blocks)):
        if new > old:
            notes.append(f"{what} {old + 1} to {new} are not in the source and start as the identity")
        elif new < old:
            notes.append(f"the source's {what} {new + 1} to {old} are left out")
    for layer in (f"heads.{k}.{i}.linear" for k in range(K) for i in range(L)):
        places[f"{layer}.weight"].copy_(given.tensors[f"{layer}.weight"])
        if heads.bias and given.has_bias:
            places[f"{layer}.bias"].copy_(given.tensors[f"{layer}.bias"])
        elif given.has_bias and given.tensors[f"{layer}.bias"].any():
            raise ValueError(
                f"warm start: the source's blocks have biases, which heads.bias=false would drop ({layer}.bias is not "
                "zero); set heads.bias=true"
            )
    if heads.bias and not given.has_bias:
        notes.append("the source has no biases, they start at zero")
    elif given.has_bias and not heads.bias:
        notes.append("the source's biases are zero and are left out")
    return "; ".join(notes)


def read_source(folder: Path) -> Source:
    """What kind of checkpoint a folder is, its files tell."""
    if (folder / "checkpoints").is_dir():
        folder = find_checkpoint(folder / "checkpoints", "best")
    if (folder / "heads.json").is_file():
        return read_ours(folder)
    for name in MEDUSA_FILES:
        if (folder / name).is_file():
            return read_medusa(folder / name)
    if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
        return read_export(folder)
    raise ValueError(
        f"warm_start={folder} holds no heads: expected a run folder, heads.json with heads.safetensors, "
        f"config.json with model.safetensors, or {' or '.join(MEDUSA_FILES)}"
    )


def read_ours(folder: Path) -> Source:
    checkpoint = load_heads(folder)
    heads, record = checkpoint.heads, checkpoint.record
    target = record["target"]
    origin = f"step {record['step']} of heads for {target['name']} ({target['revision']})"
    return source_of(origin, heads, checkpoint.vocabulary, target)


def source_of(origin: str, heads: Heads, vocabulary: DraftVocabulary, target: Mapping[str, Any]) -> Source:
    tensors, token_ids_M = tensors_of(heads), vocabulary.token_ids_M
    return Source(origin, kind_of(heads), tensors, heads.num_heads, heads.hidden_size, token_ids_M, target)


def read_export(folder: Path) -> Source:
    """vLLM's layout, or heads of another type as only we export them."""
    config = read_json(folder / "config.json")
    target = next(iter(targets_of(config)), {})
    if "medusa_heads" in config:
        served = load_served(folder)
        return source_of(origin_of(config, "exported heads"), served.heads, served.vocabulary, target)
    return replace(read_vllm(folder, config), target=target)


def origin_of(config: Mapping[str, Any], unknown: str) -> str:
    ours = config.get("medusa_k25")
    target = ours.get("target") if isinstance(ours, dict) else None
    if isinstance(target, dict) and {"name", "revision"} <= target.keys():
        return f"exported heads for {target['name']} ({target['revision']})"
    return unknown


def read_vllm(folder: Path, config: Mapping[str, Any]) -> Source:
    """vLLM's layout. With `original_lm_head` its lm_head is a copy of the target's, of which nothing is needed."""
    if config.get("model_type") != "medusa":
        raise ValueError(f"{folder / 'config.json'}: model_type is {config.get('model_type')!r}, expected 'medusa'")
    file = folder / "model.safetensors"
    tensors = read_tensors(file)
    token_map = tensors.pop("token_map", None)
    if config.get("original_lm_head"):
        for name in ("lm_head.weight", "lm_heads.0.weight"):
            tensors.pop(name, None)
    if token_map is not None:
        token_map = checked_map(file, token_map)
    elif config.get("truncated_vocab_size"):
        token_map = torch.arange(config["truncated_vocab_size"])
    origin = origin_of(config, "heads in vLLM's layout")
    promised = {"heads": config.get("num_heads"), "blocks": config.get("num_hidden_layers")}
    return residual_source(file, origin, tensors, MODEL_NAMES, token_map, promised)


def read_medusa(file: Path) -> Source:
    """FasterDecoding's and TGI's files, where a draft token is its place in the target's vocabulary."""
    tensors = read_tensors(file)
    layers = {name.split(".")[1] for name in tensors if name.endswith(".linear.weight")}
    config = read_json(file.parent / "config.json") if (file.parent / "config.json").is_file() else {}
    origin = "heads in FasterDecoding's layout"
    if base := config.get("base_model_name_or_path"):
        origin += f" for {base}"
    promised = {"heads": config.get("medusa_num_heads"), "blocks": config.get("medusa_num_layers")}
    return residual_source(file, origin, tensors, medusa_names(len(layers)), None, promised)


def read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file} is damaged or holds more than weights ({reason}); fetch it again") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise ValueError(f"{file} is no table of tensors by name; fetch it again")
    return tensors


def checked_map(file: Path, token_map: Tensor) -> Tensor:
    """The map as int64 [R]; in any order, but every token once."""
    ids_R = token_map.long()
    if ids_R.ndim != 1 or len(ids_R) == 0 or ids_R.min() < 0 or len(ids_R.unique()) != len(ids_R):
        raise ValueError(f"{file}: token_map must name every draft token's target token once; it is damaged")
    return ids_R


def residual_source(
    file: Path,
    origin: str,
    tensors: Mapping[str, Tensor],
    names: Mapping[str, str],
    token_ids_R: Tensor | None,
    promised: Mapping[str, int | None],
) -> Source:
    """Sizes are taken from the tensors, which must then be complete. `promised`: what config.json says of them.

    Published configs count fewer heads than their files hold; more are a fault of the files.
    """
    heads = residual_outline(file, {name: tensor.shape for name, tensor in tensors.items()}, names)
    if heads.draft_vocab_size is not None:
        if token_ids_R is None:
            token_ids_R = torch.arange(heads.draft_vocab_size)
        elif len(token_ids_R) != heads.draft_vocab_size:
            raise ValueError(
                f"{file}: its own lm_heads have {heads.draft_vocab_size:,} rows, token_map names {len(token_ids_R):,} "
                "tokens"
            )
    for what, held in (("heads", heads.num_heads), ("blocks", heads.num_blocks)):
        count = promised[what]
        if count is not None and count > held:
            raise ValueError(f"{file} holds {held} {what}, its config.json promises {count}; fetch it again")
        if count is not None and count < held:
            origin += f" (config.json counts {count} {what}, the file holds {held})"
    theirs = {theirs: ours for ours, theirs in names.items()}
    ours = {rename(name, theirs): tensor for name, tensor in tensors.items()}
    return Source(origin, kind_of(heads), ours, heads.num_heads, heads.hidden_size, token_ids_R)
