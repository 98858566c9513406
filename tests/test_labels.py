import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_k25.data.labels import IGNORE, future_tokens
from medusa_k25.data.splits import SPLITS, split_of

_ = IGNORE


def future(ids, mask, documents, positions, num_heads):
    tensors = torch.tensor(ids), torch.tensor(mask).bool(), torch.tensor(documents), torch.tensor(positions)
    return future_tokens(*tensors, num_heads).tolist()


def test_head_k_reads_state_t_and_predicts_token_t_plus_1_plus_k():
    # prompt 5 6, answer 7 8 9: state 1 (after token 6) has root 7, head 1 predicts 8, head 2 predicts 9
    rows = future([5, 6, 7, 8, 9], [0, 0, 1, 1, 1], [0] * 5, [0, 1, 2, 3, 4], num_heads=2)
    assert rows == [[_, _, _], [7, 8, 9], [8, 9, _], [9, _, _], [_, _, _]]


def test_labels_stop_at_the_document_and_at_the_answer():
    # two documents (answers 12 13 and 21), then a document with two answers (31) and (33 34)
    ids = [10, 11, 12, 13, 20, 21, 30, 31, 32, 33, 34]
    mask = [0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 1]
    documents = [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2]
    rows = future(ids, mask, documents, [1, 2, 3, 4, 6, 8, 9, 10], num_heads=2)
    assert rows == [
        [12, 13, _],
        [13, _, _],
        [_, _, _],
        [21, _, _],
        [31, _, _],
        [33, 34, _],
        [34, _, _],
        [_, _, _],
    ]


@given(st.data())
def test_a_label_is_valid_exactly_if_all_tokens_up_to_it_lie_in_one_answer(data):
    T = data.draw(st.integers(1, 12))
    mask = data.draw(st.lists(st.booleans(), min_size=T, max_size=T))
    documents = sorted(data.draw(st.lists(st.integers(0, 2), min_size=T, max_size=T)))
    K = data.draw(st.integers(1, 4))
    rows = future(list(range(100, 100 + T)), mask, documents, list(range(T)), K)
    for t, row in enumerate(rows):
        for k, token in enumerate(row):
            span = range(t + 1, t + 2 + k)
            valid = span[-1] < T and all(mask[i] and documents[i] == documents[t] for i in span)
            assert token == (100 + t + 1 + k if valid else IGNORE)


def test_splits_follow_the_group_and_are_spread_as_stated():
    assert split_of("cooking", "a") == split_of("cooking", "b")
    shares = {split: sum(split_of(None, str(i)) == split for i in range(4000)) / 4000 for split in SPLITS}
    assert abs(shares["heldout"] - 0.12) < 0.02
    assert abs(shares["calibration"] - 0.12) < 0.02
