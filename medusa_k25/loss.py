"""Cross-entropy of K heads, and distillation from the target, without the [N, V] logits of a batch.

Letters: K heads, N positions, D hidden, V tokens (rows of lm_head: the draft vocabulary where there is one), M the
(head, position) pairs whose label counts, S the rows that some pair aims at, R rows and C vocabulary columns of a
block.

Distillation costs one more row a position, not one more a pair, because logits are linear in the features. With q the
student's softmax, p the teacher's and y the label,

    gradient of CE  = E_q[W] - W_y           KL(p || q) = CE + x . U - H(p)      where U = W_y - E_p[W]
    gradient of KL  = E_q[W] - E_p[W]                   = (gradient of CE) + U

so the same pass that gives CE and E_q[W] - W_y for features gives H(p) and U for the teacher's states, once for all
heads. Every quantity is summed over the tokens other than the label, whose own column is handled apart:

    E_q[W] - W_y = (sum over j != y of q_j W_j) - (sum over j != y of q_j) W_y
    CE = log1p(sum over j != y of q_j / q_y)

so nothing cancels when the label is nearly certain, which matters in bf16.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from medusa_k25.data.labels import IGNORE
from medusa_k25.target import cpu_has_bf16_products

# A block of logits on the CPU should be large enough to keep the threads busy between barriers, small enough for the
# last-level cache. On one thread all of 256..1024 rows x 4..32 MB ran at 88..96% of the speed of the bare products; the
# numbers for CUDA are not measured.
ROWS = {"cpu": 1024, "cuda": 4096}
BLOCK_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}  # of fp32 logits
# A trained lm_head needs whole rows, and each block of them reads and writes its gradient once: with fewer rows than
# these that would take longer than the products, so V above BLOCK_BYTES / 4 / LEAST_ROWS makes larger blocks.
LEAST_ROWS = {"cpu": 128, "cuda": 2048}


class Teacher(NamedTuple):
    """What the target knows about a batch: row n + k is its state when head k (1-based) of row n is to be right."""

    hidden_ND: Tensor  # after the final norm; only rows n + k with a label of (k, n) are read
    lm_head_VD: Tensor  # frozen, the rows of the draft vocabulary


class MedusaLoss:
    """Sum over heads of head_weights[k - 1] x the mean loss of head k = 1 .. K: cross-entropy, distillation or a mix.

    head_weights: one a head; None is 0.8**k, as in Medusa.
    distillation: share of KL(teacher || student) in the loss of a pair; the rest is cross-entropy with the label.
    temperature: of the teacher only: the distribution that a server at this temperature samples the next tokens from.
    rows: how many rows of logits are worked on at once; None picks a number for the device.
    """

    def __init__(
        self,
        head_weights: Sequence[float] | None = None,
        distillation: float = 0.0,
        temperature: float = 1.0,
        rows: int | None = None,
    ):
        if head_weights is not None and not (head_weights and all(0 <= w < math.inf for w in head_weights)):
            raise ValueError(f"loss.head_weights must be null or one number >= 0 a head, got {head_weights}")
        if not 0 <= distillation <= 1:
            raise ValueError(f"loss.distillation must be from 0 (labels) to 1 (teacher), got {distillation}")
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"loss.temperature must be above 0, got {temperature}; "
                "for greedy decoding of greedy text the teacher is the label: set loss.distillation=0"
            )
        if rows is not None and rows < 1:
            raise ValueError(f"loss.rows must be at least 1 or null, got {rows}")
        self.head_weights = None if head_weights is None else tuple(head_weights)
        self.distillation = distillation
        self.temperature = temperature
        self.rows = rows

    @property
    def needs_teacher(self) -> bool:
        return self.distillation > 0

    def weights(self, num_heads: int) -> Sequence[float]:
        """One number a head; ValueError where head_weights has another number of them."""
        head_weights = self.head_weights or [0.8**k for k in range(1, num_heads + 1)]
        if len(head_weights) != num_heads:
            raise ValueError(
                f"loss.head_weights has {len(head_weights)} numbers for {num_heads} heads: give one a head"
            )
        return head_weights

    def __call__(
        self, features_KND: Tensor, lm_head: Tensor, labels_KN: Tensor, count_K: Tensor, teacher: Teacher | None = None
    ) -> tuple[Tensor, Tensor]:
        """(total, sum_K): the scalar to call backward on, and each head's summed loss (fp32 [K], detached).

        count_K: valid labels of each head over all micro-batches and ranks of the step, so that the totals of the
        micro-batches and ranks add up to the loss of the step. A head without labels may have count 0.
        The other arguments and the errors are those of `multi_head_loss`.
        """
        weights_K = torch.tensor(self.weights(len(features_KND)), device=features_KND.device, dtype=torch.float32)
        weights_K /= count_K.to(weights_K.device).clamp(min=1)
        return multi_head_loss(
            features_KND, lm_head, labels_KN, weights_K, teacher, self.distillation, self.temperature, self.rows
        )


@torch.compiler.disable  # what a compiler could do is done here by hand, and tracing it breaks at every block
def multi_head_loss(
    features_KND: Tensor,
    lm_head: Tensor,
    labels_KN: Tensor,
    weights_K: Tensor,
    teacher: Teacher | None = None,
    distillation: float = 0.0,
    temperature: float = 1.0,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(total, sum_K) in fp32; total is differentiable, sum_K is detached.

        sum_K = zeros(K)
        for k, n in pairs with labels_KN[k, n] != IGNORE:
            W_VD = lm_head if lm_head.ndim == 2 else lm_head[k]
            q_V = softmax(W_VD @ features_KND[k, n])
            p_V = softmax(teacher.lm_head_VD @ teacher.hidden_ND[n + k + 1] / temperature)
            CE = -log(q_V[labels_KN[k, n]])
            KL = (p_V * (log(p_V) - log(q_V))).sum()
            sum_K[k] += (1 - distillation) * CE + distillation * KL
        total = (weights_K * sum_K).sum()

    lm_head [V, D] is frozen, shared by the heads and by the teacher, and gets no gradient. lm_head [K, V, D] is one a
    head and is trained: it gets a gradient, in its dtype; the teacher keeps the frozen one. With a draft vocabulary, V
    counts its tokens: the teacher is conditioned on the next token being one of them (the mass of all others is
    dropped), and pairs whose label is another are IGNORE in every loss.
    All pairs of one teacher row must have the same label, the token after that row. The temperature is the teacher's
    alone: the student's softmax is the same in CE, KL and every mix, and ranks and serving are not touched by it.

    The products run in the dtype of the features (of autocast where that is on), in fp32 where bf16 products are slow;
    the softmax is fp32. lm_head may have another dtype: it is cast block by block. float32 and bfloat16 only. Rounding
    can leave a KL that is 0 slightly below it. Rows that no labelled pair needs cost nothing and may hold anything.
    Memory: the gradients, [N, D] in fp32 for the teacher, and for a shared lm_head blocks of `rows` x D and of
    BLOCK_BYTES, for own ones two blocks of `rows` x V.
    Raises ValueError on shapes that do not fit, other dtypes, labels outside 0..V-1 that are not IGNORE, and a teacher
    that is missing or does not fit.
    """
    _check(features_KND, lm_head, labels_KN)
    aims = None
    if distillation > 0:
        if teacher is None:
            raise ValueError(f"distillation={distillation} needs a teacher: pass the hidden states of the batch")
        _check_teacher(teacher, features_KND, lm_head)
        aims = _Aims(teacher, _teacher_labels(labels_KN), distillation, temperature)
    weights_K = weights_K.to(features_KND.device, torch.float32)
    if torch.is_grad_enabled() and (features_KND.requires_grad or (lm_head.ndim == 3 and lm_head.requires_grad)):
        return _HeadSums.apply(features_KND, lm_head, labels_KN, weights_K, aims, rows)
    sum_K, _, _ = _sums_and_gradients(features_KND, lm_head, labels_KN, None, aims, rows)
    return (weights_K * sum_K).sum(), sum_K


