"""Small models in low bits, and folders with their dequantised values, which this trainer did not compute."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.unit.fixtures import fp8, hf, mxfp4, packed

BF16 = torch.bfloat16
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ],
    dtype=np.float32,
)


@dataclass(frozen=True)
class Base:
    """A model in low bits.  targets: the Linears with adapters

    values: writes the model to a folder, and returns the dequantised values of tensors by name
    """

    dtype: str  # the value of model.base_dtype
    values: Callable[[Path], dict[str, torch.Tensor]]
    targets: Any


def _packed(name: str, family: str) -> Callable[[Path], dict[str, torch.Tensor]]:
    def values(folder: Path) -> dict[str, torch.Tensor]:
        hf.save(folder, family, dtype=BF16, **SIZES[family])
        meant = packed.quantise(folder, name)
        hf.change(folder, quantization_config=packed.FORMS[name].config())
        return meant

    return values


def _gpt_oss(folder: Path) -> dict[str, torch.Tensor]:
    return mxfp4.quantise(hf.save(folder, "gpt_oss", dtype=BF16, hidden_size=64, intermediate_size=64))


def _nf4(family: str, part: str = "_proj.weight") -> Callable[[Path], dict[str, torch.Tensor]]:
    def values(folder: Path) -> dict[str, torch.Tensor]:
        stored = hf.tensors(hf.save(folder, family, **SIZES[family]))
        return {name: rounded(tensor) for name, tensor in stored.items() if name.endswith(part)}

    return values


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest values of NF4, block by block of 64 numbers of a row."""
    found = torch.empty_like(matrix)
    for row, out in zip(matrix.numpy(), found.numpy()):
        for first in range(0, len(row), 64):
            block = row[first : first + 64]
            largest = np.abs(block).max()
            nearest = np.abs(block[:, None] / largest - NF4).argmin(1)
            out[first : first + 64] = NF4[nearest] * largest
    return found


SIZES: dict[str, dict[str, Any]] = {
    "qwen3": dict(hidden_size=64, intermediate_size=128),
    "qwen3_moe": dict(hidden_size=64, intermediate_size=128, moe_intermediate_size=64, head_dim=32),
}
LATENT = ["o_proj", "kv_b_proj", "down_proj"]
BASES = {
    "mxfp4": Base("as_stored", _gpt_oss, ["q_proj", "o_proj"]),
    "fp8": Base("as_stored", lambda folder: fp8.save(folder, "deepseek_v3"), LATENT),
    "fp8 in whole blocks": Base("as_stored", lambda folder: fp8.save(folder, "qwen3"), "all-linear"),
    "fp8 by row": Base("as_stored", lambda folder: fp8.save(folder, "glm4_moe"), ["all-linear", "experts.*"]),
    "int4": Base("as_stored", _packed("int4", "qwen3_moe"), ["all-linear", "experts.*"]),
    "int4 with zero points": Base("as_stored", _packed("int4 with zero points", "qwen3"), "all-linear"),
    "nvfp4": Base("as_stored", _packed("nvfp4", "qwen3"), "all-linear"),
    "mxfp8": Base("as_stored", _packed("mxfp8", "qwen3"), "all-linear"),
    "nf4": Base("nf4", _nf4("qwen3"), "all-linear"),
    "nf4 experts": Base("nf4", _nf4("qwen3_moe"), ["all-linear", "experts.*"]),
}


def save(name: str, folder: Path) -> tuple[Path, Path]:
    """Folders of the model in low bits, and of the model with its dequantised values in fp32."""
    source, plain = folder / "source", folder / "dequantised"
    meant = BASES[name].values(source)
    stored = {key: tensor for key, tensor in hf.tensors(source).items() if key in meant or not _belongs(key, meant)}
    content = {key: tensor.float().contiguous() for key, tensor in (stored | meant).items()}
    plain.mkdir()
    save_file(content, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text((source / "config.json").read_text())
    hf.change(plain, quantization_config=...)
    return source, plain


def _belongs(key: str, meant: dict[str, torch.Tensor]) -> bool:
    """Whether a stored tensor has numbers or scales of a quantised tensor."""
    name = key.removesuffix("_blocks").removesuffix("_scales").removesuffix("_scale_inv")
    return name in meant or key.removesuffix("_scale") in meant or f"{key.rpartition('.')[0]}.weight" in meant
