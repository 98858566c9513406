"""The frozen target: sizes, final norm, lm_head, embeddings and fingerprints, read from its checkpoint folder.

Three tensors of a checkpoint matter for training; for Kimi-K2.5 they are 5 of about 600 GB. They are found through
the safetensors index and memory-mapped; the model itself is only built by `Target.load_model`.

Letters: B batch, T tokens, D hidden size, V vocabulary.
"""

import hashlib
import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TENSORS = {"lm_head": "lm_head.weight", "final_norm": "model.norm.weight", "embeddings": "model.embed_tokens.weight"}
IN_A_CACHE = (*TENSORS, "tokenizer")  # what ids and states on disk depend on, of `Target.fingerprints`
PREFIXES = ("", "language_model.")  # Kimi-K2.5 wraps its language model
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "chat_template.jinja", "chat_template.json")
FINGERPRINT_ROWS = 1024
UNKNOWN_REVISION = "local"

KIMI_VOCAB_SIZE = 163840
KIMI_THINK_ID, KIMI_THINK_END_ID = 163606, 163607


@dataclass(frozen=True)
class Target:
    """A checkpoint folder that has been opened: plain facts, nothing loaded. Cheap to make and to pickle."""

    name: str
    path: Path
    revision: str  # the commit on the hub that the folder was fetched from, else UNKNOWN_REVISION
    model_type: str
    quantisation: str  # "none", "compressed-tensors int4", ...
    dtype: str  # of the stored lm_head: "bfloat16", "float16" or "float32"
    hidden_size: int
    vocab_size: int
    num_layers: int
    norm_eps: float
    tied: bool  # lm_head is the embedding matrix
    end_ids: tuple[int, ...]  # tokens that end an answer, as the checkpoint's generation config says
    sources: Mapping[str, tuple[str, str]]  # role (a key of TENSORS) -> (file, tensor name)
    trust_remote_code: bool = False  # only ever used to load the tokenizer

    @classmethod
    def open(cls, path: str | Path, name: str | None = None, trust_remote_code: bool = False) -> "Target":
        """Read the facts of the checkpoint in folder `path`; `name` defaults to the folder's or the hub's.

        Only the shards that hold the three tensors of TENSORS have to be there.
        Raises one ValueError that lists everything missing or truncated, or names what does not fit.
        """
        path = Path(path).expanduser().absolute()
        if not path.is_dir():
            raise ValueError(f"no checkpoint at {path}: expected a folder with config.json and safetensors files")
        index = _tensor_files(path) if (path / INDEX).is_file() else {}
        names = [prefix + tensor for prefix in PREFIXES for tensor in TENSORS.values()]
        _require_complete(path, [index[name] for name in names if name in index])
        config = _read_json(path / "config.json")
        text = config.get("text_config", config)
        facts = {key: text.get(key) for key in ("hidden_size", "vocab_size", "num_hidden_layers", "rms_norm_eps")}
        if unknown := [key for key, value in facts.items() if value is None]:
            raise ValueError(f"{path}/config.json lacks {', '.join(unknown)}: they have no safe default, so add them")
        # Of the outer and the inner config the outer one counts; transformers' own default for Kimi-K2.5 is wrong.
        tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))

        sources = _find_sources(path, index or _tensor_files(path), tied)
        D, V = facts["hidden_size"], facts["vocab_size"]
        shapes = {"lm_head": [V, D], "final_norm": [D], "embeddings": [V, D]}
        dtypes = {}
        for role, (file, tensor) in sources.items():
            with safe_open(path / file, framework="pt") as shard:
                header = shard.get_slice(tensor)
                shape, dtypes[role] = header.get_shape(), header.get_dtype()
            if shape != shapes[role] or dtypes[role] not in DTYPES:
                raise ValueError(
                    f"{path}/{file}: {tensor} is {dtypes[role]} {shape}, config.json implies {shapes[role]} "
                    f"and this project reads {', '.join(DTYPES)}; the file belongs to another checkpoint"
                )
        return cls(
            name=name or _repository(path) or path.name,
            path=path,
            revision=_revision(path, config),
            model_type=str(config.get("model_type")),
            quantisation=_quantisation(text.get("quantization_config") or config.get("quantization_config")),
            dtype=DTYPES[dtypes["lm_head"]],
            hidden_size=D,
            vocab_size=V,
            num_layers=facts["num_hidden_layers"],
            norm_eps=float(facts["rms_norm_eps"]),
            tied=tied,
            end_ids=_end_ids(path, config, text),
            sources=sources,
            trust_remote_code=trust_remote_code,
        )

    @property
    def lm_head(self) -> Tensor:
        """[V, D] as stored. Memory-mapped: pages are read when they are touched."""
        return self._read("lm_head")

    @property
    def norm_weight(self) -> Tensor:
        """[D] as stored, the weight of the final RMS norm."""
        return self._read("final_norm")

    @property
    def embeddings(self) -> Tensor:
        """[V, D] as stored, the input embeddings; the same tensor as `lm_head` in a tied model."""
        return self._read("embeddings")

    def _read(self, role: str) -> Tensor:
        file, tensor = self.sources[role]
        with safe_open(self.path / file, framework="pt") as shard:
            return shard.get_tensor(tensor)

    def _unmapped_fingerprint(self, role: str) -> str:
        """`tensor_fingerprint`, of rows that are read: a kernel may map far more around those that are touched."""
        file, tensor = self.sources[role]
        with safe_open(self.path / file, framework="pt") as shard, (self.path / file).open("rb", buffering=0) as opened:
            whole = shard.get_tensor(tensor)
            start = 8 + int.from_bytes(opened.read(8), "little")
            start += json.loads(opened.read(start - 8))[tensor]["data_offsets"][0]
            return tensor_fingerprint(
                whole, lambda row: os.pread(opened.fileno(), whole[0].nbytes, start + row * whole[0].nbytes)
            )

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """sha256 of "lm_head", "final_norm", "embeddings" and "tokenizer".

        A tensor's digest covers dtype, shape and the bytes of at most FINGERPRINT_ROWS rows, spread evenly from the
        first to the last: all rows when there are no more than that (the norm is one row), and for Kimi-K2.5's
        2.35 GB lm_head 15 MB. The tokenizer's digest covers names and bytes of its vocabulary and chat template.
        """
        return {
            "lm_head": tensor_fingerprint(self.lm_head),
            "final_norm": tensor_fingerprint(self.norm_weight[None]),
            "embeddings": self._unmapped_fingerprint("embeddings"),
            "tokenizer": _tokenizer_fingerprint(self.path),
        }

    @property
    def identity(self) -> dict[str, Any]:
        """What caches, checkpoints and exports record of the target they were made for; see `target_differences`."""
        return {key: getattr(self, key) for key in ("name", "revision", "quantisation", "fingerprints")}

    @cached_property
    def placeholder_id(self) -> int | None:
        """The token that stands for a piece of an image in the text; None for a model of text alone."""
        config = _read_json(self.path / "config.json")
        return config.get("media_placeholder_token_id", config.get("image_token_id"))

    def load_tokenizer(self) -> Any:
        """The checkpoint's own transformers tokenizer. Raises ValueError when it does not load or is wrong."""
        tokenizer = load_tokenizer(self.path, self.trust_remote_code)
        if self.model_type == "kimi_k25" and self.vocab_size == KIMI_VOCAB_SIZE:
            # AutoTokenizer may pick a backend that splits this token; every prompt would then be wrong.
            ids = tokenizer.encode("<think>", add_special_tokens=False)
            if ids != [KIMI_THINK_ID]:
                raise ValueError(
                    f'the tokenizer of {self.path} encodes "<think>" as {ids}, expected [{KIMI_THINK_ID}]; the '
                    "checkpoint brings its own: read that code, and if you trust it set target.trust_remote_code=true"
                )
        return tokenizer

    def load_model(self, dtype: torch.dtype, device: str | torch.device = "cpu") -> "TargetModel":
        """The target in this process, upcast or rounded to `dtype`. Raises ValueError unless all shards are there."""
        from transformers import AutoConfig, AutoModelForCausalLM

        _require_complete(self.path, _tensor_files(self.path).values())
        with quiet_transformers():
            # Kimi-K2.5's wrapper class would build a vision tower that nobody feeds here: its language model is a
            # plain DeepseekV3ForCausalLM whose weights carry a prefix.
            config = AutoConfig.from_pretrained(self.path, trust_remote_code=False).get_text_config()
            config.tie_word_embeddings = self.tied
            config.model_type = type(config).model_type  # "kimi_k2" has no rules for its experts in transformers 5.19
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.path,
                config=config,
                dtype=dtype,
                key_mapping={r"^language_model\.": ""},
                attn_implementation="sdpa",  # honours 4-D boolean masks; eager attention would add the booleans
                output_loading_info=True,
            )
        model, info = loaded
        if wrong := sorted(info["missing_keys"]) + sorted(info["mismatched_keys"]):
            raise ValueError(f"{self.path} does not hold {len(wrong)} weights of its own model, such as {wrong[:3]}")
        if not torch.equal(model.lm_head.weight, self.lm_head.to(dtype)):
            # transformers then ignores tie_word_embeddings, serving engines ignore the tensor
            raise ValueError(f"{self.path} has an lm_head of its own, but tie_word_embeddings is true in config.json")
        target_model = TargetModel(model.to(device))
        probe_BT = torch.arange(4, device=device)[None]
        expected = model(input_ids=probe_BT).logits.float()
        if not torch.allclose(target_model.logits(target_model.hidden(probe_BT)), expected, rtol=1e-2, atol=1e-3):
            raise ValueError(f"{self.name}: a {config.model_type} model scales or caps its logits; heads cannot use it")
        return target_model


