"""Texts of a target with their states, and the files in which other engines and tools would have left them."""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa_k25.cache.writer import quantise
from medusa_k25.conversations import Generator, read_conversations
from medusa_k25.prompts import Prompt
from medusa_k25.target import Target

QUESTIONS = ["Hi", "What is a fox?", "Name three rivers.", "Why?", "Tell me about the sea, in one short sentence."]
QUESTIONS += [f"What is {n} and {n}?" for n in range(15)]


@dataclass(frozen=True)
class Known:
    """A text, and what the target's layers make of it. Letters: T tokens, L layers, D hidden."""

    row: dict[str, Any]  # of conversations.jsonl
    ids_T: Tensor
    mask_T: Tensor  # True on the answer
    before_TLD: Tensor  # what comes out of each layer; of the last one, before the final norm
    after_TD: Tensor  # after it


def known_texts(target: Target, conversations: Path, temperature: float = 0.0) -> list[Known]:
    """The target's answers, also in `conversations`, with their states in float32."""
    prompts = [Prompt(f"p{i}", None, [{"role": "user", "content": text}]) for i, text in enumerate(QUESTIONS)]
    Generator(max_new_tokens=24, dtype="float32", temperature=temperature).run(target, prompts, conversations)
    model = target.load_model(torch.float32)
    outputs: list[Tensor] = []
    for layer in model.model.base_model.layers:
        layer.register_forward_hook(
            lambda module, inputs, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
    texts = []
    for row in read_conversations(conversations):
        ids_T = torch.tensor(row["prompt_ids"] + row["answer_ids"])
        outputs.clear()
        after_1TD = model.hidden(ids_T[None])
        mask_T = torch.arange(len(ids_T)) >= len(row["prompt_ids"])
        texts.append(Known(row, ids_T, mask_T, torch.cat(outputs).transpose(0, 1), after_1TD[0]))
    return texts


Change = Callable[[Known], Known]


def write_vllm(folder: Path, texts: Sequence[Known], dtype: torch.dtype = torch.float32) -> None:
    """vLLM's extract_hidden_states: a file a request, with a lock file that stays."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        tensors = {"hidden_states": text.before_TLD.to(dtype).contiguous(), "token_ids": text.ids_T}
        save_file(tensors, folder / f"cmpl-{i}-a0b.safetensors")
        (folder / f"cmpl-{i}-a0b.safetensors.lock").touch()


def write_speculators(folder: Path, texts: Sequence[Known], fp8: bool = False, beside: bool = False) -> None:
    """speculators 0.9: an Arrow dataset, and below it (or beside it) the states."""
    from datasets import Dataset

    rows = [
        {"input_ids": text.ids_T.tolist(), "loss_mask": text.mask_T.long().tolist(), "seq_len": len(text.ids_T)}
        for text in texts
    ]
    Dataset.from_list(rows).save_to_disk(str(folder))
    states = folder if beside else folder / "hidden_states"
    states.mkdir(exist_ok=True)
    for i, text in enumerate(texts):
        tensors = {"hidden_states": text.before_TLD.bfloat16().contiguous(), "token_ids": text.ids_T}
        if fp8:
            fp8_TD, scales_T = quantise(text.before_TLD.flatten(start_dim=1))
            tensors["hidden_states"] = fp8_TD.view(text.before_TLD.shape)
            tensors["hidden_states_scales"] = scales_T.view(-1, 1, 1)
        save_file(tensors, states / f"hs_{i}.safetensors")


def write_speculators_03(folder: Path, texts: Sequence[Known]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        layers = [layer_TD.contiguous() for layer_TD in text.before_TLD.unbind(dim=1)]
        data = {"input_ids": text.ids_T, "hidden_states": layers, "loss_mask": text.mask_T.long()}
        torch.save(data, folder / f"data_{i}.pt")


def write_specforge(
    folder: Path, texts: Sequence[Known], strategy: str = "eagle3", gz: bool = False, group: int = 5, padding: int = 0
) -> None:
    """SpecForge: `group` files a folder; a row that was padded has states there, too."""
    for i, text in enumerate(texts):
        start = i // group * group
        states_1TD = torch.cat([text.after_TD, torch.randn(padding, text.after_TD.shape[1])])[None]
        data = {
            "input_ids": torch.cat([text.ids_T, torch.zeros(padding, dtype=torch.long)]),
            "loss_mask": torch.cat([text.mask_T.long(), torch.zeros(padding, dtype=torch.long)]),
        }
        if strategy == "eagle3":
            data |= {"aux_hidden_state": states_1TD.repeat(1, 1, 3), "hidden_state": states_1TD}
        else:
            data |= {"hidden_states": states_1TD.repeat(1, 1, 5)}
        if strategy == "dspark":
            data |= {"target_last_hidden_states": states_1TD}
        file = folder / f"rows_{start}-{start + group}" / f"data_{i}.ckpt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(data, file)
        if gz:
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), compresslevel=1))
            file.unlink()


def sglang_line(text: Known, prompt_ids: Sequence[int] | None = None) -> str:
    """What a client keeps of SGLang's /generate: its request's ids and the answer."""
    P = len(text.row["prompt_ids"])
    states = text.after_TD.tolist()
    facts = {"finish_reason": {"type": text.row["finish_reason"]}, "hidden_states": [states[:P], *states[P:-1]]}
    row = {"input_ids": list(prompt_ids or text.row["prompt_ids"]), "output_ids": text.row["answer_ids"]}
    return json.dumps(row | {"meta_info": facts}) + "\n"


def write_sglang_json(file: Path, texts: Sequence[Known]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(map(sglang_line, texts)).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
