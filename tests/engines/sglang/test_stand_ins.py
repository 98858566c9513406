"""Each stand-in does what its name means, told in another way than it is written."""

import importlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import sgl_kernel
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_kernel.speculative import reconstruct_indices_from_tree_mask
from torch import Tensor
from tree_attention import tree_attention

# parents[i - 1] < i is the parent of node i: every tree with parents before children
trees = st.integers(0, 7).flatmap(lambda n: st.tuples(*(st.integers(0, i) for i in range(n))))


def mask_of(parents: Sequence[int]) -> Tensor:
    """Row i: node i and its ancestors."""
    mask_NN = torch.eye(len(parents) + 1, dtype=torch.bool)
    for node, parent in enumerate(parents, start=1):
        mask_NN[node] |= mask_NN[parent]
    return mask_NN


def links_of(batch: Sequence[Sequence[int]], lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, N = len(batch), len(batch[0]) + 1
    positions, index, child, sibling = torch.full((B * N,), -9), *(torch.full((B, N), -9) for _ in range(3))
    mask = torch.cat([mask_of(parents).flatten() for parents in batch])
    reconstruct_indices_from_tree_mask(mask, torch.tensor(lengths), positions, index, child, sibling, B, N)
    return positions, index, child, sibling


@given(trees, trees, st.integers(0, 50))
@settings(deadline=None)
def test_links_of_a_tree_are_those_of_its_parents(one, other, length):
    shorter = min(len(one), len(other))
    batch = [one[:shorter], other[:shorter]]
    positions, index, child, sibling = links_of(batch, [length, 7])
    assert index.flatten().tolist() == list(range(index.numel()))
    for b, parents in enumerate(batch):
        for node in range(shorter + 1):
            children = [k for k, parent in enumerate(parents, start=1) if parent == node]
            assert child[b, node] == (children or [-1])[0]
            for a, following in pairwise([*children, -1]):
                assert sibling[b, a] == following
        assert sibling[b, 0] == -1
        depths = [len(list(ancestors(parents, node))) for node in range(shorter + 1)]
        assert positions.view(2, -1)[b].tolist() == [depth + (length, 7)[b] for depth in depths]


def walk(parents: Sequence[int], tokens: Sequence[int], said: Sequence[int], node: int, steps: int) -> list[int]:
    """The nodes that are accepted from `node` on, itself included, at most `steps` below it."""
    if steps:
        for child, parent in enumerate(parents, start=1):
            if parent == node and tokens[child] == said[node]:
                return [node, *walk(parents, tokens, said, child, steps - 1)]
    return [node]


@given(trees, st.data())
@settings(max_examples=300, deadline=None)
def test_greedy_verification_walks_where_the_target_goes(parents, data):
    """Two requests of the same tree, of three possible tokens, so that walks are long and siblings hold the same."""
    B, N = 2, len(parents) + 1
    some = st.lists(st.integers(0, 2), min_size=N, max_size=N)
    tokens, said = ([data.draw(some) for _ in range(B)] for _ in range(2))
    steps = data.draw(st.integers(1, N + 1)) - 1
    _, index, child, sibling = links_of([parents] * B, [5, 6])
    predicts = torch.full((B * N,), -9, dtype=torch.int32)
    accepted = torch.full((B, steps + 1), -1, dtype=torch.int32)
    count = torch.full((B,), -9, dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=torch.tensor(tokens),
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=torch.tensor(said),
    )
    for b in range(B):
        path = walk(parents, tokens[b], said[b], 0, steps)
        assert count[b] == len(path) - 1
        assert accepted[b].tolist() == [b * N + node for node in path] + [-1] * (steps + 1 - len(path))
        for node in range(N):
            assert predicts[b * N + node] == (said[b][node] if node in path else -9)


def spans(rows: int, length: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    span = st.tuples(st.integers(0, length), st.integers(0, length)).map(lambda ends: (min(ends), max(ends)))
    return st.lists(span, min_size=1, max_size=rows)


@given(spans(4, 9), st.permutations(range(6)))
@settings(deadline=None)
def test_a_requests_row_is_written_and_read_where_it_grows(ends, order):
    table = torch.arange(6 * 9, dtype=torch.int32).view(6, 9)
    rows = torch.tensor(order[: len(ends)])
    start, end = (torch.tensor(column) for column in zip(*ends, strict=True))
    cells = [(int(row), place) for row, (a, b) in zip(rows, ends, strict=True) for place in range(a, b)]

    read = torch.full((len(cells) + 2,), -9)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, start, end, read, 9)
    assert read.tolist() == [int(table[cell]) for cell in cells] + [-9, -9]

    expected = table.clone()
    slots = 100 + torch.arange(len(cells))
    for cell, slot in zip(cells, slots, strict=True):
        expected[cell] = slot
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, start, end, slots, 9)
    assert torch.equal(table, expected)


