"""The page on the cache format is enough for another project: its program writes a cache that passes every check."""

import re
from pathlib import Path
from typing import Any

import torch

from medusa_k25.cache import Cache, verify
from medusa_k25.cache.manifest import Manifest
from medusa_k25.cache.reader import Document
from medusa_k25.conversations import prompt_key
from medusa_k25.data.windows import answers_of
from medusa_k25.target import Target
from tests.tiny import greedy_answer, random_prompts

PAGE = (Path(__file__).parents[1] / "notes" / "cache_format.md").read_text()


def test_the_program_on_the_page_writes_a_cache(tiny_llama: Target, tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    model = tiny_llama.load_model(torch.float32)
    texts = [
        (f"text {i}", prompt, greedy_answer(model, prompt, [], limit=20)) for i, prompt in enumerate(random_prompts(4))
    ]
    facts = {
        key: getattr(tiny_llama, key)
        for key in ("name", "revision", "quantisation", "hidden_size", "vocab_size", "fingerprints")
    }
    namespace["write_cache"](tmp_path, facts, texts, lambda ids: model.hidden(torch.tensor([ids]))[0].numpy())

    cache = Cache.open(tmp_path, tiny_llama)
    assert list(verify(cache)) == [[]]
    for document, (id, prompt, answer) in zip(cache.documents, texts, strict=True):
        assert (document.id, document.hash) == (id, prompt_key(prompt))
        assert cache.token_ids(document).tolist() == prompt + answer
        [(hidden_SD, future_SK)] = answers_of(cache, document, 1)
        assert torch.equal(future_SK[:, 1], torch.tensor(answer[1:]))
        torch.testing.assert_close(hidden_SD, model.hidden(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -2])


def test_the_page_names_every_fact_of_the_manifest_and_of_a_document() -> None:
    derived = {"shard", "start", "row_start", "row_stop"}
    for key in Manifest.__dataclass_fields__.keys() | (Document.__dataclass_fields__.keys() - derived):
        assert f"`{key}`" in PAGE, key
