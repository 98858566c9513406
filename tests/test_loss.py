"""The loss against its plain formula, written out in float64 with all logits in memory.

Letters: K heads, N positions, D hidden, V vocabulary, T tokens.
"""

import inspect
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa_k25 import loss as loss_module
from medusa_k25.conversations import choose_dtype
from medusa_k25.data.labels import IGNORE
from medusa_k25.loss import MedusaLoss, Teacher, matmul_dtype, multi_head_loss

CONF = Path(__file__).parents[1] / "conf" / "loss"
LOSSES = {"cross-entropy": 0.0, "mix": 0.3, "distillation": 1.0}
each_loss = pytest.mark.parametrize("distillation", LOSSES.values(), ids=LOSSES)
each_lm_head = pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])


class Problem(NamedTuple):
    features_KND: Tensor
    lm_head: Tensor
    labels_KN: Tensor
    weights_K: Tensor
    teacher: Teacher | None
    distillation: float
    temperature: float


def example(
    K=3, N=37, D=16, V=101, ignored=0.3, dtype=torch.float32, seed=0, own=False, distillation=0.0, temperature=1.0
):
    """One text of random tokens: row n is a state before token n + 1, so head k's label is token n + 1 + k."""
    g = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(N, D, generator=g).to(dtype)
    features_KND = torch.randn(K, N, D, generator=g).to(dtype).requires_grad_()
    lm_head_VD = torch.randn(V, D, generator=g).to(dtype)
    lm_head = torch.randn(K, V, D, generator=g).to(dtype).requires_grad_() if own else lm_head_VD
    token_T = torch.randint(0, V, (N + 1,), generator=g)
    labels_KN = torch.full((K, N), IGNORE)
    for k in range(K):
        labels_KN[k, : max(0, N - 1 - k)] = token_T[k + 2 :]
    labels_KN[torch.rand(K, N, generator=g) < ignored] = IGNORE
    weights_K = 0.8 ** torch.arange(1.0, K + 1)
    return Problem(
        features_KND, lm_head, labels_KN, weights_K, Teacher(hidden_ND, lm_head_VD), distillation, temperature
    )


def call(loss, problem, count_K):
    return loss(problem.features_KND, problem.lm_head, problem.labels_KN, count_K, problem.teacher)


def leaves(problem):
    """What gets a gradient."""
    return [problem.features_KND] + [problem.lm_head] * (problem.lm_head.ndim == 3)


def ours(problem, rows=None):
    """(total, sum_K, gradients)"""
    total, sum_K = multi_head_loss(*problem, rows)
    assert sum_K.dtype == total.dtype == torch.float32
    assert not sum_K.requires_grad
    return total, sum_K, torch.autograd.grad(total, leaves(problem))


def plain(problem):
    """(total, sum_K, gradients) by the formula of the docstring, in float64 on the very same numbers."""
    a = problem.distillation
    features_KND = problem.features_KND.detach().double().requires_grad_()
    lm_head = problem.lm_head.detach().double().requires_grad_()
    sums = [torch.zeros((), dtype=torch.float64) + 0 * features_KND.sum() + 0 * lm_head.sum() for _ in features_KND]
    for k, n in (problem.labels_KN != IGNORE).nonzero().tolist():
        log_q_V = ((lm_head if lm_head.ndim == 2 else lm_head[k]) @ features_KND[k, n]).log_softmax(0)
        sums[k] = sums[k] - (1 - a) * log_q_V[problem.labels_KN[k, n]]
        if a > 0:
            logits_V = problem.teacher.lm_head_VD.double() @ problem.teacher.hidden_ND[n + k + 1].double()
            log_p_V = (logits_V / problem.temperature).log_softmax(0)
            sums[k] = sums[k] + a * (log_p_V.exp() * (log_p_V - log_q_V)).sum()
    total = (problem.weights_K * torch.stack(sums)).sum()
    wanted = [features_KND] + [lm_head] * (lm_head.ndim == 3)
    return total.detach(), torch.stack(sums).detach(), torch.autograd.grad(total, wanted)


