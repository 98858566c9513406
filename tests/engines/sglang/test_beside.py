"""A continuation beside the heads' tree in the real engine: output as the plain server's, passes as the reference's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from medusa_k25.heads import DraftVocabulary, ResidualHeads, Speculator
from medusa_k25.ngram.beside import Beside
from medusa_k25.ngram.table import AnswersTable
from medusa_k25.serving.beside_files import write_beside
from medusa_k25.serving.decode import Drafter, speculative_decode
from medusa_k25.target import Target
from medusa_k25.tree import Tree
from tests.engines.sglang.accepting import TREE, accepting_heads, serve_from

LIMIT = 40
SMALLER = Tree([[0], [1], [0, 0], [0, 0, 0]])


def greedy(limit: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": limit, "ignore_eos": True}


@pytest.mark.parametrize("source", ["lookup", "answers"])
def test_text_and_passes(tiny_llama: Target, engine: Callable[..., Any], tmp_path: Any, source: str) -> None:
    """Prompts in chunks and from the prefix cache, several requests at once, and some that are retracted."""
    target, model = tiny_llama, tiny_llama.load_model(torch.float32)
    everything = DraftVocabulary(torch.arange(target.vocab_size), target.vocab_size)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 490, (3 + i * 7 % 50,), generator=generator).tolist() for i in range(8)]
    nothing = Drafter(Speculator.of(ResidualHeads(target.hidden_size, 1), everything, target), Tree([]))
    answers = [speculative_decode(model, nothing, prompt, LIMIT, ()).answer_ids for prompt in prompts]
    # a prompt that ends with the first tokens of what it holds once more behind: the own text is looked up in it
    prompts = [[*prompt[:2], *answer[2:5], *prompt[2:]] for prompt, answer in zip(prompts, answers, strict=True)]
    answers = [speculative_decode(model, nothing, prompt, LIMIT, ()).answer_ids for prompt in prompts]
    heads = accepting_heads(model, target.lm_head, prompts, answers, everything, steps=25)
    table = None
    if source == "answers":
        table = AnswersTable.build([torch.tensor(ids, dtype=torch.int32) for ids in answers[::2]], 12)
    beside = Beside(TREE, SMALLER, 2, table=table)
    drafter = Drafter(Speculator.of(heads, everything, target), TREE)
    expected = [speculative_decode(model, drafter, prompt, LIMIT, (), beside=beside) for prompt in prompts]
    alone = [speculative_decode(model, drafter, prompt, LIMIT, ()) for prompt in prompts]
    assert [each.answer_ids for each in expected] == answers
    folder = serve_from(tmp_path, target, heads, everything, TREE)
    write_beside(folder, beside)
    with engine(
        target,
        speculative_algorithm="MEDUSA",
        speculative_draft_model_path=str(folder),
        context_length=160,
        skip_tokenizer_init=True,
        chunked_prefill_size=16,
        max_total_tokens=300,
    ) as running:
        for _ in range(2):  # the second time the prompts come from the prefix cache
            rows = running.generate(input_ids=prompts, sampling_params=greedy(LIMIT))
            assert [row["output_ids"] for row in rows] == answers
            counted = [i for i, row in enumerate(rows) if not row["meta_info"]["num_retractions"]]
            assert counted
            passes = [rows[i]["meta_info"]["spec_verify_ct"] for i in counted]
            assert passes == [expected[i].acceptance.passes for i in counted]
        # what was generated so far is a prompt now: the lookup knows it from there
        longer = [prompt + ids[:20] for prompt, ids in zip(prompts, answers, strict=True)]
        rows = running.generate(input_ids=longer, sampling_params=greedy(LIMIT - 20))
        assert [row["output_ids"] for row in rows] == [ids[20:] for ids in answers]
    if source == "answers":
        assert sum(each.acceptance.passes for each in expected) < sum(each.acceptance.passes for each in alone)
