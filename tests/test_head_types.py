"""What every type of heads has to do: one test for all, by the names that checkpoints carry."""

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from medusa_k25.checkpoint import write_heads
from medusa_k25.config import compose
from medusa_k25.data.labels import IGNORE
from medusa_k25.heads import HEADS, DraftVocabulary, Embeddings, Heads, ResidualRootHeads
from medusa_k25.heads.base import zeroed
from medusa_k25.serving.card import model_card
from medusa_k25.serving.formats import MAX_PARTS, export_heads
from medusa_k25.tree import Tree
from medusa_k25.warm_start import warm_start

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
        assert all(same_K[:column]) and same_K[column] == (column >= reads)
        assert all(same_K) == (column >= reads)


@pytest.mark.parametrize("kind", HEADS)
def test_positions_do_not_see_each_other(kind: str) -> None:
    heads, (hidden_ND, path_NK, embed) = trained(kind), inputs()
    one_by_one = [heads(hidden_ND[n : n + 1], path_NK[n : n + 1], embed) for n in range(N)]
    torch.testing.assert_close(torch.cat(one_by_one, dim=1), heads(hidden_ND, path_NK, embed))


@pytest.mark.parametrize("kind", HEADS)
def test_it_says_its_own_work(kind: str) -> None:
    """Products as torch counts them; biases are added, not multiplied, so heads that can do without have none here."""
    from torch.utils.flop_counter import FlopCounterMode

    options = {"bias": False} if "bias" in inspect.signature(HEADS[kind]).parameters else {}
    heads, (hidden_ND, path_NK, embed) = build(kind, **options), inputs()
    with FlopCounterMode(display=False) as counter:
        features_KND = heads(hidden_ND, path_NK, embed)
    assert counter.get_total_flops() == 2 * N * sum(heads.products)
    with FlopCounterMode(display=False) as counter:
        features_KND.sum().backward()
    assert counter.get_total_flops() == 2 * N * (sum(heads.products) + heads.trained_inputs)


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


TREE = Tree([[0], [1], [0, 0]])
VOCABULARY = DraftVocabulary(torch.tensor([1, 3, 4, 5, 7, 9]), V)
PROVENANCE: dict[str, Any] = {"target": {"name": "toy", "revision": "main"}, "step": 7}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_export_reads_back_bit_for_bit(tmp_path: Path, kind: str, own: bool, dtype: torch.dtype) -> None:
    heads = trained(kind, own_lm_head=own, draft_vocab_size=M, bias=False)
    served = export_heads(tmp_path, heads, VOCABULARY, TREE, dtype, PROVENANCE)
    assert served.tree == TREE and torch.equal(served.vocabulary.token_ids_M, VOCABULARY.token_ids_M)
    assert type(served.heads) is HEADS[kind]
    expected, found = heads.state_dict(), served.heads.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor.to(dtype), found[name]) for name, tensor in expected.items())
    written = {name: value for name, value in heads.arguments.items() if own or name != "draft_vocab_size"}
    assert served.heads.arguments | written == served.heads.arguments


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("format", ["vllm", "medusa"])
def test_formats_of_others_hold_residual_heads_and_say_so(tmp_path: Path, kind: str, format: str) -> None:
    def export() -> None:
        export_heads(
            tmp_path / "x", trained(kind), VOCABULARY, TREE, torch.float32, {}, format, torch.randn(V, D), "toy"
        )

    if kind == "residual":
        export()
        return
    message = f"format={format} holds residual heads alone, these are {kind} heads.* format=sglang, which holds every"
    with pytest.raises(ValueError, match=message):
        export()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", HEADS)
def test_a_card_says_what_it_is(tmp_path: Path, kind: str) -> None:
    served = export_heads(tmp_path, trained(kind, bias=False), VOCABULARY, TREE, torch.float32, {})
    target = {"name": "toy", "revision": "main", "quantisation": "none", "fingerprints": {"lm_head": "abc"}}
    card = model_card("sglang", served, None, target, "none", [], [], nested=False, terms=[], heads_license=None)
    assert f"| heads | 3 of type {kind}, " in card and "bias false" in card
    reads = {"state": "state, the target", "root": "state and the token", "path": "state, the token that"}
    assert reads[served.heads.reads] in card


def write_checkpoint(folder: Path, heads: Heads) -> None:
    folder.mkdir()
    write_heads(folder, heads.state_dict(), heads, VOCABULARY, PROVENANCE)


def write_export(folder: Path, heads: Heads) -> None:
    export_heads(folder, heads, VOCABULARY, TREE, torch.float32, PROVENANCE)


@pytest.mark.parametrize("write", [write_checkpoint, write_export])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("own", [False, True])
def test_a_warm_start_takes_heads_of_the_same_type_whole(
    tmp_path: Path, write: Callable[[Path, Heads], None], kind: str, own: bool
) -> None:
    source = trained(kind, own_lm_head=own, draft_vocab_size=M)
    write(tmp_path / "source", source)
    heads = build(kind, seed=3, own_lm_head=own, draft_vocab_size=M)
    lm_head_MD = torch.randn(M, D)
    heads.init_lm_heads(lm_head_MD)
    said = warm_start(heads, VOCABULARY, tmp_path / "source", 1.0)
    assert "toy (main)" in said and "6 of 6 draft tokens" in said
    found = heads.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in source.state_dict().items())

    # rows of another draft vocabulary are matched by token: of 3, 4, 5, 6, 7 and 8 it lacks 6 and 8
    other = build(kind, seed=3, own_lm_head=own, draft_vocab_size=M)
    other.init_lm_heads(lm_head_MD)
    warm_start(other, DraftVocabulary(torch.arange(3, 9), V), tmp_path / "source", 0.6)
    if own:
        assert source.lm_heads is not None and other.lm_heads is not None
        old, new = source.lm_heads.weight[1], other.lm_heads.weight[1]
        assert torch.equal(new, torch.stack([*old[1:4], lm_head_MD[3], old[4], lm_head_MD[5]]))


