import json

import pytest
import torch

from medusa_k25.breakdown import break_down
from medusa_k25.data.texts import Text
from medusa_k25.replay import Resampling, walk_all


def text(states: int, document: str, group: str | None, label: str | None, answer_at: int) -> Text:
    return Text(torch.zeros(states + 3, dtype=torch.int32), 2, document, group, label, 0.0, answer_at)


TEXTS = [text(6, "a", "trees", None, 4), text(20, "b", "birds", "long", 0), text(2, "c", "trees", None, 3)]
#                                          passes: 3 + 1 + 2 tokens | 20 of one token, but the last | one of two
ACCEPTED = [torch.tensor([2, 9, 9, 0, 1, 9]), torch.tensor([0] * 18 + [4, 9]), torch.tensor([1, 0])]


@pytest.fixture
def breakdown():
    return break_down(TEXTS, walk_all(ACCEPTED), Resampling([text.document for text in TEXTS]), 5)


def counts(parts):
    return {part.name: (part.documents, part.passes, part.emitted) for part in parts}


def test_parts_by_hand(breakdown):
    assert counts(breakdown.groups) == {"birds": (1, 19, 20), "trees": (2, 4, 8)}
    assert counts(breakdown.labels) == {"long": (1, 19, 20)}
    # a pass belongs to the token after its root: those of b from state 15 on emit token 16 and on
    assert counts(breakdown.positions) == {"0 to 15": (3, 19, 23), "16 to 63": (1, 4, 5)}
    # a: its first pass emits tokens 1 to 3, the last thoughts, the next one token 4; c: tokens 1 and 2, both thoughts
    assert counts(breakdown.sections) == {"thoughts": (2, 2, 5), "answer": (2, 21, 23)}
    # accepted: a 2, 0, 1; b 18 times 0 and then 2 of 2 left; c 1
    assert breakdown.accepted_share == pytest.approx([4 / 23, 2 / 23])
    assert breakdown.passes == 23


def test_a_part_of_one_document_has_no_narrow_interval(breakdown):
    birds, trees = breakdown.groups
    assert birds.interval == (1.0, 5.0)
    low, high = trees.interval
    assert low <= trees.length == 2.0 <= high


def test_parts_that_do_not_exist_are_left_out():
    texts = [text(3, "a", None, None, 0), text(3, "b", None, None, 0)]
    accepted = [torch.zeros(3, dtype=torch.long)] * 2
    breakdown = break_down(texts, walk_all(accepted), Resampling(["a", "b"]), 5)
    assert breakdown.groups == breakdown.labels == breakdown.sections == breakdown.accepted_share == []
    assert json.loads(json.dumps(breakdown.as_json()))["positions"][0]["interval"] == [1.0, 1.0]
