"""How fast this machine trains: real steps of the heads, the loss and the optimizer on random states.

Letters: K heads, N positions, D hidden, M draft vocabulary.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch.optim import Optimizer

from medusa_k25.data.labels import IGNORE
from medusa_k25.heads import Embeddings, Heads
from medusa_k25.loss import MedusaLoss, Teacher

LEAST_STEPS = 3


def timed_positions_per_s(
    heads: Heads,
    draft_vocab_size: int,
    loss: MedusaLoss,
    optimizer: Callable[..., Optimizer],
    positions: int,
    device: torch.device,
    low_precision: bool,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Positions a second of one device: the median step of as many as take `seconds`, behind one that warms up.

    Reading states, logging and gradients that other ranks send are not in it.
    """
    K, N, D, M = heads.num_heads, positions, heads.hidden_size, draft_vocab_size
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if low_precision else torch.float32
    lm_head_MD = (torch.randn(M, D, device=device, generator=generator) / D**0.5).to(dtype)
    heads = heads.to(device)
    heads.init_lm_heads(lm_head_MD.float())
    stepping = optimizer(heads.parameters())
    hidden_ND = torch.randn(N, D, device=device, generator=generator).to(dtype)
    labels_KN = torch.randint(0, M, (K, N), device=device, generator=generator)
    path_NK = torch.randint(0, M, (N, K), device=device, generator=generator)
    embed = (
        None if heads.reads == "state" else Embeddings(torch.randn(M, D, device=device, generator=generator).to(dtype))
    )
    teacher = None
    if loss.needs_teacher:
        teacher = Teacher(hidden_ND, lm_head_MD)
        for k in range(1, K + 1):
            labels_KN[k - 1, max(N - k, 0) :] = IGNORE  # no state lies so far ahead
    count_K = (labels_KN != IGNORE).sum(1)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low_precision):
            features_KND = heads(hidden_ND, path_NK, embed)
            total, _ = heads.with_lm_head(
                lm_head_MD, lambda lm_head: loss(features_KND, lm_head, labels_KN, count_K, teacher)
            )
        total.backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        stepping.step()
        stepping.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()
    times: list[float] = []
    while len(times) < LEAST_STEPS or sum(times) < seconds:
        start = clock()
        step()
        times.append(clock() - start)
    return N / median(times)
