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

    heads may lie on the meta device. N: positions of a rank's micro-batch, M: draft vocabulary, V: of the target.
    longest_answer: tokens, of one that is validated.
    """

    heads: Heads
    N: int
    M: int
    V: int
    teacher: bool
    strategy: str  # auto, ddp, zero1, zero2, zero3
    world_size: int
    low_precision: bool  # products in bf16
    device_type: str
    longest_answer: int

    @property
    def K(self) -> int:
        return self.heads.num_heads

    @property
    def D(self) -> int:
        return self.heads.hidden_size

    @property
    def trained(self) -> int:
        """Parameters that the optimizer holds."""
        features = sum(weight.numel() for name, weight in self.heads.named_parameters() if name != "lm_heads.weight")
        return features + (self.K * self.M * self.D if self.heads.own_lm_head else 0)

    @property
    def flops_per_position(self) -> float:
        """Forward and backward: no gradient to the frozen lm_head or to the cached states."""
        logits = 2 * self.D * self.M
        features = 4 * sum(self.heads.products) + 2 * self.heads.trained_inputs
        ranked = self.K * logits * (3 if self.heads.own_lm_head else 2)
        return features + ranked + (2 * logits if self.teacher else 0)

    @property
    def forward_flops_per_position(self) -> float:
        """Of a validated position: what the heads rank, without a teacher."""
        return 2 * sum(self.heads.products) + self.K * 2 * self.D * self.M

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
        activations = N * self.heads.saved_numbers * item
        rows = min(ROWS[self.device_type], K * N)
        loss = BLOCK_BYTES[self.device_type] * (2 if self.low_precision else 1) + 4 * rows * D * 4
        loss += N * D * 4 if self.teacher else 0
        if self.heads.own_lm_head:  # its gradient in fp32 and scaled, whole rows of logits, and what ZeRO-3 gathers
            loss += 8 * K * self.M * D + 2 * LEAST_ROWS[self.device_type] * self.M * 4
            loss += K * self.M * D * item if self.strategy == "zero3" else 0
        validation = (2 * K + 1) * self.longest_answer * D * item + 2 * BLOCK_BYTES[self.device_type]
        return {
            "weights, gradients, optimizer": self.state_bytes,
            "frozen lm_head": self.M * D * item,
            "frozen embeddings": 0 if self.heads.reads == "state" else self.V * D * item,
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
        if self.heads.own_lm_head:
            with torch.device("meta"):
                arguments = self.heads.arguments | {"own_lm_head": False}
                shared = replace(self, heads=type(self.heads)(**arguments))
            if shared.memory_bytes <= available:
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
