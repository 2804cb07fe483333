"""Random Llama models as Hugging Face folders, with the sizes of released models and any number of layers."""

import json
from collections.abc import Mapping
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from sft.hf.architecture import architecture
from sft.hf.hub import CONFIG
from sft.hf.safetensors_writer import write_tensors

KEYS = "hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size tie_word_embeddings".split()
SHAPES = {
    "llama-3.2-1b": (2048, 8192, 32, 8, 128_256, True),
    "llama-3-8b": (4096, 14_336, 32, 8, 128_256, False),
    "llama-3-70b": (8192, 28_672, 64, 8, 128_256, False),
    "tiny": (64, 128, 4, 2, 512, False),
}


def config_of(shape: str, num_layers: int) -> dict[str, Any]:
    """The content of the model's config.json."""
    sizes = dict(zip(KEYS, SHAPES[shape]), num_hidden_layers=num_layers)
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **sizes}


def tensors_of(content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a model with this config.json, on the meta device."""
    model = architecture(content, CONFIG)
    mappings = model.family.mappings(model.model, model.vocab_size)
    parts = [part for mapping in mappings for part in mapping.sources]
    return {part.name: torch.empty(part.shape, dtype=torch.bfloat16, device="meta") for part in parts}


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def num_layers_for(shape: str, limit: float) -> int:
    """The largest number of layers of a model of at most `limit` bytes; at least one."""
    first, second = (num_bytes(tensors_of(config_of(shape, layers))) for layers in (1, 2))
    return max(1, 1 + int((limit - first) // (second - first)))


def make(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes a random model, one tensor at a time."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(content), encoding="utf-8")
    tensors, generator = tensors_of(content), torch.Generator().manual_seed(0)

    def values(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Random bits of finite numbers; drawing normal numbers takes five times as long."""
        bits = torch.empty(tensor.shape, dtype=torch.int16).random_(0, 0x4000, generator=generator)
        return name, bits.view(tensor.dtype)

    write_tensors(folder, tensors, starmap(values, tensors.items()))
