"""What a training run takes: memory of a device, work, disk. From its sizes alone, before it starts.

Letters: K heads, N positions of a micro-batch, D hidden, M draft vocabulary, V target vocabulary.
"""

import time
from dataclasses import dataclass, replace

import torch

from medusa_k25.heads import Heads
from medusa_k25.loss import BLOCK_BYTES, LEAST_ROWS, ROWS

GB = 1e9
# Dense bf16 peak, FLOP/s, from the vendor's data sheets.
PEAK_FLOPS = {
    "RTX PRO 6000": 503e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
}
GPU_SHARE_OF_PEAK = 0.45  # assumed: not measured yet
CPU_SHARE_OF_PEAK = 0.8  # of the products' measured speed, see `python -m bench.training`
CUDA_CONTEXT_BYTES = 1_500_000_000  # CUDA, cuBLAS and NCCL, before the first tensor


@dataclass(frozen=True)
class TrainingCost:
    """The sizes of a run. Memory and disk in bytes, of one device and of the whole run; work in FLOP.

    parameters: of the blocks of all heads; further_parameters: of them, in blocks behind a head's first.
    """

    K: int
    N: int
    D: int
    M: int
    parameters: int
    further_parameters: int
    blocks: int
    own_lm_head: bool
    teacher: bool
    strategy: str  # auto, ddp, zero1, zero2, zero3
    world_size: int
    low_precision: bool  # products in bf16
    device_type: str
    longest_answer: int

    @classmethod
    def of(
        cls,
        heads: Heads,
        num_blocks: int,
        positions: int,
        draft_vocab_size: int,
        teacher: bool,
        strategy: str,
        world_size: int,
        low_precision: bool,
        device_type: str,
        longest_answer: int,
    ) -> "TrainingCost":
        """Of `heads`, which may lie on the meta device; `positions` of a rank's micro-batch."""
        own = 0 if heads.lm_heads is None else heads.lm_heads.weight.numel()
        parameters = sum(parameter.numel() for parameter in heads.parameters()) - own
        return cls(
            K=heads.num_heads,
            N=positions,
            D=heads.hidden_size,
            M=draft_vocab_size,
            parameters=parameters,
            further_parameters=parameters * (num_blocks - 1) // num_blocks,
            blocks=num_blocks,
            own_lm_head=heads.own_lm_head,
            teacher=teacher,
            strategy=strategy,
            world_size=world_size,
            low_precision=low_precision,
            device_type=device_type,
            longest_answer=longest_answer,
        )

    @property
    def trained(self) -> int:
        """Parameters that the optimizer holds."""
        return self.parameters + (self.K * self.M * self.D if self.own_lm_head else 0)

    @property
    def flops_per_position(self) -> float:
        """Forward and backward: no gradient to the frozen lm_head or to the cached states."""
        logits = 2 * self.D * self.M
        blocks = 2 * self.parameters + 2 * self.parameters + 2 * self.further_parameters
        heads = self.K * logits * (3 if self.own_lm_head else 2)
        return blocks + heads + (2 * logits if self.teacher else 0)

    @property
    def forward_flops_per_position(self) -> float:
        """Of a validated position: what the heads rank, without a teacher."""
        return 2 * self.parameters + self.K * 2 * self.D * self.M

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and AdamW's two moments of one device, as the strategy shards them."""
        weight = 2 if self.low_precision and self.strategy.startswith("zero") else 4
        master = 4  # DeepSpeed keeps a fp32 copy beside the weights, whatever their dtype
        moments = 8
        P, W = self.trained, self.world_size
        if self.strategy == "zero1":
            return 2 * weight * P + (master + moments) * P // W
        if self.strategy == "zero2":
            return weight * P + (weight + master + moments) * P // W
        if self.strategy == "zero3":
            return (2 * weight + master + moments) * P // W
        buckets = 4 * P if W > 1 else 0  # DDP's, in which gradients are summed
        return (2 * weight + moments) * P + buckets

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of one device, by part."""
        item = 2 if self.low_precision else 4
        K, N, D = self.K, self.N, self.D
        activations = K * N * D * item * (3 * self.blocks + 2) + 2 * N * D * item
        rows = min(ROWS[self.device_type], K * N)
        loss = BLOCK_BYTES[self.device_type] * (2 if self.low_precision else 1) + 4 * rows * D * 4
        loss += N * D * 4 if self.teacher else 0
        if self.own_lm_head:  # its gradient in fp32 and scaled, whole rows of logits, and what ZeRO-3 gathers
            loss += 8 * K * self.M * D + 2 * LEAST_ROWS[self.device_type] * self.M * 4
            loss += K * self.M * D * item if self.strategy == "zero3" else 0
        validation = (2 * K + 1) * self.longest_answer * D * item + 2 * BLOCK_BYTES[self.device_type]
        return {
            "weights, gradients, optimizer": self.state_bytes,
            "frozen lm_head": self.M * D * item,
            "a micro-batch": max(activations + loss, validation),
            "libraries": CUDA_CONTEXT_BYTES if self.device_type == "cuda" else 0,
        }

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def disk_bytes(self) -> int:
        """The best checkpoint, the last, and the one being written: weights and moments, and the heads in fp32."""
        return 3 * (4 + 8 + 4 + (2 if self.low_precision else 4)) * self.trained

    def smaller(self, available: int) -> str:
        """The settings that would fit into `available` bytes, in the order in which they cost least."""
        fits = []
        for strategy in ("zero2", "zero3"):
            if self.world_size > 1 and replace(self, strategy=strategy).memory_bytes <= available:
                fits.append(f"strategy={strategy}")
        smaller = self
        while smaller.N > 64 and smaller.memory_bytes > available:
            smaller = replace(smaller, N=smaller.N // 2)
        if smaller.memory_bytes <= available:
            fits.append(
                f"data.batch_size or data.window 1/{self.N // smaller.N} of now, with as many more "
                "trainer.accumulate_grad_batches"
            )
        if self.own_lm_head and replace(self, own_lm_head=False).memory_bytes <= available:
            fits.append("heads.own_lm_head=false")
        smaller = self
        while smaller.M > 1024 and smaller.memory_bytes > available:
            smaller = replace(smaller, M=smaller.M // 2)
        if smaller.M < self.M and smaller.memory_bytes <= available:
            fits.append(f"draft_vocab_size={smaller.M}")
        return "; ".join(fits) if fits else "more devices, or devices with more memory"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a device: the data sheet's where the GPU is known, else what one large product reaches here."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, flops in PEAK_FLOPS.items():
            if known in name:
                return flops
    size = 8192 if device.type == "cuda" else 768
    a = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
