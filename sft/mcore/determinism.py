"""Makes a run on GPUs bitwise repeatable (`run.deterministic`), at the cost of slower kernels.

`set_mode` runs before the first use of CUDA, because libraries read these variables once: cuBLAS when a handle is made,
NCCL when a communicator is made, Transformer Engine when its attention is first used.  torch then takes deterministic
kernels (also the backward of torch's flash attention), and raises an error where it has none.  megatron-core reads
`deterministic_mode` (model.py) and torch's own flag.  docs/concepts/numerics.md says which promise holds where.
"""

import os
from collections.abc import MutableMapping

import torch

from sft.errors import ConfigError

# Each variable: values that make results repeatable.  The first is set if the variable is unset.  As megatron-core 0.19
# (megatron/training/determinism.py), which does not accept NCCL's trees: their order of sums depends on the topology.
VALUES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
}


def set_mode(is_on: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Turn deterministic algorithms on or off for this process.

    Raises ConfigError if a variable of the environment asks for other algorithms.
    """
    if is_on:
        for name, values in VALUES.items():
            if environ.setdefault(name, values[0]) not in values:
                raise ConfigError(
                    f"run.deterministic = true, but the environment has {name}={environ[name]}, with which results "
                    f"differ from run to run.  Unset it, or use {' or '.join(values)}."
                )
    torch.use_deterministic_algorithms(is_on)
