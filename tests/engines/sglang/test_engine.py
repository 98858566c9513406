"""The engine on the CPU, with its stand-ins, says what transformers says; so does its own speculation in trees."""

import pytest

LENGTHS = [24, 3, 17, 24, 1, 24]


def ask(engine, prompts, lengths):
    sampling = [{"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
    return engine.generate(input_ids=prompts, sampling_params=sampling)


def test_plain_greedy_answers_are_those_of_transformers(tiny_k25, engine, prompts_of, greedy):
    """Of the other targets the tests of MEDUSA say so."""
    prompts = [prompt * 3 for prompt in prompts_of(tiny_k25, len(LENGTHS))]
    expected = greedy(tiny_k25, prompts, limit=max(LENGTHS), past_the_end=True)
    with engine(tiny_k25) as running:
        answered = ask(running, prompts, LENGTHS)
    assert [row["output_ids"] for row in answered] == [ids[:n] for ids, n in zip(expected, LENGTHS, strict=True)]


@pytest.mark.parametrize("name", ["smollm2", "tiny_k25"])
def test_ngram_speculation_changes_nothing(name, request, engine, prompts_of, greedy):
    """Prompts that repeat themselves, so that drafts are accepted."""
    target = request.getfixturevalue(name)
    prompts = [prompt * 3 for prompt in prompts_of(target, len(LENGTHS))]
    expected = greedy(target, prompts, limit=max(LENGTHS), past_the_end=True)
    settings = {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 6,
        "speculative_ngram_max_bfs_breadth": 10,
    }
    with engine(target, **settings) as running:
        answered = ask(running, prompts, LENGTHS)
        again = ask(running, prompts, LENGTHS)  # the answers are known now: they are drafted
    for rows in (answered, again):
        assert [row["output_ids"] for row in rows] == [ids[:n] for ids, n in zip(expected, LENGTHS, strict=True)]
    passes = sum(row["meta_info"].get("spec_verify_ct", 0) for row in again)  # a single token needs none
    assert 0 < passes < 0.8 * sum(LENGTHS)


def test_an_engine_that_dies_fails_the_test_and_no_more(engine, tiny_k25):
    """tiny_k25's attention cannot run without the plugin of the stand-ins."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="died"):
        patch.setenv("SGLANG_PLUGINS", "none")
        with engine(tiny_k25) as running:
            ask(running, [[5, 6, 7]], [2])
