"""The export verb: three formats from one checkpoint, untrained heads from none, and a card that invents nothing."""

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from medusa_k25 import export
from medusa_k25.acceptance import BOTH
from medusa_k25.acceptance import TREE as TREE_ROW
from medusa_k25.cache import Cache, CacheWriter
from medusa_k25.checkpoint import write_heads
from medusa_k25.config import compose
from medusa_k25.heads import DraftVocabulary, ResidualHeads
from medusa_k25.replay import Acceptance
from medusa_k25.reports.report import read_report, update_report
from medusa_k25.serving.adaptive_fit import adaptive_note
from medusa_k25.serving.blank import made_up_tree
from medusa_k25.serving.card import measured_rows
from medusa_k25.serving.formats import load_served, tensors_of
from medusa_k25.target import Target
from medusa_k25.tree import Tree
from tests.test_cache import make_document
from tests.tiny import cache_of

TREE = [[0], [1], [0, 0]]
DRAFT_SIZE = 300


@pytest.fixture
def run_dir(tiny_llama, tmp_path):
    """A run folder with one checkpoint of random heads."""
    torch.manual_seed(0)
    heads = ResidualHeads(tiny_llama.hidden_size, 3, draft_vocab_size=DRAFT_SIZE)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    vocabulary = DraftVocabulary.most_frequent(torch.arange(tiny_llama.vocab_size, 0, -1), DRAFT_SIZE)
    record = {
        "target": {"name": "tiny", "revision": "r1", "quantisation": "none", "fingerprints": tiny_llama.fingerprints},
        "cache_fingerprint": "f" * 64,
        "code_version": "0",
        "step": 70,
        "config": {key: compose([])[key] for key in ("num_nodes", "max_width")}
        | {"hardware": plain(compose([]).hardware)},
        "metrics": {
            "calibration/speedup": 1.0,
            "heldout/acceptance_tree": 1.3125,
            "heldout/acceptance_chain": 1.25,
        },
        "tree": TREE,
    }
    folder = tmp_path / "run" / "checkpoints" / "step-000070"
    folder.mkdir(parents=True)
    write_heads(folder, heads.state_dict(), heads, vocabulary, record)
    return tmp_path / "run"


def plain(node):
    return OmegaConf.to_container(node, resolve=True)


def run(run_dir, target, *overrides):
    config = compose(["target=local", f"target.path={target.path}", f"run_dir={run_dir}", *overrides])
    inspect.unwrap(export.main)(config)  # without the command line around it


def card_of(folder):
    """(front matter, text)"""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


@pytest.mark.parametrize("format", ["sglang", "vllm", "medusa"])
def test_every_format_comes_from_one_checkpoint(run_dir, tiny_llama, capsys, format):
    run(run_dir, tiny_llama, f"format={format}", "base_model=org/tiny")
    served = load_served(run_dir / "export")
    assert served.tree == Tree(TREE)
    assert served.config["medusa_k25"]["target"]["fingerprints"]["lm_head"] == tiny_llama.fingerprints["lm_head"]
    front, text = card_of(run_dir / "export")
    assert front["base_model"] == "org/tiny"
    assert {"medusa", "speculative-decoding"} < {*front["tags"]}
    command = {
        "sglang": "--speculative-algorithm MEDUSA --speculative-draft-model-path DIR",
        "vllm": "3}' \\\n    --model-loader-extra-config '{\"enable_weights_track\": false}'",
        "medusa": "text-generation-launcher --model-id DIR",
    }
    assert [name for name, line in command.items() if line in text] == [format]
    out = capsys.readouterr().out
    assert ("This format knows no sharing" in out) == (format == "medusa")
    assert ("vLLM loads the draft vocabulary of 300 tokens only with" in out) == (format == "vllm")
    assert out.endswith(f"wrote {run_dir / 'export'}: 3 heads in bfloat16, tree of 4 nodes\n")
    if format == "medusa":
        assert served.config["base_model_name_or_path"] == "org/tiny"


