"""The strategies by name: Lightning's own, and DeepSpeed's ZeRO on GPUs as well as, for tests and dry runs, on CPUs."""

import os
from typing import Any
from unittest import mock

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy

STRATEGIES = ("auto", "ddp", "zero1", "zero2", "zero3")


def build_strategy(name: str, devices: int, num_nodes: int, micro_batch: int) -> str | Strategy:
    """`auto` is one device, or DDP over several. zero1 to zero3 are DeepSpeed's; on a CPU machine they run over gloo.

    The frozen lm_head is a buffer: `forward_sync_buffers=False` keeps DDP from sending it around at every step.
    `micro_batch` is what DeepSpeed prints its throughput for.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy.name={name}: expected one of {', '.join(STRATEGIES)}")
    cpu = not torch.cuda.is_available()
    if name == "auto" and devices * num_nodes == 1:
        return "auto"
    if name in ("auto", "ddp"):
        return DDPStrategy(forward_sync_buffers=False)
    options: dict[str, Any] = {"stage": int(name[-1]), "logging_batch_size_per_gpu": micro_batch}
    if not cpu:
        return DeepSpeedStrategy(**options)
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is first imported
    return CPUDeepSpeedStrategy(process_group_backend="gloo", **options)


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeed on CPU ranks. Only what Lightning refuses on CPUs is replaced; engine and ZeRO are the real ones."""

    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator):
            raise ValueError("this strategy is for trainer.accelerator=cpu")
        # DeepSpeed takes the number of local ranks for its device count; its own guess is the number of NUMA nodes
        os.environ.setdefault("LOCAL_SIZE", str(self.num_processes))
        super(DeepSpeedStrategy, self).setup_environment()  # skips the check for CUDA

    def setup_distributed(self) -> None:
        import deepspeed

        # only an inference collective uses this operation; building it takes minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()  # skips the check for a device index, which CPUs lack

    def init_deepspeed(self) -> None:
        import deepspeed

        initialize = deepspeed.initialize

        def with_rank(*args: Any, **kwargs: Any) -> Any:
            # Lightning passes the device index, None on a CPU
            kwargs["args"].device_rank = self.local_rank
            return initialize(*args, **kwargs)

        with mock.patch.object(deepspeed, "initialize", with_rank):
            super().init_deepspeed()
