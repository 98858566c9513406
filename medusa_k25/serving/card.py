"""The README.md of an export folder, as the Hugging Face hub shows it. It holds no figure that was not measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from medusa_k25.acceptance import BOTH, BOTH_ANSWERS, CHAIN, NGRAM_LOOKUP, TREE
from medusa_k25.heads import kind_of
from medusa_k25.serving.formats import MEDUSA_FILE, ServedHeads, arguments_of

# Where the name that a target has in a run is not the one that it has on the hub.
HUB_NAMES = {"kimi_k25": "moonshotai/Kimi-K2.5", "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}

# What heads read besides the hidden state, by `Heads.reads`.
READS = {
    "state": "",
    "root": " and the token that the target has just produced",
    "path": ", the token that the target has just produced and the drafts between it and the guess",
}


@dataclass(frozen=True)
class Measured:
    """One line of the acceptance table. `interval`: 95% over answers; None where it was not computed."""

    predictor: str
    num_nodes: int
    length: float
    interval: tuple[float, float] | None


def measured_rows(
    record: Mapping[str, Any],
    evaluation: Mapping[str, Any] | None,
    paths: Sequence[Sequence[int]],
    num_heads: int,
    beside: str | None = None,
) -> list[Measured]:
    """What is known of a checkpoint's heads in the tree `paths`, in their chain, and of n-gram lookup alone.

    evaluation: the "evaluate" section of report.json where it is about this checkpoint, else None; then the figures of
    the checkpoint's own record count. An evaluated or recorded tree other than `paths` is left out. beside: "lookup" or
    "answers" where the folder drafts that, too: what the heads accept with it.
    """
    tree = [list(path) for path in paths]
    sizes = {TREE: len(tree) + 1, CHAIN: num_heads + 1, NGRAM_LOOKUP: len(tree) + 1}
    if evaluation is not None:
        rows = [row for row in evaluation["rows"] if row["predictor"] != TREE or row["tree"] == tree]
        if beside is not None and any(row["predictor"] == TREE for row in rows):
            sizes[{"lookup": BOTH, "answers": BOTH_ANSWERS}[beside]] = len(tree) + 1
        return [
            Measured(row["predictor"], row["num_nodes"], row["every"]["length"], tuple(row["interval"]))
            for row in rows
            if row["num_nodes"] == sizes.get(row["predictor"])
        ]
    metrics, rows = record["metrics"], []
    for shape in ("tree", "chain"):
        length = metrics.get(f"heldout/acceptance_{shape}")
        if length is not None and (shape == "chain" or record["tree"] == tree):
            rows.append(Measured(f"heads, {shape}", sizes[f"heads, {shape}"], length, None))
    return rows


def commands(format: str, base_model: str, served: ServedHeads, nested: bool) -> str:
    """How to serve the folder. `nested`: the target's config has its vocab_size inside a text_config."""
    if format == "sglang":
        return (
            "pip install --no-deps medusa-k25   # into SGLang's environment\n"
            f"python -m sglang.launch_server --model-path {base_model} \\\n"
            "    --speculative-algorithm MEDUSA --speculative-draft-model-path DIR"
        )
    if format == "medusa":
        return (
            "text-generation-launcher --model-id DIR\n"
            "# FasterDecoding's own code reads a pickle, which is not shipped; in DIR:\n"
            'python -c "import torch; from safetensors.torch import load_file; '
            f"torch.save(load_file('{MEDUSA_FILE}'), 'medusa_lm_head.pt')\""
        )
    speculative = {"method": "medusa", "model": "DIR", "num_speculative_tokens": served.heads.num_heads}
    lines = [f"vllm serve {base_model}", f"--speculative-config '{json.dumps(speculative)}'"]
    if len(served.vocabulary) < served.vocabulary.vocab_size:
        lines.append("--model-loader-extra-config '{\"enable_weights_track\": false}'")
    if nested:
        lines.append(f"--hf-overrides '{json.dumps({'vocab_size': served.vocabulary.vocab_size})}'")
    return " \\\n    ".join(lines)


