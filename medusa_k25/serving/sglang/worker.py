"""One round of the server: verify the tree that the last round drafted, accept, draft the next tree.

What a round starts from is a row of n tokens a request, `accept_tokens` of the spec_info that the scheduler carries
from round to round and moves with the requests as they come, go and are retracted. The verify pass gives the target's
choice at every node, and the states after the final norm: the one at the last accepted node drafts the next tree.

Letters: N requests, n tree nodes, D hidden.
"""

import logging
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from medusa_k25.heads import kind_of
from medusa_k25.serving.beside_files import open_beside
from medusa_k25.serving.formats import open_served
from medusa_k25.serving.sglang.algorithm import heads_folder
from medusa_k25.serving.sglang.beside import EngineBeside
from medusa_k25.serving.sglang.compat import (
    BaseSpecWorker,
    CaptureHiddenMode,
    ForwardMode,
    GenerationBatchResult,
    GrammarTree,
    NgramVerifyInput,
    ScheduleBatch,
    TpModelWorker,
    TreeMaskMode,
    assign_extend_cache_locs_func,
    build_grammar_vocab_mask,
    commit_mamba_states_after_verify,
    compute_spec_logprobs,
    default_tree_mask_mode,
    eagle_sample,
    get_alloc_reserve_per_decode,
    get_device,
    get_server_return_hidden_states_mode,
    get_spec,
    get_tp_group,
    move_accept_tokens_to_target_kvcache,
    prepare_mamba_track_for_verify,
    record_stream_for_v2_verify,
)
from medusa_k25.serving.sglang.drafting import EngineHeads, EngineTree, Ranks, Shard, full_mask

logger = logging.getLogger(__name__)


class MedusaVerifyInput(NgramVerifyInput):
    """A tree to verify; between rounds, the tree to verify next. Its pass returns the state of every node."""

    capture_hidden_mode = CaptureHiddenMode.FULL


