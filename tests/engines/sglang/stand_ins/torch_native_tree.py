"""A plugin for SGLang, for tests: its `torch_native` attention honours tree masks and serves MLA models.

SGLang itself has no backend on this kind of CPU that verifies a tree.
"""

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from tree_attention import tree_attention


def register() -> None:
    register_attention_backend("torch_native")(_create)

    # torch_native computes no expanded MLA; the absorbed form is attention with a single head of keys and values.
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)

    from medusa_k25.serving.sglang import algorithm

    for backends in (*algorithm.TREE_BACKENDS.values(), algorithm.PAGED_TREE_BACKENDS):
        backends.add("torch_native")


def _create(runner):
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    class TorchNativeTreeBackend(TorchNativeAttnBackend):
        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            if not forward_batch.forward_mode.is_target_verify():
                return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            if layer.sliding_window_size not in (None, -1):
                raise NotImplementedError("tree masks with a sliding window")
            if save_kv_cache:
                self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
            keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
            N = forward_batch.spec_info.draft_token_num
            B = forward_batch.batch_size
            query_BNHC = q.view(B, N, layer.tp_q_head_num, layer.qk_head_dim)
            mask_BNN = forward_batch.spec_info.custom_mask[: B * N * N].view(B, N, N).bool()
            attended = []
            for b, row in enumerate(forward_batch.req_pool_indices):
                slots_T = self.req_to_token_pool.req_to_token[row, : forward_batch.seq_lens[b] + N].long()
                key_TGC, value_TGC = (cache[slots_T].to(q.dtype) for cache in (keys, values))
                attended.append(tree_attention(query_BNHC[b], key_TGC, value_TGC, mask_BNN[b], layer.scaling))
            return torch.cat(attended).flatten(1)

    return TorchNativeTreeBackend(runner)
