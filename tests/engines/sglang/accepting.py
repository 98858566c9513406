"""Heads that know a few answers by heart, so that verify passes accept long paths through a tree."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from medusa_k25.data.labels import IGNORE, future_tokens
from medusa_k25.heads import HEADS, DraftVocabulary, Embeddings, Heads, Speculator
from medusa_k25.serving.decode import Decoded, Drafter, speculative_decode
from medusa_k25.serving.formats import export_heads
from medusa_k25.target import Target, TargetModel
from medusa_k25.tree import Tree

TREE = Tree([[0], [1], [2], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]])
K = 3


def accepting_heads(
    model: TargetModel,
    lm_head_VD: torch.Tensor,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    vocabulary: DraftVocabulary,
    steps: int = 150,
    kind: str = "residual",
    **arguments: Any,
) -> Heads:
    """`steps` 150: nearly all drafts are right where the draft vocabulary has them; 25: some are."""
    torch.manual_seed(0)
    heads = HEADS[kind](lm_head_VD.shape[1], K, draft_vocab_size=len(vocabulary), **arguments).float()
    embed = Embeddings(model.model.get_input_embeddings().weight)
    lm_head_MD = vocabulary.rows(lm_head_VD).float()
    heads.init_lm_heads(lm_head_MD)
    states, futures = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids_T = torch.tensor(prompt + answer)
        positions_N = torch.arange(len(prompt) - 1, len(ids_T) - 1)
        mask_T = torch.arange(len(ids_T)) >= len(prompt)
        futures.append(future_tokens(ids_T, mask_T, torch.zeros_like(ids_T), positions_N, K))
        states.append(model.hidden(ids_T[None])[0, positions_N])
    hidden_ND, future_NF = torch.cat(states), torch.cat(futures)  # the root, and K tokens after it
    labels_NK = vocabulary.to_draft(future_NF[:, 1:])
    optimizer = torch.optim.AdamW(heads.parameters(), lr=2e-2)
    for _ in range(steps):
        features_KND = heads(hidden_ND, future_NF[:, :-1], embed)
        logits_KNM = heads.with_lm_head(lm_head_MD, partial(_logits, features_KND))
        cross_entropy(logits_KNM.flatten(0, 1), labels_NK.T.flatten(), ignore_index=IGNORE).backward()
        optimizer.step()
        optimizer.zero_grad()
    return heads.requires_grad_(False)


def _logits(features_KND: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    return features_KND @ lm_head.mT


def serve_from(
    folder: Path,
    target: Target,
    heads: Heads,
    vocabulary: DraftVocabulary,
    tree: Tree,
    format: str = "sglang",
) -> Path:
    """`folder`, with an export in float32 that names its target."""
    fingerprints = dict(target.fingerprints)
    provenance = {"target": {"name": target.name, "revision": target.revision, "fingerprints": fingerprints}}
    export_heads(folder, heads, vocabulary, tree, torch.float32, provenance, format, target.lm_head.float())
    return folder


def decode_all(
    target: Target,
    model: TargetModel,
    heads: Heads,
    vocabulary: DraftVocabulary,
    tree: Tree,
    prompts: Sequence[list[int]],
    limit: int,
) -> list[Decoded]:
    """What the reference decoder makes of the prompts: answers of `limit` tokens, and the passes they take."""
    drafter = Drafter(Speculator.of(heads, vocabulary, target), tree)
    return [speculative_decode(model, drafter, prompt, limit, ()) for prompt in prompts]
