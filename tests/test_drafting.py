"""What a rank of the engine drafts with, held against the reference decoder's drafter and a plain walk of the tree."""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_k25.heads import HEADS, DraftVocabulary, Embeddings, Speculator
from medusa_k25.serving.decode import Drafter
from medusa_k25.serving.formats import ServedHeads
from medusa_k25.serving.sglang.drafting import Drafts, EngineHeads, EngineTree, Part, Ranks, Shard
from medusa_k25.tree import Tree

D, V, K = 8, 20, 3
ALONE = Ranks(0, 1, lambda tensor: tensor[None], lambda tensor: None)
FEW = [0, 1, 2, 3, 5, 8, 13, 19]


class Group:
    """Made-up ranks, a thread each, and their collectives, which are counted."""

    def __init__(self, size: int):
        self.size, self.barrier, self.collectives = size, Barrier(size, timeout=20), 0
        self.parts = [torch.empty(0)] * size

    def ranks(self, rank: int) -> Ranks:
        def exchanged(tensor: Tensor) -> Tensor:
            self.parts[rank] = tensor.clone()
            self.collectives += rank == 0
            self.barrier.wait()
            together = torch.stack(self.parts)
            self.barrier.wait()
            return together

        def all_reduce(tensor: Tensor) -> None:
            tensor.copy_(exchanged(tensor).sum(0))

        return Ranks(rank, self.size, exchanged, all_reduce)


def drafts_of_ranks(
    served: ServedHeads,
    lm_head_VD: Tensor,
    embeddings_VD: Tensor,
    hiddens_ND: Sequence[Tensor],
    root_N: Tensor,
    bounds: Sequence[int] | None = None,
) -> tuple[list[Drafts], int]:
    """(what each rank drafts, collectives of that round). hiddens_ND: a rank's own each; bounds: of the ranks' rows."""
    size = len(hiddens_ND)
    bounds = bounds or [rank * V // size for rank in range(size + 1)]
    group = Group(size)

    def shard(matrix_VD: Tensor, rank: int) -> Shard:
        return Shard(matrix_VD[bounds[rank] : bounds[rank + 1]].clone(), bounds[rank])

    def start(rank: int) -> EngineHeads:
        embeddings = None if served.heads.reads == "state" else shard(embeddings_VD, rank)
        own = copy.deepcopy(served)
        return EngineHeads(
            own, served.tree, shard(lm_head_VD, rank), embeddings, group.ranks(rank), torch.float32, "cpu"
        )

    with ThreadPoolExecutor(size) as pool:
        started = list(pool.map(start, range(size)))
        before = group.collectives
        drafts = list(pool.map(lambda rank: started[rank].draft(hiddens_ND[rank], root_N, True), range(size)))
    return drafts, group.collectives - before


@st.composite
def trees(draw: st.DrawFn, width: int = 4) -> Tree:
    paths: set[tuple[int, ...]] = {()}
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from(sorted(path for path in paths if len(path) < K)))
        paths.add((*parent, draw(st.integers(0, width - 1))))
    return Tree(paths)


def served_heads(kind: str, tree: Tree, token_ids: list[int], own: bool = False, seed: int = 0) -> ServedHeads:
    torch.manual_seed(seed)
    heads = HEADS[kind](hidden_size=D, num_heads=K, own_lm_head=own, draft_vocab_size=len(token_ids))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return ServedHeads(heads, DraftVocabulary(torch.tensor(token_ids), V), tree, {})


def walked(speculator: Speculator, tree: Tree, hidden_D: Tensor, root: int) -> tuple[list[int], Tensor]:
    """(tokens, log probabilities [n]) in the plainest way: every node's path is read anew, with its own forward pass of
    all heads."""
    heads, vocabulary = speculator.heads, speculator.vocabulary
    lm_heads_KMD = heads.with_lm_head(speculator.lm_head_MD, lambda lm_head: lm_head.expand(K, -1, -1))
    tokens: dict[tuple[int, ...], int] = {(): root}
    log_p = [torch.zeros(())]
    for path in tree.paths:
        known = [tokens[path[:depth]] for depth in range(len(path))]
        path_1K = torch.tensor([known + [0] * (K - len(known))])
        logits_M = (speculator.features(hidden_D[None], path_1K)[len(path) - 1] @ lm_heads_KMD[len(path) - 1].T)[0]
        best_M = logits_M.sort(descending=True, stable=True).indices
        tokens[path] = int(vocabulary.to_target(best_M[path[-1]]))
        log_p.append(logits_M.log_softmax(0)[best_M[path[-1]]])
    return list(tokens.values()), torch.stack(log_p)


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


