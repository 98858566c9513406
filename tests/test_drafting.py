"""What a rank of the engine drafts with, held against the reference decoder's drafter and a plain walk of the tree."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_k25.heads import DraftVocabulary, ResidualHeads, Speculator
from medusa_k25.serving.decode import Drafter
from medusa_k25.serving.formats import ServedHeads
from medusa_k25.serving.sglang.drafting import EngineHeads, EngineTree, LmHeadShard, Ranks
from medusa_k25.tree import Tree

D, V, K = 8, 20, 3
ALONE = Ranks(0, 1, lambda tensor: tensor[None], lambda tensor: None)


@st.composite
def trees(draw: st.DrawFn, width: int = 4) -> Tree:
    paths: set[tuple[int, ...]] = {()}
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from(sorted(path for path in paths if len(path) < K)))
        paths.add((*parent, draw(st.integers(0, width - 1))))
    return Tree(paths)


def served_heads(tree: Tree, token_ids: list[int], own: bool, seed: int = 0) -> ServedHeads:
    torch.manual_seed(seed)
    heads = ResidualHeads(D, K, 1, True, own, len(token_ids) if own else None)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return ServedHeads(heads, DraftVocabulary(torch.tensor(token_ids), V), tree, {})


@given(trees(), st.integers(1, 3))
def test_links_lead_through_all_children_in_order(tree: Tree, num_requests: int) -> None:
    engine = EngineTree(tree, num_requests, "cpu")
    for row in range(num_requests):
        for node, expected in enumerate(tree.children):
            found, child = [], int(engine.next_token_Nn[row, node])
            while child != -1:
                found.append(child)
                child = int(engine.next_sibling_Nn[row, child])
            assert found == expected
    assert engine.index_Nn.flatten().tolist() == list(range(num_requests * tree.num_nodes))


@given(trees(), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_full_mask_shows_the_past_and_the_ancestors(tree: Tree, lengths: list[int]) -> None:
    engine, n = EngineTree(tree, 4, "cpu"), tree.num_nodes
    expected = [torch.cat([torch.ones(n, length, dtype=torch.bool), tree.mask_nn], 1).flatten() for length in lengths]
    assert torch.equal(engine.full_mask(lengths), torch.cat(expected))
    assert torch.equal(engine.tree_mask(len(lengths)).view(-1, n, n), tree.mask_nn.expand(len(lengths), n, n))


@settings(deadline=None)
@given(trees(), st.sampled_from(["shared", "draft vocabulary", "own"]), st.integers(1, 4), st.integers(0, 5))
def test_every_rank_drafts_what_one_drafter_does(tree: Tree, kind: str, size: int, seed: int) -> None:
    token_ids = list(range(V)) if kind == "shared" else [0, 1, 2, 3, 5, 8, 13, 19]
    served = served_heads(tree, token_ids, kind == "own", seed)
    lm_head_VD = torch.randn(V, D)
    hidden_ND, root_N = torch.randn(5, D), torch.randint(0, V, (5,))

    drafter = Drafter(Speculator(served.heads, served.vocabulary, served.vocabulary.rows(lm_head_VD)), tree)
    expected = [drafter.draft(hidden_D, int(root)) for hidden_D, root in zip(hidden_ND, root_N, strict=True)]
    engine_tree = EngineTree(tree, 5, "cpu")
    for choices in choices_of_ranks(served, lm_head_VD, size, hidden_ND, root_N):
        assert engine_tree.fill(root_N, choices).tolist() == expected


def choices_of_ranks(
    served: ServedHeads, lm_head_VD: Tensor, size: int, hidden_ND: Tensor, root_N: Tensor
) -> list[Tensor]:
    """All ranks in one process: a collective first takes every rank's part, then gives every rank the whole."""
    bounds = [rank * V // size for rank in range(size + 1)]
    shards = [LmHeadShard(lm_head_VD[first:stop].clone(), first) for first, stop in pairwise(bounds)]

    def run(rank: int, gathered: Tensor | None, summed: Tensor | None) -> tuple:
        seen: dict[str, Tensor] = {}

        def all_gather(tensor: Tensor) -> Tensor:
            seen["part"] = tensor.clone()
            return torch.stack([tensor] * size) if gathered is None else gathered

        def all_reduce(tensor: Tensor) -> None:
            seen["rows"] = tensor.clone()
            if summed is not None:
                tensor.copy_(summed)

        ranks = Ranks(rank, size, all_gather, all_reduce)
        heads = EngineHeads(copy.deepcopy(served), served.tree.width, shards[rank], ranks, torch.float32, "cpu")
        return heads.choices(hidden_ND, root_N), seen

    rows = [seen["rows"] for _, seen in (run(rank, None, None) for rank in range(size)) if "rows" in seen]
    summed = torch.stack(rows).sum(0) if rows else None
    parts = [seen["part"] for _, seen in (run(rank, None, summed) for rank in range(size)) if "part" in seen]
    gathered = torch.stack(parts) if parts else None
    return [run(rank, gathered, summed)[0] for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_of_equal_logits_the_lower_id_comes_first_on_any_number_of_ranks(size: int) -> None:
    served = served_heads(Tree([[0], [1], [2]]), list(range(V)), own=False)
    lm_head_VD = torch.zeros(V, D)
    lm_head_VD[[15, 2, 7]] = torch.ones(D)
    torch.nn.init.zeros_(served.heads.get_parameter("heads.0.0.linear.weight"))
    torch.nn.init.ones_(served.heads.get_parameter("heads.0.0.linear.bias"))
    for choices in choices_of_ranks(served, lm_head_VD, size, torch.ones(1, D), torch.tensor([0])):
        assert choices[0, 0].tolist() == [2, 7, 15]


def test_a_tree_of_the_root_alone_drafts_nothing() -> None:
    served = served_heads(Tree([]), list(range(V)), own=False)
    heads = EngineHeads(served, served.tree.width, LmHeadShard(torch.randn(V, D), 0), ALONE, torch.float32, "cpu")
    choices = heads.choices(torch.randn(2, D), torch.tensor([3, 4]))
    assert EngineTree(served.tree, 2, "cpu").fill(torch.tensor([3, 4]), choices).tolist() == [[3], [4]]


def test_shared_rows_are_not_copied() -> None:
    served = served_heads(Tree([[0]]), list(range(V)), own=False)
    lm_head_VD = torch.randn(V, D)
    heads = EngineHeads(served, served.tree.width, LmHeadShard(lm_head_VD, 0), ALONE, torch.float32, "cpu")
    assert heads.lm_head.data_ptr() == lm_head_VD.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_take_the_engines_dtype(dtype: torch.dtype) -> None:
    served = served_heads(Tree([[0], [1]]), [1, 2, 3, 4], own=True)
    heads = EngineHeads(served, served.tree.width, LmHeadShard(torch.randn(V, D), 0), ALONE, dtype, "cpu")
    assert {parameter.dtype for parameter in heads.heads.parameters()} == {heads.lm_head.dtype} == {dtype}
    assert heads.choices(torch.randn(1, D), torch.tensor([0])).shape == (1, K, 2)
