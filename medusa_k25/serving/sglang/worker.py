"""One round of the server: verify the tree that the last round drafted, or a part of it, accept, draft the next tree.

What a round starts from is a row of numbers a request, `accept_tokens` of the spec_info that the scheduler carries from
round to round and moves with the requests as they come, go and are retracted: n tokens, and what each part of the tree
is expected to emit. The verify pass gives the target's choice at every node, and the states after the final norm: the
one at the last accepted node drafts the next tree.

The root alone is a part, too: the plain step of a server that does not speculate. It is what a round verifies where
drafting is switched off, where a request's row was drafted by other heads, and where no more than that pays.

Letters: N requests, n tree nodes, s nodes of a part, S parts, R numbers of a row, D hidden.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_k25.adaptive import MOST_SIZES, Adaptive
from medusa_k25.heads import Heads, kind_of
from medusa_k25.ngram.beside import Beside
from medusa_k25.serving.beside_files import open_beside
from medusa_k25.serving.formats import ServedFolder, ServedHeads, open_served
from medusa_k25.serving.sglang.algorithm import compare_with_target, heads_folder
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
    get_observability,
    get_server_return_hidden_states_mode,
    get_spec,
    get_tp_group,
    move_accept_tokens_to_target_kvcache,
    prepare_mamba_track_for_verify,
    record_stream_for_v2_verify,
)
from medusa_k25.serving.sglang.drafting import EngineHeads, Part, Ranks, Shard, full_mask
from medusa_k25.serving.sglang.graphs import Captured, capture_parts
from medusa_k25.serving.sglang.meter import Exporter, Meter, note_nodes
from medusa_k25.serving.sglang.switch import LOOK_EVERY, Plan, Switch, control_folder
from medusa_k25.tree import Tree

logger = logging.getLogger(__name__)


class MedusaVerifyInput(NgramVerifyInput):
    """A tree to verify; between rounds, the tree to verify next. Its pass returns the state of every node."""

    capture_hidden_mode = CaptureHiddenMode.FULL


@dataclass(frozen=True, eq=False)
class Serving:
    """What is drafted with, and which parts of its tree may be verified: the root alone first, the whole tree last.

    adaptive: which of them pays; None: always the whole tree. number: what requests remember of them, who must not keep
    them in memory.
    """

    number: int
    tree: Tree
    beside: Beside | None
    heads: EngineHeads
    adaptive: Adaptive | None
    parts: list[Part]


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
        self.num_nodes = self.speculative_num_draft_tokens = spec.speculative_num_draft_tokens
        self.branches = spec.speculative_eagle_topk > 1  # else only the chain part is served, see `settle`
        self.ranks = tensor_parallel_ranks()
        folder = heads_folder(spec.speculative_draft_model_path, spec.speculative_draft_model_revision)
        self.switch = Switch(control_folder(), folder)
        self.meter = Meter()
        self.exporter = Exporter(self.meter) if self.ranks.rank == 0 and get_observability().enable_metrics else None
        self.launched: deque[tuple[list[Any], Serving, Part, bool]] = deque()
        self.rounds = self.loads = 0
        self.opened = open_served(folder, self.model_runner.model_config.vocab_size)
        self.tree = self._tree_of(self.opened)
        assert self.tree.num_nodes == self.num_nodes
        found = open_beside(self.opened, folder, self.opened.vocab_size) if self.branches else None
        self.loaded_beside = None if found is None else found.load()
        self.vocab_size = self.opened.vocab_size
        self.heads = self._engine_heads(self.opened.load(), self.tree)

    @property
    def draft_worker(self) -> None:
        """There is no draft model."""
        return None

    def alloc_memory_pool(self, **_pools: Any) -> None:
        """Called when the target's pools exist, which the worker shares, and the number of requests is known."""
        self.req_to_token_pool, self.token_to_kv_pool_allocator = self._target_worker.get_memory_pool()
        row = self.req_to_token_pool.req_to_token.shape[1]
        assert row >= self.model_runner.model_config.context_len + get_alloc_reserve_per_decode()  # room_for_two_trees
        self.serving = self._serving(self.opened, self.tree, self.heads)
        del self.heads  # others may take their place, and their memory
        if self.ranks.rank == 0:
            self._tell()
        self.beside = None
        if self.loaded_beside is not None:
            places = self.req_to_token_pool.req_to_token.shape[0]
            # after a pass its accepted tokens, and their padding, are written behind the root
            size = row + self.num_nodes + 1
            self.beside = EngineBeside(self.loaded_beside, places, size, self.vocab_size, self.device)
            if self.ranks.rank == 0:
                logger.info(
                    "MEDUSA: %d of the %d nodes of a pass go to what followed the last tokens before; %.1f MB for the "
                    "texts of %d requests of %d tokens and the table of answers",
                    self.loaded_beside.chain,
                    self.num_nodes,
                    self.beside.nbytes / 1e6,
                    places,
                    size,
                )

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        # without an operator and a rule nothing but the whole tree is ever verified
        switched = self.switch.folder is not None or self.serving.adaptive is not None
        sizes = {part.num_nodes for part in self.serving.parts} if switched else {self.num_nodes}
        self.captured: dict[int, Captured] = capture_parts(self.model_runner, sizes)

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Callable[[Tensor], None] | None = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """The scheduler's entry: a decode round, or prefill. `on_publish` takes the new lengths as soon as known."""
        assert pp_proxy_tensors is None  # pipeline parallelism is refused at the start
        stream = torch.get_device_module(self.device).current_stream()
        record_stream_for_v2_verify(batch, None, stream)
        self._look()
        return self._verify(batch, on_publish) if batch.forward_mode.is_decode() else self._prefill(batch, on_publish)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """The scheduler has the numbers of the oldest round that it has not yet taken over, one round a call."""
        reqs, serving, part, drafts = self.launched.popleft()
        assert len(reqs) == batch_size
        emitted = 0
        for req, accepted in zip(reqs, num_correct_drafts_per_req, strict=True):
            emitted += accepted + 1
            if not (req.is_retracted or req.finished()):  # a round that ran ahead of a request's end is not its own
                label = self.meter.label(req.sampling_params.custom_params)
                looked_up = serving.beside is not None and part is serving.parts[-1]
                self.meter.add(label, accepted, part.num_nodes, [] if looked_up else part.depths)
                note_nodes(req, part.num_nodes, accepted)
        if drafts and serving.adaptive is not None:
            cost_ms = serving.adaptive.cost(part.num_nodes, batch_size)
            self.meter.paid(batch_size, emitted, cost_ms, serving.adaptive.plain(batch_size))
        if self.exporter is not None:
            self.exporter.flush(self.switch.drafting)

    def _look(self) -> None:
        """Every few rounds: is there an order of the operator's, does drafting still pay?"""
        self.rounds += 1
        if self.rounds % LOOK_EVERY != 1:
            return
        plan = self.switch.look(self.meter.pays, self._judge) if self.ranks.rank == 0 else None
        plan = self.ranks.from_first(plan)
        if plan is not None:
            self._carry_out(plan)

    def _carry_out(self, plan: Plan) -> None:
        serving, error = self.serving, None
        if plan.heads is not None:
            served, digest = None, ""
            try:  # what only one rank cannot read must not leave the others waiting for it in a collective
                opened = open_served(plan.heads, self.vocab_size)
                served = opened.load()
                digest = sha256((plan.heads / "config.json").read_bytes()).hexdigest()
                torch.empty(self._room_for(served), dtype=torch.uint8, device=self.device)  # and is free again
            except (ValueError, OSError, RuntimeError) as failure:  # the last: no memory for both
                error = f"rank {self.ranks.rank} cannot load {plan.heads}: {failure}"
            found = self.ranks.from_all((error, digest))
            errors = [each for each, _ in found if each is not None]
            if not errors and len({digest for _, digest in found}) > 1:
                errors = [f"{plan.heads} is not the same folder on all ranks; give one that all of them see"]
            error = errors[0] if errors else None
            if error is None and served is not None:
                tree = self._tree_of(opened)
                serving = self._serving(opened, tree, self._engine_heads(served, tree))
        self.switch.carry_out(plan, error)
        if self.switch.error is None:
            self.meter.forget()  # what the whole tree, or other heads, have gained says nothing of what comes
            self.serving = serving
        if self.ranks.rank == 0:
            self._tell()
            if self.exporter is not None:
                self.exporter.flush(self.switch.drafting, force=True)

    def _tell(self) -> None:
        adaptive = self.serving.adaptive
        self.switch.tell(None if adaptive is None else adaptive.draft_up_to)

    def _judge(self, folder: Path) -> None:
        """ValueError for an export that this server, as it was started, cannot draft with."""
        opened = open_served(folder, self.vocab_size)
        if opened.vocab_size != self.vocab_size:
            raise ValueError(f"{folder} holds heads of a vocabulary of {opened.vocab_size}, not {self.vocab_size}")
        compare_with_target(opened, self.server_args.model_path)
        self._shards(opened.heads)
        tree = self._tree_of(opened)
        if tree.num_nodes > self.num_nodes:
            raise ValueError(
                f"{folder} has a tree of {tree.num_nodes} nodes, this server was started for {self.num_nodes}; export "
                "a smaller one, or start the server with the larger one"
            )
        self._beside_of(opened, tree)
        sizes = {1 + len(kept) for kept in self._parts(opened, tree)}
        if missing := sorted(sizes - self.captured.keys()) if self.captured else []:
            raise ValueError(
                f"{folder} has passes of {missing} tokens, for which this server captured no CUDA graphs at its start; "
                f"export trees of {sorted(self.captured)} nodes"
            )

    def _tree_of(self, opened: ServedFolder) -> Tree:
        """The exported tree, or the chain in it where the attention backend takes no tree."""
        return opened.tree if self.branches or opened.tree.width <= 1 else opened.tree.chain_part

    def _beside_of(self, opened: ServedFolder, tree: Tree) -> Beside | None:
        """What is drafted beside this tree. ValueError unless it is nothing, or what the server was started with: the
        texts of the running requests were kept for that."""
        if not self.branches or "beside" not in opened.config:
            return None
        if self.loaded_beside is None or opened.config["beside"] != self.opened.config["beside"]:
            raise ValueError(
                f"{opened.file.parent} drafts a lookup beside its heads as this server was not started to; export it "
                "without beside, or start the server with it"
            )
        return self.loaded_beside

    def _parts(self, opened: ServedFolder, tree: Tree) -> list[list[int]]:
        """The nodes, but the root, of every part that a round may verify."""
        whole = list(range(1, tree.num_nodes))
        adaptive = opened.adaptive if tree is opened.tree else None
        kept = [] if adaptive is None else [adaptive.nodes(size)[1:] for size in adaptive.sizes[1:-1]]
        return [[], *kept, *([whole] if whole else [])]

    def _shards(self, heads: Heads) -> tuple[Shard, Shard | None]:
        """What heads share of the target: lm_head and, if they read tokens, embeddings. ValueError if they cannot."""
        model, sizes = self.model_runner.model, (self.vocab_size, heads.hidden_size)
        lm_head = shard_of(lm_head_of(model), *sizes, self.ranks)
        return lm_head, None if heads.reads == "state" else shard_of(embeddings_of(model), *sizes, self.ranks)

    def _engine_heads(self, served: ServedHeads, tree: Tree) -> EngineHeads:
        lm_head, embeddings = self._shards(served.heads)
        return EngineHeads(served, tree, lm_head, embeddings, self.ranks, self.model_runner.dtype, self.device)

    def _room_for(self, served: ServedHeads) -> int:
        """Bytes that heads take at most on a rank: their own, and the target's rows of their draft vocabulary."""
        numbers = sum(parameter.numel() for parameter in served.heads.parameters())
        rows = 3 * len(served.vocabulary.token_ids_M) * served.heads.hidden_size  # two, and one while they are gathered
        return (numbers + rows) * self.model_runner.dtype.itemsize

    def _serving(self, opened: ServedFolder, tree: Tree, heads: EngineHeads) -> Serving:
        requests = self.model_runner.max_running_requests
        parts = [Part(tree, kept, requests, self.device) for kept in self._parts(opened, tree)]
        adaptive = opened.adaptive if tree is opened.tree else None
        if self.ranks.rank == 0:
            logger.info(
                "MEDUSA: %d %s heads, a tree of %d nodes, %d deep, in parts of %s nodes for up to %s requests, from %s",
                heads.heads.num_heads,
                kind_of(heads.heads),
                tree.num_nodes,
                tree.depth,
                ", ".join(str(part.num_nodes) for part in parts),
                "any" if adaptive is None else adaptive.draft_up_to,
                opened.file.parent,
            )
        self.loads += 1
        return Serving(self.loads, tree, self._beside_of(opened, tree), heads, adaptive, parts)

    def _drafts(self, batch: ScheduleBatch) -> bool:
        """Whether this round ends with drafts for the next one."""
        adaptive = self.serving.adaptive if self.switch.adapts else None
        return self.switch.drafting and (adaptive is None or len(batch.reqs) <= adaptive.draft_up_to)

    def _part(self, batch: ScheduleBatch) -> Part:
        """What this round verifies of every request's tree."""
        serving = self.serving
        drafted_by = {getattr(req, "medusa_serving", None) for req in batch.reqs}
        if not self.switch.drafting or drafted_by != {serving.number}:
            return serving.parts[0]
        if serving.adaptive is None or not self.switch.adapts:
            return serving.parts[-1]
        rows_NR = batch.spec_info.accept_tokens.view(len(batch.reqs), -1)
        expected_NS = rows_NR[:, self.num_nodes : self.num_nodes + len(serving.parts)].view(torch.float64)
        size = serving.adaptive.choose(expected_NS)
        return next(part for part in serving.parts if part.num_nodes == size)

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
            batch.reqs,
            self._drafts(batch),
            result,
            result.next_token_ids,
            accept_lens_N,
            new_lengths_N,
            hidden_ND,
            result.next_token_ids,
        )

    def _verify(self, batch: ScheduleBatch, on_publish: Callable[[Tensor], None] | None) -> GenerationBatchResult:
        part, drafts = self._part(batch), self._drafts(batch)
        self.launched.append((list(batch.reqs), self.serving, part, drafts))
        verify_input = self._verify_input(batch, part)
        batch.spec_info, batch.input_ids = verify_input, verify_input.draft_token
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        N, n = len(batch.reqs), part.num_nodes
        if self.captured:
            self.captured[n].use(self.model_runner)
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
        result = self._drafted(
            batch.reqs,
            drafts,
            result,
            chosen[accepted_Nn].flatten(),
            accept_lens_N,
            new_lengths_N,
            hidden_ND,
            root_N,
        )
        result.speculative_num_draft_tokens = n
        return result

    def _verify_input(self, batch: ScheduleBatch, part: Part) -> MedusaVerifyInput:
        N, n, tree = len(batch.reqs), part.num_nodes, part.tree
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
        tokens_Nn = batch.spec_info.accept_tokens.view(N, -1)[:, part.nodes_s]
        tokens = tokens_Nn.flatten()
        if self.beside is not None and self.serving.beside is not None and part is self.serving.parts[-1]:
            longest = int(batch.seq_lens_cpu.max()) + 1
            own = self.beside.verified(tokens_Nn, batch.req_pool_indices, batch.seq_lens + 1, longest)
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
        reqs: list[Any],
        drafts: bool,
        result: GenerationBatchResult,
        next_token_ids: Tensor,
        accept_lens_N: Tensor,
        new_lengths_N: Tensor,
        hidden_ND: Tensor,
        root_N: Tensor,
    ) -> GenerationBatchResult:
        """The round's result, with the next round's tree drafted from the last accepted state and its token."""
        row_NR = torch.zeros(len(root_N), self.num_nodes + MOST_SIZES, dtype=torch.int64, device=root_N.device)
        row_NR[:, 0] = root_N
        serving = self.serving if drafts else None
        for req in reqs:
            req.medusa_serving = None if serving is None else serving.number
        if serving is not None:
            drafted = serving.heads.draft(hidden_ND, root_N, with_log_p=serving.adaptive is not None)
            row_NR[:, : serving.tree.num_nodes] = drafted.tokens_Nn
            if serving.adaptive is not None and drafted.log_p_Nn is not None:
                expected_NS = serving.adaptive.expected(drafted.log_p_Nn, serving.tree)
                at = slice(self.num_nodes, self.num_nodes + expected_NS.shape[1])
                row_NR[:, at] = expected_NS.double().view(torch.int64)
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=next_token_ids,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=accept_lens_N,
            new_seq_lens=new_lengths_N,
            next_draft_input=MedusaVerifyInput(
                draft_token_num=row_NR.shape[1],
                new_seq_lens=new_lengths_N,
                accept_tokens=row_NR.flatten(),
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
        from_first=lambda word: group.broadcast_object(word, src=0),
        from_all=lambda word: _gathered(word, group.world_size, group.cpu_group),
    )


def _gathered(word: Any, size: int, group: Any) -> list[Any]:
    words: list[Any] = [None] * size
    torch.distributed.all_gather_object(words, word, group=group)
    return words


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
