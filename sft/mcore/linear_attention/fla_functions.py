"""Lists and loads the inner functions of flash-linear-attention (FLA, the package fla-core) that this trainer calls.

FLA does not promise that inner functions stay as they are.  So a run uses FLA only if its release is one of RELEASES
and each function has the arguments that are named here.
"""

import importlib
import inspect
import math
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch.torch_version import TorchVersion

from sft.config import Config

# FLA's kernels take sums of g as logarithms to base 2, and return gradients with respect to natural logarithms.
TO_BASE_2 = 1 / math.log(2)
RELEASES = ("0.6.0", "0.7")  # the first release that is supported, and the first that is not
INSTALL = 'Install it with: pip install "fla-core[cuda]>=0.6,<0.7" (docs/start/install.md)'
_PACK = " cu_seqlens chunk_indices"
# module -> function -> arguments
FUNCTIONS: Mapping[str, Mapping[str, str]] = {
    "fla.modules.norm.l2norm": {"l2norm_fwd": "x eps", "l2norm_bwd": "y rstd dy eps"},
    "fla.ops.utils": {"chunk_local_cumsum": "g chunk_size reverse scale" + _PACK},
    "fla.ops.gated_delta_rule.chunk_fwd": {"chunk_gated_delta_rule_fwd_intra": "k v g beta chunk_size" + _PACK},
    "fla.ops.gated_delta_rule.wy_fast": {"prepare_wy_repr_bwd": "k v beta A dw du g" + _PACK},
    "fla.ops.common.chunk_delta_h": {
        "chunk_gated_delta_rule_fwd_h": "k w u g gk initial_state chunk_size save_new_value chunk_offsets" + _PACK,
        "chunk_gated_delta_rule_bwd_dhu": "q k w do dv g gk h0 dht scale chunk_size chunk_offsets" + _PACK,
    },
    "fla.ops.common.chunk_o": {
        "chunk_fwd_o": "q k v h g scale chunk_size" + _PACK,
        "chunk_bwd_dv_local": "q k do g scale chunk_size" + _PACK,
        "chunk_bwd_dqkwg": "q k v do h dh w g dv scale chunk_size" + _PACK,
    },
    "fla.ops.cp.chunk_fwd": {"chunk_cp_fwd_h": "k w u hm g gk cu_seqlens chunk_size multi_seqs"},
    "fla.ops.kda.chunk_intra": {
        "chunk_kda_fwd_intra": "q k v gk beta scale chunk_size disable_recompute" + _PACK,
        "chunk_kda_bwd_intra": "q k g beta dAqk dAkk dq dk db dg chunk_size" + _PACK,
    },
    "fla.ops.kda.chunk_bwd": {
        "chunk_kda_bwd_dAv": "q k v do A scale chunk_size" + _PACK,
        "chunk_kda_bwd_wy_dqkg_fused": "q k v v_new g beta A h do dh dv scale chunk_size chunk_offsets" + _PACK,
    },
    "fla.ops.kda.gate": {"fused_kda_gate": "g A_log dt_bias lower_bound output_dtype"},
    "fla.ops.gla.chunk": {"chunk_gla_fwd_o_gk": "q v g A h scale chunk_size" + _PACK},
    "fla.ops.gated_delta_rule.gate": {"fused_gdn_gate": "g A_log dt_bias output_dtype"},
    "fla.modules.causal_conv1d.ops": {
        "causal_conv1d_fwd": "x weight bias residual initial_state activation" + _PACK,
        "causal_conv1d_bwd": "x dy dht weight bias initial_state activation" + _PACK,
    },
    "fla.modules.norm.fused_norm_gate": {
        "layer_norm_gated_fwd": "x g weight bias activation eps is_rms_norm",
        "layer_norm_gated_bwd": "dy x g weight bias activation eps rstd is_rms_norm",
    },
}


def excluded_by(config: Config, device_type: str) -> str | None:
    """The reason why a run with this recipe cannot use FLA, whatever is installed; None if it can."""
    if device_type != "cuda":
        return "FLA needs CUDA, but this run is on the CPU"
    if config.run.precision != "bf16":
        return f"FLA computes in bf16, but run.precision is {config.run.precision}"
    if config.run.deterministic:
        return "run.deterministic is true, and FLA measures at run time which of its kernels' variants are fastest"
    return None


def problem(wanted: Mapping[str, Mapping[str, str]] = FUNCTIONS) -> str | None:
    """The reason why these functions of the installed FLA cannot be used, with advice; None if they can."""
    try:
        release = importlib.import_module("fla").__version__
        modules = {name: importlib.import_module(name) for name in wanted}
    except ImportError as error:
        return f"fla cannot be imported ({error}).  {INSTALL}"
    if not RELEASES[0] <= TorchVersion(release) < RELEASES[1]:
        return f"fla-core {release} is installed, and its inner functions are not known.  {INSTALL}"
    for name, functions in wanted.items():
        for function, arguments in functions.items():
            if not hasattr(modules[name], function):
                return f"fla-core {release} has no function {name}.{function}.  {INSTALL}"
            known = inspect.signature(getattr(modules[name], function)).parameters
            if lacking := [argument for argument in arguments.split() if argument not in known]:
                return f"{name}.{function} of fla-core {release} takes no {' and no '.join(lacking)}.  {INSTALL}"
    return None


@cache
def functions() -> Any:
    """An object with each function of FUNCTIONS as an attribute.  `problem` must have returned None."""
    return loaded(FUNCTIONS)


def loaded(wanted: Mapping[str, Mapping[str, str]]) -> Any:
    """An object with each of these functions as an attribute."""
    return SimpleNamespace(
        **{
            function: getattr(importlib.import_module(module), function)
            for module in wanted
            for function in wanted[module]
        }
    )