def licence_terms(name: str, hub_name: str | None, folder: Path, heads_license: str | None, prompts: str) -> list[str]:
    """Lines of the card on the terms of target, heads, prompts and answers: as their owners give them, or whom to ask.

    folder: the target's checkpoint. prompts: a sentence on where they come from.
    """
    said = []
    if (folder / "README.md").is_file():
        data = ModelCard((folder / "README.md").read_text(), ignore_metadata_errors=True).data.to_dict()
        if given := [str(data[key]) for key in ("license", "license_name", "license_link") if data.get(key)]:
            said.append(f"its README.md gives {', '.join(given)}")
    for file in sorted(folder.glob("LICEN[SC]E*")):
        lines = [line.strip() for line in file.read_text().splitlines() if line.strip()]
        said += [f'its file {file.name} begins "{lines[0]}"'] if lines else []
    if said:
        target = f"{'; '.join(said)}. Read what it asks of those who serve the target or pass on what was made with it"
    else:
        place = f"https://huggingface.co/{hub_name}" if hub_name else "its owner's page"
        target = f"not stated in its folder: must be looked up, at {place}"
    return [
        "| whose | terms |",
        "|---|---|",
        f"| target {name} | {target} |",
        f"| these heads | {heads_license or 'to be chosen by whoever publishes them'} |",
        f"| prompts | {prompts} |",
        f"| answers | written by {name}: look up what its terms say of outputs, and of models that learn from them |",
    ]


def model_card(
    format: str,
    served: ServedHeads,
    base_model: str | None,
    target: Mapping[str, Any],
    data: str,
    rows: Sequence[Measured],
    notes: Sequence[str],
    nested: bool,
    terms: Sequence[str],
    heads_license: str | None,
) -> str:
    """README.md. base_model: the target's name on the hub, None where it has none. data: a sentence on the training.
    terms: `licence_terms`. heads_license: an identifier of the hub, None where nobody has chosen one.
    """
    heads, vocabulary = served.heads, served.vocabulary
    M, V = len(vocabulary), vocabulary.vocab_size
    front = {
        "base_model": base_model,
        "library_name": "medusa-k25",
        "license": heads_license,
        "tags": ["medusa", "speculative-decoding", {"sglang": "sglang", "vllm": "vllm", "medusa": "tgi"}[format]],
    }
    name = base_model or target["name"]
    paths = [list(path) for path in served.tree.paths]
    said = ("num_heads", "own_lm_head")
    described = "".join(f", {key} {json.dumps(value)}" for key, value in arguments_of(heads).items() if key not in said)
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in front.items() if value is not None),  # JSON is YAML
        "---",
        f"# Medusa heads for {name}",
        "",
        f"{heads.num_heads} Medusa heads: each guesses one token further ahead from the target's final hidden state"
        f"{READS[heads.reads]}, the target verifies all guesses in one pass, and its output stays its own.",
        "",
        "| | |",
        "|---|---|",
        f"| target | {name}, revision {target['revision']}, quantisation {target['quantisation']} |",
        f"| its lm_head | sha256 of sampled rows {target['fingerprints']['lm_head']} |",
        f"| heads | {heads.num_heads} of type {kind_of(heads)}{described}, hidden size {heads.hidden_size:,}, "
        f"{'own lm_heads' if heads.own_lm_head else 'the lm_head of the target'}, "
        f"{str(next(heads.parameters()).dtype).removeprefix('torch.')} |",
        f"| draft vocabulary | {f'{M:,} of {V:,} tokens' if M < V else f'all {V:,} tokens'} |",
        f"| tree | {served.tree.num_nodes} nodes verified a pass, the root included: `{json.dumps(paths)}` |",
        f"| data | {data} |",
        "",
        "## Acceptance",
        "",
    ]
    if rows:
        lines += [
            "Tokens emitted a verify pass, on held-out answers of the target itself.",
            "",
            "| predictor | nodes verified a pass | acceptance length | 95% interval |",
            "|---|---|---|---|",
        ]
        for row in rows:
            interval = "not computed" if row.interval is None else f"{row.interval[0]:.3f} to {row.interval[1]:.3f}"
            lines.append(f"| {row.predictor} | {row.num_nodes} | {row.length:.3f} | {interval} |")
    else:
        lines.append("Not measured for these heads in this tree.")
    lines += [
        "",
        "## Serve",
        "",
        "DIR is this folder.",
        "",
        "```",
        commands(format, name, served, nested),
        "```",
        *(f"\n{note}." for note in notes),
        "",
        "## Licences",
        "",
        *terms,
        "",
    ]
    return "\n".join(lines)
