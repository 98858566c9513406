"""Which servers MEDUSA accepts, what it sets, and what it needs of SGLang: no engine is started."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, get_required_capture_hidden_mode
from sglang.srt.model_executor.runner.base_runner import BaseRunner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from medusa_k25.heads import DraftVocabulary, ResidualHeads
from medusa_k25.serving.formats import export_heads, open_served
from medusa_k25.serving.sglang import compat, plugin
from medusa_k25.serving.sglang.algorithm import MedusaAlgorithm, settle, tree_to_serve
from medusa_k25.serving.sglang.drafting import Ranks
from medusa_k25.serving.sglang.graphs import capture_states_for_medusa
from medusa_k25.serving.sglang.meter import WINDOW_PASSES, Meter
from medusa_k25.serving.sglang.switch import Switch
from medusa_k25.serving.sglang.worker import MedusaVerifyInput, MedusaWorker, embeddings_of, lm_head_of, shard_of
from medusa_k25.target import Target
from medusa_k25.tree import Tree
from tests.engines.sglang.accepting import TREE, serve_from


@pytest.fixture(scope="module")
def folder(tiny_llama: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = DraftVocabulary(torch.arange(tiny_llama.vocab_size), tiny_llama.vocab_size)
    heads = ResidualHeads(tiny_llama.hidden_size, 3)
    return serve_from(tmp_path_factory.mktemp("heads"), tiny_llama, heads, vocabulary, TREE)


@pytest.fixture
def arguments(folder: Path, tiny_llama: Target) -> SimpleNamespace:
    """As far as `settle` reads them."""
    return SimpleNamespace(
        model_path=str(tiny_llama.path),
        speculative_draft_model_path=str(folder),
        speculative_draft_model_revision="main",
        speculative_num_draft_tokens=None,
        speculative_attention_mode="prefill",
        attention_backend="triton",
        prefill_attention_backend=None,
        decode_attention_backend=None,
        page_size=1,
        pp_size=1,
        enable_dp_attention=False,
        enable_two_batch_overlap=False,
        enable_watermark=False,
        disaggregation_mode="null",
        max_running_requests=None,
    )


@pytest.fixture(scope="module", autouse=True)
def _the_plugin_is_found_by_its_entry_point() -> None:
    load_plugins()


@pytest.fixture(autouse=True)
def _a_target_that_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "uses_mla", lambda server_args: True)
    monkeypatch.setattr(compat, "vocab_size_of", lambda server_args: 512)


def test_what_follows_from_the_tree_is_set(arguments: SimpleNamespace) -> None:
    settle(arguments)
    assert arguments.speculative_num_draft_tokens == TREE.num_nodes == 12
    assert (arguments.speculative_num_steps, arguments.speculative_eagle_topk) == (3, 2)
    assert not hasattr(arguments, "return_hidden_states_mode")  # users may ask for what the operator lets them
    assert arguments.max_running_requests == 48
    assert arguments.enable_mixed_chunk is False


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pp_size", 2, "pp-size"),
        ("enable_dp_attention", True, "dp-attention"),
        ("attn_dp_size", 2, "dp-attention"),
        ("disaggregation_mode", "prefill", "disaggregation-mode"),
        ("enable_watermark", True, "watermark"),
        ("enable_two_batch_overlap", True, "two-batch-overlap"),
        ("speculative_draft_model_path", None, "draft-model-path DIR"),
        ("speculative_num_draft_tokens", 9, "has 12 nodes"),
        ("attention_backend", "flashinfer", "takes no tree mask with MLA; start with --attention-backend fa3 or"),
        ("attention_backend", "trtllm_mla", "takes no tree mask with MLA"),
        ("decode_attention_backend", "flashmla", "takes no tree mask with MLA"),
        ("page_size", 64, "start with --page-size 1"),
    ],
)
def test_a_server_that_would_serve_wrongly_is_refused(
    arguments: SimpleNamespace, name: str, value: Any, message: str
) -> None:
    setattr(arguments, name, value)
    if name == "decode_attention_backend":
        arguments.speculative_attention_mode = "decode"
    with pytest.raises(ValueError, match=message):
        settle(arguments)


def test_a_backend_without_tree_masks_serves_the_chain_where_the_export_allows_it(
    tiny_llama: Target, tmp_path: Path
) -> None:
    vocabulary = DraftVocabulary(torch.arange(tiny_llama.vocab_size), tiny_llama.vocab_size)
    heads = ResidualHeads(tiny_llama.hidden_size, 3)
    export_heads(tmp_path, heads, vocabulary, TREE, torch.float32, {}, tree_fallback="chain")
    served = open_served(tmp_path)
    assert tree_to_serve(served, "trtllm_mla", mla=True, page_size=64) == Tree.chain(3)
    assert tree_to_serve(served, "triton", mla=True, page_size=64) == Tree.chain(3)
    assert tree_to_serve(served, "triton", mla=True, page_size=1) == TREE


def test_heads_of_another_target_are_refused(arguments: SimpleNamespace, tiny_k25: Target) -> None:
    arguments.model_path = str(tiny_k25.path)
    with pytest.raises(ValueError, match=r"hidden size|in: .*lm_head"):
        settle(arguments)


def test_heads_of_a_target_with_another_lm_head_are_refused(
    arguments: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from tests.conftest import write_tiny_llama

    arguments.model_path = str(write_tiny_llama(tmp_path_factory.mktemp("other") / "llama", seed=1))
    with pytest.raises(ValueError, match="in: lm_head, final_norm, embeddings; choose"):
        settle(arguments)


def test_a_real_server_is_refused_by_its_own_arguments(tiny_llama: Target, folder: Path) -> None:
    """The way that a command line takes: ServerArgs calls MEDUSA, and passes on what it raises."""
    given = {"model_path": str(tiny_llama.path), "device": "cpu", "attention_backend": "torch_native"}
    medusa = {"speculative_algorithm": "medusa", "speculative_draft_model_path": str(folder)}
    with pytest.raises(ValueError, match="has 12 nodes"):
        ServerArgs(**given, **medusa, speculative_num_draft_tokens=5).resolve_once()


def test_data_parallel_attention_is_refused_as_a_command_line_gives_it(tiny_llama: Target, folder: Path) -> None:
    """SGLang rewrites the flag before it asks the algorithm."""
    given = {"model_path": str(tiny_llama.path), "device": "cpu", "attention_backend": "torch_native"}
    medusa = {"speculative_algorithm": "MEDUSA", "speculative_draft_model_path": str(folder)}
    with pytest.raises(ValueError, match="dp-attention"):
        ServerArgs(**given, **medusa, enable_dp_attention=True, dp_size=2, tp_size=2).resolve_once()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "config.json"),
        ("[" * 100_000, "config.json"),
        ('{"medusa_choices": [' + "[0], " * 400_000 + "[1]]}", "config.json"),
        (None, "there is no such folder"),
    ],
)
def test_a_hostile_folder_is_judged_before_sglang_reads_it(
    tiny_llama: Target, folder: Path, tmp_path: Path, config: str | None, message: str
) -> None:
    heads = tmp_path / "heads"
    if config is not None:
        shutil.copytree(folder, heads)
        (heads / "config.json").write_text(config)
    given = {"model_path": str(tiny_llama.path), "device": "cpu", "attention_backend": "torch_native"}
    medusa = {"speculative_algorithm": "MEDUSA", "speculative_draft_model_path": str(heads)}
    with pytest.raises(ValueError, match=message):
        ServerArgs(**given, **medusa).resolve_once()


def test_an_algorithm_answers_all_that_the_built_in_ones_answer() -> None:
    medusa = MedusaAlgorithm("MEDUSA", lambda server_args: object, supports_overlap=True)
    assert isinstance(SpeculativeAlgorithm.from_string("medusa"), MedusaAlgorithm)
    for name in vars(SpeculativeAlgorithm):
        if callable(getattr(SpeculativeAlgorithm.NGRAM, name, None)) and not name.startswith("_"):
            assert callable(getattr(medusa, name)), name
    assert medusa.is_ngram()
    assert not medusa.need_topk()
    with pytest.raises(AttributeError):
        medusa.no_such_question()
    assert isinstance(medusa, CustomSpecAlgo)


@pytest.mark.parametrize("algorithm", ["MEDUSA", "NGRAM"])
def test_cuda_graphs_are_captured_with_the_states_that_a_round_needs(
    monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """The runners' own rules, without a GPU: they capture with the mode that BaseRunner leaves them, or with that of
    the dummy input if it is more. n-gram lookup's dummy, which MEDUSA shares, asks for none."""
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(is_draft_worker=False), return_hidden_states_mode=CaptureHiddenMode.NULL
    )
    capture_states_for_medusa(None, runner)
    dummy = NgramVerifyInput(custom_mask=torch.ones(1, dtype=torch.bool), draft_token_num=4)
    dummy.capture_hidden_mode = CaptureHiddenMode.NULL
    captured = get_required_capture_hidden_mode(runner.return_hidden_states_mode, dummy)
    round_input = MedusaVerifyInput(custom_mask=torch.ones(1, dtype=torch.bool), draft_token_num=4)
    asked = get_required_capture_hidden_mode(CaptureHiddenMode.NULL, round_input)
    for runner_class in (DecodeCudaGraphRunner, PrefillCudaGraphRunner):
        check = runner_class._validate_capture_hidden_mode
        graphs, batch = SimpleNamespace(capture_hidden_mode=captured), SimpleNamespace(capture_hidden_mode=asked)
        if algorithm == "MEDUSA":
            check(graphs, batch)
        else:
            with pytest.raises(RuntimeError, match="exceeds the fixed"):
                check(graphs, batch)


