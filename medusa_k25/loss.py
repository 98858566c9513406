"""Cross-entropy of K heads through one frozen lm_head, without the [N, V] logits.

Letters: K heads, N positions, D hidden, V vocabulary, M the (head, position) pairs whose label counts, R rows and
C vocabulary columns of a block.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from medusa_k25.data.labels import IGNORE

# A block of logits on the CPU should be large enough to keep the threads busy between barriers, small enough for the
# last-level cache. On one thread all of 256..1024 rows x 4..32 MB ran at 88..96% of the speed of the bare products; the
# numbers for CUDA are not measured.
ROWS = {"cpu": 1024, "cuda": 4096}
BLOCK_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}  # of fp32 logits


class MedusaLoss:
    """Sum over heads of head_decay**k x the mean cross-entropy of head k, with k = 1 for the first head (as in Medusa).

    rows: how many (head, position) pairs are worked on at once; None picks a number for the device.
    """

    def __init__(self, head_decay: float = 0.8, rows: int | None = None):
        if not head_decay > 0:
            raise ValueError(f"loss.head_decay must be above 0, got {head_decay}")
        if rows is not None and rows < 1:
            raise ValueError(f"loss.rows must be at least 1 or null, got {rows}")
        self.head_decay = head_decay
        self.rows = rows

    def __call__(
        self, features_KND: Tensor, lm_head_VD: Tensor, labels_KN: Tensor, count_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(total, sum_K): the scalar to call backward on, and each head's summed cross-entropy (fp32 [K], detached).

        count_K: valid labels of each head over all micro-batches and ranks of the step, so that the totals of the
        micro-batches and ranks add up to the loss of the step. A head without labels may have count 0.
        """
        k = torch.arange(1, len(features_KND) + 1, device=features_KND.device, dtype=torch.float32)
        weights_K = self.head_decay**k / count_K.to(k.device).clamp(min=1)
        return multi_head_cross_entropy(features_KND, lm_head_VD, labels_KN, weights_K, self.rows)


def multi_head_cross_entropy(
    features_KND: Tensor, lm_head_VD: Tensor, labels_KN: Tensor, weights_K: Tensor, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """(total, sum_K) in fp32; total is differentiable with respect to the features only, sum_K is detached.

        sum_K[k] = cross_entropy(features_KND[k] @ lm_head_VD.T, labels_KN[k], ignore_index=IGNORE, reduction="sum")
        total = (weights_K * sum_K).sum()

    The products run in the dtype of the features (of autocast where that is on), in fp32 where bf16 products are slow;
    the softmax is fp32. lm_head_VD may have another dtype: it is cast block by block. float32 and bfloat16 only.
    Memory: the gradient, plus blocks of `rows` x D and of BLOCK_BYTES; positions labelled IGNORE cost nothing.
    Raises ValueError on shapes that do not fit, other dtypes, and labels outside 0..V-1 that are not IGNORE.
    """
    _check(features_KND, lm_head_VD, labels_KN)
    weights_K = weights_K.to(features_KND.device, torch.float32)
    if torch.is_grad_enabled() and features_KND.requires_grad:
        return _HeadSums.apply(features_KND, lm_head_VD, labels_KN, weights_K, rows)
    sum_K, _ = _sums_and_gradient(features_KND, lm_head_VD, labels_KN, None, rows)
    return (weights_K * sum_K).sum(), sum_K


class _HeadSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        features_KND: Tensor,
        lm_head_VD: Tensor,
        labels_KN: Tensor,
        weights_K: Tensor,
        rows: int | None,
    ) -> tuple[Tensor, Tensor]:
        sum_K, gradient_KND = _sums_and_gradient(features_KND, lm_head_VD, labels_KN, weights_K, rows)
        ctx.save_for_backward(gradient_KND)
        ctx.mark_non_differentiable(sum_K)
        return (weights_K * sum_K).sum(), sum_K

    @staticmethod
    @once_differentiable
    def backward(ctx, total_gradient, _):
        (gradient_KND,) = ctx.saved_tensors
        return gradient_KND * total_gradient, None, None, None, None