class MedusaWorker(BaseSpecWorker):
    def __init__(
        self,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
        ps: Any = None,  # SGLang 0.5.20 passes it
    ):
        super().__init__()
        self.server_args = server_args
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.device = get_device().device
        self.adaptive_controller = None
        spec = get_spec()
        folder = heads_folder(spec.speculative_draft_model_path, spec.speculative_draft_model_revision)
        opened = open_served(folder, self.model_runner.model_config.vocab_size)
        model, ranks, sizes = (
            self.model_runner.model,
            tensor_parallel_ranks(),
            (opened.vocab_size, opened.heads.hidden_size),
        )
        lm_head = shard_of(lm_head_of(model), *sizes, ranks)
        embeddings = None if opened.heads.reads == "state" else shard_of(embeddings_of(model), *sizes, ranks)
        self.num_nodes = self.speculative_num_draft_tokens = spec.speculative_num_draft_tokens
        # the server's settings say whether the whole tree is served or, on this attention backend, its chain part
        self.tree = opened.tree if opened.tree.num_nodes == self.num_nodes else opened.tree.chain_part
        assert self.tree.num_nodes == self.num_nodes
        found = open_beside(opened, folder, opened.vocab_size) if spec.speculative_eagle_topk > 1 else None
        self.loaded_beside = None if found is None else found.load()
        self.vocab_size, self.rank = opened.vocab_size, ranks.rank
        if ranks.rank == 0:
            logger.info(
                "MEDUSA: %d %s heads, a tree of %d nodes, %d deep, from %s",
                opened.heads.num_heads,
                kind_of(opened.heads),
                self.tree.num_nodes,
                self.tree.depth,
                folder,
            )
        self.heads = EngineHeads(
            opened.load(), self.tree, lm_head, embeddings, ranks, self.model_runner.dtype, self.device
        )

    @property
    def draft_worker(self) -> None:
        """There is no draft model."""
        return None

    def alloc_memory_pool(self, **_pools: Any) -> None:
        """Called when the target's pools exist, which the worker shares, and the number of requests is known."""
        self.req_to_token_pool, self.token_to_kv_pool_allocator = self._target_worker.get_memory_pool()
        row = self.req_to_token_pool.req_to_token.shape[1]
        assert row >= self.model_runner.model_config.context_len + get_alloc_reserve_per_decode()  # room_for_two_trees
        self.engine_tree = EngineTree(self.tree, self.model_runner.max_running_requests, self.device)
        self.beside = None
        if self.loaded_beside is not None:
            places = self.req_to_token_pool.req_to_token.shape[0]
            # after a pass its accepted tokens, and their padding, are written behind the root
            size = row + self.num_nodes + 1
            self.beside = EngineBeside(self.loaded_beside, places, size, self.vocab_size, self.device)
            if self.rank == 0:
                logger.info(
                    "MEDUSA: %d of the %d nodes of a pass go to what followed the last tokens before; %.1f MB for the "
                    "texts of %d requests of %d tokens and the table of answers",
                    self.loaded_beside.chain,
                    self.num_nodes,
                    self.beside.nbytes / 1e6,
                    places,
                    size,
                )

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Callable[[Tensor], None] | None = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """The scheduler's entry: a decode round, or prefill. `on_publish` takes the new lengths as soon as known."""
        assert pp_proxy_tensors is None  # pipeline parallelism is refused at the start
        stream = torch.get_device_module(self.device).current_stream()
        record_stream_for_v2_verify(batch, None, stream)
        return self._verify(batch, on_publish) if batch.forward_mode.is_decode() else self._prefill(batch, on_publish)

    def _prefill(self, batch: ScheduleBatch, on_publish: Callable[[Tensor], None] | None) -> GenerationBatchResult:
        result = self.target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        new_lengths_N = batch.seq_lens.clone()
        if on_publish is not None:
            on_publish(new_lengths_N)
        # the last of each request; a copy from pageable memory would wait for the pass to end
        ends = [stop - 1 for stop in accumulate(batch.extend_lens)]
        last_N = torch.tensor(ends, pin_memory=self.device != "cpu")
        hidden_ND = result.logits_output.hidden_states[last_N.to(self.device, non_blocking=True)]
        asked = max(batch.return_hidden_states_mode, get_server_return_hidden_states_mode())
        if asked.is_last():  # what the scheduler then expects
            result.logits_output.hidden_states = hidden_ND
        accept_lens_N = torch.ones(len(batch.reqs), dtype=torch.int32, device=self.device)
        if self.beside is not None:
            for row, (req, prefix, extend) in enumerate(
                zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
            ):
                ids = req.origin_input_ids + req.output_ids  # of a retracted request what it had generated, too
                if prefix + extend == len(ids):  # not before the last chunk
                    self.beside.begin(batch.req_pool_indices, row, ids)
            self.beside.extend(batch.req_pool_indices, new_lengths_N, result.next_token_ids[:, None])
        return self._drafted(
            result, result.next_token_ids, accept_lens_N, new_lengths_N, hidden_ND, result.next_token_ids
        )

    def _verify(self, batch: ScheduleBatch, on_publish: Callable[[Tensor], None] | None) -> GenerationBatchResult:
        verify_input = self._verify_input(batch)
        batch.spec_info, batch.input_ids = verify_input, verify_input.draft_token
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        N, n = len(batch.reqs), self.num_nodes
        grammar_tree = None
        if batch.has_grammar:  # its copy to the host runs beside the pass
            grammar_tree = GrammarTree.from_device(
                verify_input.retrieve_next_token,
                verify_input.retrieve_next_sibling,
                verify_input.draft_token.view(N, n),
            )
        result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        output = result.logits_output
        grammar_mask = None
        if grammar_tree is not None:
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=batch.sampling_info,
                device=self.device,
                barrier=None,
            )
        # chosen: the target's token at every accepted node; accepted_Nn: those nodes, -1 behind them
        chosen, accept_lens_N, accepted_Nn = eagle_sample(verify_input, batch, output, grammar_mask)
        new_lengths_N = batch.seq_lens + accept_lens_N
        commit_mamba_states_after_verify(self.target_worker, batch, accept_lens_N, accepted_Nn, n)
        move_accept_tokens_to_target_kvcache(batch, accepted_Nn, accept_lens_N - 1, self.token_to_kv_pool_allocator)
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, chosen, accept_index=accepted_Nn)
        if on_publish is not None:
            on_publish(new_lengths_N)
        last_N = accepted_Nn.gather(1, accept_lens_N.long()[:, None] - 1).squeeze(1).long()
        hidden_ND, root_N = output.hidden_states[last_N], chosen[last_N]
        if batch.return_hidden_states:  # the scheduler expects a row an emitted token
            output.hidden_states = output.hidden_states[accepted_Nn.flatten().clamp(min=0).long()]
        if self.beside is not None:  # behind the root, which is known
            self.beside.extend(batch.req_pool_indices, batch.seq_lens + 1, chosen[accepted_Nn])
        batch.forward_mode = ForwardMode.DECODE
        return self._drafted(result, chosen[accepted_Nn].flatten(), accept_lens_N, new_lengths_N, hidden_ND, root_N)

    def _verify_input(self, batch: ScheduleBatch) -> MedusaVerifyInput:
        N, n, tree = len(batch.reqs), self.num_nodes, self.engine_tree
        batch.out_cache_loc = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=batch.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            end_offset=batch.seq_lens + n,
            batch_size=N,
            draft_token_num=n,
            device=self.device,
        )
        prepare_mamba_track_for_verify(batch)
        only_tree = default_tree_mask_mode() == TreeMaskMode.QLEN_ONLY
        tokens = batch.spec_info.accept_tokens
        if self.beside is not None:
            own = self.beside.verified(tokens.view(N, n), batch.req_pool_indices, batch.seq_lens + 1)
            mask = own.mask_Nnn.flatten() if only_tree else full_mask(own.mask_Nnn, batch.seq_lens_cpu.tolist())
            tokens, depths_Nn = own.tokens_Nn.flatten(), own.depths_Nn
            next_token_Nn, next_sibling_Nn = own.next_token_Nn, own.next_sibling_Nn
        else:
            mask = tree.tree_mask(N) if only_tree else tree.full_mask(batch.seq_lens_cpu.tolist())
            depths_Nn = tree.depths_n
            next_token_Nn, next_sibling_Nn = tree.next_token_Nn[:N], tree.next_sibling_Nn[:N]
        return MedusaVerifyInput(
            draft_token=tokens,
            custom_mask=mask,
            positions=(batch.seq_lens[:, None] + depths_Nn).flatten(),
            retrieve_index=tree.index_Nn[:N],
            retrieve_next_token=next_token_Nn,
            retrieve_next_sibling=next_sibling_Nn,
            draft_token_num=n,
        )

    def _drafted(
        self,
        result: GenerationBatchResult,
        next_token_ids: Tensor,
        accept_lens_N: Tensor,
        new_lengths_N: Tensor,
        hidden_ND: Tensor,
        root_N: Tensor,
    ) -> GenerationBatchResult:
        """The round's result, with the next round's tree drafted from the last accepted state and its token."""
        tokens_Nn = self.heads.draft(hidden_ND, root_N)
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=next_token_ids,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=accept_lens_N,
            new_seq_lens=new_lengths_N,
            next_draft_input=MedusaVerifyInput(
                draft_token_num=self.num_nodes,
                new_seq_lens=new_lengths_N,
                accept_tokens=tokens_Nn.flatten(),
                accept_lens=accept_lens_N,
            ),
            speculative_num_draft_tokens=self.num_nodes,
        )