class TargetModel:
    """The target in process, frozen and in eval mode."""

    def __init__(self, model: Any):
        self.model = model.eval().requires_grad_(False)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = model.config.vocab_size
        # transformers is renaming the argument; the old name warns, the new one is unknown to older versions
        arguments = inspect.signature(model.base_model.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"

    @torch.no_grad()
    def hidden(
        self,
        input_ids_BT: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any | None = None,
        use_cache: bool = False,
    ) -> Tensor:
        """Hidden states after the final norm, [B, T, D] in the model's dtype.

        attention_mask: [B, past + T] with 0 at padding, or [B, 1, T, past + T], boolean (True: may look) or additive.
        past_key_values: a transformers Cache, which grows by T; position_ids [B, T] default to counting on from it.
        """
        states = self.model.base_model(
            input_ids=input_ids_BT,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache or past_key_values is not None,
            **{self._cache_argument: past_key_values},
        )
        return states.last_hidden_state

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> float32 [..., V], multiplied in the model's dtype."""
        return F.linear(hidden.to(self.dtype), self.model.lm_head.weight).float()


def cpu_has_bf16_products() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; elsewhere float32 is the faster choice."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def target_differences(
    recorded: Mapping[str, Any], identity: Mapping[str, Any], parts: Iterable[str] = tuple(TENSORS)
) -> list[str]:
    """In what two targets (`Target.identity`) differ: revision, quantisation, and by fingerprint each of `parts`.

    What one of them does not know is not compared: the revision of a folder of nobody's, or a fingerprint that an older
    version did not take. The name is what a user calls it and makes no difference.
    """
    found = []
    for key in ("revision", "quantisation"):
        theirs, ours = recorded.get(key), identity.get(key)
        if theirs and ours and UNKNOWN_REVISION not in (theirs, ours) and theirs != ours:
            found.append(f"{key} ({theirs} there, {ours} here)")
    theirs, ours = recorded.get("fingerprints") or {}, identity.get("fingerprints") or {}
    return found + [part for part in parts if part in theirs and part in ours and theirs[part] != ours[part]]


