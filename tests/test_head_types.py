"""What every type of heads has to do: one test for all, by the names that checkpoints carry."""

from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch.nn.functional import cross_entropy

from medusa_k25.config import compose
from medusa_k25.data.labels import IGNORE
from medusa_k25.heads import HEADS, Embeddings, Heads

D, K, M, N, V = 8, 3, 6, 5, 11


def build(kind: str, seed: int = 0, **options: Any) -> Heads:
    torch.manual_seed(seed)
    return HEADS[kind](D, K, **options)


def trained(kind: str, **options: Any) -> Heads:
    """With weights far from the start."""
    heads = build(kind, **options)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.5)
    return heads


def inputs(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, Embeddings]:
    generator = torch.Generator().manual_seed(seed)
    embeddings = Embeddings(3 * torch.randn(V, D, generator=generator))
    return torch.randn(N, D, generator=generator), torch.randint(0, V, (N, K), generator=generator), embeddings


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("own", [False, True])
def test_before_training_every_logit_is_the_targets(kind: str, own: bool) -> None:
    heads, (hidden_ND, path_NK, embed) = build(kind, own_lm_head=own, draft_vocab_size=M), inputs()
    lm_head_MD = torch.randn(M, D)
    heads.init_lm_heads(lm_head_MD)
    lm_heads_KMD = heads.with_lm_head(lm_head_MD, lambda lm_head: lm_head.expand(K, -1, -1))
    for features_ND, own_MD in zip(heads(hidden_ND, path_NK, embed), lm_heads_KMD, strict=True):
        assert torch.equal(features_ND @ own_MD.T, hidden_ND @ lm_head_MD.T)


@pytest.mark.parametrize("kind", HEADS)
def test_every_parameter_learns(kind: str) -> None:
    """From the identity on, within two steps: a matrix behind one of zeros has no gradient in the first."""
    heads, (hidden_ND, path_NK, embed) = build(kind), inputs()
    before = {name: parameter.clone() for name, parameter in heads.named_parameters()}
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
    for _ in range(2):
        heads(hidden_ND, path_NK, embed).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before and not any(torch.equal(parameter, before[name]) for name, parameter in heads.named_parameters())


@pytest.mark.parametrize("kind", HEADS)
def test_gradients_are_those_of_the_function(kind: str) -> None:
    heads, (hidden_ND, path_NK, embed) = trained(kind).double(), inputs()
    names, values = zip(*heads.named_parameters(), strict=True)
    hidden_ND = hidden_ND.double()

    def features(*parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(heads, dict(zip(names, parameters, strict=True)), (hidden_ND, path_NK, embed))

    assert torch.autograd.gradcheck(features, tuple(value.detach().requires_grad_() for value in values))


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_reads_no_token_beyond_its_guess(kind: str) -> None:
    heads, (hidden_ND, path_NK, embed) = trained(kind), inputs()
    features_KND = heads(hidden_ND, path_NK, embed)
    for column in range(K):
        other_NK = path_NK.clone()
        other_NK[:, column] = (other_NK[:, column] + 1) % V
        same_K = [torch.equal(*pair) for pair in zip(features_KND, heads(hidden_ND, other_NK, embed), strict=True)]
        reads = {"state": 0, "root": 1, "path": K}[heads.reads]
        assert same_K == [k < column + 1 or column >= reads for k in range(1, K + 1)]


@pytest.mark.parametrize("kind", HEADS)
def test_positions_do_not_see_each_other(kind: str) -> None:
    heads, (hidden_ND, path_NK, embed) = trained(kind), inputs()
    one_by_one = [heads(hidden_ND[n : n + 1], path_NK[n : n + 1], embed) for n in range(N)]
    torch.testing.assert_close(torch.cat(one_by_one, dim=1), heads(hidden_ND, path_NK, embed))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("bias", [False, True])
def test_it_says_its_own_work(kind: str, bias: bool) -> None:
    """Products as torch counts them, which adds biases apart."""
    from torch.utils.flop_counter import FlopCounterMode

    heads, (hidden_ND, path_NK, embed) = build(kind, bias=bias), inputs()
    with FlopCounterMode(display=False) as counter:
        features_KND = heads(hidden_ND, path_NK, embed)
    biases = {"residual": K * D, "residual_root": K * D, "hydra": K * D, "recurrent": K * 2 * D}[kind] * bias
    assert counter.get_total_flops() == 2 * N * (sum(heads.products) - biases)
    with FlopCounterMode(display=False) as counter:
        features_KND.sum().backward()
    assert counter.get_total_flops() == 2 * N * (sum(heads.products) - biases + heads.trained_inputs)


@pytest.mark.parametrize("kind", HEADS)
def test_its_configuration_is_its_name(kind: str) -> None:
    heads = instantiate(compose([f"heads={kind}"]).heads)(hidden_size=D, draft_vocab_size=M)
    assert type(heads) is HEADS[kind] and heads.num_heads == 4
    again = HEADS[kind](**heads.arguments)
    assert {name: value.shape for name, value in again.state_dict().items()} == {
        name: value.shape for name, value in heads.state_dict().items()
    }


@pytest.mark.parametrize("kind", HEADS)
def test_it_learns_what_it_can_see(kind: str) -> None:
    """Text in which a token decides the next one: heads that see the token before their guess know it."""
    torch.manual_seed(0)
    following_V = torch.randperm(V)
    root_N = torch.randint(0, V, (400,))
    path_NK = torch.stack([root_N, following_V[root_N], following_V[following_V[root_N]]], dim=1)
    labels_KN = following_V[path_NK].T
    hidden_ND, lm_head_VD, embed = torch.randn(400, D), torch.randn(V, D), Embeddings(torch.randn(V, D))
    heads = build(kind)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=0.02)
    for _ in range(150):
        logits_KNV = heads(hidden_ND, path_NK, embed) @ lm_head_VD.T
        optimizer.zero_grad()
        cross_entropy(logits_KNV.flatten(0, 1), labels_KN.flatten()).backward()
        optimizer.step()
    right_K = (logits_KNV.argmax(-1) == labels_KN).float().mean(1)
    assert (right_K > 0.5).all() if heads.reads != "state" else (right_K < 0.4).all(), right_K


def test_embeddings_have_a_root_mean_square_of_one() -> None:
    weight_VD = torch.randn(V, D, dtype=torch.bfloat16) * 40
    weight_VD[3] = 0
    rows = Embeddings(weight_VD)(torch.tensor([[0, 3], [IGNORE, 5]]))
    assert rows.shape == (2, 2, D) and rows.dtype == torch.float32
    torch.testing.assert_close(rows.square().mean(-1), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    torch.testing.assert_close(rows[0, 0] * weight_VD[0].float().square().mean().sqrt(), weight_VD[0].float())
    assert not list(Embeddings(weight_VD).parameters()) and not Embeddings(weight_VD).state_dict()
