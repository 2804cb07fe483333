"""Lists GPUs and networks with their vendors' numbers, and computes how much of a GPU's memory a run can use.

The rates in this file are peaks; `constants.py` has the rates of real programs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sft.errors import ConfigError
from sft.layers.kernel_rates import AMPERE, BLACKWELL, HOPPER

GIB = 2**30
HOST_GIB = 1000.0  # usable host memory of a node.  A node of 8 GPUs has 2 TB, but not all of it can be page-locked
CONTEXT_BYTES = 0.75 * GIB  # CUDA's context, and the code of kernels; assumed, 0.5 to 0.9 GiB on Hopper
RESERVE = 0.03  # share of the capacity for workspaces and gaps between allocations (docs/numbers/performance.md)


@dataclass(frozen=True)
class Gpu:
    """One type of GPU.

    memory_bytes     capacity that CUDA reports; less than the name says if ECC takes a part
    tflops           dense bf16 peak
    hbm_gb_s         bandwidth of the GPU's memory
    intra_node_gb_s  GB/s that the GPU receives from GPUs of its node in a collective: about 3/4 of the link's one
                     direction
    pcie_gb_s        GB/s of copies between the device and page-locked host memory, in one direction
    architecture     the rows of sft/layers/kernel_rates.py for this GPU; None: the table has none
    """

    name: str
    memory_bytes: float
    tflops: float
    hbm_gb_s: float
    intra_node_gb_s: float
    pcie_gb_s: float
    architecture: str | None = None


# Capacities are those that nvidia-smi or torch report.  Dense peaks and bandwidths are from the vendors' data sheets.
GPUS: Mapping[str, Gpu] = {
    name: Gpu(name, gib * GIB, *rates)
    for name, gib, *rates in (
        ("h100", 79.1, 989.4, 3350, 340, 55, HOPPER),  # H100 data sheet, SXM5; NVLink 4: 450 GB/s each way; PCIe 5
        ("h200", 139.8, 989.4, 4800, 340, 55, HOPPER),  # H200 data sheet, SXM; NVLink 4
        ("h20", 95.0, 148, 4000, 340, 55, HOPPER),  # H20, published by resellers; NVLink 4
        ("b200", 178.3, 2250, 8000, 680, 55, BLACKWELL),  # DGX B200 data sheet, 1/8; NVLink 5: 900 GB/s each way
        ("b300", 268.0, 2250, 8000, 680, 55, BLACKWELL),  # DGX B300 data sheet, 1/8; NVLink 5
        ("gb200", 184.0, 2450, 8000, 680, 200, BLACKWELL),  # GB200 NVL72 data sheet, 1/72; host by NVLink-C2C
        ("a100-80", 79.2, 312, 2039, 230, 25, AMPERE),  # A100 data sheet, SXM4; NVLink 3: 300 GB/s each way; PCIe 4
        ("a100-40", 39.4, 312, 1555, 230, 25, AMPERE),  # A100 data sheet, SXM4
        ("l40s", 44.4, 362, 864, 25, 25, AMPERE),  # L40S data sheet; no NVLink, PCIe 4
        ("cpu", 4.0, 0.1, 10, 1, 10),  # assumed, for one core of a server per process, with gloo; peak in fp32
        ("mi300x", 191.5, 1307, 5300, 310, 55),  # MI300X data sheet; Infinity Fabric: 7 links of 64 GB/s
    )
}

# GPUs that most readers have or can rent, the smallest first.  `sft check` without --gpu names those that fit.
COMMON = ("h100", "h200", "b200")

# GB/s that one GPU receives from other nodes, if each GPU has its own port: about 4/5 of the port's bits / 8.
FABRICS: Mapping[str, float] = {
    "none": 0.1,  # one node; a layout over two nodes is predicted to be useless
    "eth100": 10.0,
    "roce200": 18.0,
    "roce400": 38.0,
    "ib200": 20.0,
    "ib400": 40.0,
    "ib800": 80.0,
}


def gpu(name: str) -> Gpu:
    """The GPU of this name.  Raises ConfigError with the list of names if the name is unknown."""
    if name not in GPUS:
        raise ConfigError(f"unknown GPU {name}.  Known GPUs: {', '.join(sorted(GPUS))}.")
    return GPUS[name]


def fabric(name: str) -> float:
    """GB/s of the network of this name, or the number in the text.  Raises ConfigError if it is neither.

    "ib400" -> 40        "25" -> 25
    """
    if name in FABRICS:
        return FABRICS[name]
    try:
        gb_s = float(name)
    except ValueError:
        gb_s = 0.0
    if not gb_s > 0.0:
        known = ", ".join(FABRICS)
        raise ConfigError(f"unknown network {name}.  Known networks: {known}; or give GB/s for each GPU, such as 25.")
    return gb_s


def gpu_of_machine(driver: Path = Path("/proc/driver/nvidia/gpus")) -> Gpu | None:
    """The GPU of this machine, read from the files of NVIDIA's driver, without CUDA.

    None: there is no GPU, or the table does not have it.
    """
    for path in sorted(driver.glob("*/information")):
        models = [line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("Model")]
        if models:
            return gpu_of_device(models[0])
    return None


def gpu_of_device(name: str) -> Gpu | None:
    """The GPU with this name in the driver or in CUDA: "NVIDIA H100 80GB HBM3" -> h100; None: not in the table."""
    words = name.lower()
    for key in ("gb200", "b300", "b200", "h200", "h100", "h20", "l40s", "mi300x"):
        if key in words:
            return GPUS[key]
    if "a100" in words:
        return GPUS["a100-80" if "80gb" in words else "a100-40"]
    return None


@dataclass(frozen=True, kw_only=True)
class Usable:
    """The bytes of a GPU (`capacity`).  The other fields are parts of `capacity` that a run's tensors cannot use."""

    capacity: float
    context: float
    communicators: float
    reserve: float

    @property
    def bytes(self) -> float:
        """The bytes that remain for the tensors of a run."""
        return self.capacity - self.context - self.communicators - self.reserve

    def describe(self) -> str:
        """`73.8 GiB = capacity 79.1 - CUDA's context 0.75 - NCCL's buffers 2.0 - 3% 2.4`"""
        return (
            f"{self.bytes / GIB:.1f} GiB = capacity {self.capacity / GIB:.1f} - CUDA's context "
            f"{self.context / GIB:.2f} - NCCL's buffers {self.communicators / GIB:.2f} - {RESERVE:.0%} "
            f"{self.reserve / GIB:.1f}"
        )


def usable_memory(gpu: Gpu, nccl_bytes: float) -> Usable:
    """The memory that the tensors of a run can use.  nccl_bytes: `communicators.nccl_bytes`

    h100, 2.4 GiB -> 79.1 - 0.75 - 2.4 - 2.373 = 73.58 GiB
    """
    return Usable(
        capacity=gpu.memory_bytes,
        context=CONTEXT_BYTES,
        communicators=nccl_bytes,
        reserve=RESERVE * gpu.memory_bytes,
    )
