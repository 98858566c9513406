"""The demo's heads on the real SmolLM2: the acceptance that training printed is the one that the engine counts."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from medusa_k25.cache import Cache, Document
from medusa_k25.checkpoint import find_checkpoint, load_heads
from medusa_k25.data.windows import documents_of
from medusa_k25.heads import Speculator
from medusa_k25.replay import Acceptance, answer_ranks, replay
from medusa_k25.serving.formats import load_served
from medusa_k25.target import Target
from medusa_k25.tree import Tree

RUN = Path(__file__).parents[3] / "runs" / "smol_4heads"  # `make heads`
QUESTION = (
    "<|im_start|>user\nName three colours and say where each is found in nature.<|im_end|>\n<|im_start|>assistant\n"
)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"colour": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["colour", "count"],
    }
)
# Requests whose answers the server shapes. (Penalties and min_new_tokens are not among them: SGLang renews them once a
# pass, under all of its speculative algorithms.)
SHAPED: dict[str, dict[str, Any]] = {
    "stop string": {"stop": [" blue", "nature"]},
    "stop strings that are not there": {"stop": ["xylophone", "<nothing>"]},
    "a regular expression": {"regex": r"(red|green|blue)(, (red|green|blue)){2,4}\."},
    "a JSON schema": {"json_schema": SCHEMA},
    "a biased token": {"logit_bias": {"30": 8.0}},
    "plain": {},
}


@pytest.fixture(scope="module")
def answered(smollm2: Target, engine: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """What an engine answers, without MEDUSA and with it."""
    cache = Cache.open(RUN / "cache", smollm2)
    prompts = [cache.token_ids(d).tolist()[: d.prompt_length] for d in proof_set(cache)]
    arguments = {"grammar_backend": "xgrammar", "max_running_requests": 4}
    medusa = {"speculative_algorithm": "MEDUSA", "speculative_draft_model_path": str(RUN / "export")}
    found = {}
    for name, more in (("plain", {}), ("medusa", medusa)):
        with engine(smollm2, **arguments, **more) as running:
            limits = {"temperature": 0, "max_new_tokens": 64}
            found[name] = {
                "shaped": running.generate(
                    prompt=[QUESTION] * len(SHAPED), sampling_params=[limits | each for each in SHAPED.values()]
                ),
                "streamed": [
                    part["text"] for part in running.generate(prompt=QUESTION, sampling_params=limits, stream=True)
                ],
                "scored": running.generate(
                    prompt=QUESTION, sampling_params=limits, return_logprob=True, logprob_start_len=0
                ),
            }
            if more:
                found[name]["proof"] = running.generate(input_ids=prompts, sampling_params=limits)
    return found


def proof_set(cache: Cache) -> list[Document]:
    documents = documents_of(cache, "heldout")
    assert len(documents) >= 20
    return documents


def test_output_and_counts_are_the_targets_and_replays(answered: dict[str, Any], smollm2: Target) -> None:
    cache = Cache.open(RUN / "cache", smollm2)
    served = load_served(RUN / "export")
    speculator = Speculator.of(served.heads, served.vocabulary, smollm2)
    total, counted = Acceptance(), Acceptance()
    for document, row in zip(proof_set(cache), answered["medusa"]["proof"], strict=True):
        ids, counts = cache.token_ids(document).tolist(), row["meta_info"]
        assert row["output_ids"] == ids[document.prompt_length :]
        ranks = answer_ranks(speculator, cache, [document])
        expected = replay(ranks, served.tree)
        assert counts["spec_verify_ct"] == expected.passes
        assert counts["completion_tokens"] - 1 == expected.emitted
        # the engine's last pass may count drafts beyond the answer's end
        histogram = Counter(dict(enumerate(counts["spec_correct_drafts_histogram"])))
        assert sum((histogram - Counter(expected.accepted)).values()) <= 1
        assert sum(histogram.values()) == expected.passes
        total += expected
        counted += Acceptance(1, counts["spec_verify_ct"], counts["completion_tokens"] - 1)
    checkpoint = load_heads(find_checkpoint(RUN / "checkpoints", "best"))
    assert Tree(checkpoint.record["tree"]) == served.tree
    trained = checkpoint.record["metrics"]["heldout/acceptance_tree"]  # with its float32 weights, exported in bf16
    print(
        f"{counted.answers} held-out answers: acceptance length {counted.length:.4f} in SGLang "
        f"({counted.passes} passes), {total.length:.4f} by replay ({total.passes}); training printed {trained:.4f}"
    )
    assert counted.length == total.length > 1.3
    assert counted.length == pytest.approx(trained, rel=0.01)


@pytest.mark.parametrize("request_name", SHAPED)
def test_a_request_that_the_server_shapes_has_the_text_that_it_has_without_medusa(
    answered: dict[str, Any], request_name: str
) -> None:
    place = list(SHAPED).index(request_name)
    ours, plain = (answered[name]["shaped"][place] for name in ("medusa", "plain"))
    assert ours["text"] == plain["text"]
    assert ours["output_ids"] == plain["output_ids"]
    assert ours["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]


def test_a_streamed_text_grows_to_the_same_end(answered: dict[str, Any]) -> None:
    ours, plain = (answered[name]["streamed"] for name in ("medusa", "plain"))
    assert ours[-1] == plain[-1]
    assert all(after.startswith(before) for before, after in pairwise(ours))
    assert len(ours) < len(plain)


def test_log_probabilities_are_the_same(answered: dict[str, Any]) -> None:
    ours, plain = (answered[name]["scored"]["meta_info"] for name in ("medusa", "plain"))
    for key in ("input_token_logprobs", "output_token_logprobs"):
        for (score, token, _), (other_score, other_token, _) in zip(ours[key], plain[key], strict=True):
            assert token == other_token
            assert score == pytest.approx(other_score, abs=1e-3)