def test_sglang_is_told_how_much_of_the_tree_to_verify_and_when(tmp_path, run_dir, tiny_llama, capsys):
    cache_of(tiny_llama, tmp_path / "cache", num_documents=40)
    known = [f"cache={tmp_path / 'cache'}", "allow_other_cache=true", f"hardware.target={tiny_llama.name}"]
    run(run_dir, tiny_llama, "tree=[[0],[1],[0,0]]", *known)
    adaptive = load_served(run_dir / "export").adaptive
    assert adaptive is not None
    assert (sorted(adaptive.order), adaptive.sizes) == ([1, 2, 3], (1, 2, 4))
    assert adaptive_note(adaptive, "cpu") in card_of(run_dir / "export")[1]
    assert read_report(run_dir)["export"]["draft_up_to"] == adaptive.draft_up_to
    for overrides, why in (
        ([f"cache={tmp_path / 'none'}", *known[1:]], "every cycle verifies the whole tree: no cache at"),
        (known[:2], "knows the passes of smollm2-135m-instruct, not of tiny"),
        ([*known, "beside=lookup"], "nobody knows how sure what was looked up is"),
        ([*known, "adaptive=false"], ""),
        ([*known, "format=vllm"], ""),
    ):
        capsys.readouterr()
        run(run_dir, tiny_llama, "tree=[[0],[1],[0,0]]", *overrides)
        assert load_served(run_dir / "export").adaptive is None
        assert why in capsys.readouterr().out


def table_of(text):
    return [line for line in text.splitlines() if line.startswith(("| heads,", "| n-gram"))]


def test_the_cards_figures_are_the_evaluations_or_the_checkpoints_or_none(run_dir, tiny_llama):
    run(run_dir, tiny_llama)
    front, text = card_of(run_dir / "export")
    assert "base_model" not in front  # nobody knows it
    assert "| target | tiny, revision r1, quantisation none |" in text
    assert "| data | cache ffffffffffffffff, 70 steps |" in text
    assert table_of(text) == [
        "| heads, tree | 4 | 1.312 | not computed |",
        "| heads, chain | 4 | 1.250 | not computed |",
    ]
    # another tree was not measured; a chain of all heads was
    run(run_dir, tiny_llama, "tree=[[0],[2]]")
    assert table_of(card_of(run_dir / "export")[1]) == ["| heads, chain | 4 | 1.250 | not computed |"]

    def row(predictor, num_nodes, tree, emitted):
        every = {"length": Acceptance(1, 100, emitted, {}).length}
        return {"predictor": predictor, "num_nodes": num_nodes, "tree": tree, "every": every, "interval": [1.1, 2.2]}

    rows = [
        row("heads, tree", 4, TREE, 140),
        row("heads, tree", 3, [[0], [1]], 999),
        row("n-gram lookup", 4, None, 120),
    ]
    rows += [row("heads, tree", 4, [[0], [1], [2]], 999), row("untrained heads, tree", 4, TREE, 999)]
    path = run_dir / "checkpoints" / "step-000070"
    made_from = {"checkpoint": str(path), "cache_fingerprint": "f" * 64}
    update_report(run_dir, "evaluate", made_from | {"rows": rows})
    run(run_dir, tiny_llama)
    assert table_of(card_of(run_dir / "export")[1]) == [
        "| heads, tree | 4 | 1.400 | 1.100 to 2.200 |",
        "| n-gram lookup | 4 | 1.200 | 1.100 to 2.200 |",
    ]
    # an evaluation of other heads says nothing about these
    update_report(run_dir, "evaluate", made_from | {"checkpoint": "elsewhere", "rows": rows})
    run(run_dir, tiny_llama)
    assert "| heads, tree | 4 | 1.312 | not computed |" in table_of(card_of(run_dir / "export")[1])


def test_the_card_says_what_the_cache_held_if_it_still_does(run_dir, tiny_llama, tmp_path):
    cache = cache_of(tiny_llama, tmp_path / "cache", num_documents=10)
    file = run_dir / "checkpoints" / "step-000070" / "heads.json"
    file.write_text(file.read_text().replace("f" * 64, cache.fingerprint))
    run(run_dir, tiny_llama, f"cache={cache.path}")
    _, text = card_of(run_dir / "export")
    (line,) = [line for line in text.splitlines() if line.startswith("| data |")]
    assert f" documents with {24 * int(line.split()[3])} positions, cache {cache.fingerprint[:16]}, 70 steps" in line
    file.write_text(file.read_text().replace(cache.fingerprint, "0" * 64))  # the cache has grown since
    run(run_dir, tiny_llama, f"cache={cache.path}")
    assert "| data | cache 0000000000000000, 70 steps |" in card_of(run_dir / "export")[1]