def assert_close(actual, expected, rtol=1e-5, atol=1e-4, gradient_atol=1e-5):
    for value, other in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(value.double(), other, rtol=rtol, atol=atol)
    for gradient, other in zip(actual[2], expected[2], strict=True):
        torch.testing.assert_close(gradient.double(), other, rtol=rtol, atol=gradient_atol)


def assert_same(problem, rows=None):
    assert_close(ours(problem, rows), plain(problem))


@settings(deadline=None, max_examples=200)
@given(
    K=st.integers(1, 5),
    N=st.integers(0, 12),
    D=st.integers(1, 9),
    V=st.integers(1, 40),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    own=st.booleans(),
    distillation=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    rows=st.one_of(st.none(), st.integers(1, 30)),
    block_bytes=st.integers(1, 4000),
    seed=st.integers(0, 9),
)
def test_equals_the_plain_formula_for_any_shape_and_blocks(
    K, N, D, V, ignored, own, distillation, temperature, rows, block_bytes, seed
):
    problem = example(K, N, D, V, ignored, torch.float32, seed, own, distillation, temperature)
    with (
        mock.patch.dict(loss_module.BLOCK_BYTES, cpu=block_bytes),
        mock.patch.dict(loss_module.LEAST_ROWS, cpu=1),
    ):
        assert_same(problem, rows)


@each_loss
@each_lm_head
@pytest.mark.parametrize("rows", [None, 10])
def test_equals_the_plain_formula(own, distillation, rows):
    assert_same(example(own=own, distillation=distillation, temperature=0.7), rows)


@each_lm_head
def test_a_student_that_is_the_teacher_has_no_loss_and_no_gradient(own):
    problem = example(ignored=0, own=own, distillation=1.0)
    hidden_ND, lm_head_VD = problem.teacher
    features_KND = torch.stack([hidden_ND.roll(-k, dims=0) for k in (1, 2, 3)]).requires_grad_()
    lm_head = lm_head_VD.repeat(3, 1, 1).requires_grad_() if own else lm_head_VD
    _, sum_K, gradients = ours(problem._replace(features_KND=features_KND, lm_head=lm_head))
    assert sum_K.abs().max() < 1e-4
    assert all(gradient.abs().max() < 1e-5 for gradient in gradients)
    assert ours(problem)[1].min() > 10


def test_the_teacher_of_a_draft_vocabulary_is_the_target_given_that_the_token_is_drafted():
    """Rows 3, 7, 11 .. of 101: teacher probabilities over all 101, those of drafted tokens divided by their sum."""
    problem = example(D=8, V=25, distillation=1.0, temperature=2.0)
    g = torch.Generator().manual_seed(1)
    full_VD = torch.randn(101, 8, generator=g)
    draft = torch.arange(3, 101, 4)
    lm_head_VD = full_VD[draft].clone()
    problem = problem._replace(lm_head=lm_head_VD, teacher=Teacher(problem.teacher.hidden_ND, lm_head_VD))
    p_NV = (problem.teacher.hidden_ND @ full_VD.T / 2.0).softmax(dim=1)[:, draft]
    p_NV /= p_NV.sum(dim=1, keepdim=True)
    log_q_KNV = (problem.features_KND @ lm_head_VD.T).log_softmax(dim=2)
    expected = [
        sum((p_NV[n + k + 1] * (p_NV[n + k + 1].log() - log_q_KNV[k, n])).sum() for n in range(37) if y_N[n] != IGNORE)
        for k, y_N in enumerate(problem.labels_KN)
    ]
    torch.testing.assert_close(ours(problem)[1], torch.stack(expected))