@torch.no_grad()
def _sums_and_gradient(
    features_KND: Tensor, lm_head_VD: Tensor, labels_KN: Tensor, weights_K: Tensor | None, rows: int | None
) -> tuple[Tensor, Tensor]:
    """Each head's summed cross-entropy [K]; where weights are given also the gradient of their total [K, N, D].

    The softmax is built up over blocks of the vocabulary (running maximum m and sum s, as in online softmax), starting
    from the label's own logit; the label's column is then left out of the blocks. With p = softmax:
        loss = m - gold + log(s),   gradient = sum over j != label of p_j W_j - (1 - p_label) W_label
    so neither cancels when the label is nearly certain, which matters in bf16.
    """
    K, N, D = features_KND.shape
    V = len(lm_head_VD)
    device = features_KND.device
    dtype = matmul_dtype(features_KND)
    features = features_KND.detach().reshape(K * N, D)
    labels = labels_KN.reshape(K * N)
    pairs_M = (labels != IGNORE).nonzero().squeeze(1)
    M = len(pairs_M)
    R, C = block_shape(M, V, device.type, rows)

    # every dtype is named: bf16-true training sets torch's default dtype to bf16
    loss = torch.zeros(K * N, device=device, dtype=torch.float32)
    gradient = torch.zeros_like(features) if weights_K is not None else features[:0]
    block = torch.empty(R * C, device=device, dtype=torch.float32)
    fp32 = dtype == torch.float32
    low_block = torch.empty(0 if fp32 else R * C, device=device, dtype=dtype)
    cast_CD = torch.empty((0 if dtype == lm_head_VD.dtype else C, D), device=device, dtype=dtype)

    for start in range(0, M, R):
        pairs = pairs_M[start : start + R]
        x_RD = features[pairs].to(dtype)
        y_R1 = labels[pairs, None]
        gold_RD = lm_head_VD[y_R1[:, 0]].to(dtype).float()
        gold_R1 = (x_RD * gold_RD).sum(dim=1, keepdim=True)  # vecdot would run in bf16 under autocast
        max_R1 = gold_R1
        others_R1 = torch.zeros_like(gold_R1)  # sum of exp(logit - max) over the other tokens
        others_RD = torch.zeros_like(gold_RD)  # the same, each times its row of lm_head
        for c in range(0, V, C):
            w_CD = lm_head_VD[c : c + C]
            if dtype != lm_head_VD.dtype:
                w_CD = cast_CD[: len(w_CD)].copy_(w_CD)
            size = len(pairs) * len(w_CD)
            logits_RC = block[:size].view(len(pairs), -1)
            low_RC = logits_RC if fp32 else low_block[:size].view(len(pairs), -1)
            torch.mm(x_RD, w_CD.T, out=low_RC)
            if not fp32:
                logits_RC.copy_(low_RC)
            column_R1 = (y_R1 - c).clamp(0, len(w_CD) - 1)
            inside_R1 = column_R1 == y_R1 - c
            logits_RC.scatter_(1, column_R1, logits_RC.gather(1, column_R1).masked_fill(inside_R1, -torch.inf))

            new_R1 = torch.maximum(max_R1, logits_RC.amax(dim=1, keepdim=True))
            scale_R1 = (max_R1 - new_R1).exp_()
            max_R1 = new_R1
            logits_RC.sub_(max_R1).exp_()
            others_R1.mul_(scale_R1).add_(logits_RC.sum(dim=1, keepdim=True))
            if weights_K is not None:
                others_RD.mul_(scale_R1)
                if fp32:
                    others_RD.addmm_(logits_RC, w_CD)
                else:
                    others_RD.add_(torch.mm(low_RC.copy_(logits_RC), w_CD))
        sum_R1 = others_R1 + (gold_R1 - max_R1).exp_()
        loss[pairs] = (max_R1 - gold_R1 + sum_R1.log()).squeeze(1)
        if weights_K is not None:
            others_RD.addcmul_(gold_RD, others_R1, value=-1).mul_(weights_K[pairs // N, None] / sum_R1)
            gradient[pairs] = others_RD.to(gradient.dtype)
    return loss.view(K, N).sum(dim=1), gradient.view(K, N, D) if weights_K is not None else gradient


def block_shape(pairs: int, vocab_size: int, device_type: str, rows: int | None = None) -> tuple[int, int]:
    """(R, C): rows (at most `rows`) and vocabulary columns of a block of logits, both at least 1."""
    passes = math.ceil(pairs / (rows or ROWS[device_type]))
    R = math.ceil(pairs / passes) if passes else 1  # equal shares: each pass reads all of lm_head
    return R, max(1, min(BLOCK_BYTES[device_type] // (4 * R), vocab_size))


def matmul_dtype(features: Tensor) -> torch.dtype:
    """The dtype that products with these features run in: theirs or autocast's; fp32 where the CPU is slow in bf16."""
    kind = features.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"features of dtype {dtype}: expected float32 or bfloat16; set the precision to one of them")
    return torch.float32 if kind == "cpu" and not cpu_has_bf16_products() else dtype


def cpu_has_bf16_products() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _check(features_KND: Tensor, lm_head_VD: Tensor, labels_KN: Tensor) -> None:
    if features_KND.ndim != 3 or lm_head_VD.ndim != 2 or features_KND.shape[2] != lm_head_VD.shape[1]:
        got = f"{tuple(features_KND.shape)} and {tuple(lm_head_VD.shape)}"
        raise ValueError(f"features must be [K, N, D] and lm_head [V, D] with the same D, got {got}")
    if labels_KN.shape != features_KND.shape[:2]:
        raise ValueError(f"labels must be [K, N] = {tuple(features_KND.shape[:2])}, got {tuple(labels_KN.shape)}")
    check_labels(labels_KN, len(lm_head_VD))


def check_labels(labels: Tensor, vocab_size: int) -> None:
    wrong = ((labels < 0) | (labels >= vocab_size)) & (labels != IGNORE)
    if wrong.any():
        raise ValueError(
            f"label {labels[wrong][0]} is outside the {vocab_size} rows of lm_head; "
            f"map labels to the draft vocabulary first (unknown tokens become {IGNORE})"
        )