def test_the_runners_take_the_hooks() -> None:
    """What the plugin hooks is there, and its graph runners start from it."""
    assert issubclass(DecodeCudaGraphRunner, BaseRunner) and issubclass(PrefillCudaGraphRunner, BaseRunner)
    assert hasattr(BaseRunner.__init__, "__wrapped__")
    assert hasattr(allocation_sizing.get_req_to_token_extra_context_len, "__wrapped__")


def test_a_quantised_lm_head_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 2, dtype=torch.uint8), requires_grad=False)
    model = SimpleNamespace(lm_head=SimpleNamespace(weight=weight))
    with pytest.raises(ValueError, match="no lm_head in floating point"):
        lm_head_of(model)
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=weight, shard_indices=None))
    with pytest.raises(ValueError, match="no input embeddings in floating point"):
        embeddings_of(SimpleNamespace(language_model=model))


@pytest.mark.parametrize("kind", ["hidden_size", "reads"])
def test_heads_that_cannot_share_with_the_target_are_refused_before_they_are_loaded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the target's checkpoint cannot be compared with. What is raised later would end the server."""
    indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=10)
    lm_head = SimpleNamespace(weight=torch.zeros(10, 2), shard_indices=indices, org_vocab_size=10, tp_size=1)
    heads = SimpleNamespace(hidden_size=3 if kind == "hidden_size" else 2, reads="state" if kind != "reads" else "path")
    opened = SimpleNamespace(vocab_size=10, heads=heads)
    monkeypatch.setattr("medusa_k25.serving.sglang.worker.open_served", lambda *_: opened)
    monkeypatch.setattr("medusa_k25.serving.sglang.worker.compare_with_target", lambda *_: None)
    worker = object.__new__(MedusaWorker)
    worker.vocab_size, worker.ranks = 10, Ranks(0, 1, torch.clone, lambda tensor: None)
    worker.server_args, worker.model_runner = SimpleNamespace(model_path=""), SimpleNamespace(model=SimpleNamespace())
    worker.model_runner.model.lm_head = lm_head
    with pytest.raises(ValueError, match="10 x 3" if kind == "hidden_size" else "no input embeddings"):
        worker._judge(tmp_path)


