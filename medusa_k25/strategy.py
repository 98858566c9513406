"""The strategies by name: Lightning's own, and DeepSpeed's ZeRO on GPUs as well as, for tests and dry runs, on CPUs."""

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy

# A machine that is cut off closes no connection: after this long the others end. Rank 0 alone never works so long.
TIMEOUT = timedelta(minutes=10)
STRATEGIES = ("auto", "ddp", "zero1", "zero2", "zero3")


def build_strategy(
    name: str, devices: int, num_nodes: int, micro_batch: int, resume_world_size: int | None = None
) -> str | Strategy:
    """`auto` is one device, or DDP over several. zero1 to zero3 are DeepSpeed's; on a CPU machine they run over gloo.

    The frozen lm_head is a buffer: `forward_sync_buffers=False` keeps DDP from sending it around at every step.
    `micro_batch` is what DeepSpeed prints its throughput for. `resume_world_size`: of the checkpoint to go on from.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy.name={name}: expected one of {', '.join(STRATEGIES)}")
    if name == "auto" and devices * num_nodes == 1:
        return "auto"
    if name in ("auto", "ddp"):
        return DDPStrategy(forward_sync_buffers=False, timeout=TIMEOUT)
    kind = HeadsDeepSpeedStrategy
    options: dict[str, Any] = {}
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is first imported
        kind, options = CPUDeepSpeedStrategy, {"process_group_backend": "gloo"}
    strategy = kind(stage=int(name[-1]), logging_batch_size_per_gpu=micro_batch, timeout=TIMEOUT, **options)
    if resume_world_size not in (None, devices * num_nodes):
        assert isinstance(strategy.config, dict)
        strategy.config["checkpoint"] = {"load_universal": True}
    return strategy


class HeadsDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeed that takes a checkpoint of another world size, too: through its universal format."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert isinstance(self.config, dict)
        if self.config.get("checkpoint", {}).get("load_universal"):
            checkpoint_path = self._as_universal(Path(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _as_universal(self, path: Path) -> Path:
        """Written by rank 0 into the checkpoint's folder, with which it will go; found there after another resume."""
        universal = path.with_name("universal.ckpt")
        if self.is_global_zero and not (universal / "latest_universal").exists():
            shutil.rmtree(universal, ignore_errors=True)  # of a conversion that was killed
            print(f"{path} is of another number of ranks: converting it to DeepSpeed's universal format")
            command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
            folders = ["--input_folder", str(path / "checkpoint"), "--output_folder", str(universal / "checkpoint")]
            workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
            run = subprocess.run([*command, *folders, *workers], capture_output=True, text=True, check=False)
            if run.returncode:
                raise ValueError(f"DeepSpeed cannot convert {path}:\n{run.stderr[-2000:]}")
        self.barrier()
        return universal


class CPUDeepSpeedStrategy(HeadsDeepSpeedStrategy):
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
