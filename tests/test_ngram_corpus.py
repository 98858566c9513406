"""export format=ngram_corpus: answers in, a file that SGLang reads and the way to serve with it out."""

import inspect
import json

import pytest
import torch

from medusa_k25 import export
from medusa_k25.config import compose
from medusa_k25.data.splits import SPLITS, split_of
from medusa_k25.data.texts import Text
from medusa_k25.serving.ngram_corpus import as_sglang_reads, make_corpus
from medusa_k25.target import Target
from tests.tiny import cache_of

WORDS = [
    "the tide rises",
    "a kettle boils\n",
    "“snow” falls <b>softly</b>",
    "  we walk home",
    "rain, rain, rain",
    "42 + 0",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_k25):
    return tiny_k25.load_tokenizer()


def answer_ids(tokenizer, number):
    generator = torch.Generator().manual_seed(number)
    phrases = [WORDS[i] for i in torch.randint(len(WORDS), (6,), generator=generator)]
    return tokenizer.encode(" ".join(phrases) + "<|im_end|>", add_special_tokens=False)


@pytest.fixture(scope="module")
def conversations(tokenizer, tmp_path_factory):
    """60 rows as generate writes them."""
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    rows = [
        {
            "id": str(i),
            "group": f"topic {i}",
            "label": None,
            "prompt_ids": tokenizer.encode(f"Question {i}?", add_special_tokens=False),
            "messages": [],
            "answer": "",
            "answer_ids": answer_ids(tokenizer, i),
            "finish_reason": "stop",
            "sampling": {"mode": "greedy", "temperature": 0.0, "top_p": 1.0},
            "dtype": "float32",
        }
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(target, tmp_path, *overrides):
    local = [f"target.path={target.path}", f"run_dir={tmp_path / 'run'}", f"export_dir={tmp_path / 'out'}"]
    config = compose(["target=local", "format=ngram_corpus", *local, *overrides])
    inspect.unwrap(export.main)(config)
    return [json.loads(line) for line in (tmp_path / "out" / "corpus.jsonl").read_text().splitlines()]


def test_a_corpus_of_conversations(tiny_k25, tokenizer, conversations, tmp_path, capsys):
    lines = run(tiny_k25, tmp_path, f"conversations={conversations}", "base_model=org/tiny", "num_nodes=9")
    train = [i for i in range(60) if split_of(f"topic {i}", "") == "train"]
    assert sorted(lines) == sorted(tokenizer.decode(answer_ids(tokenizer, i)) for i in train)
    tokens = sum(len(answer_ids(tokenizer, i)) for i in train) + len(train) - 1
    report = json.loads((tmp_path / "run" / "report.json").read_text())["ngram_corpus"]
    assert (report["answers"], report["tokens"], report["changed_by_tokenizer"]) == (len(train), tokens, 0)
    both, own = report["rows"]
    assert both["length"] > own["length"] >= 1
    out, readme = capsys.readouterr().out, (tmp_path / "out" / "README.md").read_text()
    assert f"| corpus and own text | {both['length']:.3f} |" in readme
    assert f"{both['length']:.3f} tokens a pass" in out
    assert out.endswith(f"corpus.jsonl with {len(train)} answers, and in README.md how to serve with it\n")
    assert "--model-path org/tiny \\\n    --speculative-algorithm NGRAM --speculative-num-draft-tokens 9" in readme
    assert f"--speculative-ngram-external-sam-budget {report['corpus_drafts']} \\" in readme
    assert "--speculative-ngram-external-corpus-max-tokens 10000000\n" in readme
    assert f"{report['host_bytes_a_rank'] / 1e9:.1f} GB in every rank of SGLang" in out


def test_the_limit_holds_for_what_sglang_counts(tiny_k25, tokenizer, conversations, tmp_path):
    lines = run(tiny_k25, tmp_path, f"conversations={conversations}", "corpus_tokens=300", "num_nodes=5")
    ids = [tokenizer.encode(line, add_special_tokens=False) for line in lines]
    assert 200 < sum(map(len, ids)) + len(ids) - 1 <= 300
    report = json.loads((tmp_path / "run" / "report.json").read_text())["ngram_corpus"]
    assert report["answers"] < report["available_answers"]


def test_a_named_tokenizer_is_all_that_is_needed_of_the_target(tiny_k25, tokenizer, conversations, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    overrides = [
        *("target=kimi_k25", "format=ngram_corpus", f"tokenizer={tmp_path / 'tokenizer'}"),
        *(f"conversations={conversations}", f"run_dir={tmp_path / 'run'}", f"export_dir={tmp_path / 'out'}"),
    ]
    with pytest.raises(ValueError, match=r"no config.json, whose sizes the passes of hardware=cpu depend on"):
        inspect.unwrap(export.main)(compose(overrides))
    inspect.unwrap(export.main)(compose([*overrides, "hardware=rtx_pro_6000_x8"]))
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "--model-path moonshotai/Kimi-K2.5 \\" in readme
    # not the 64 that accept most: a pass of the machine's takes 6 ms more a node
    assert "--speculative-num-draft-tokens 4 " in readme


def test_a_cache_will_do_and_a_folder_of_heads_is_left_alone(tiny_k25, tmp_path, monkeypatch):
    monkeypatch.setattr(Target, "load_tokenizer", lambda target: Numbers())  # random ids are no text
    cache = cache_of(tiny_k25, tmp_path / "cache", num_documents=40)
    assert run(tiny_k25, tmp_path, f"cache={cache.path}")
    assert cache.fingerprint[:16] in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds exported heads"):
        run(tiny_k25, tmp_path, f"cache={cache.path}")


def split_texts(answers):
    texts = [Text(torch.tensor([1, *ids], dtype=torch.int32), 1, str(i), None, None, 0.0) for i, ids in answers]
    return {split: texts[i::3] for i, split in enumerate(SPLITS)}


class Numbers:
    """A tokenizer whose text is the ids."""

    def decode(self, ids, **options):
        return " ".join(map(str, ids))

    def encode(self, string, **options):
        return [*map(int, string.split())]


class Splitting(Numbers):
    """Reads every odd token as two."""

    def encode(self, string, **options):
        return [part for token in map(int, string.split()) for part in ([token] if token % 2 == 0 else [token, 0])]


def test_what_sglang_reads_otherwise_is_counted_and_fits_all_the_same():
    answers = [(i, [2, 4, 6, 8 + i % 2, 8]) for i in range(30)]
    line, ids = as_sglang_reads(torch.tensor([2, 3]), Splitting())
    assert (line, ids.tolist()) == ('"2 3"', [2, 3, 0])
    made = make_corpus(split_texts(answers), Splitting(), 59, {5: 1.0})
    assert made.available == 10
    assert made.changed == 5
    assert made.tokens <= 59
    assert len(made.lines) == 9  # ten would fit as the target wrote them
    with pytest.raises(ValueError, match="none of 10 answers .* tokenizer=FOLDER"):
        make_corpus(split_texts([(i, [3, 5, 7]) for i in range(30)]), Splitting(), 100, {5: 1.0})


def test_what_cannot_become_a_corpus_is_refused():
    texts = split_texts([(i, [2, 4, 6]) for i in range(9)])
    with pytest.raises(ValueError, match="num_nodes=1: expected the root and at least one draft"):
        make_corpus(texts, Splitting(), 100, {1: 1.0})
    with pytest.raises(ValueError, match="no answer in the heldout split"):
        make_corpus(texts | {"heldout": []}, Splitting(), 100, {5: 1.0})
