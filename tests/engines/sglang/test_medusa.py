"""MEDUSA in the real engine, on the miniature of Kimi-K2.5 and on a small Llama: the target's greedy text, in as many
passes as the reference decoder makes, through all that a server does to its requests."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_k25.heads import DraftVocabulary, ResidualHeads
from medusa_k25.replay import Acceptance
from medusa_k25.serving.decode import Decoded
from medusa_k25.target import Target, TargetModel
from medusa_k25.tree import Tree
from tests.engines.sglang.accepting import TREE, accepting_heads, decode_all, serve_from

LIMIT, CONTEXT = 48, 160
LENGTHS = [48, 7, 33, 48, 1, 40, 2, 12, 30, 21, 3, 5, 48, 4, 17, 26]  # they end in a tree, before one, after the prompt

# What is served, to which target, with which server arguments. Each starts an engine.
CASES: dict[str, dict[str, Any]] = {
    "mla": {"target": "tiny_k25", "server": {"return_hidden_states_mode": "full"}},
    "mla-pages-chunks-retraction-no-overlap": {
        "target": "tiny_k25",
        "server": {
            "page_size": 4,
            "chunked_prefill_size": 16,
            "max_total_tokens": 272,
            "disable_overlap_schedule": True,
        },
    },
    "mla-draft-vocabulary-two-ranks": {"target": "tiny_k25", "every": 2, "server": {"tp_size": 2}},
    "own-lm-heads-two-blocks-no-bias-two-ranks-pages": {
        "target": "tiny_llama",
        "heads": {"num_blocks": 2, "bias": False, "own_lm_head": True},
        "every": 3,
        "server": {"tp_size": 2, "page_size": 16},
    },
    "fasterdecoding-chain-no-prefix-cache": {
        "target": "tiny_llama",
        "tree": Tree.chain(3),
        "format": "medusa",
        "server": {"disable_radix_cache": True},
    },
    "heads-that-are-often-wrong-chunks": {
        "target": "tiny_llama",
        "steps": 25,
        "server": {"chunked_prefill_size": 8, "return_hidden_states_mode": "last"},
    },
    "recurrent-mla-draft-vocabulary-two-ranks": {
        "target": "tiny_k25",
        "heads": {"kind": "recurrent"},
        "every": 2,
        "server": {"tp_size": 2},
    },
    "recurrent-own-lm-heads-retraction-chunks": {
        "target": "tiny_llama",
        "heads": {"kind": "recurrent", "own_lm_head": True},
        "every": 3,
        "server": {"chunked_prefill_size": 16, "max_total_tokens": 272},
    },
    "hydra-mla-often-wrong": {"target": "tiny_k25", "heads": {"kind": "hydra"}, "steps": 25, "server": {}},
    "residual-root-two-ranks": {
        "target": "tiny_llama",
        "heads": {"kind": "residual_root"},
        "server": {"tp_size": 2},
    },
    "root-alone": {"target": "tiny_llama", "tree": Tree([]), "steps": 0, "server": {}},
}


@dataclass
class Text:
    """A target in process, prompts, and its answers of LIMIT tokens; the last prompt leaves no room for all of its."""

    target: Target
    model: TargetModel
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def texts(tiny_k25: Target, tiny_llama: Target) -> dict[str, Text]:
    made = {}
    for name, target in (("tiny_k25", tiny_k25), ("tiny_llama", tiny_llama)):
        generator = torch.Generator().manual_seed(4)
        sizes = [3 + i * 7 % 58 for i in range(len(LENGTHS))] + [CONTEXT - 11]
        prompts = [torch.randint(3, 490, (size,), generator=generator).tolist() for size in sizes]
        model = target.load_model(torch.float32)
        everything = DraftVocabulary(torch.arange(target.vocab_size), target.vocab_size)
        nothing = ResidualHeads(target.hidden_size, 1)
        plain = decode_all(target, model, nothing, everything, Tree([]), prompts, LIMIT)
        made[name] = Text(target, model, prompts, [each.answer_ids for each in plain])
        for prompt, each in zip(prompts, plain, strict=True):  # another order of sums must not choose another token
            hidden_TD = model.hidden(torch.tensor([prompt + each.answer_ids[:-1]]))[0, len(prompt) - 1 :]
            best_T2 = model.logits(hidden_TD).topk(2).values
            assert (best_T2[:, 0] - best_T2[:, 1]).min() > 5e-4
    return made


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_text_and_passes(
    case: dict[str, Any], texts: dict[str, Text], engine: Callable[..., Any], tmp_path: Path
) -> None:
    text, tree, server = texts[case["target"]], case.get("tree", TREE), case["server"]
    if "page_size" in server and version("sglang") in ("0.5.20", "0.5.21"):
        pytest.skip("this version allocates pages of several tokens with a Triton kernel, which no CPU runs")
    target, model = text.target, text.model
    vocabulary = DraftVocabulary(torch.arange(0, target.vocab_size, case.get("every", 1)), target.vocab_size)
    heads = accepting_heads(
        model,
        target.lm_head,
        text.prompts,
        text.answers,
        vocabulary,
        case.get("steps", 150),
        **case.get("heads", {}),
    )
    expected = decode_all(target, model, heads, vocabulary, tree, text.prompts[:-1], LIMIT)
    assert [each.answer_ids for each in expected] == text.answers[:-1]
    folder = serve_from(tmp_path, target, heads, vocabulary, tree, case.get("format", "sglang"))
    with pytest.MonkeyPatch.context() as patch:
        if "tp_size" in server:
            patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        with engine(
            target,
            speculative_algorithm="MEDUSA",
            speculative_draft_model_path=str(folder),
            context_length=CONTEXT,
            skip_tokenizer_init=True,
            **server,
        ) as running:
            retracted = check_counts(running, text, expected, tree)
            check_conditions(running, text, prefix_cache=not server.get("disable_radix_cache"))
            check_returned_states(running, text, server.get("return_hidden_states_mode"))
    assert bool(retracted) == ("max_total_tokens" in server)


def greedy(limit: int | None, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": limit, "ignore_eos": True, **more}


def ids_of(rows: list[dict[str, Any]]) -> list[list[int]]:
    return [row["output_ids"] for row in rows]


def check_counts(running: Any, text: Text, expected: list[Decoded], tree: Tree) -> int:
    """Output and passes are the reference decoder's. Returns how many requests were retracted: their counts differ."""
    rows = running.generate(input_ids=text.prompts[:-1], sampling_params=greedy(LIMIT))
    assert ids_of(rows) == text.answers[:-1]
    total, retracted = Acceptance(), 0
    for row, decoded in zip(rows, expected, strict=True):
        counts = row["meta_info"]
        if counts["num_retractions"]:  # what it had generated is read again as a prompt, whose end drafts anew
            retracted += 1
            continue
        if tree.num_nodes > 1:  # SGLang counts no passes that verify no draft
            assert counts.get("spec_verify_ct", 0) == decoded.acceptance.passes
        assert counts["completion_tokens"] - 1 == decoded.acceptance.emitted
        total += decoded.acceptance
    assert retracted < len(rows) / 2
    assert total.length == 1 if tree.num_nodes == 1 else total.length > 1.2
    return retracted


