"""Small caches of a small target's own greedy text."""

from collections.abc import Sequence
from pathlib import Path

import torch

from medusa_k25.cache import Cache, CacheWriter
from medusa_k25.metrics import topk_ids
from medusa_k25.target import Target, TargetModel

NEW_TOKENS = 24
# Many modules ask one target the same: {(its folder, prompt, end ids): answer of NEW_TOKENS}
ANSWERS: dict[tuple[Path, tuple[int, ...], tuple[int, ...]], list[int]] = {}


def greedy_answer(model: TargetModel, prompt_ids: list[int], end_ids: list[int], limit: int = NEW_TOKENS) -> list[int]:
    """Plain decoding, the whole text read again at every step."""
    ids = list(prompt_ids)
    while len(ids) < len(prompt_ids) + limit and (len(ids) == len(prompt_ids) or ids[-1] not in end_ids):
        ids.append(int(topk_ids(model.logits(model.hidden(torch.tensor([ids]))[0, -1:]), 1)))
    return ids[len(prompt_ids) :]


def random_prompts(count: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 500, (3 + i % 9,), generator=generator).tolist() for i in range(count)]


def cache_of(
    target: Target,
    path: Path,
    num_documents: int = 40,
    end_ids: tuple[int, ...] = (),
    storage: str = "answers",
    shard_tokens: int = 4096,
    turns: int = 1,
    labels: Sequence[str | None] = (None,),
) -> Cache:
    """Documents without a group, so that their split is spread by hash; each has `turns` greedy answers."""
    model = target.load_model(torch.float32)
    with CacheWriter.open(path, target, "float32", "test", shard_tokens=shard_tokens) as writer:
        for i, prompt in enumerate(random_prompts(num_documents)):
            ids: list[int] = []
            mask: list[bool] = []
            needed: list[int] = []
            for _ in range(turns):
                ids += prompt
                mask += [False] * len(prompt)
                key = (target.path, tuple(ids), end_ids)
                if key not in ANSWERS:
                    ANSWERS[key] = greedy_answer(model, ids, list(end_ids))
                answer = ANSWERS[key]
                needed += range(len(ids) - 1, len(ids) + len(answer) - 1)
                ids, mask = ids + answer, mask + [True] * len(answer)
            hidden_TD = model.hidden(torch.tensor([ids]))[0]
            positions = torch.tensor(needed if storage == "answers" else range(len(ids) - 1))
            writer.add(
                id=f"document-{i}",
                group=None,
                token_ids_T=torch.tensor(ids),
                loss_mask_T=torch.tensor(mask),
                hidden_MD=hidden_TD[positions],
                positions_M=positions,
                prompt_length=len(prompt),
                finish_reason="stop" if ids[-1] in end_ids else "length",
                sampling={"mode": "greedy", "temperature": 0.0, "top_p": 1.0},
                dtype="float32",
                label=labels[i % len(labels)],
                origin={},
            )
    return Cache.open(path, target)