@given(trees(), st.data())
def test_a_part_is_the_tree_without_the_other_nodes(tree: Tree, data: st.DataObject) -> None:
    ends = data.draw(st.sets(st.integers(0, tree.num_nodes - 1)))
    kept = sorted({node for end in ends for node in tree.mask_nn[end].nonzero().flatten().tolist()} - {0})
    part = Part(tree, kept[::-1], 2, "cpu")
    nodes = [0, *kept]
    assert part.nodes_s.tolist() == nodes and part.num_nodes == len(nodes)
    assert torch.equal(part.tree.mask_nn, tree.mask_nn[nodes][:, nodes])
    assert torch.equal(part.tree.depths_n, tree.depths_n[nodes])
    assert part.depths == [
        sum(int(tree.depths_n[node]) == depth for node in kept) for depth in range(1, len(part.depths) + 1)
    ]
    assert sum(part.depths) == len(kept)


@given(trees(), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_full_mask_shows_the_past_and_the_ancestors(tree: Tree, lengths: list[int]) -> None:
    engine, n = EngineTree(tree, 4, "cpu"), tree.num_nodes
    expected = [torch.cat([torch.ones(n, length, dtype=torch.bool), tree.mask_nn], 1).flatten() for length in lengths]
    assert torch.equal(engine.full_mask(lengths), torch.cat(expected))
    assert torch.equal(engine.tree_mask(len(lengths)).view(-1, n, n), tree.mask_nn.expand(len(lengths), n, n))


@pytest.mark.parametrize("kind", HEADS)
@settings(deadline=None, max_examples=40)
@given(trees(), st.sampled_from(["shared", "draft vocabulary", "own"]), st.integers(1, 4), st.integers(0, 5))
def test_every_rank_drafts_what_one_drafter_does(kind: str, tree: Tree, lm_head: str, size: int, seed: int) -> None:
    served = served_heads(kind, tree, list(range(V)) if lm_head == "shared" else FEW, lm_head == "own", seed)
    lm_head_VD, embeddings_VD = torch.randn(V, D), 3 * torch.randn(V, D)
    hidden_ND, root_N = torch.randn(5, D), torch.randint(0, V, (5,))

    embed = Embeddings(embeddings_VD)
    speculator = Speculator(served.heads, served.vocabulary, served.vocabulary.rows(lm_head_VD), embed)
    drafter = Drafter(speculator, tree)
    expected = [drafter.draft(hidden_D, int(root)) for hidden_D, root in zip(hidden_ND, root_N, strict=True)]
    tokens, log_p_n = walked(speculator, tree, hidden_ND[0], int(root_N[0]))
    assert expected[0] == tokens
    drafts, collectives = drafts_of_ranks(served, lm_head_VD, embeddings_VD, [hidden_ND] * size, root_N)
    assert [each.tokens_Nn.tolist() for each in drafts] == [expected] * size
    for each in drafts:  # the ranks choose by these: they are the same to the bit
        assert each.log_p_Nn is not None and drafts[0].log_p_Nn is not None
        assert torch.equal(each.log_p_Nn, drafts[0].log_p_Nn)
        torch.testing.assert_close(each.log_p_Nn[0], log_p_n.float(), rtol=1e-4, atol=1e-3)  # of logits of 100
    assert collectives == (size > 1 and tree.num_nodes > 1)  # none is needed alone, and one is all


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_of_equal_logits_the_lower_id_comes_first_on_any_number_of_ranks(kind: str, size: int) -> None:
    served = served_heads(kind, Tree([[0], [1], [2], [0, 0], [0, 1], [0, 2]]), list(range(V)))
    for parameter in served.heads.parameters():
        torch.nn.init.zeros_(parameter)  # the features are the state
    lm_head_VD = torch.zeros(V, D)
    lm_head_VD[[15, 2, 7]] = torch.ones(D)
    hidden_ND, root_N = torch.ones(1, D), torch.tensor([0])
    for each in drafts_of_ranks(served, lm_head_VD, torch.randn(V, D), [hidden_ND] * size, root_N)[0]:
        assert each.tokens_Nn.tolist() == [[0, 2, 7, 15, 2, 7, 15]]


@pytest.mark.parametrize("kind", HEADS)
def test_ranks_whose_states_differ_in_the_last_bits_draft_alike(kind: str) -> None:
    """Two tokens are tied but for those bits: each rank's own state would choose another one of them."""
    tree = Tree([[0], [1], [0, 0], [1, 0]])
    served = served_heads(kind, tree, list(range(V)))
    for parameter in served.heads.parameters():
        torch.nn.init.zeros_(parameter)
    lm_head_VD = torch.zeros(V, D)
    lm_head_VD[4, 0] = lm_head_VD[11, 1] = 1
    hiddens_ND = [torch.ones(1, D), torch.ones(1, D)]
    hiddens_ND[0][0, 0] += 1e-6
    hiddens_ND[1][0, 1] += 1e-6
    first, second = drafts_of_ranks(served, lm_head_VD, torch.randn(V, D), hiddens_ND, torch.tensor([3]))[0]
    assert torch.equal(first.tokens_Nn, second.tokens_Nn)


@pytest.mark.parametrize("kind", HEADS)
def test_a_rank_may_hold_no_token_at_all(kind: str) -> None:
    """Engines pad a small vocabulary: the first ranks then hold all of it."""
    served = served_heads(kind, Tree([[0], [0, 0], [1]]), FEW)
    lm_head_VD, embeddings_VD = torch.randn(V, D), torch.randn(V, D)
    hidden_ND, root_N = torch.randn(4, D), torch.randint(0, V, (4,))
    (expected,), _ = drafts_of_ranks(served, lm_head_VD, embeddings_VD, [hidden_ND], root_N)
    drafts, _ = drafts_of_ranks(served, lm_head_VD, embeddings_VD, [hidden_ND] * 3, root_N, [0, 16, V, V])
    assert all(torch.equal(each.tokens_Nn, expected.tokens_Nn) for each in drafts)


@pytest.mark.parametrize("kind", HEADS)
def test_a_tree_of_the_root_alone_drafts_nothing(kind: str) -> None:
    served = served_heads(kind, Tree([]), list(range(V)))
    (drafts,), _ = drafts_of_ranks(
        served, torch.randn(V, D), torch.randn(V, D), [torch.randn(2, D)], torch.tensor([3, 4])
    )
    assert drafts.tokens_Nn.tolist() == [[3], [4]]


@pytest.mark.parametrize("kind", HEADS)
def test_one_rank_copies_nothing_that_it_shares(kind: str) -> None:
    served = served_heads(kind, Tree([[0]]), list(range(V)))
    shard = Shard(torch.randn(V, D), 0)
    heads = EngineHeads(served, served.tree, shard, shard, ALONE, torch.float32, "cpu")
    assert heads.lm_head.data_ptr() == shard.weight_RD.data_ptr()
    assert heads.embeddings is shard and heads.embeddings_MD is None


@pytest.mark.parametrize("kind", HEADS)
def test_only_the_rows_that_the_tree_needs_are_multiplied_with_lm_head(kind: str) -> None:
    """A head for each node with children, or one for all where it does not see the path; none beyond the tree."""
    from torch.utils.flop_counter import FlopCounterMode

    tree = Tree([[0], [1], [2], [0, 0], [0, 1], [2, 0]])
    served = served_heads(kind, tree, FEW)
    lm_head = Shard(torch.randn(V, D), 0)
    heads = EngineHeads(served, tree, lm_head, Shard(torch.randn(V, D), 0), ALONE, torch.float32, "cpu")
    with FlopCounterMode(display=False) as counter:
        heads.draft(torch.randn(5, D), torch.zeros(5))
    bias = {"bias": False}
    first, second = HEADS[kind](D, K, **bias).products[:2]
    drafters = 2 if heads.heads.reads == "path" else 1
    assert counter.get_total_flops() == 2 * 5 * (first + drafters * second + (1 + drafters) * D * len(FEW))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_take_the_engines_dtype(kind: str, dtype: torch.dtype) -> None:
    served = served_heads(kind, Tree([[0], [1], [1, 0]]), FEW, own=True)
    shard = Shard(torch.randn(V, D, dtype=dtype), 0)
    heads = EngineHeads(served, served.tree, shard, shard, ALONE, dtype, "cpu")
    assert {parameter.dtype for parameter in heads.heads.parameters()} == {heads.lm_head.dtype} == {dtype}
    assert heads.draft(torch.randn(1, D, dtype=dtype), torch.tensor([0])).tokens_Nn.shape == (1, 4)