def refuse_other_target(
    what: str, recorded: Mapping[str, Any], target: Target, allow_mismatch: bool, parts: Iterable[str] = tuple(TENSORS)
) -> list[str]:
    """How `target` differs from the one that `what` was made for: ValueError, or a warning where that is allowed."""
    found = target_differences(recorded, target.identity, parts)
    if found:
        said = (
            f"{what} was made for target {recorded['name']} ({recorded['revision']}), which differs from target "
            f"{target.name} ({target.revision}) at {target.path} in: {', '.join(found)}"
        )
        if not allow_mismatch:
            raise ValueError(
                f"{said}; choose the target it was made for, make it anew for this one, or set "
                "allow_target_mismatch=true to go on all the same (for a server's heads: when they are exported)"
            )
        logger.warning("WARNING: %s; going on, for allow_target_mismatch=true", said)
    return found


def tensor_fingerprint(tensor: Tensor, read: Callable[[int], bytes] | None = None) -> str:
    """sha256 over dtype, shape and evenly spread rows of a matrix; see `Target.fingerprints`. read: gives a row's bytes
    where the matrix itself is not to be touched."""
    rows, count = len(tensor), min(len(tensor), FINGERPRINT_ROWS)
    sampled = torch.arange(count) * (rows - 1) // max(count - 1, 1)
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    if read is None:
        digest.update(tensor[sampled].contiguous().view(torch.uint8).numpy().data)
    else:
        digest.update(b"".join(map(read, sampled.tolist())))
    return digest.hexdigest()


def _tokenizer_fingerprint(path: Path) -> str:
    parts = {name: (path / name).read_bytes() for name in TOKENIZER_FILES if (path / name).is_file()}
    config = path / "tokenizer_config.json"  # where older checkpoints keep the chat template
    if config.is_file() and (template := _read_json(config).get("chat_template")):
        parts["chat_template"] = json.dumps(template).encode()
    digest = hashlib.sha256()
    for name, content in sorted(parts.items()):
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): truncated? download it again") from error