def test_blank_heads_need_no_checkpoint_and_take_any_tree(tiny_llama, tmp_path, capsys):
    run(tmp_path / "run", tiny_llama, "heads=blank", "tree=[[0],[0,0],[3]]", f"draft_vocab_size={DRAFT_SIZE}")
    folder = tmp_path / "run" / "export"
    served = load_served(folder)
    assert served.tree == Tree([[0], [0, 0], [3]])
    assert (served.heads.num_heads, len(served.vocabulary)) == (2, DRAFT_SIZE)
    hidden_ND = torch.randn(3, tiny_llama.hidden_size).bfloat16()
    assert torch.equal(served.heads(hidden_ND, torch.zeros(3, 2)), hidden_ND.expand(2, -1, -1))
    _, text = card_of(folder)
    assert "these heads are untrained: use them to measure" in text
    assert "Not measured for these heads in this tree." in text
    assert not (tmp_path / "run" / "report.json").exists()
    assert "2 untrained heads in bfloat16, tree of 4 nodes" in capsys.readouterr().out

    run(tmp_path / "run", tiny_llama, "heads=blank", "num_nodes=16", "draft_vocab_size=null")  # replaces blank ones
    assert load_served(folder).tree.num_nodes == 16
    assert "medusa_tree_fallback" not in load_served(folder).config
    chain = ["num_nodes=6", "max_width=1", "draft_vocab_size=null", "medusa_tree_fallback=chain"]
    run(tmp_path / "run", tiny_llama, "heads=blank", *chain)
    assert load_served(folder).tree == Tree.chain(5)
    assert load_served(folder).config["medusa_tree_fallback"] == "chain"
    own = [
        "heads=blank",
        "num_nodes=9",
        "heads.own_lm_head=true",
        "heads.num_heads=4",
        "draft_vocab_size=null",
        "format=vllm",
    ]
    run(tmp_path / "run", tiny_llama, *own)
    assert load_served(folder).heads.num_heads == 4
    assert torch.equal(tensors_of(load_served(folder).heads)["lm_heads.3.weight"], tiny_llama.lm_head)


def test_blank_heads_never_replace_trained_ones(run_dir, tiny_llama):
    run(run_dir, tiny_llama)
    before = (run_dir / "export" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="holds trained heads, which blank ones would replace; give export_dir=FOLDER"):
        run(run_dir, tiny_llama, "heads=blank", "num_nodes=9", "draft_vocab_size=null")
    shutil.rmtree(run_dir / "checkpoints")
    run(run_dir, tiny_llama, "heads=blank", "num_nodes=9", "draft_vocab_size=null", f"export_dir={run_dir / 'blank'}")
    assert (run_dir / "export" / "model.safetensors").read_bytes() == before


def test_blank_heads_of_the_k25_experiment(tiny_k25, tmp_path):
    config = compose(
        [
            *("+exp=k25_4heads", "target=tiny_k25", f"target.home={tiny_k25.path.parent}", "heads=blank"),
            *(f"export_dir={tmp_path}", "num_nodes=8", "format=vllm", "draft_vocab_size=null"),
        ]
    )
    inspect.unwrap(export.main)(config)
    _, text = card_of(tmp_path)
    assert "--hf-overrides '{\"vocab_size\": 512}'" in text  # vLLM looks for it outside text_config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tree=16"], r"tree=16: expected rank paths .* num_nodes=N"),
        (["tree=[0,1]"], r"tree=\[0, 1\]: expected rank paths"),
        (["heads.num_heads=1", "num_nodes=40"], "1 heads with 10 choices each make 11 nodes; raise heads.num_heads"),
        (["heads.num_heads=1", "tree=[[0],[0,0]]"], "2 deep but there are 1 heads"),
        (["num_nodes=2000", "max_width=20"], "the tree has 2,000 nodes, a server takes at most 1,024"),
        (["num_nodes=9", "format=gguf"], "format=gguf: expected one of sglang, vllm, medusa"),
        (["num_nodes=9", "medusa_tree_fallback=tree"], "medusa_tree_fallback=tree: expected null or chain"),
        (["num_nodes=9", "export_dtype=float8"], "export_dtype: expected bfloat16, float16 or float32"),
    ],
)
def test_what_cannot_be_exported_is_refused(tiny_llama, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, tiny_llama, "heads=blank", "draft_vocab_size=null", *overrides)
    assert not (tmp_path / "export").exists()


def test_blank_heads_are_not_trained(tiny_llama):
    from hydra.utils import instantiate

    with pytest.raises(ValueError, match="train with heads=residual"):
        instantiate(compose(["heads=blank"]).heads)(hidden_size=8, draft_vocab_size=4)