def check_conditions(running: Any, text: Text, prefix_cache: bool) -> None:
    prompts, answers = text.prompts[:-1], text.answers[:-1]

    rows = running.generate(input_ids=prompts, sampling_params=[greedy(length) for length in LENGTHS])
    assert ids_of(rows) == [ids[:length] for ids, length in zip(answers, LENGTHS, strict=True)]

    # prompts that hold the beginning of their answer, which the prefix cache holds, too, if it kept it
    longer = [prompt + ids[:20] for prompt, ids in zip(prompts, answers, strict=True)]
    rows = [running.generate(input_ids=longer[0], sampling_params=greedy(LIMIT - 20)) for _ in range(2)]
    rows += running.generate(input_ids=longer, sampling_params=greedy(LIMIT - 20))
    assert ids_of(rows) == [answers[0][20:]] * 2 + [ids[20:] for ids in answers]
    assert (rows[1]["meta_info"]["cached_tokens"] > 0) == prefix_cache

    # an end token somewhere in the middle, in a tree
    ends = [{ids[13], *text.target.end_ids} for ids in answers]
    stops = [greedy(LIMIT, stop_token_ids=sorted(end)) | {"ignore_eos": False} for end in ends]
    rows = running.generate(input_ids=prompts, sampling_params=stops)
    last = [
        next(place for place, token in enumerate(ids) if token in end) for ids, end in zip(answers, ends, strict=True)
    ]
    assert ids_of(rows) == [ids[: place + 1] for ids, place in zip(answers, last, strict=True)]
    assert max(last) == 13

    # the end of the context, in a tree
    row = running.generate(input_ids=text.prompts[-1], sampling_params=greedy(None))
    assert CONTEXT - 2 <= len(text.prompts[-1]) + len(row["output_ids"]) <= CONTEXT
    assert row["output_ids"] == text.answers[-1][: len(row["output_ids"])]

    rows = running.generate(input_ids=prompts[:4], sampling_params=greedy(20), return_logprob=True, top_logprobs_num=2)
    for row, ids in zip(rows, answers, strict=False):
        chosen, best = row["meta_info"]["output_token_logprobs"], row["meta_info"]["output_top_logprobs"]
        assert [token for _, token, _ in chosen] == [first[1] for first, _ in best] == ids[:20]

    parts = list(running.generate(input_ids=prompts[0], sampling_params=greedy(30), stream=True))
    assert len(parts) > 1
    assert parts[-1]["output_ids"] == answers[0][:30]