def test_an_order_begins_the_window_anew_and_a_refused_one_does_not(tmp_path: Path) -> None:
    worker = object.__new__(MedusaWorker)
    worker.serving, worker.exporter, worker.meter = cast(Any, SimpleNamespace(adaptive=None)), None, Meter()
    worker.ranks = Ranks(0, 1, torch.clone, lambda tensor: None)
    worker.switch = Switch(tmp_path, tmp_path)
    for order, pays in ('{"drafting": "on"}', None), ('{"drafting": "auto"}', None), ("{", 0.5):
        for _ in range(WINDOW_PASSES):
            worker.meter.paid(2, 2, 2.0, 1.0)
        (tmp_path / "control.json").write_text(order)
        plan = worker.switch.look(None, lambda folder: None)
        assert plan is not None
        worker._carry_out(plan)
        assert (None if worker.meter.pays is None else worker.meter.pays.ratio) == pays


@pytest.mark.parametrize("copies", [False, True])
def test_ranks_hold_every_row_once(copies: bool) -> None:
    """Also where the engine gives each of them the whole matrix."""
    weight = torch.arange(10.0)[:, None].expand(10, 2)
    shards = []
    for rank in range(3):
        first, stop = (0, 10) if copies else (4 * rank, min(4 * rank + 4, 10))
        indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=stop)
        padded = torch.nn.functional.pad(weight[first:stop], (0, 0, 0, 2))
        module = SimpleNamespace(weight=padded, shard_indices=indices, org_vocab_size=10, tp_size=1 if copies else 3)
        shards.append(shard_of(module, 10, 2, Ranks(rank, 3, torch.clone, lambda tensor: None)))
    assert torch.equal(torch.cat([shard.weight_RD for shard in shards]), weight)
    assert [shard.first for shard in shards] == ([0, 3, 6] if copies else [0, 4, 8])
    with pytest.raises(ValueError, match="an lm_head of 11 x 2, the served target has 10 x 2"):
        shard_of(module, 11, 2, Ranks(0, 3, torch.clone, lambda tensor: None))


def test_nothing_of_training_is_imported() -> None:
    """In a fresh process: what a server imports when it serves MEDUSA and records."""
    modules = [f"medusa_k25.serving.sglang.{name}" for name in ("plugin", "worker", "algorithm", "drafting")]
    heavy = ["hydra", "omegaconf", "lightning", "deepspeed", "datasets", "wandb", "matplotlib"]
    script = f"""
import importlib, sys
for name in {modules}: importlib.import_module(name)
from medusa_k25.serving.sglang.plugin import register
register()
found = [name for name in {heavy} if name in sys.modules]
print("found", found)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert "found []" in run.stdout, run.stdout + run.stderr[-2000:]


def test_a_failure_to_register_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("no module named registry")

    monkeypatch.setattr(plugin, "register_medusa", fail)
    with pytest.raises(SystemExit, match="could not register with SGLang: no module named registry"):
        plugin.register()


def test_a_name_that_sglang_does_not_offer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.speculative.eagle_utils as eagle_utils

    monkeypatch.delattr(eagle_utils, "eagle_sample")
    monkeypatch.delitem(sys.modules, "medusa_k25.serving.sglang.compat")
    with pytest.raises(ValueError, match=r"SGLang 0\.5\.\d+ does not offer what MEDUSA needs .*eagle_sample"):
        importlib.import_module("medusa_k25.serving.sglang.compat")
