"""Finds the peak of the GPU, from which the log computes MFU."""

import torch

from sft.config import Config
from sft.estimate.gpus import gpu_of_device


def peak_tflops(config: Config, device: torch.device) -> float | None:
    """Peak dense TFLOP/s of the device in the run's precision; None if unknown, as on a CPU.

    sft/estimate/gpus.py lists the peaks of GPUs in bf16.
    """
    if device.type != "cuda" or config.run.precision != "bf16" or config.run.fp8 is not None:
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.tflops