def check_returned_states(running: Any, text: Text, allowed: str | None) -> None:
    """Users get the states that the operator lets them ask for, and no others."""
    prompts, answers = text.prompts[:2], text.answers
    asks = {"input_ids": prompts, "sampling_params": greedy(12)}
    if allowed != "full":
        with pytest.raises(ValueError, match="return.hidden.states"):
            running.generate(**asks, return_hidden_states=True)
    if allowed is None:
        return
    rows = running.generate(**asks, return_hidden_states=True if allowed == "full" else "last")
    for row, prompt, ids in zip(rows, prompts, answers, strict=False):
        assert row["output_ids"] == ids[:12]
        states = row["meta_info"]["hidden_states"]  # full: the prompt's rows, then one a token but the last
        states = [*states[0][-1:], *states[1:12]] if allowed == "full" else [states]
        with torch.no_grad():
            expected_TD = text.model.hidden(torch.tensor([prompt + ids[:11]]))[0]
        torch.testing.assert_close(torch.tensor(states), expected_TD[-len(states) :], rtol=1e-3, atol=1e-3)


def test_in_bf16_texts_part_only_where_two_tokens_are_nearly_tied(
    texts: dict[str, Text], engine: Callable[..., Any], tmp_path: Path
) -> None:
    text = texts["tiny_llama"]
    everything = DraftVocabulary(torch.arange(text.target.vocab_size), text.target.vocab_size)
    heads = accepting_heads(text.model, text.target.lm_head, text.prompts, text.answers, everything)
    folder = serve_from(tmp_path, text.target, heads, everything, TREE)
    prompts = text.prompts[:-1]
    arguments = {"dtype": "bfloat16", "skip_tokenizer_init": True}
    medusa = {"speculative_algorithm": "MEDUSA", "speculative_draft_model_path": str(folder)}
    with engine(text.target, **arguments) as running:
        plain = running.generate(
            input_ids=prompts, sampling_params=greedy(LIMIT), return_logprob=True, top_logprobs_num=2
        )
    with engine(text.target, **arguments, **medusa) as running:
        ours = running.generate(input_ids=prompts, sampling_params=greedy(LIMIT))
    # the heads know the text of float32, from which this one parts sooner or later
    assert sum(row["meta_info"]["spec_verify_ct"] for row in ours) < 0.9 * sum(map(len, ids_of(ours)))
    parted = 0
    for row, other in zip(plain, ours, strict=True):
        differing = [a != b for a, b in zip(row["output_ids"], other["output_ids"], strict=True)]
        if any(differing):
            parted += 1
            (first, _, _), (second, _, _) = row["meta_info"]["output_top_logprobs"][differing.index(True)]
            assert first - second < 0.2  # logits up to 30, of which bf16 keeps eight bits
    print(f"{parted} of {len(plain)} texts part in bf16")
    assert parted < len(plain) / 2