@pytest.mark.parametrize("kind", HEADS)
def test_a_warm_start_from_another_type_says_what_fits(tmp_path: Path, kind: str) -> None:
    heads = trained(kind)
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    for other in HEADS.keys() - {kind}:
        write_export(tmp_path / other, trained(other))
        message = f"it holds {other} heads, these are {kind}; choose {kind} heads, or train with heads={other}"
        with pytest.raises(ValueError, match=message):
            warm_start(heads, VOCABULARY, tmp_path / other, 0.1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in heads.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "options", "fault"),
    [
        ("hydra", {"bias": False}, "'heads.0.bias' is not there, expected"),
        ("recurrent", {"inner_size": 5}, "'inner.weight' is .5, 16., expected .16, 16."),
        ("residual_root", {"num_heads": 2}, "'heads.2.weight' is not there"),
    ],
)
def test_a_warm_start_from_other_sizes_says_which(tmp_path: Path, kind: str, options: dict, fault: str) -> None:
    write_export(tmp_path / "source", HEADS[kind](D, **({"num_heads": K} | options)))
    with pytest.raises(ValueError, match=f"{kind} heads are copied whole, .*{fault}.*choose a source with"):
        warm_start(trained(kind), VOCABULARY, tmp_path / "source", 0.1)


@pytest.mark.parametrize("kind", HEADS)
def test_a_file_can_hold_what_its_constructor_takes(kind: str) -> None:
    """What `formats.outline_of_config` can read: a type with other arguments would need another file."""
    for name, parameter in inspect.signature(HEADS[kind]).parameters.items():
        assert parameter.annotation in (bool, int, float, bool | None, int | None, float | None), name
        value = getattr(trained(kind), name)
        assert not name.startswith("num_") or 1 <= value <= MAX_PARTS


def test_heads_of_a_new_type_need_no_new_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NewHeads(ResidualRootHeads):
        """With a tensor of three dimensions and arguments that no other type has."""

        def __init__(
            self,
            hidden_size: int,
            num_heads: int = 4,
            num_parts: int = 2,
            dropout: float = 0.0,
            part_size: int | None = None,
            own_lm_head: bool = False,
            draft_vocab_size: int | None = None,
        ):
            super().__init__(hidden_size, num_heads, True, own_lm_head, draft_vocab_size)
            self.num_parts, self.dropout, self.part_size = num_parts, dropout, part_size
            self.parts = torch.nn.Parameter(torch.randn(num_parts, part_size or 3, hidden_size))
            self.register_buffer("scale", torch.tensor(2.0))

    monkeypatch.setitem(HEADS, "new", NewHeads)
    heads = NewHeads(D, K, num_parts=5, dropout=0.25)
    served = export_heads(tmp_path, heads, VOCABULARY, TREE, torch.float32, PROVENANCE)
    assert served.heads.arguments == heads.arguments | {"draft_vocab_size": M}
    assert all(torch.equal(tensor, served.heads.state_dict()[name]) for name, tensor in heads.state_dict().items())
    assert "parts 5, dropout 0.25, part_size null" in model_card(
        "sglang",
        served,
        None,
        {**PROVENANCE["target"], "quantisation": "", "fingerprints": {"lm_head": ""}},
        "",
        [],
        [],
        False,
        [],
        None,
    )
    fresh = NewHeads(D, K, num_parts=5)
    assert "new heads copied" in warm_start(fresh, VOCABULARY, tmp_path, 1.0)
    assert torch.equal(fresh.parts, heads.parts)


def test_the_page_on_adding_a_type_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its example passes the tests above."""
    page = (Path(__file__).parents[1] / "notes" / "head_types.md").read_text()
    code, _, text = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.DOTALL)
    names = {"Heads": Heads, "zeroed": zeroed, "silu": silu, "torch": torch, "nn": nn, "Tensor": Tensor}
    found: dict[str, Any] = {}
    exec(code, names | {"Sequence": Sequence}, found)
    kind: type[Heads] = found["LastTokenHeads"]
    monkeypatch.setitem(HEADS, "last_token", kind)
    test_before_training_every_logit_is_the_targets("last_token", own=False)
    test_before_training_every_logit_is_the_targets("last_token", own=True)
    test_every_parameter_learns("last_token")
    test_gradients_are_those_of_the_function("last_token")
    test_a_head_reads_no_token_beyond_its_guess("last_token")
    test_it_learns_what_it_can_see("last_token")
    test_it_says_its_own_work("last_token")
    given = yaml.safe_load(text)
    assert given.pop("_target_") == "medusa_k25.heads.LastTokenHeads" and given.pop("_partial_")
    assert isinstance(kind(D, draft_vocab_size=M, **given), Heads)
