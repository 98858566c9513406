"""What drafting takes beside a verify pass, by type of heads: as the SGLang plugin does it.

Letters: D hidden, M draft vocabulary.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from medusa_k25.costs.hardware import Hardware
from medusa_k25.costs.served import Served
from medusa_k25.heads import HEADS, Heads

ITEM_BYTES = 2  # of weights and states, bf16


@dataclass(frozen=True)
class Drafting:
    """One drafting for trees of `nodes`, root included. Bytes and FLOPs are those of one rank.

    heads: how many draft; a tree of n nodes is n - 1 deep at most. parameters: of all heads, which every rank holds.
    read_bytes: weights of features and lm_head, again for every head that waits for the one before it. held_bytes: the
    target's rows that a rank holds for drafting alone.
    """

    nodes: int
    heads: int
    parameters: int
    read_bytes: float
    flops: float
    collectives: int
    held_bytes: float
    ms: float

    def text(self, pass_ms: float) -> str:
        """pass_ms: of the verify pass that follows."""
        return (
            f"{self.parameters / 1e6:.1f} M parameters; before a pass of {self.nodes} nodes a rank reads "
            f"{self.read_bytes / 1e6:,.0f} MB and computes {self.flops / 1e9:.2f} GFLOP, {self.collectives} "
            f"collective{'' if self.collectives == 1 else 's'}: {self.ms:.2f} ms, {self.ms / pass_ms:.1%} of the pass "
            f"of {pass_ms:.1f} ms; it holds {self.held_bytes / 1e6:,.0f} MB of the target's rows for it"
        )


def drafting(
    hardware: Hardware, served: Served, heads: Heads, draft_vocab_size: int, nodes: int, batch: int = 1
) -> Drafting:
    """Of `batch` requests: they share what is read. `heads` may lie on the meta device.

    Heads that read the state alone multiply a rank's share of lm_head, then the ranks gather their best tokens. For all
    others every rank holds the draft vocabulary's rows of lm_head, and for the path those of the embeddings; what is
    summed over ranks is the root's embedding and one rank's state, 2 D numbers. Heads that read the path evaluate
    lm_head once a depth, in rows as many as the nodes there that have children, of which a tree of n nodes has n - 1 at
    most. What is gathered is taken to be as large as a state.
    """
    D, M, gpus = served.hidden_size, draft_vocab_size, max(hardware.gpus, 1)
    count = min(heads.num_heads, nodes - 1)
    shares = gpus if heads.reads == "state" else 1
    in_turn = heads.reads == "path"
    products, lm_head = heads.products[:count], D * M / shares
    matrices = count if in_turn or heads.own_lm_head else 1
    more_rows = nodes - 1 - count if in_turn else 0  # taken to be of the dearest head
    read_bytes = ITEM_BYTES * (sum(products) + matrices * lm_head)
    flops = 2 * batch * (sum(products) + count * lm_head + more_rows * (max(products) + lm_head))
    reading_s = read_bytes / (hardware.bandwidth_tb_s.value * 1e12 * hardware.bandwidth_share.value)
    products_s = flops / (hardware.bf16_tflops.value * 1e12 * hardware.train_share.value)
    message = batch * (D if heads.reads == "state" else 2 * D) * ITEM_BYTES
    collective_ms = hardware.allreduce_us(message) / 1000 if gpus > 1 else 0.0
    copied = M < served.vocab_size or shares < gpus  # else the target's own rows serve
    rows = (0 if heads.own_lm_head else 1 / shares) + (in_turn and gpus > 1)
    features = sum(weight.numel() for name, weight in heads.named_parameters() if name != "lm_heads.weight")
    return Drafting(
        nodes,
        count,
        parameters=features + (heads.num_heads * M * D if heads.own_lm_head else 0),
        read_bytes=read_bytes,
        flops=flops,
        collectives=int(gpus > 1),
        held_bytes=rows * M * D * ITEM_BYTES if copied else 0,
        ms=1000 * max(reading_s, products_s) + collective_ms,
    )


def every_type(heads: Heads) -> Mapping[str, Heads]:
    """All types with those of the arguments of `heads` that they have, their own defaults else; on the meta device."""
    found: dict[str, Heads] = {}
    with torch.device("meta"):
        for name, kind in HEADS.items():
            known = inspect.signature(kind).parameters
            found[name] = kind(**{key: value for key, value in heads.arguments.items() if key in known})
    return found
