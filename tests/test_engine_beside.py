"""The engine's trees, one a request, against the reference merge; and the buffer of what is known of each request."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_k25.ngram.beside import Beside
from medusa_k25.serving.sglang.beside import EngineBeside
from medusa_k25.tree import Tree
from tests.beside import VOCAB, besides, repeating


def parents_by_links(next_token, next_sibling):
    """Node numbers of the parents, by the links alone; every node must be linked once."""
    parents = {0: -1}
    waiting = [0]
    while waiting:
        parent = waiting.pop()
        child = next_token[parent]
        while child >= 0:
            assert child not in parents
            parents[child] = parent
            waiting.append(child)
            child = next_sibling[child]
    return [parents[node] for node in range(len(next_token))]


@settings(deadline=None, max_examples=60)
@given(besides(), st.lists(repeating(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_every_request_has_the_reference_merge(beside, some, random):
    engine = EngineBeside(beside, num_places=6, row=60, vocab_size=VOCAB, device="cpu")
    engine.history_PL.random_(0, VOCAB)  # what an earlier request has left
    place_N = torch.tensor(random.sample(range(6), len(some)), dtype=torch.int32)
    drafted = []
    for row, ids in enumerate(some):
        known = random.randint(0, len(ids) - 1)  # the rest comes in passes
        engine.begin(place_N, row, ids[:known])
        while known < len(ids):
            accepted = random.randint(1, len(ids) - known)
            width = accepted + random.randint(0, 3)
            tokens = (ids[known:] + [VOCAB - 1] * 3)[:width]
            engine.extend(place_N[row : row + 1], torch.tensor([known]), torch.tensor([tokens]))
            known += accepted
        choices: dict[int, int] = {}
        for node, parent in enumerate(beside.tree.parents[1:], start=1):
            taken = {choices[each] for each in beside.tree.children[parent] if each in choices}
            choices[node] = random.choice([token for token in range(VOCAB) if token not in taken])
        drafted.append([ids[-1], *choices.values()])
    lengths_N = torch.tensor([len(ids) for ids in some])
    found = engine.verified(torch.tensor(drafted), place_N, lengths_N, int(lengths_N.max()))
    n = beside.tree.num_nodes
    for row, (ids, tokens) in enumerate(zip(some, drafted, strict=True)):
        topology, merged = beside.merged(tokens, ids)
        assert found.tokens_Nn[row].tolist() == merged
        assert found.depths_Nn[row].equal(topology.depths_n)
        assert found.mask_Nnn[row].equal(topology.mask_nn)
        links = found.next_token_Nn[row].tolist(), found.next_sibling_Nn[row].tolist()
        assert parents_by_links(*links) == topology.parents
    assert found.mask_Nnn.shape == (len(some), n, n)
    assert all(each.is_contiguous() for each in (found.tokens_Nn, found.next_token_Nn, found.next_sibling_Nn))


def test_what_is_no_token_is_never_drafted():
    beside = Beside(Tree.chain(2), Tree([]), 2)
    engine = EngineBeside(beside, 1, 20, VOCAB, "cpu")
    place_N = torch.zeros(1, dtype=torch.long)
    engine.begin(place_N, 0, [1, 2, 10**12, 10**12, 1, 2])
    found = engine.verified(torch.tensor([[2, 5, 6]]), place_N, torch.tensor([6]), 6)
    assert found.tokens_Nn.tolist() == [[2, VOCAB - 1, VOCAB - 1]]
    assert engine.nbytes == 20 * 4
