"""How fast the loss is and how much memory it takes, beside the alternatives, in one run:

    python -m bench.loss                 # the two shapes below, about 2 minutes on 2 cores
    python -m bench.loss --rounds 9      # steadier medians
    python -m bench.loss --cpu-seconds   # one thread and its CPU time: what to look at on a busy machine

- matrix products: only the products that no method can avoid (logits, gradient), in our blocks, preallocated
- ours: medusa_k25.loss.multi_head_cross_entropy
- full logits: F.cross_entropy(features @ lm_head.T) in fp32, once a head
- torch linear_ce: F.linear_cross_entropy with its default options, once a head (torch >= 2.13)
- torch chunked: the same with LinearCrossEntropyOptions(); one head and once, because on a CPU it takes 20 times longer

Each time is forward + backward. Rounds alternate between the methods; shown are medians, the share is the median over
rounds of the ratio to the bare products of the same round. Peak memory is what one step in a fresh process needed
beyond the inputs. Letters: K heads, N positions a head, D hidden, V vocabulary, M all positions of all heads, R rows
and C columns of a block.
"""

import argparse
import ctypes
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_k25.loss import block_shape, matmul_dtype, multi_head_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    K: int
    N: int
    D: int
    V: int

    @property
    def flops(self) -> int:
        return 4 * self.K * self.N * self.D * self.V


SHAPES = (Shape(K=4, N=512, D=576, V=49152), Shape(K=4, N=128, D=1024, V=163840))
BARE, OURS, FULL, TORCH, CHUNKED = "matrix products", "ours", "full logits", "torch linear_ce", "torch chunked"
METHODS = (BARE, OURS, FULL, *((TORCH, CHUNKED) if hasattr(F, "linear_cross_entropy") else ()))