def _tensor_files(path: Path) -> dict[str, str]:
    """Tensor name -> file name, for the whole checkpoint."""
    if (path / INDEX).is_file():
        return _read_json(path / INDEX)["weight_map"]
    with safe_open(path / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)


def _find_sources(path: Path, files: Mapping[str, str], tied: bool) -> dict[str, tuple[str, str]]:
    prefix = next((p for p in PREFIXES if p + TENSORS["final_norm"] in files), None)
    names = {role: (prefix or "") + tensor for role, tensor in TENSORS.items()}
    if tied:
        names["lm_head"] = names["embeddings"]
    if lacking := [tensor for tensor in names.values() if tensor not in files]:
        raise ValueError(
            f"{path} holds no {', '.join(lacking)} (with tie_word_embeddings {str(tied).lower()} in config.json; "
            f"prefixes tried: {', '.join(map(repr, PREFIXES))}); it has {len(files)} tensors, such as "
            f"{sorted(files)[:3]}"
        )
    return {role: (files[tensor], tensor) for role, tensor in names.items()}


def _require_complete(path: Path, shards: Iterable[str]) -> None:
    """Raise one ValueError that lists every problem of the checkpoint's config, index and these `shards`."""
    problems = {} if (path / "config.json").is_file() else {"config.json": "missing"}
    if not (path / INDEX).is_file():
        if (path / SINGLE).is_file():
            shards = [SINGLE]
        else:
            problems[INDEX] = f"missing, and there is no {SINGLE} either"
    for file in sorted(set(shards)):
        if not (path / file).is_file():
            problems[file] = "missing"
            continue
        try:
            with safe_open(path / file, framework="pt"):  # compares the file's length with what its header announces
                pass
        except (SafetensorError, OSError) as error:
            problems[file] = f"truncated or damaged ({error})"
    if not problems:
        return

    repository = _repository(path)
    downloads = path.parent.parent / "blobs" if repository else path
    unfinished = {file.name: "unfinished download" for file in sorted(downloads.rglob("*.incomplete"))}
    fix = "copy or download these files again"
    if repository:
        files = "" if INDEX in problems else " ".join(["", *problems])
        damaged = any(problem.startswith("truncated") for problem in problems.values())
        fix = f"finish the download: hf download {repository}{files}{' --force-download' if damaged else ''}"
    listed = "\n".join(f"  {file}: {problem}" for file, problem in (problems | unfinished).items())
    raise ValueError(f"checkpoint {path} is incomplete:\n{listed}\n{fix}")


def _repository(path: Path) -> str | None:
    """ORGANISATION/MODEL when `path` is a snapshot in the Hugging Face cache."""
    folder = path.parent.parent.name
    if path.parent.name != "snapshots" or not folder.startswith("models--"):
        return None
    return folder.removeprefix("models--").replace("--", "/")


def _revision(path: Path, config: Mapping[str, Any]) -> str:
    """The name of a snapshot in the Hugging Face cache, what a download into a folder or into config.json left."""
    if _repository(path):
        return path.name
    left = path / ".cache" / "huggingface" / "download" / "config.json.metadata"  # hf download --local-dir
    lines = left.read_text().splitlines() if left.is_file() else []
    for commit in (*lines[:1], config.get("_commit_hash")):
        if isinstance(commit, str) and re.fullmatch("[0-9a-f]{40}", commit):
            return commit
    return UNKNOWN_REVISION


def _quantisation(config: Mapping[str, Any] | None) -> str:
    if not config:
        return "none"
    method = str(config.get("quant_method", "unknown"))
    for group in config.get("config_groups", {}).values():
        weights = group["weights"]
        return f"{method} {weights['type']}{weights['num_bits']}"
    return f"{method} int{config['bits']}" if "bits" in config else method


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> Any:
    """The transformers tokenizer of a folder, which may hold nothing else. Raises ValueError when it does not load."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"cannot load the tokenizer of {path}: {error}") from error


def end_ids_of(path: Path, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer, by the configs in the tokenizer's folder, else by the tokenizer."""
    config = _read_json(path / "config.json") if (path / "config.json").is_file() else {}
    return _end_ids(path, config, config.get("text_config", {})) or (tokenizer.eos_token_id,)


def _end_ids(path: Path, config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    file = path / "generation_config.json"
    generation = _read_json(file) if file.is_file() else {}
    ids = next((c["eos_token_id"] for c in (generation, config, text) if c.get("eos_token_id") is not None), ())
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars or load reports from transformers inside; what matters in them is checked here."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