@each_lm_head
@each_loss
def test_documents_side_by_side_are_documents_alone(own, distillation):
    """Two windows with the halo of three states each: no pair looks across, and no state without a pair is read."""
    first, second = example(N=20, own=own, distillation=distillation), example(N=9, seed=1, distillation=distillation)
    lm_head, lm_head_VD = first.lm_head, first.teacher.lm_head_VD
    second = second._replace(lm_head=lm_head, teacher=second.teacher._replace(lm_head_VD=lm_head_VD))
    for problem in (first, second):
        problem.labels_KN[:, -3:] = IGNORE
    hidden_ND = torch.cat([first.teacher.hidden_ND, second.teacher.hidden_ND])
    labels_KN = torch.cat([first.labels_KN, second.labels_KN], dim=1)
    features_KND = torch.cat([first.features_KND, second.features_KND], dim=1).detach()
    features_KND[labels_KN == IGNORE] = torch.nan
    read = {int(n) + k + 1 for k in range(3) for n in (labels_KN[k] != IGNORE).nonzero()}
    hidden_ND[[n for n in range(29) if n not in read]] = torch.nan
    both = first._replace(
        features_KND=features_KND.requires_grad_(), labels_KN=labels_KN, teacher=Teacher(hidden_ND, lm_head_VD)
    )
    total, sum_K, gradients = ours(both)
    alone = [plain(first), plain(second)]
    expected = [[one[2][0] for one in alone], [one[2][1] for one in alone]] if own else [[one[2][0] for one in alone]]
    gradient_sums = [torch.cat(expected[0], dim=1), *[sum(gradients) for gradients in expected[1:]]]
    assert_close((total, sum_K, gradients), (alone[0][0] + alone[1][0], alone[0][1] + alone[1][1], gradient_sums))


@each_lm_head
@each_loss
@pytest.mark.parametrize("descending", [False, True])
def test_large_logits_do_not_overflow(descending, own, distillation):
    """Integer logits up to +-1e5, exact in fp32; the maximum of row 0 rises from block to block, or is in the first."""
    problem = example(V=64, own=own, distillation=distillation, temperature=2.0)
    features_KND = (problem.features_KND.detach() * 5).round().mul(100).requires_grad_()
    hidden_ND, lm_head_VD = problem.teacher
    lm_head_VD = (lm_head_VD * 5).round()
    lm_head_VD = lm_head_VD[(features_KND[0, 0] @ lm_head_VD.T).argsort(descending=descending)]
    lm_head = (problem.lm_head.detach() * 5).round().requires_grad_() if own else lm_head_VD
    problem = problem._replace(
        features_KND=features_KND, lm_head=lm_head, teacher=Teacher((hidden_ND * 5).round().mul(100), lm_head_VD)
    )
    with mock.patch.dict(loss_module.BLOCK_BYTES, cpu=4 * 10 * 3):
        assert_close(ours(problem, rows=10), plain(problem), gradient_atol=1e-2 if own else 1e-4)