def test_slots_of_accepted_nodes_are_packed():
    accept_index = torch.tensor([[0, 2, -1], [3, -1, -1], [6, 7, 8]])
    packed = torch.full((9,), -9)
    sgl_kernel.fill_accept_out_cache_loc_cpu(accept_index, torch.arange(10, 19), packed)
    assert packed.tolist() == [10, 12, 13, 16, 17, 18, -9, -9, -9]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), unique_by=lambda move: move[0]))
@settings(deadline=None)
def test_states_move_between_slots_in_every_layer(moves):
    """Float32 and bfloat16 buffers of different widths; targets may be sources of other moves."""
    layers = [torch.randn(8, 2, 3), torch.randn(8, 5).bfloat16()]
    expected = [[layer[dict(moves).get(slot, slot)] for slot in range(8)] for layer in map(torch.clone, layers)]
    addresses = torch.tensor([layer.data_ptr() for layer in layers])
    sizes = torch.tensor([layer[0].nbytes for layer in layers])
    target, source = (torch.tensor([move[i] for move in moves], dtype=torch.int64) for i in range(2))
    sgl_kernel.copy_all_layer_kv_cache_cpu(addresses, sizes, target, source)
    for layer, rows in zip(layers, expected, strict=True):
        assert torch.equal(layer, torch.stack(rows))


@given(trees, st.integers(0, 6), st.sampled_from([(4, 4, 8, 8), (4, 2, 8, 8), (4, 1, 12, 8)]), st.integers(0, 99))
@settings(deadline=None)
def test_a_node_attends_to_the_text_and_its_ancestors(parents, prefix, shape, seed):
    """Shapes: heads, heads of keys, channels of keys, of values: MHA, GQA, and MLA, where a value is a key's beginning.

    The long way: each node on its own, with its path as plain text behind the prefix.
    """
    heads, groups, channels, values = shape
    N, scale = len(parents) + 1, 0.3
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(N, heads, channels, generator=generator)
    key = torch.randn(prefix + N, groups, channels, generator=generator)
    value = key[..., :values] if groups == 1 else torch.randn(prefix + N, groups, values, generator=generator)
    attended = tree_attention(query, key, value, mask_of(parents), scale)
    assert attended.shape == (N, heads, values)
    for node in range(N):
        path = [node, *ancestors(parents, node)]
        seen = torch.tensor([*range(prefix), *(prefix + place for place in path)])
        for head in range(heads):
            group = head * groups // heads
            weights = torch.softmax(scale * key[seen, group] @ query[node, head], dim=0)
            torch.testing.assert_close(attended[node, head], weights @ value[seen, group], rtol=1e-4, atol=1e-5)


def ancestors(parents: Sequence[int], node: int) -> Iterator[int]:
    while node:
        node = parents[node - 1]
        yield node


@pytest.mark.parametrize("module", ["sgl_kernel", "sgl_kernel.speculative", "torchvision", "torchvision.io"])
def test_whatever_is_left_out_says_so_when_called(module):
    name = importlib.import_module(module).some_operation
    with pytest.raises(NotImplementedError, match=rf"{module}\.some_operation has no stand-in"):
        name(1, key=2)