def step(method: str, shape: Shape, dtype: torch.dtype) -> Callable[[], None]:
    """One forward + backward of the method, on inputs made here."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    features_KND = torch.randn(shape.K, shape.N, shape.D, generator=generator, device=DEVICE).to(dtype)
    features_KND.requires_grad_()
    lm_head_VD = lm_head(shape, dtype)
    labels_KN = torch.randint(0, shape.V, (shape.K, shape.N), generator=generator, device=DEVICE)
    weights_K = (0.8 ** torch.arange(1, shape.K + 1)).to(DEVICE) / shape.N

    def per_head(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        return lambda: sum(weights_K[k] * loss(features_KND[k], labels_KN[k]) for k in range(shape.K)).backward()  # type: ignore[union-attr]

    if method == BARE:
        return bare(features_KND.detach().flatten(0, 1), lm_head_VD)
    if method == OURS:
        return lambda: multi_head_cross_entropy(features_KND, lm_head_VD, labels_KN, weights_K)[0].backward()
    if method == FULL:
        return per_head(lambda x, y: F.cross_entropy((x @ lm_head_VD.T).float(), y, reduction="sum"))
    if method == TORCH:
        return per_head(lambda x, y: F.linear_cross_entropy(x, lm_head_VD, y, reduction="sum"))
    options = torch.nn.LinearCrossEntropyOptions()
    return per_head(lambda x, y: F.linear_cross_entropy(x, lm_head_VD, y, reduction="sum", options=options))


def bare(features_MD: Tensor, lm_head_VD: Tensor) -> Callable[[], None]:
    M, V = len(features_MD), len(lm_head_VD)
    R, C = block_shape(M, V, DEVICE)
    logits = torch.empty(R * C, device=DEVICE, dtype=features_MD.dtype)
    gradient_MD = torch.zeros_like(features_MD)

    def products() -> None:
        for features_RD, gradient_RD in zip(features_MD.split(R), gradient_MD.split(R), strict=True):
            for w_CD in lm_head_VD.split(C):
                logits_RC = logits[: len(features_RD) * len(w_CD)].view(len(features_RD), len(w_CD))
                torch.mm(features_RD, w_CD.T, out=logits_RC)
                gradient_RD.addmm_(logits_RC, w_CD)

    return products


_lm_heads: dict[tuple[Shape, torch.dtype], Tensor] = {}


def lm_head(shape: Shape, dtype: torch.dtype) -> Tensor:
    """[V, D], shared by the methods of a process."""
    key = replace(shape, N=0), dtype
    if key not in _lm_heads:
        _lm_heads.clear()
        _lm_heads[key] = torch.rand(shape.V, shape.D, device=DEVICE, dtype=dtype).sub_(0.5).mul_(0.1)
    return _lm_heads[key]


def seconds(run: Callable[[], None], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def choose_clock(cpu_seconds: bool) -> Callable[[], float]:
    if not cpu_seconds:
        return time.perf_counter
    torch.set_num_threads(1)  # threads that wait for each other would count as work
    return time.process_time


def in_fresh_process(method: str, shape: Shape, dtype: torch.dtype, cpu_seconds: bool) -> tuple[float, int]:
    """(seconds, peak bytes beyond the inputs) of one step; on the CPU the peak is the process's, on Linux only."""
    clock = choose_clock(cpu_seconds)
    step(method, Shape(K=1, N=1, D=8, V=16), dtype)()  # libraries load, threads start
    run = step(method, shape, dtype)
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return seconds(run, clock), torch.cuda.max_memory_allocated() - before
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # sets the peak, VmHWM, back to the current size
    before = status_bytes("VmRSS")
    return seconds(run, clock), status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def report(shape: Shape, dtype: torch.dtype, rounds: int, cpu_seconds: bool) -> None:
    clock = choose_clock(cpu_seconds)
    shapes = {method: replace(shape, K=1) if method == CHUNKED else shape for method in METHODS}
    times: dict[str, list[float]] = {}
    peaks = {}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for method in METHODS:
            once, peaks[method] = pool.apply(in_fresh_process, (method, shapes[method], dtype, cpu_seconds))
            times[method] = [once] if method == CHUNKED else []
    runs = {method: step(method, shape, dtype) for method in METHODS if method != CHUNKED}
    for _ in range(rounds):
        for method, run in runs.items():
            times[method].append(seconds(run, clock))
    print(f"\nK={shape.K} N={shape.N} D={shape.D} V={shape.V:,} {str(dtype).removeprefix('torch.')}, {rounds} rounds")
    print(f"{'':24} {'seconds':>8} {'GFLOP/s':>8} {'share of products':>18} {'peak MB':>8} {'of full logits':>15}")
    for method in METHODS:
        work = shapes[method].flops / shape.flops
        median = statistics.median(times[method])
        share = statistics.median(
            work * bare_s / own_s for bare_s, own_s in zip(times[BARE], times[method], strict=False)
        )
        print(
            f"{method + (' (1 head)' if method == CHUNKED else ''):24} {median:8.2f} "
            f"{shapes[method].flops / median / 1e9:8.0f} {share:18.0%} "
            f"{peaks[method] / 1e6:8.0f} {peaks[method] / peaks[FULL]:15.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.loss", description="The loss beside its alternatives.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-seconds", action="store_true", help="measure CPU seconds on one thread")
    arguments = parser.parse_args()
    if arguments.cpu_seconds and DEVICE == "cuda":
        parser.error("--cpu-seconds says nothing about a GPU; leave it out, or hide the GPU with CUDA_VISIBLE_DEVICES=")
    choose_clock(arguments.cpu_seconds)
    print(f"torch {torch.__version__} on {DEVICE}, {torch.get_num_threads()} threads", end="")
    print(", CPU seconds" if arguments.cpu_seconds else ", wall-clock seconds")
    fast_bf16 = matmul_dtype(torch.empty(0, device=DEVICE, dtype=torch.bfloat16)) == torch.bfloat16
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16) if fast_bf16 else (torch.float32,):
            report(shape, dtype, arguments.rounds, arguments.cpu_seconds)


if __name__ == "__main__":
    main()
