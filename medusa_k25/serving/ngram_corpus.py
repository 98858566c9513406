"""The folder that lets SGLang's n-gram speculation draft from answers that exist already: no heads, no training.

SGLang reads one JSON string a line and tokenises it itself; what it then drafts is replayed on held-out text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_k25.acceptance import SHARING_TOKENS, CorpusAndOwnText, some_of
from medusa_k25.data.splits import Split
from medusa_k25.data.texts import Text
from medusa_k25.ngram.corpus import choose_corpus
from medusa_k25.ngram.engine import Corpus, EngineNgram
from medusa_k25.replay import Resampling, walk_all
from medusa_k25.serving.card import Measured

CORPUS_FILE = "corpus.jsonl"
# Of SGLang 0.5.23's own structures, in every rank: 370 to 480 bytes were measured, with 0.1 to 1.9 million tokens.
BYTES_PER_TOKEN = 480
TRIE_BYTES = 10_000_000 * 187  # what its trie takes at the start, whatever the corpus: --speculative-ngram-capacity


@dataclass(frozen=True)
class NgramCorpus:
    """A corpus file's lines and what is known of it.

    tokens: as SGLang counts them. available, available_tokens: of the training split. changed: answers that SGLang
    tokenises otherwise than the target wrote them. corpus_drafts: the best share of a pass's drafts.
    """

    lines: list[str]
    tokens: int
    available: int
    available_tokens: int
    changed: int
    num_nodes: int
    corpus_drafts: int
    heldout: int  # answers
    rows: list[Measured]

    @property
    def host_bytes(self) -> int:
        """In every rank of the server."""
        return self.tokens * BYTES_PER_TOKEN + TRIE_BYTES

    def summary(self) -> list[str]:
        changed = f"{self.changed:,} of them tokenised otherwise than the target wrote them"
        lines = [
            f"corpus      {len(self.lines):,} of {self.available:,} training answers, which hold "
            f"{self.available_tokens:,} tokens: {self.tokens:,} with a separator between two; {changed}",
            f"host memory {self.host_bytes / 1e9:.1f} GB in every rank of SGLang: {BYTES_PER_TOKEN} bytes a token, and "
            f"{TRIE_BYTES / 1e9:.1f} GB for its trie, with or without a corpus",
            f"drafts      {self.corpus_drafts} of {self.num_nodes - 1} a pass from the corpus, the best share on "
            "calibration text",
        ]
        for row in self.rows:
            low, high = row.interval or (row.length, row.length)
            lines.append(
                f"replayed    {row.length:.3f} tokens a pass ({low:.3f} to {high:.3f}) on {self.heldout:,} held-out "
                f"answers, {row.predictor}"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "answers": len(self.lines),
            "tokens": self.tokens,
            "available_answers": self.available,
            "available_tokens": self.available_tokens,
            "changed_by_tokenizer": self.changed,
            "host_bytes_a_rank": self.host_bytes,
            "nodes": self.num_nodes,
            "corpus_drafts": self.corpus_drafts,
            "rows": [
                {"predictor": row.predictor, "nodes": row.num_nodes, "length": row.length, "interval": row.interval}
                for row in self.rows
            ],
        }


def make_corpus(
    texts: Mapping[Split, Sequence[Text]],
    tokenizer: Any,
    max_tokens: int,
    cycle_ms: Mapping[int, float],
    most_tokens: int | None = None,
) -> NgramCorpus:
    """The corpus of at most `max_tokens`, chosen on calibration text, and what it accepts on held-out text.

    cycle_ms: what a pass takes by its number of nodes: the fastest is taken. most_tokens: of calibration and of
    held-out text, see `acceptance.some_of`.
    Raises ValueError for an empty split, or a tokenizer that is not the target's.
    """
    if min(cycle_ms) < 2:
        raise ValueError(f"num_nodes={min(cycle_ms)}: expected the root and at least one draft, 2 or more")
    if not texts["heldout"]:
        raise ValueError("there is no answer in the heldout split to replay the corpus on; give more conversations")
    chosen = choose_corpus(texts["train"], some_of(texts["calibration"], most_tokens), max_tokens)
    lines, read = [], []
    for text in chosen:
        line, answer_T = as_sglang_reads(text.answer_T, tokenizer)
        lines.append(line)
        read.append(answer_T)
    changed = sum(not torch.equal(ours.answer_T.long(), theirs) for ours, theirs in zip(chosen, read, strict=True))
    if changed == len(chosen):
        raise ValueError(
            f"none of {changed:,} answers has the same tokens after decoding and encoding: is this tokenizer the one "
            "of the target that wrote them? Name its folder, tokenizer=FOLDER"
        )
    tokens = sum(map(len, read)) + len(read) - 1
    dropped = 0  # tokenised otherwise, they may be longer; the first are worth least
    while tokens > max_tokens:
        tokens -= len(read[dropped]) + 1
        dropped += 1
    lines, corpus = lines[dropped:], Corpus(read[dropped:])
    calibration = some_of(texts["calibration"], SHARING_TOKENS)
    both = CorpusAndOwnText("corpus and own text", corpus, calibration)

    def speed(nodes: int) -> float:
        return walk_all(both.accepted(calibration, nodes)).acceptance.length / cycle_ms[nodes]

    num_nodes = max(sorted(cycle_ms, reverse=True), key=speed)  # what was found for the most nodes serves the others
    drafts = both.corpus_drafts(num_nodes)
    replayed = some_of(texts["heldout"], most_tokens)
    draws = Resampling([text.document for text in replayed])
    rows = []
    for predictor in (both, EngineNgram("own text, without the corpus", None, 0)):
        passes = walk_all(predictor.accepted(replayed, num_nodes))
        interval = draws.interval(passes, num_nodes)
        rows.append(Measured(predictor.name, num_nodes, passes.acceptance.length, interval))
    train = texts["train"]
    available_tokens = sum(len(text.answer_T) for text in train)
    return NgramCorpus(
        lines, corpus.num_tokens, len(train), available_tokens, changed, num_nodes, drafts, len(replayed), rows
    )


def as_sglang_reads(answer_T: Tensor, tokenizer: Any) -> tuple[str, Tensor]:
    """An answer as a line of the corpus, and its ids when SGLang has tokenised that, int64 [T']."""
    string = tokenizer.decode(answer_T.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return json.dumps(string), torch.tensor(tokenizer.encode(string, add_special_tokens=False), dtype=torch.long)


def write_corpus(folder: Path, made: NgramCorpus, base_model: str, max_tokens: int, source: str) -> None:
    """corpus.jsonl and README.md. base_model: what the server is told to load. source: where the answers come from."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CORPUS_FILE).write_text("".join(line + "\n" for line in made.lines))
    (folder / "README.md").write_text(readme(made, base_model, max_tokens, source))


def readme(made: NgramCorpus, base_model: str, max_tokens: int, source: str) -> str:
    lines = [
        f"# A corpus for n-gram speculation with {base_model}",
        "",
        f"{CORPUS_FILE} holds {len(made.lines):,} answers of the model, {made.tokens:,} tokens, one JSON string a "
        "line. SGLang looks the last tokens of a request up in them and drafts what followed there; the model verifies "
        "the drafts, and its output stays its own.",
        "",
        "## Serve",
        "",
        "DIR is this folder.",
        "",
        "```",
        f"python -m sglang.launch_server --model-path {base_model} \\",
        f"    --speculative-algorithm NGRAM --speculative-num-draft-tokens {made.num_nodes} \\",
        f"    --speculative-ngram-external-corpus-path DIR/{CORPUS_FILE} \\",
        f"    --speculative-ngram-external-sam-budget {made.corpus_drafts} \\",
        f"    --speculative-ngram-external-corpus-max-tokens {max_tokens}",
        "```",
        "",
        f"Every rank of the server keeps the corpus in {made.tokens * BYTES_PER_TOKEN / 1e9:.2f} GB of host memory "
        f"({BYTES_PER_TOKEN} bytes a token), beside {TRIE_BYTES / 1e9:.1f} GB that SGLang takes for its trie with or "
        "without it (--speculative-ngram-capacity).",
        "",
        "## Acceptance",
        "",
        f"Tokens emitted a verify pass of {made.num_nodes} nodes on {made.heldout:,} held-out answers, replayed for a "
        "server that has answered nothing before; one that has drafts from what it answered, too.",
        "",
        "| predictor | acceptance length | 95% interval |",
        "|---|---|---|",
    ]
    for row in made.rows:
        interval = "not computed" if row.interval is None else f"{row.interval[0]:.3f} to {row.interval[1]:.3f}"
        lines.append(f"| {row.predictor} | {row.length:.3f} | {interval} |")
    lines += [
        "",
        "## Data",
        "",
        f"{len(made.lines):,} of the {made.available:,} training answers of {source}, chosen by what calibration "
        f"answers repeat of them; the best stand last, where SGLang prefers them. {made.changed:,} are tokenised "
        "otherwise by SGLang than the model wrote them.",
        "",
        "The file is the model's own text: check its licence, and that of the prompts, before you pass it on.",
        "",
    ]
    return "\n".join(lines)
