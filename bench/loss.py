"""How fast the loss is and how much memory it takes, beside the alternatives, in one run:

    python -m bench.loss                 # the two shapes below, about 3 minutes on 2 cores
    python -m bench.loss --rounds 9      # steadier medians
    python -m bench.loss --cpu-seconds   # one thread and its CPU time: what to look at on a busy machine

- matrix products: only the products that no method can avoid (logits, gradient), in our blocks, preallocated
- ours CE, KD, mix: medusa_k25.loss.multi_head_loss with distillation 0, 1 and 0.5; the teacher adds 1/K to the products
- full logits CE: F.cross_entropy(features @ lm_head.T) in fp32, once a head
- full logits KD: F.kl_div of the same logits' log-softmax from the teacher's, which is computed once for all heads
- torch linear_ce: F.linear_cross_entropy with its default options, once a head (torch >= 2.13)
- torch chunked: the same with LinearCrossEntropyOptions(); one head and once, because on a CPU it takes 20 times longer

Each time is forward + backward. Rounds alternate between the methods; shown are medians, and of ratios the median over
the ratios of each round: the speed of the bare products of CE is 100%, the time of our CE is 1.00. Peak memory is what
one step in a fresh process needed beyond the inputs, for this batch and for one of a quarter: ours grows by gradients
and the teacher's rows, of D numbers each, not by V. Letters: K heads, N labelled positions a head, D hidden,
V vocabulary, M all labelled positions of all heads, R rows and C columns of a block.
"""

import argparse
import ctypes
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_k25.data.labels import IGNORE
from medusa_k25.loss import Teacher, block_shape, matmul_dtype, multi_head_loss

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


SHAPES = (Shape(K=4, N=512, D=576, V=49152), Shape(K=4, N=96, D=1024, V=163840))
BARE, FULL, FULL_KD = "matrix products", "full logits CE", "full logits KD"
OURS_CE = "ours CE"
OURS = {OURS_CE: 0.0, "ours KD": 1.0, "ours mix": 0.5}  # share of distillation
TORCH, CHUNKED = "torch linear_ce", "torch chunked"
METHODS = (BARE, *OURS, FULL, FULL_KD, *((TORCH, CHUNKED) if hasattr(F, "linear_cross_entropy") else ()))


def step(method: str, shape: Shape, dtype: torch.dtype) -> Callable[[], None]:
    """One forward + backward of the method, on inputs made here: one text, with K states beyond the last label."""
    K, N = shape.K, shape.N
    generator = torch.Generator(DEVICE).manual_seed(0)
    features_KND = torch.randn(K, N + K, shape.D, generator=generator, device=DEVICE).to(dtype).requires_grad_()
    hidden_ND = torch.randn(N + K, shape.D, generator=generator, device=DEVICE).to(dtype)
    lm_head_VD = lm_head(shape, dtype)
    token_T = torch.randint(0, shape.V, (N + K + 1,), generator=generator, device=DEVICE)
    labels_KN = torch.stack([token_T[k + 1 : k + 1 + N] for k in range(1, K + 1)])
    weights_K = (0.8 ** torch.arange(1, K + 1)).to(DEVICE) / N

    def per_head(loss: Callable[[Tensor, int], Tensor]) -> Callable[[], None]:
        """loss(the labelled features [N, D] of a head, its k)"""
        return lambda: sum(weights_K[k - 1] * loss(features_KND[k - 1, :N], k) for k in range(1, K + 1)).backward()  # type: ignore[union-attr]

    def full_logits_kd() -> None:
        log_p_NV = (hidden_ND @ lm_head_VD.T).float().log_softmax(dim=1)

        def kl(x_ND: Tensor, k: int) -> Tensor:
            log_q_NV = (x_ND @ lm_head_VD.T).float().log_softmax(dim=1)
            return F.kl_div(log_q_NV, log_p_NV[k : k + N], reduction="sum", log_target=True)

        per_head(kl)()

    if method == BARE:
        return bare(features_KND.detach()[:, :N].flatten(0, 1), lm_head_VD)
    if method in OURS:
        labels_KN = F.pad(labels_KN, (0, K), value=IGNORE)
        teacher = Teacher(hidden_ND, lm_head_VD)
        arguments = features_KND, lm_head_VD, labels_KN, weights_K, teacher, OURS[method]
        return lambda: multi_head_loss(*arguments)[0].backward()
    if method == FULL:
        return per_head(lambda x, k: F.cross_entropy((x @ lm_head_VD.T).float(), labels_KN[k - 1], reduction="sum"))
    if method == FULL_KD:
        return full_logits_kd
    options = torch.nn.LinearCrossEntropyOptions() if method == CHUNKED else None
    return per_head(
        lambda x, k: F.linear_cross_entropy(x, lm_head_VD, labels_KN[k - 1], reduction="sum", options=options)
    )


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


def in_fresh_process(
    method: str, shapes: Sequence[Shape], dtype: torch.dtype, cpu_seconds: bool
) -> list[tuple[float, int]]:
    """(seconds, peak bytes beyond the inputs) of one step each; on the CPU the process's peak, on Linux only."""
    clock = choose_clock(cpu_seconds)
    step(method, Shape(K=1, N=1, D=8, V=16), dtype)()  # libraries load, threads start
    results = []
    for shape in shapes:
        run = step(method, shape, dtype)
        if DEVICE == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            results.append((seconds(run, clock), torch.cuda.max_memory_allocated() - before))
            continue
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # sets the peak, VmHWM, back to the current size
        before = status_bytes("VmRSS")
        results.append((seconds(run, clock), status_bytes("VmHWM") - before))
    return results


def status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def report(shape: Shape, dtype: torch.dtype, rounds: int, cpu_seconds: bool) -> None:
    clock = choose_clock(cpu_seconds)
    shapes = {method: replace(shape, K=1) if method == CHUNKED else shape for method in METHODS}
    small = shape.N // 4
    times: dict[str, list[float]] = {}
    peaks, small_peaks = {}, {}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for method, own in shapes.items():
            (_, small_peaks[method]), (once, peaks[method]) = pool.apply(
                in_fresh_process, (method, (replace(own, N=small), own), dtype, cpu_seconds)
            )
            times[method] = [once * shape.flops / own.flops] if method == CHUNKED else []
    runs = {method: step(method, shape, dtype) for method in METHODS if method != CHUNKED}
    for _ in range(rounds):
        for method, run in runs.items():
            times[method].append(seconds(run, clock))
    name = str(dtype).removeprefix("torch.")
    print(f"\nK={shape.K} N={shape.N} D={shape.D} V={shape.V:,} {name}, {rounds} rounds; MB are peak memory")
    print(
        f"{'':24} {'seconds':>8} {'GFLOP/s':>8} {'share of products':>18} {'x ours CE':>10} "
        f"{f'MB, N={small}':>10} {f'MB, N={shape.N}':>10} {'of full logits':>15}"
    )
    for method in METHODS:
        median = statistics.median(times[method])
        print(
            f"{method + (' (1 head x K)' if method == CHUNKED else ''):24} {median:8.2f} "
            f"{shape.flops / median / 1e9:8.0f} {median_ratio(times[BARE], times[method]):18.0%} "
            f"{median_ratio(times[method], times[OURS_CE]):10.2f} "
            f"{small_peaks[method] / 1e6:10.0f} {peaks[method] / 1e6:10.0f} {peaks[method] / peaks[FULL]:15.3f}",
            flush=True,
        )


def median_ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(time_s / other_s for time_s, other_s in zip(times, others, strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.loss", description="The loss beside its alternatives.")
    parser.add_argument("--rounds", type=int, default=2)
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
