from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa_k25 import loss as loss_module
from medusa_k25.data.labels import IGNORE
from medusa_k25.loss import MedusaLoss, multi_head_cross_entropy


def plain(features_KND, lm_head_VD, labels_KN, weights_K):
    """The formula of the docstring, with all logits in memory."""
    logits_KNV = features_KND @ lm_head_VD.to(features_KND.dtype).T
    sum_K = torch.stack(
        [
            F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE, reduction="sum")
            for logits_NV, labels_N in zip(logits_KNV, labels_KN, strict=True)
        ]
    )
    return (weights_K * sum_K).sum(), sum_K.detach()


def example(K=3, N=37, D=16, V=101, ignored=0.3, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    features_KND = torch.randn(K, N, D, generator=g).to(dtype).requires_grad_()
    lm_head_VD = torch.randn(V, D, generator=g).to(dtype)
    labels_KN = torch.randint(0, V, (K, N), generator=g)
    labels_KN[torch.rand(K, N, generator=g) < ignored] = IGNORE
    return features_KND, lm_head_VD, labels_KN, 0.8 ** torch.arange(1.0, K + 1)


def gradient(total, features_KND):
    return torch.autograd.grad(total, features_KND)[0]


def assert_same(arguments, rows=None):
    features_KND, lm_head_VD, labels_KN, weights_K = arguments
    total, sum_K = multi_head_cross_entropy(features_KND, lm_head_VD, labels_KN, weights_K, rows)
    plain_total, plain_sum_K = plain(features_KND, lm_head_VD, labels_KN, weights_K)
    assert sum_K.dtype == total.dtype == torch.float32
    assert not sum_K.requires_grad
    torch.testing.assert_close(sum_K, plain_sum_K, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(total, plain_total, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        gradient(total, features_KND),
        gradient(plain_total, features_KND),
        rtol=1e-5,
        atol=2e-6 * lm_head_VD.abs().max().item(),
    )


@settings(deadline=None, max_examples=150)
@given(
    K=st.integers(1, 5),
    N=st.integers(0, 20),
    D=st.integers(1, 9),
    V=st.integers(1, 40),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    rows=st.one_of(st.none(), st.integers(1, 30)),
    block_bytes=st.integers(1, 4000),
    seed=st.integers(0, 9),
)
def test_equals_the_plain_formula_for_any_shape_and_blocks(K, N, D, V, ignored, rows, block_bytes, seed):
    with mock.patch.dict(loss_module.BLOCK_BYTES, cpu=block_bytes):
        assert_same(example(K, N, D, V, ignored, seed=seed), rows)


@pytest.mark.parametrize("descending", [False, True])
def test_large_logits_do_not_overflow(descending):
    """Integer logits up to +-1e5, exact in fp32; the maximum of row 0 rises from block to block, or is in the first."""
    features_KND, lm_head_VD, labels_KN, weights_K = example(V=64)
    features_KND = (features_KND.detach() * 5).round().mul(100).requires_grad_()
    lm_head_VD = (lm_head_VD * 5).round()
    lm_head_VD = lm_head_VD[(features_KND[0, 0] @ lm_head_VD.T).argsort(descending=descending)]
    with mock.patch.dict(loss_module.BLOCK_BYTES, cpu=4 * 10 * 3):
        assert_same((features_KND, lm_head_VD, labels_KN, weights_K), rows=10)


@pytest.mark.parametrize("lm_head_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bf16_products", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "autocast", "fp32"])
def test_dtypes(precision, bf16_products, lm_head_dtype, monkeypatch):
    """Against the plain formula in fp32 on the same bf16 numbers; without bf16 products only the result is rounded."""
    monkeypatch.setattr(loss_module, "cpu_has_bf16_products", lambda: bf16_products)
    monkeypatch.setitem(loss_module.BLOCK_BYTES, "cpu", 4 * 16 * 30)
    features_KND, lm_head_VD, labels_KN, weights_K = example(dtype=torch.bfloat16)
    lm_head_VD = lm_head_VD.to(lm_head_dtype)
    exact_KND = features_KND.detach().float().requires_grad_()
    if precision != "bf16":
        features_KND = exact_KND
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        total, sum_K = multi_head_cross_entropy(features_KND, lm_head_VD, labels_KN, weights_K, rows=16)
    plain_total, plain_sum_K = plain(exact_KND, lm_head_VD, labels_KN, weights_K)
    in_bf16 = bf16_products and precision != "fp32"
    torch.testing.assert_close(sum_K, plain_sum_K, rtol=2e-3 if in_bf16 else 1e-5, atol=0)
    gradient_KND = gradient(total, features_KND)
    assert gradient_KND.dtype == features_KND.dtype
    difference_KND = gradient_KND.float() - gradient(plain_total, exact_KND)
    limit = 0.03 if in_bf16 else 0.01 if precision == "bf16" else 1e-5
    assert difference_KND.abs().max() < limit
    assert torch.equal(gradient_KND == 0, (labels_KN == IGNORE)[..., None].expand_as(gradient_KND))


def test_bf16_gradient_of_a_nearly_certain_label_is_not_rounding_noise(monkeypatch):
    """1 - p is near 1e-3: rounding (sum_j p_j W_j) before subtracting W_label would leave errors of 100%."""
    monkeypatch.setattr(loss_module, "cpu_has_bf16_products", lambda: True)
    lm_head_VD = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    own_KND = lm_head_VD[None, :20].float()
    features_KND = (15 * own_KND / own_KND.square().sum(dim=2, keepdim=True)).bfloat16().requires_grad_()  # logit 15
    exact_KND = features_KND.detach().float().requires_grad_()
    labels_KN = torch.arange(20)[None]
    total, _ = multi_head_cross_entropy(features_KND, lm_head_VD, labels_KN, torch.ones(1))
    expected_KND = gradient(plain(exact_KND, lm_head_VD, labels_KN, torch.ones(1))[0], exact_KND)
    error_KN = (gradient(total, features_KND).float() - expected_KND).norm(dim=2) / expected_KND.norm(dim=2)
    assert error_KN.max() < 0.05


def test_default_dtype_does_not_matter():
    """bf16-true training runs the step with bf16 as torch's default dtype."""
    features_KND, lm_head_VD, labels_KN, _ = example()
    count_K = torch.tensor([30, 20, 10])
    torch.set_default_dtype(torch.bfloat16)
    try:
        total, sum_K = MedusaLoss()(features_KND, lm_head_VD, labels_KN, count_K)
    finally:
        torch.set_default_dtype(torch.float32)
    expected, expected_K = MedusaLoss()(features_KND, lm_head_VD, labels_KN, count_K)
    assert total.dtype == torch.float32
    assert torch.equal(total, expected)
    assert torch.equal(sum_K, expected_K)


@pytest.mark.parametrize("N", [0, 5])
def test_without_any_label_the_loss_is_zero_and_so_are_the_gradients(N):
    features_KND, lm_head_VD, labels_KN, _ = example(N=N, ignored=1.0)
    total, sum_K = MedusaLoss()(features_KND, lm_head_VD, labels_KN, torch.zeros(3, dtype=torch.int64))
    total.backward()
    assert total == 0
    assert sum_K.tolist() == [0, 0, 0]
    assert torch.equal(features_KND.grad, torch.zeros_like(features_KND))


def test_ignored_positions_may_hold_anything():
    features_KND, lm_head_VD, labels_KN, weights_K = example()
    broken_KND = features_KND.detach().masked_fill((labels_KN == IGNORE)[..., None], torch.nan).requires_grad_()
    total, _ = multi_head_cross_entropy(broken_KND, lm_head_VD, labels_KN, weights_K)
    expected, _ = multi_head_cross_entropy(features_KND, lm_head_VD, labels_KN, weights_K)
    assert torch.equal(gradient(total, broken_KND), gradient(expected, features_KND))


def test_without_gradients_only_the_loss_is_computed():
    arguments = example()
    expected = multi_head_cross_entropy(*arguments)
    with mock.patch.object(torch.Tensor, "addmm_", side_effect=AssertionError("a gradient was formed")):
        with torch.no_grad():
            under_no_grad = multi_head_cross_entropy(*arguments)
        detached = multi_head_cross_entropy(arguments[0].detach(), arguments[1].requires_grad_(), *arguments[2:])
        with pytest.raises(AssertionError, match="a gradient was formed"):
            multi_head_cross_entropy(*arguments)
    for total, sum_K in (under_no_grad, detached):
        assert not total.requires_grad
        assert torch.equal(total, expected[0])
        assert torch.equal(sum_K, expected[1])


def test_gradients_scale_accumulate_and_leave_lm_head_alone():
    features_KND, lm_head_VD, labels_KN, weights_K = example()
    lm_head_VD.requires_grad_()
    once_KND = gradient(multi_head_cross_entropy(features_KND, lm_head_VD, labels_KN, weights_K)[0], features_KND)
    total, _ = multi_head_cross_entropy(features_KND, lm_head_VD, labels_KN, weights_K)
    (total * 3).backward(retain_graph=True)
    total.backward()
    torch.testing.assert_close(features_KND.grad, 4 * once_KND)
    assert lm_head_VD.grad is None


def test_micro_batches_add_up_to_the_step():
    """Divide once: totals and gradients of two unequal parts, each divided by the count of both, are the whole's."""
    loss = MedusaLoss(head_decay=0.5)
    features_KND, lm_head_VD, labels_KN, _ = example(K=2, N=30)
    count_K = (labels_KN != IGNORE).sum(dim=1)
    total, _ = loss(features_KND, lm_head_VD, labels_KN, count_K)
    parts = [
        loss(features_KND[:, part], lm_head_VD, labels_KN[:, part], count_K)[0]
        for part in (slice(0, 7), slice(7, None))
    ]
    torch.testing.assert_close(sum(parts), total)
    torch.testing.assert_close(gradient(sum(parts), features_KND), gradient(total, features_KND))
    means = [F.cross_entropy(features_KND[k] @ lm_head_VD.T, labels_KN[k], ignore_index=IGNORE) for k in range(2)]
    torch.testing.assert_close(total, 0.5 * means[0] + 0.25 * means[1])


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize(("function", "exists"), [(plain, True), (multi_head_cross_entropy, False)])
def test_the_logits_of_a_batch_never_exist(function, exists):
    K, N, D, V = 2, 1024, 4, 8192
    arguments = example(K, N, D, V, ignored=0)
    with LargestTensor() as mode:
        function(*arguments)[0].backward()
    assert (mode.largest >= N * V) == exists
    assert exists or 4 * mode.largest <= loss_module.BLOCK_BYTES["cpu"]


@pytest.mark.parametrize(("pairs", "expected"), [(0, 1), (1, 1), (1024, 1024), (1025, 513), (5000, 1000)])
def test_rows_are_shared_out_evenly(pairs, expected):
    assert loss_module.block_shape(pairs, 100, "cpu") == (expected, 100)
    assert loss_module.block_shape(pairs, 10**9, "cpu")[1] == loss_module.BLOCK_BYTES["cpu"] // (4 * expected)


@pytest.mark.parametrize("label", [-1, 101, -101])
def test_labels_outside_the_vocabulary_are_refused(label):
    features_KND, lm_head_VD, labels_KN, weights_K = example()
    labels_KN[1, 2] = label
    with pytest.raises(ValueError, match=f"label {label} is outside the 101 rows"):
        multi_head_cross_entropy(features_KND, lm_head_VD, labels_KN, weights_K)


def test_wrong_shapes_dtypes_and_settings_are_refused():
    features_KND, lm_head_VD, labels_KN, weights_K = example()
    with pytest.raises(ValueError, match="with the same D"):
        multi_head_cross_entropy(features_KND, lm_head_VD[:, 1:], labels_KN, weights_K)
    with pytest.raises(ValueError, match=r"\[K, N\] = \(3, 37\)"):
        multi_head_cross_entropy(features_KND, lm_head_VD, labels_KN.T, weights_K)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        multi_head_cross_entropy(features_KND.half(), lm_head_VD, labels_KN, weights_K)
    with pytest.raises(ValueError, match="head_decay"):
        MedusaLoss(head_decay=0)
    with pytest.raises(ValueError, match="rows"):
        MedusaLoss(rows=0)
