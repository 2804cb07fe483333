"""Makes a run on GPUs bitwise repeatable (`run.deterministic`), at the cost of slower kernels.

`set_mode` runs before the first use of CUDA, because each library reads its environment variable once: cuBLAS when a
handle is made, NCCL when a communicator is made, Transformer Engine when its attention is first used.  torch then uses
deterministic kernels, also in the backward pass of its flash attention, and raises an error if it has none.
megatron-core reads `deterministic_mode` (model/chunks.py) and torch's own flag.  docs/concepts/numerics.md lists what
is promised on which hardware.
"""

import os
from collections.abc import MutableMapping

import torch

from sft.errors import ConfigError

# For each variable, the values that make results repeatable.  The first value is set if the variable is unset.  The
# values are those of megatron-core 0.19 (megatron/training/determinism.py).  It does not accept NCCL's trees, whose
# order of sums depends on the topology.
VALUES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
}


def set_mode(is_on: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Turn deterministic algorithms on or off for this process.

    Raises ConfigError if an environment variable has a value with which results are not repeatable.
    """
    if is_on:
        for name, values in VALUES.items():
            if environ.setdefault(name, values[0]) not in values:
                raise ConfigError(
                    f"run.deterministic = true, but the environment has {name}={environ[name]}, with which results "
                    f"differ from run to run.  Unset it, or use {' or '.join(values)}."
                )
    torch.use_deterministic_algorithms(is_on)