@pytest.mark.parametrize("lm_head_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bf16_products", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "autocast", "fp32"])
@each_loss
@each_lm_head
def test_dtypes(own, distillation, precision, bf16_products, lm_head_dtype, monkeypatch):
    """Against the plain formula on the same bf16 numbers; without bf16 products only the result is rounded."""
    monkeypatch.setattr(loss_module, "cpu_has_bf16_products", lambda: bf16_products)
    monkeypatch.setitem(loss_module.BLOCK_BYTES, "cpu", 4 * 16 * 30)
    problem = example(N=20, dtype=torch.bfloat16, own=own, distillation=distillation, temperature=0.8)
    lm_head_VD = problem.teacher.lm_head_VD.to(lm_head_dtype)
    features_KND = problem.features_KND.detach().to(torch.bfloat16 if precision == "bf16" else torch.float32)
    problem = problem._replace(
        features_KND=features_KND.requires_grad_(),
        lm_head=problem.lm_head.detach().to(lm_head_dtype).requires_grad_() if own else lm_head_VD,
        teacher=Teacher(problem.teacher.hidden_ND, lm_head_VD),
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        _, sum_K, gradients = ours(problem, rows=16)
    _, plain_sum_K, plain_gradients = plain(problem)
    in_bf16 = bf16_products and precision != "fp32"
    torch.testing.assert_close(sum_K.double(), plain_sum_K, rtol=3e-3 if in_bf16 else 1e-5, atol=0)
    for leaf, gradient, expected in zip(leaves(problem), gradients, plain_gradients, strict=True):
        assert gradient.dtype == leaf.dtype
        rounded_once = 2**-8 if leaf.dtype == torch.bfloat16 else 1e-5
        rtol, atol = (0, 0.06) if in_bf16 else (rounded_once, 1e-5)
        torch.testing.assert_close(gradient.double(), expected, rtol=rtol, atol=atol)
    ignored_KND = (problem.labels_KN == IGNORE)[..., None].expand_as(features_KND)
    assert torch.equal(gradients[0] == 0, ignored_KND)


@pytest.mark.parametrize("capability", ["avx512_bf16", "amx_bf16", "avx2"])
def test_the_loss_and_the_target_agree_on_where_bf16_is_fast(capability, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    expected = torch.float32 if capability == "avx2" else torch.bfloat16
    assert matmul_dtype(torch.empty(0, dtype=torch.bfloat16)) == choose_dtype("auto", "cpu") == expected


def certain(own, distillation, student_logit, teacher_logit, dtype):
    """One head and its teacher that give the label (token n + 1 at row n) these logits, far above all others."""
    lm_head_VD = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows_ND = lm_head_VD[:20].float()
    unit_ND = rows_ND / rows_ND.square().sum(dim=1, keepdim=True)  # gives token n of row n the logit 1
    return Problem(
        features_KND=(student_logit * unit_ND[None, 1:]).to(dtype).requires_grad_(),
        lm_head=lm_head_VD[None].clone().requires_grad_() if own else lm_head_VD,
        labels_KN=torch.tensor([[*range(1, 19), IGNORE]]),
        weights_K=torch.ones(1),
        teacher=Teacher((teacher_logit * unit_ND[:19]).to(dtype), lm_head_VD),
        distillation=distillation,
        temperature=1.0,
    )


@each_loss
@each_lm_head
def test_bf16_gradient_of_a_nearly_certain_label_is_not_rounding_noise(own, distillation, monkeypatch):
    """1 - q of the label is near 1e-3, 1 - p near 1e-4: sums over all tokens, rounded, would be wrong by 100%."""
    monkeypatch.setattr(loss_module, "cpu_has_bf16_products", lambda: True)
    problem = certain(own, distillation, 15, 18, torch.bfloat16)
    total, _, gradients = ours(problem)
    plain_total, _, plain_gradients = plain(problem)
    assert plain_total < 0.1
    torch.testing.assert_close(total.double(), plain_total, rtol=0.05, atol=0)
    for gradient, expected in zip(gradients, plain_gradients, strict=True):
        error_KN, norm_KN = (gradient.double() - expected).norm(dim=2), expected.norm(dim=2)
        assert error_KN.norm() / norm_KN.norm() < 0.05
        assert (error_KN / norm_KN)[norm_KN > 0].median() < 0.05


@each_loss
@each_lm_head
def test_a_loss_below_the_rounding_of_one_is_not_lost(own, distillation):
    problem = certain(own, distillation, 60, 70, torch.float32)
    total, _, gradients = ours(problem)
    plain_total, _, plain_gradients = plain(problem)
    assert 0 < plain_total < 1e-7
    torch.testing.assert_close(total.double(), plain_total, rtol=1e-3, atol=0)
    for gradient, expected in zip(gradients, plain_gradients, strict=True):
        assert (gradient.double() - expected).norm() / expected.norm() < 1e-3


@each_loss
def test_default_dtype_does_not_matter(distillation):
    """bf16-true training runs the step with bf16 as torch's default dtype."""
    loss = MedusaLoss(distillation=distillation)
    for own in (False, True):
        problem = example(own=own)
        count_K = torch.tensor([30, 20, 10])
        torch.set_default_dtype(torch.bfloat16)
        try:
            total, sum_K = call(loss, problem, count_K)
        finally:
            torch.set_default_dtype(torch.float32)
        expected, expected_K = call(loss, problem, count_K)
        assert total.dtype == torch.float32
        assert torch.equal(total, expected)
        assert torch.equal(sum_K, expected_K)


@pytest.mark.parametrize("N", [0, 5])
@each_loss
@each_lm_head
def test_without_any_label_the_loss_is_zero_and_so_are_the_gradients(own, distillation, N):
    problem = example(N=N, ignored=1.0, own=own)
    loss = MedusaLoss(distillation=distillation)
    total, sum_K = call(loss, problem, torch.zeros(3, dtype=torch.int64))
    total.backward()
    assert total == 0
    assert sum_K.tolist() == [0, 0, 0]
    for leaf in leaves(problem):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@each_loss
@each_lm_head
def test_without_gradients_only_the_loss_is_computed(own, distillation):
    """Only the teacher's rows of a shared lm_head take part in a second product: their mean row is in the KL."""
    problem = example(own=own, distillation=distillation)
    expected = multi_head_loss(*problem)
    with Products() as with_gradient:
        multi_head_loss(*problem)
    with Products() as without:
        with torch.no_grad():
            under_no_grad = multi_head_loss(*problem)
    detached = multi_head_loss(
        *problem._replace(features_KND=problem.features_KND.detach(), lm_head=problem.lm_head.detach())
    )
    for total, sum_K in (under_no_grad, detached):
        assert not total.requires_grad
        assert torch.equal(total, expected[0])
        assert torch.equal(sum_K, expected[1])
    assert without.logits == with_gradient.logits
    assert (without.others > 0) == (distillation > 0 and not own)
    assert without.others < with_gradient.others / 2


@each_loss
@each_lm_head
def test_gradients_scale_and_accumulate(own, distillation):
    problem = example(own=own, distillation=distillation)
    problem.teacher.lm_head_VD.requires_grad_()
    once = ours(problem)[2]
    total, _ = multi_head_loss(*problem)
    (total * 3).backward(retain_graph=True)
    total.backward()
    for leaf, gradient in zip(leaves(problem), once, strict=True):
        torch.testing.assert_close(leaf.grad, 4 * gradient)
    assert problem.teacher.lm_head_VD.grad is None


@pytest.mark.parametrize("trained", ["features", "lm_head"])
def test_only_what_is_trained_gets_a_gradient(trained):
    problem = example(own=True, distillation=0.5)
    expected = dict(zip(("features", "lm_head"), ours(problem)[2], strict=True))
    leaf = {"features": problem.features_KND, "lm_head": problem.lm_head}
    (frozen,) = {"features", "lm_head"} - {trained}
    leaf[frozen].requires_grad_(False)
    multi_head_loss(*problem)[0].backward()
    assert torch.equal(leaf[trained].grad, expected[trained])
    assert leaf[frozen].grad is None


@each_loss
@each_lm_head
def test_micro_batches_add_up_to_the_step(own, distillation):
    """Divide once: totals and gradients of two unequal parts, each divided by the count of both, are the whole's."""
    loss = MedusaLoss(head_weights=[0.5, 0.25], distillation=distillation, temperature=2.0)
    problem = example(K=2, N=30, own=own, distillation=distillation, temperature=2.0)
    problem.labels_KN[0, 6] = problem.labels_KN[1, 5:7] = IGNORE
    features_KND, lm_head, labels_KN, _, teacher, *_ = problem
    count_K = (labels_KN != IGNORE).sum(dim=1)
    total, _ = loss(features_KND, lm_head, labels_KN, count_K, teacher)
    parts = [
        loss(features_KND[:, part], lm_head, labels_KN[:, part], count_K, teacher._replace(hidden_ND=teacher[0][part]))
        for part in (slice(0, 7), slice(7, None))
    ]
    parts_total = parts[0][0] + parts[1][0]
    torch.testing.assert_close(parts_total, total)
    for leaf in leaves(problem):
        gradients = [torch.autograd.grad(t, leaf, retain_graph=True)[0] for t in (parts_total, total)]
        torch.testing.assert_close(*gradients)
    means_K = plain(problem)[1] / count_K
    torch.testing.assert_close(total.double(), 0.5 * means_K[0] + 0.25 * means_K[1], rtol=1e-5, atol=1e-5)


def test_default_weights_are_those_of_medusa():
    problem = example()
    total, sum_K = call(MedusaLoss(), problem, torch.ones(3))
    torch.testing.assert_close(total, (torch.tensor([0.8, 0.64, 0.512]) * sum_K).sum())
    assert not MedusaLoss().needs_teacher
    assert MedusaLoss(distillation=0.1).needs_teacher


class Products(TorchDispatchMode):
    """Elements of all logits that were multiplied, multiplications of all other products, the largest tensor."""

    logits = others = largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        if func is torch.ops.aten.mm.out:
            self.logits += result.numel()
        elif func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.others += result.numel() * args[-1].shape[0]
        return result


@each_loss
@each_lm_head
def test_the_teacher_is_computed_once_a_position(own, distillation):
    """Not once a pair: 4 x 60 student rows of logits take 63 of the teacher, over all blocks."""
    problem = example(K=4, N=64, ignored=0, own=own, distillation=distillation)
    problem.labels_KN[:, 60:] = IGNORE
    with mock.patch.dict(loss_module.BLOCK_BYTES, cpu=4 * 10 * 30), mock.patch.dict(loss_module.LEAST_ROWS, cpu=7):
        with Products() as products:
            multi_head_loss(*problem, rows=None if own else 13)
    pairs, teacher_rows = 4 * 60, 63 if distillation else 0
    student_rows = 4 * 63 if own else pairs  # own lm_heads: a block covers the same teacher rows for every head
    assert products.logits == (student_rows + teacher_rows) * 101


@pytest.mark.parametrize(("function", "exists"), [(multi_head_loss, False), (lambda *p: full_logits(*p), True)])
@each_loss
@each_lm_head
def test_the_logits_of_a_batch_never_exist(own, distillation, function, exists):
    K, N, D, V = 2, 1024, 4, 8192
    problem = example(K, N, D, V, ignored=0, own=own, distillation=distillation)
    with Products() as products:
        function(*problem)[0].backward()
    assert (products.largest >= N * V) == exists
    assert exists or 4 * products.largest <= loss_module.BLOCK_BYTES["cpu"]


def full_logits(features_KND, lm_head, labels_KN, weights_K, *_):
    logits_KNV = features_KND @ lm_head.mT
    return (torch.nn.functional.cross_entropy(logits_KNV.flatten(0, 1), labels_KN.flatten(), ignore_index=IGNORE),)


@pytest.mark.parametrize(("pairs", "expected"), [(0, 1), (1, 1), (1024, 1024), (1025, 513), (5000, 1000)])
def test_rows_are_shared_out_evenly(pairs, expected):
    assert loss_module.block_shape(pairs, 100, "cpu") == (expected, 100)
    assert loss_module.block_shape(pairs, 10**9, "cpu")[1] == loss_module.BLOCK_BYTES["cpu"] // (4 * expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it itself
def test_a_compiled_module_runs_the_loss_as_it_is():
    problem = example(distillation=0.5)
    loss = MedusaLoss(distillation=0.5)

    class Step(torch.nn.Module):
        def forward(self, x_KND):
            total, _ = call(loss, problem._replace(features_KND=2 * x_KND), torch.tensor([20, 10, 10]))
            return 3 * total

    totals = [step(problem.features_KND) for step in (Step(), torch.compile(Step(), backend="eager"))]
    assert torch.equal(*totals)
    assert torch.equal(*[torch.autograd.grad(total, problem.features_KND)[0] for total in totals])


@pytest.mark.parametrize("label", [-1, 101, -101])
@each_lm_head
def test_labels_outside_the_vocabulary_are_refused(own, label):
    problem = example(own=own)
    problem.labels_KN[1, 2] = label
    with pytest.raises(ValueError, match=f"label {label} is outside the 101 rows"):
        multi_head_loss(*problem)


def test_wrong_shapes_and_dtypes_are_refused():
    problem = example()
    for lm_head in (problem.lm_head[:, 1:], problem.lm_head.repeat(2, 1, 1), problem.lm_head[0]):
        with pytest.raises(ValueError, match="with the same D"):
            multi_head_loss(*problem._replace(lm_head=lm_head))
    with pytest.raises(ValueError, match=r"\[K, N\] = \(3, 37\)"):
        multi_head_loss(*problem._replace(labels_KN=problem.labels_KN.T))
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        multi_head_loss(*problem._replace(features_KND=problem.features_KND.half()))


def test_a_teacher_that_does_not_fit_is_refused():
    problem = example(ignored=0, distillation=0.5)
    hidden_ND, lm_head_VD = problem.teacher
    with pytest.raises(ValueError, match=r"distillation=0.5 needs a teacher"):
        multi_head_loss(*problem._replace(teacher=None))
    with pytest.raises(ValueError, match=r"\[N, D\] = \(37, 16\), got \(36, 16\)"):
        multi_head_loss(*problem._replace(teacher=Teacher(hidden_ND[1:], lm_head_VD)))
    with pytest.raises(ValueError, match="the same tensor"):
        multi_head_loss(*problem._replace(teacher=Teacher(hidden_ND, lm_head_VD.clone())))
    with pytest.raises(ValueError, match=r"\[V, D\] = \(101, 16\).* got \(100, 16\)"):
        own = example(own=True, distillation=0.5)
        multi_head_loss(*own._replace(teacher=Teacher(hidden_ND, lm_head_VD[1:])))
    labels_KN = problem.labels_KN.clone()
    labels_KN[1, 8] = (labels_KN[1, 8] + 1) % 101
    with pytest.raises(ValueError, match="pairs .* have different labels"):
        multi_head_loss(*problem._replace(labels_KN=labels_KN))
    labels_KN = problem.labels_KN.clone()
    labels_KN[2, 34] = 0
    with pytest.raises(ValueError, match="up to row 37 of the teacher's 37"):
        multi_head_loss(*problem._replace(labels_KN=labels_KN))


@pytest.mark.parametrize(
    "setting",
    [
        {"head_weights": []},
        {"head_weights": [1.0, -0.5]},
        {"head_weights": [float("nan")]},
        {"distillation": -0.1},
        {"distillation": 1.1},
        {"temperature": 0},
        {"temperature": float("inf")},
        {"rows": 0},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(setting):
    with pytest.raises(ValueError, match=f"loss.{next(iter(setting))} must be"):
        MedusaLoss(**setting)


def test_one_weight_a_head():
    problem = example()
    with pytest.raises(ValueError, match="has 2 numbers for 3 heads"):
        call(MedusaLoss(head_weights=[1, 1]), problem, torch.ones(3))


@pytest.mark.parametrize(("name", "distillation"), [("cross_entropy", 0), ("distillation", 1), ("mix", 0.5)])
def test_configuration_names_every_argument(name, distillation):
    config = OmegaConf.load(CONF / f"{name}.yaml")
    assert config.keys() == {"_target_", *inspect.signature(MedusaLoss).parameters}
    loss = instantiate(config, head_weights=[1, 0.5, 0])
    assert (loss.distillation, loss.temperature, loss.head_weights) == (distillation, 1.0, (1, 0.5, 0))


def test_every_configuration_is_tested():
    assert {path.stem for path in CONF.iterdir()} == {"cross_entropy", "distillation", "mix"}