def tensor_parallel_ranks() -> Ranks:
    group = get_tp_group()
    return Ranks(
        rank=group.rank_in_group,
        size=group.world_size,
        all_gather=lambda tensor: group.all_gather(tensor[None], dim=0),
        all_reduce=lambda tensor: torch.distributed.all_reduce(tensor, group=group.device_group),
    )


def lm_head_of(model: Any) -> Any:
    """The target's lm_head; ValueError where it has none that heads could share."""
    text_model = model if hasattr(model, "lm_head") else getattr(model, "language_model", model)
    lm_head = getattr(text_model, "lm_head", None)
    weight = getattr(lm_head, "weight", None)
    if weight is None or not weight.is_floating_point():
        raise ValueError(
            f"MEDUSA: {type(model).__name__} offers no lm_head in floating point, whose rows the heads could share; "
            "serve a checkpoint whose lm_head is not quantised"
        )
    return lm_head


def embeddings_of(model: Any) -> Any:
    """The target's input embeddings; ValueError where heads could not read them."""
    owners: tuple[Any, ...] = (model, getattr(model, "language_model", None))
    for each in owners:
        module: Any = each.get_input_embeddings() if hasattr(each, "get_input_embeddings") else None
        if hasattr(module, "shard_indices") and module.weight.is_floating_point():
            return module
    raise ValueError(
        f"MEDUSA: {type(model).__name__} offers no input embeddings in floating point, which these heads read; serve "
        "residual heads, which read the hidden state alone"
    )


def shard_of(module: Any, vocab_size: int, hidden_size: int, ranks: Ranks) -> Shard:
    """This rank's rows of the target's lm_head or embeddings, padding left out.

    Of a matrix that every rank holds whole, an even share. ValueError unless heads of these sizes fit it.
    """
    weight, indices = module.weight.detach(), module.shard_indices
    if weight.shape[1] != hidden_size or module.org_vocab_size != vocab_size:
        raise ValueError(
            f"MEDUSA: the heads are for an lm_head of {vocab_size} x {hidden_size}, the served target has "
            f"{module.org_vocab_size} x {weight.shape[1]}; serve their own target"
        )
    first, stop = indices.org_vocab_start_index, indices.org_vocab_end_index
    if module.tp_size == 1:  # as SGLANG_ENABLE_EMBED_REPLICATION leaves the embeddings
        first, stop = (rank * vocab_size // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        return Shard(weight[first:stop], first)
    return Shard(weight[: stop - first], first)
