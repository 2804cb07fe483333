"""Measures the constants of predictions on the ranks of this launch.  Writes no file.

A single process measures its device.  Under torchrun, the ranks also measure the links between the ranks of a node, and
with several nodes the links between nodes.
"""

import datetime
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from sft.calibration import fit, steps
from sft.calibration.kernels import Kernels
from sft.calibration.links import Link, Links
from sft.calibration.sizes import SIZES, MeasuredSizes
from sft.errors import ConfigError
from sft.estimate import gpus
from sft.estimate.constants import Constant, Constants, Curve, assumed
from sft.mcore import device as devices
from sft.mcore import process_groups
from sft.parallel.layout import Layout

TIMEOUT_S = 600


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The measured constants of a type of device.

    errors: (predicted - measured) / measured for each short step, after the fit, by name of the step
    """

    constants: Constants
    errors: dict[str, float]

    def describe(self) -> list[str]:
        listed = ", ".join(f"{name} {error:+.0%}" for name, error in self.errors.items())
        return [self.constants.describe(), f"short steps, predicted against measured: {listed}"]


def calibrate(device_type: str, sizes: MeasuredSizes | None = None, store: dist.Store | None = None) -> Calibration:
    """Starts process groups, measures, and stops the groups.  Every rank returns the same constants.  Collective.

    device_type: cpu or cuda
    sizes: the sizes to measure; None: `SIZES` of the device type; store: as in `process_groups.start`

    Raises ConfigError if the table of GPUs does not have this GPU.
    """
    sizes = sizes or SIZES[device_type]
    device = devices.start(device_type)
    gpu, name = _gpu(device)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    configs = steps.recipes(sizes, device_type, num_ranks)
    layout = Layout.resolve(configs["layers"], num_ranks)
    groups = process_groups.start(layout, device, seed=0, timeout_s=TIMEOUT_S, store=store)
    source = f"measured {datetime.date.today()} on {name}, ranks {num_ranks}"
    constants = assumed(gpu, gpu.intra_node_gb_s)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    constants = _with_kernels(constants, Kernels(sizes, device, dtype), source, device_type)
    constants = _with_links(constants, sizes, device, source)
    taken = list(steps.measured(configs, groups))
    constants = fit.fitted(constants, taken, source)
    process_groups.stop()
    return Calibration(constants=constants, errors=fit.errors(constants, taken))


def _with_kernels(constants: Constants, kernels: Kernels, source: str, device_type: str) -> Constants:
    products = Curve(kernels.products(), source)
    forward, backward = (Curve(points, source) for points in kernels.attention())
    changes: dict[str, Any] = {"gemm_tflops": products, "attention_forward": forward, "attention_backward": backward}
    changes["attention_kernel"] = kernels.attention_kernel
    if device_type == "cpu":  # a data sheet of a CPU does not give its peak in fp32
        changes["peak_tflops"] = max(rate for _, rate in products.points)
    return replace(constants, **changes)


def _with_links(constants: Constants, sizes: MeasuredSizes, device: torch.device, source: str) -> Constants:
    """The constants with measured links.  A single rank measures only copies from its host, and only on CUDA."""
    num_ranks, per_node = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    changes: dict[str, Any] = {}
    if device.type == "cuda":
        changes["pcie_gb_s"] = Constant(Links(sizes.message, device).copied_gb_s(), source)
    if per_node > 1:
        node = dist.new_subgroups(per_node)[0]
        changes |= _of_link("intra_gb_s", Links(sizes.message // (per_node - 1), device, node).measure(), source)
    if num_ranks > per_node:  # a group has one rank of each node; all groups measure at the same time
        groups = [dist.new_group(range(first, num_ranks, per_node)) for first in range(per_node)]
        across, others = groups[dist.get_rank() % per_node], num_ranks // per_node - 1
        between = _of_link("inter_gb_s", Links(sizes.message // others, device, across).measure(), source)
        changes = between | changes if per_node > 1 else between
    return replace(constants, **changes)


def _of_link(bandwidth: str, link: Link, source: str) -> dict[str, Constant]:
    values = link._asdict()
    values[bandwidth] = values.pop("gb_s")
    return {name: Constant(value, source) for name, value in values.items()}


def _gpu(device: torch.device) -> tuple[gpus.Gpu, str]:
    """The row of the table for this device, and the device's name.  Raises ConfigError if the table lacks the GPU."""
    if device.type == "cpu":
        return gpus.gpu("cpu"), "the CPU"
    name = torch.cuda.get_device_name(device)
    gpu = gpus.gpu_of_device(name)
    if gpu is None:
        raise ConfigError(
            f"{name} is not in the table of GPUs, so its peak and its memory are not known.  Known GPUs: "
            f"{', '.join(gpus.GPUS)}.  A line in sft/estimate/gpus.py adds one."
        )
    return gpu, name