def test_a_made_up_tree_is_whole_and_grows_from_the_likeliest_paths():
    assert made_up_tree(1, 4, 10) == Tree([])
    assert made_up_tree(4, 4, 10) == Tree([[0], [1], [0, 0]])
    for n in range(2, 60):
        tree = made_up_tree(n, 4, 10)
        assert (tree.num_nodes, tree.depth <= 4, tree.width <= 10) == (n, True, True)
    assert {*made_up_tree(20, 4, 10).paths} < {*made_up_tree(21, 4, 10).paths}


def test_the_card_gives_the_terms_that_owners_give_or_says_to_look_them_up(run_dir, tiny_llama, tmp_path):
    def terms(*overrides, target=tiny_llama):
        run(run_dir, target, *overrides)
        front, text = card_of(run_dir / "export")
        rows = [line.split(" | ") for line in text[text.index("## Licences") :].splitlines() if line.startswith("| ")]
        return front, {row[0].removeprefix("| ").split()[0]: row[1].removesuffix(" |") for row in rows}

    front, said = terms("base_model=org/tiny")
    assert "license" not in front  # nobody has said
    assert said["target"] == "not stated in its folder: must be looked up, at https://huggingface.co/org/tiny"
    assert said["these"] == "to be chosen by whoever publishes them"
    assert said["prompts"] == "from an origin that was not recorded: their terms must be looked up with their owner"
    assert said["answers"].startswith("written by org/tiny: look up what its terms say of outputs")

    folder = tmp_path / "licensed"
    shutil.copytree(tiny_llama.path, folder)
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: toy-licence\n---\n# Toy\n")
    (folder / "LICENSE").write_text("\n  Toy Licence 3\nText\n")
    front, said = terms("heads_license=mit", target=Target.open(folder))
    assert front["license"] == "mit" and said["these"] == "mit"
    assert 'its README.md gives other, toy-licence; its file LICENSE begins "Toy Licence 3". Read' in said["target"]


@pytest.mark.parametrize(
    ("ids", "named", "said"),
    [
        (
            ["cooking-00", "sql-00-01"],
            "package",
            "2 of 2 are questions that medusa_k25 ships, under Apache-2.0",
        ),
        (
            ["sql-00-01", "mine"],
            "mine.jsonl",
            "1 of 2 are .*; the others from `mine.jsonl`: their terms must be looked up",
        ),
        (["mine"], "org/set", "from `org/set`: their terms must be looked up with their owner"),
        (["mine"], "package", "from an origin that was not recorded: their terms must be looked up"),
    ],
)
def test_prompts_are_known_by_their_ids_or_must_be_looked_up(tiny_llama, tmp_path, ids, named, said):
    with CacheWriter.open(tmp_path, tiny_llama, "float32", "test") as writer:
        for id in ids:
            document = make_document(id)
            writer.add(**document | {"hidden_MD": torch.ones(len(document["positions_M"]), tiny_llama.hidden_size)})
    provenance = {"cache_fingerprint": Cache.open(tmp_path, check=False).fingerprint}
    assert re.match(said, export.prompts_of(tmp_path, provenance, {"prompts": named}))
    assert "must be looked up" in export.prompts_of(tmp_path, {"cache_fingerprint": "0"}, {"prompts": named})


def test_the_report_names_the_export(run_dir, tiny_llama):
    run(run_dir, tiny_llama)
    assert json.loads((run_dir / "report.json").read_text())["export"] == {
        "folder": str(run_dir / "export"),
        "checkpoint": str(Path(run_dir) / "checkpoints" / "step-000070"),
        "nodes": 4,
    }


def test_a_card_has_what_the_heads_accept_with_what_is_drafted_beside_them() -> None:
    def row(predictor: str, nodes: int, length: float, tree: list[list[int]] | None = None) -> dict[str, Any]:
        return {
            "predictor": predictor,
            "num_nodes": nodes,
            "every": {"length": length},
            "interval": [1, 2],
            "tree": tree,
        }

    evaluation = {"rows": [row(TREE_ROW, 3, 1.5, [[0], [1]]), row(BOTH, 3, 1.8), row(BOTH, 4, 1.9)]}
    rows = measured_rows({}, evaluation, [(0,), (1,)], 3, "lookup")
    assert [(each.predictor, each.length) for each in rows] == [(TREE_ROW, 1.5), (BOTH, 1.8)]
    assert [each.length for each in measured_rows({}, evaluation, [(0,), (1,)], 3)] == [1.5]
    assert not measured_rows({}, evaluation, [(0,), (0, 0)], 3, "lookup")  # another tree was evaluated