class _Aims(NamedTuple):
    """What the heads are to match besides their labels."""

    teacher: Teacher
    labels_N: Tensor  # of the token after each row; IGNORE where no pair needs the row
    share: float  # of the KL in the loss
    temperature: float


class _HeadSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        features_KND: Tensor,
        lm_head: Tensor,
        labels_KN: Tensor,
        weights_K: Tensor,
        aims: _Aims | None,
        rows: int | None,
    ) -> tuple[Tensor, Tensor]:
        sum_K, gradient_KND, gradient_KVD = _sums_and_gradients(features_KND, lm_head, labels_KN, weights_K, aims, rows)
        ctx.save_for_backward(gradient_KND, gradient_KVD)  # type: ignore[arg-type]  # None is fine
        ctx.mark_non_differentiable(sum_K)
        return (weights_K * sum_K).sum(), sum_K

    @staticmethod
    @once_differentiable
    def backward(ctx, total_gradient, _):
        gradients = [g if g is None else g * total_gradient for g in ctx.saved_tensors]
        return *gradients, None, None, None, None


@torch.no_grad()
def _sums_and_gradients(
    features_KND: Tensor,
    lm_head: Tensor,
    labels_KN: Tensor,
    weights_K: Tensor | None,
    aims: _Aims | None,
    rows: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Each head's summed loss [K]; where weights are given, the gradients of their total for features and lm_head."""
    dtype = matmul_dtype(features_KND)
    method = _shared_lm_head if lm_head.ndim == 2 else _own_lm_heads
    with torch.autocast(features_KND.device.type, enabled=False):
        return method(features_KND, lm_head, labels_KN, weights_K, aims, rows, dtype)


def _shared_lm_head(
    features_KND: Tensor,
    lm_head_VD: Tensor,
    labels_KN: Tensor,
    weights_K: Tensor | None,
    aims: _Aims | None,
    rows: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, None]:
    K, N, D = features_KND.shape
    device = features_KND.device
    features, labels = features_KND.reshape(K * N, D), labels_KN.reshape(K * N)
    # every dtype is named: bf16-true training sets torch's default dtype to bf16
    if aims is not None:
        aim_ND = torch.empty(N, D, device=device, dtype=torch.float32)  # share x U
        entropy_N1 = torch.empty(N, 1, device=device, dtype=torch.float32)  # share x H(p)
        for row_R, x_RD, ce_R1, away_RD in _cross_entropy(
            aims.teacher.hidden_ND, aims.labels_N, lm_head_VD, dtype, True, rows, aims.temperature
        ):
            aim_RD = away_RD.mul_(-aims.share)
            aim_ND[row_R] = aim_RD
            entropy_N1[row_R] = aims.share * ce_R1 + _dot(x_RD, aim_RD)

    loss = torch.zeros(K * N, device=device, dtype=torch.float32)
    gradient = torch.zeros_like(features if weights_K is not None else features[:0])
    for pair_R, x_RD, loss_R1, away_RD in _cross_entropy(
        features, labels, lm_head_VD, dtype, weights_K is not None, rows
    ):
        if aims is not None:
            teacher_R = pair_R // N + 1 + pair_R % N
            aim_RD = aim_ND[teacher_R]
            loss_R1 += _dot(x_RD, aim_RD) - entropy_N1[teacher_R]
            away_RD += aim_RD
        loss[pair_R] = loss_R1.squeeze(1)
        if weights_K is not None:
            gradient[pair_R] = away_RD.mul_(weights_K[pair_R // N, None]).to(gradient.dtype)
    return loss.view(K, N).sum(dim=1), gradient if weights_K is None else gradient.view(K, N, D), None


def _cross_entropy(
    x_ND: Tensor,
    labels_N: Tensor,
    lm_head_VD: Tensor,
    dtype: torch.dtype,
    with_gradient: bool,
    rows: int | None,
    temperature: float = 1.0,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each block of labelled rows: (their indices, x / temperature as multiplied, CE, its gradient E_q[W] - W_y).

    The softmax is built up over blocks of the vocabulary (running maximum and sum, as in online softmax), starting from
    the label's own logit. Without gradients the last tensor is zeros.
    """
    V, D = lm_head_VD.shape
    device = x_ND.device
    index_M = (labels_N != IGNORE).nonzero().squeeze(1)
    R, C = block_shape(len(index_M), V, device.type, rows)
    blocks = _Blocks(R * C, dtype, device)
    cast_CD = torch.empty((0 if dtype == lm_head_VD.dtype else C, D), device=device, dtype=dtype)
    for index_R in index_M.split(R):
        x_RD = (x_ND[index_R].float() / temperature).to(dtype)
        y_R1 = labels_N[index_R, None]
        gold_RD = lm_head_VD[y_R1[:, 0]].to(dtype).float()
        gold_R1 = _dot(x_RD, gold_RD)
        max_R1 = gold_R1
        others_R1 = torch.zeros_like(gold_R1)  # sum of exp(logit - max) over the other tokens
        others_RD = torch.zeros_like(gold_RD)  # the same, each times its row of lm_head
        for c in range(0, V, C):
            w_CD = lm_head_VD[c : c + C]
            if dtype != lm_head_VD.dtype:
                w_CD = cast_CD[: len(w_CD)].copy_(w_CD)
            logits_RC = blocks.logits(x_RD, w_CD)
            column_R1 = (y_R1 - c).clamp(0, len(w_CD) - 1)
            inside_R1 = column_R1 == y_R1 - c
            logits_RC.scatter_(1, column_R1, logits_RC.gather(1, column_R1).masked_fill(inside_R1, -torch.inf))

            new_R1 = torch.maximum(max_R1, logits_RC.amax(dim=1, keepdim=True))
            scale_R1 = (max_R1 - new_R1).exp_()
            max_R1 = new_R1
            logits_RC.sub_(max_R1).exp_()
            others_R1.mul_(scale_R1).add_(logits_RC.sum(dim=1, keepdim=True))
            if with_gradient:
                _add_product(others_RD.mul_(scale_R1), blocks.rounded(logits_RC), w_CD)
        ce_R1, sum_R1 = _finish(gold_R1, max_R1, others_R1)
        if with_gradient:
            others_RD.addcmul_(gold_RD, others_R1, value=-1).div_(sum_R1)
        yield index_R, x_RD, ce_R1, others_RD


def _own_lm_heads(
    features_KND: Tensor,
    lm_head_KVD: Tensor,
    labels_KN: Tensor,
    weights_K: Tensor | None,
    aims: _Aims | None,
    rows: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A block holds rows of the whole vocabulary: the gradient of lm_head needs each row's probabilities at once.

    It covers pairs (k, n) of equal n + k, all heads: the teacher's probabilities exist once, and one block at a time.
    The gradient of lm_head is summed in fp32 and rounded once, since bf16 would lose what a late block adds to a sum
    256 times larger.
    """
    K, N, D = features_KND.shape
    V = lm_head_KVD.shape[1]
    device = features_KND.device
    row_KN = torch.arange(1, K + 1, device=device)[:, None] + torch.arange(N, device=device)
    row_S = row_KN[labels_KN != IGNORE].unique()
    R = min(rows or max(LEAST_ROWS[device.type], BLOCK_BYTES[device.type] // (4 * V)), max(1, len(row_S)))
    blocks = _Blocks(R * V, dtype, device)
    cast_VD = torch.empty((0 if dtype == lm_head_KVD.dtype else V, D), device=device, dtype=dtype)
    if aims is not None:
        teacher_VD = aims.teacher.lm_head_VD.to(dtype)
        share = torch.empty(R * V, device=device, dtype=torch.float32)

    sum_K = torch.zeros(K, device=device, dtype=torch.float32)
    gradient_KND = torch.zeros_like(features_KND if weights_K is not None else features_KND[:0])
    gradient_KVD = None
    if weights_K is not None and lm_head_KVD.requires_grad:
        gradient_KVD = torch.zeros(K, V, D, device=device, dtype=torch.float32)

    for row_R in row_S.split(R):
        if aims is not None:
            x_RD = (aims.teacher.hidden_ND[row_R].float() / aims.temperature).to(dtype)
            y_R1 = aims.labels_N[row_R, None]
            gold_R1 = _dot(x_RD, teacher_VD[y_R1[:, 0]].float())
            logits_RV = blocks.logits(x_RD, teacher_VD)
            share_RV = share[: logits_RV.numel()].view_as(logits_RV)  # share x p, but 0 for the label
            max_R1, others_R1 = _exp_of_others(logits_RV, gold_R1, y_R1, out=share_RV)
            ce_R1, sum_R1 = _finish(gold_R1, max_R1, others_R1)
            share_RV.mul_(aims.share / sum_R1)
            mass_R1 = others_R1 * aims.share / sum_R1  # the row's sum
            entropy_R1 = aims.share * ce_R1 + mass_R1 * gold_R1 - _dot(share_RV, logits_RV)
        for k in range(K):
            n_R = row_R - (k + 1)
            inside_R = (n_R >= 0) & (n_R < N)
            n_R = n_R.clamp(0, N - 1)
            # a head without a label here computes zeros: cheaper than copying the others' rows of share_RV together
            labelled_R1 = (inside_R & (labels_KN[k, n_R] != IGNORE))[:, None]
            y_R1 = labels_KN[k, n_R, None].where(labelled_R1, 0)
            x_RD = features_KND[k, n_R].where(labelled_R1, 0).to(dtype)
            w_VD = lm_head_KVD[k] if dtype == lm_head_KVD.dtype else cast_VD.copy_(lm_head_KVD[k])

            gold_R1 = _dot(x_RD, w_VD[y_R1[:, 0]].float())
            logits_RV = blocks.logits(x_RD, w_VD)
            loss_R1 = mass_R1 * gold_R1 - _dot(share_RV, logits_RV) - entropy_R1 if aims is not None else 0
            max_R1, others_R1 = _exp_of_others(logits_RV, gold_R1, y_R1, out=logits_RV)
            ce_R1, sum_R1 = _finish(gold_R1, max_R1, others_R1)
            sum_K[k] += (loss_R1 + ce_R1).where(labelled_R1, 0).sum()
            if weights_K is None:
                continue

            weight_R1 = weights_K[k] * labelled_R1
            scale_R1 = weight_R1 / sum_R1
            gradient_RV = logits_RV.mul_(scale_R1)
            label_R1 = -others_R1 * scale_R1
            if aims is not None:
                gradient_RV.addcmul_(share_RV, weight_R1, value=-1)
                label_R1 += mass_R1 * weight_R1
            gradient_RV = blocks.rounded(gradient_RV.scatter_(1, y_R1, label_R1))
            # a row of a head comes up once, but the rows that were clamped add their zeros to another's
            gradient_KND[k].index_add_(0, n_R, (gradient_RV @ w_VD).to(gradient_KND.dtype))
            if gradient_KVD is not None:
                _add_product(gradient_KVD[k], gradient_RV.T, x_RD)
    return sum_K, gradient_KND, None if gradient_KVD is None else gradient_KVD.to(lm_head_KVD.dtype)


class _Blocks:
    """A block of logits in fp32, preallocated, and in bf16 beside it where the products read and write bf16."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device):
        self.fp32 = torch.empty(elements, device=device, dtype=torch.float32)
        self.low = self.fp32 if dtype == torch.float32 else torch.empty(elements, device=device, dtype=dtype)

    def logits(self, x_RD: Tensor, w_CD: Tensor) -> Tensor:
        """x @ w.T as a view of the block, fp32."""
        size = len(x_RD) * len(w_CD)
        low_RC = torch.mm(x_RD, w_CD.T, out=self.low[:size].view(len(x_RD), len(w_CD)))
        return low_RC if self.low is self.fp32 else self.fp32[:size].view_as(low_RC).copy_(low_RC)

    def rounded(self, values_RC: Tensor) -> Tensor:
        """The block that `logits` returned, whatever it holds by now, in the dtype of the products."""
        if self.low is self.fp32:
            return values_RC
        return self.low[: values_RC.numel()].view_as(values_RC).copy_(values_RC)


def _add_product(sum_fp32: Tensor, left: Tensor, right: Tensor) -> None:
    """sum_fp32 += left @ right, for factors of the same dtype."""
    if left.dtype == torch.float32:
        sum_fp32.addmm_(left, right)
    else:
        sum_fp32.add_(torch.mm(left, right))


def _exp_of_others(logits_RV: Tensor, gold_R1: Tensor, y_R1: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """(max, sum) of each row; `out`, which may be the logits, is set to exp(logit - max), and to 0 at the label."""
    max_R1 = torch.maximum(gold_R1, logits_RV.amax(dim=1, keepdim=True))
    torch.sub(logits_RV, max_R1, out=out).exp_().scatter_(1, y_R1, 0)
    return max_R1, out.sum(dim=1, keepdim=True)


def _finish(gold_R1: Tensor, max_R1: Tensor, others_R1: Tensor) -> tuple[Tensor, Tensor]:
    """(cross-entropy, sum over all tokens of exp(logit - max)) from the label's logit and the others' sum."""
    below_R1 = gold_R1 - max_R1
    return (others_R1 + below_R1.expm1()).log1p() - below_R1, others_R1 + below_R1.exp()


def _dot(x_RD: Tensor, y_RD: Tensor) -> Tensor:
    return torch.linalg.vecdot(x_RD.float(), y_RD)[:, None]


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


def _check(features_KND: Tensor, lm_head: Tensor, labels_KN: Tensor) -> None:
    fits = features_KND.ndim == 3 and lm_head.ndim in (2, 3) and features_KND.shape[2] == lm_head.shape[-1]
    if not fits or (lm_head.ndim == 3 and len(lm_head) != len(features_KND)):
        raise ValueError(
            "features must be [K, N, D] and lm_head [V, D], or [K, V, D] with one a head, with the same D; "
            f"got {tuple(features_KND.shape)} and {tuple(lm_head.shape)}"
        )
    if labels_KN.shape != features_KND.shape[:2]:
        raise ValueError(f"labels must be [K, N] = {tuple(features_KND.shape[:2])}, got {tuple(labels_KN.shape)}")
    check_labels(labels_KN, lm_head.shape[-2])


def check_labels(labels: Tensor, vocab_size: int) -> None:
    wrong = ((labels < 0) | (labels >= vocab_size)) & (labels != IGNORE)
    if wrong.any():
        raise ValueError(
            f"label {labels[wrong][0]} is outside the {vocab_size} rows of lm_head; "
            f"map labels to the draft vocabulary first (unknown tokens become {IGNORE})"
        )


def _check_teacher(teacher: Teacher, features_KND: Tensor, lm_head: Tensor) -> None:
    got = tuple(teacher.hidden_ND.shape)
    if got != features_KND.shape[1:]:
        raise ValueError(f"the teacher's hidden must be [N, D] = {tuple(features_KND.shape[1:])}, got {got}")
    if lm_head.ndim == 2 and not teacher.lm_head_VD.is_set_to(lm_head):
        raise ValueError("heads that share one lm_head share it with the teacher: pass the same tensor as both")
    if teacher.lm_head_VD.shape != lm_head.shape[-2:]:
        raise ValueError(
            f"the teacher's lm_head must be [V, D] = {tuple(lm_head.shape[-2:])} with the rows of the students' "
            f"vocabulary, got {tuple(teacher.lm_head_VD.shape)}"
        )


def _teacher_labels(labels_KN: Tensor) -> Tensor:
    """[N]: the label that all pairs (k, n) of a row n + k have, IGNORE where there are none."""
    N = labels_KN.shape[1]
    pair_K, pair_N = (labels_KN != IGNORE).nonzero(as_tuple=True)
    labels_M, row_M = labels_KN[pair_K, pair_N], pair_N + pair_K + 1
    if (row_M >= N).any():
        raise ValueError(
            f"the last head has labels up to row {row_M.max()} of the teacher's {N}: append the states that follow, "
            f"as rows whose labels are all {IGNORE}"
        )
    labels_N = torch.full_like(labels_KN[0], IGNORE)
    labels_N[row_M] = labels_M
    if (labels_N[row_M] != labels_M).any():
        raise ValueError(
            "pairs (k, n) of equal n + k have different labels: the teacher of row n + k predicts one token, "
            f"the one after it; set labels that cross documents to {IGNORE}"
        )
    return labels_N
