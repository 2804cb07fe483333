"""Models with a block for multi-token prediction, and the block by hand: plain torch, one document at a time.

transformers has no such block.  A transformers model with one additional layer provides the layer of the block; this
module implements its norms, its projection and the shift of tokens, as the inference code of the released models does.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sft.batch import Sample
from tests.ranks.hf_models import in_float64, recipe_of, stored_gradients
from tests.unit.fixtures import hf

WEIGHT = 0.3  # value of train.mtp_loss_weight
SEED = 12  # seed with which every expert is chosen
OWN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
NAMES = {  # names of Qwen's files
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}
QWEN = ("qwen3_5_text", "qwen3_next")


def num_layers(family: str) -> int:
    """The number of layers without the block."""
    return 4 if family in QWEN else hf.LAYERS


def stored_name(family: str, name: str) -> str:
    """The name in the model's files for `name`, a tensor of a transformers model with one additional layer."""
    block = f"model.layers.{num_layers(family)}."
    if family not in QWEN or not name.startswith(block):
        return name
    inner = name.removeprefix(block)
    own = NAMES.get(inner.removesuffix(".weight"))
    return f"{own}.weight" if own else f"mtp.layers.0.{inner}"


def save(folder: Path, family: str, **fields: Any) -> tuple[Path, "ByHand"]:
    """Saves a folder with the files of a model and its block.  Returns it and the same model by hand.  fields: values
    in config.json"""
    layers = num_layers(family)
    kinds = dict(layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"])
    own = {"layer_types": kinds["layer_types"] + ["full_attention"]} if family in QWEN else {}
    hf.save(folder, family, num_hidden_layers=layers + 1, seed=SEED, **own, **fields)
    model = in_float64(hf.load(folder)).train()
    model.config.num_hidden_layers = layers
    generator = torch.Generator().manual_seed(3)
    block = {
        name: torch.randn(hf.WIDTH, *([2 * hf.WIDTH] if name == "eh_proj" else []), generator=generator) * 0.3
        for name in OWN
    }
    stored = hf.tensors(folder)
    first = f"model.layers.{layers}."
    extra = {f"{first}{name}.weight": tensor for name, tensor in block.items()}
    if family not in QWEN:
        extra |= {f"{first}embed_tokens.weight": stored["model.embed_tokens.weight"].clone()}
        extra |= {f"{first}shared_head.head.weight": stored["lm_head.weight"].clone()}
    renamed = {stored_name(family, name): tensor for name, tensor in (stored | extra).items()}
    gone = dict.fromkeys(stored.keys() - renamed.keys())
    hf.rewrite(folder, **{name.replace(".", "/"): tensor for name, tensor in (gone | renamed).items()})
    kinds = kinds if family in QWEN else dict(num_nextn_predict_layers=1)
    hf.change(folder, num_hidden_layers=layers, **kinds)
    own_tensors = {name: tensor.double().requires_grad_() for name, tensor in block.items()}
    return folder, ByHand(family, model, own_tensors)


def joint(folder: Path) -> list[str]:
    """Overrides for a model whose block is trained with it.  Saves the model in `folder`."""
    source, _ = save(folder / "model", "glm4_moe")
    return [*recipe_of(source), "train.mtp=joint"]


@dataclass(frozen=True)
class ByHand:
    """model: transformers model in float64, whose last layer is the layer of the block; own: the other tensors of the
    block"""

    family: str
    model: Any
    own: dict[str, Tensor]

    def losses(self, sample: Sample, *, is_joint: bool) -> tuple[Tensor, Tensor]:
        """-log p of the supervised tokens of one document: by the model [n], and by the block [m]."""
        tokens, weights = torch.from_numpy(sample.tokens.astype(np.int64)), torch.from_numpy(sample.weights)
        embedding, output = self.model.model.embed_tokens.weight, self.model.lm_head.weight
        hidden = self.model.model(input_ids=tokens[None]).last_hidden_state[0]  # output of the last norm
        logits = hidden @ output.T
        of_model = [cross_entropy(logits[t], tokens[t + 1]) for t in range(len(tokens) - 1) if weights[t + 1] > 0]
        if not is_joint:
            hidden, embedding, output = hidden.detach(), embedding.detach(), output.detach()
        logits = self._block(hidden[:-1], embedding[tokens[1:]]) @ output.T if len(tokens) > 1 else hidden
        second = [cross_entropy(logits[t], tokens[t + 2]) for t in range(len(tokens) - 2) if weights[t + 2] > 0]
        empty = logits.new_zeros(0)
        return torch.stack([*of_model]) if of_model else empty, torch.stack([*second]) if second else empty

    def _block(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Hidden states, and the embeddings of the next tokens, both [n, h] -> [n, h]"""
        joined = torch.cat([self._norm("enorm", embedded), self._norm("hnorm", hidden)], dim=-1)
        x = (joined @ self.own["eh_proj"].T)[None]
        size, positions = x.shape[1], torch.arange(x.shape[1])[None]
        mask = torch.full((size, size), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        rotary = self.model.model.rotary_emb(x, positions)
        x = self.model.model.layers[-1](
            x, attention_mask=mask, position_ids=positions, position_embeddings=tuple(part.double() for part in rotary)
        )
        return self._norm("shared_head.norm", (x[0] if isinstance(x, tuple) else x)[0])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        offset = 1.0 if self.family in QWEN else 0.0
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return x * scale * (self.own[name] + offset)

    def gradients(self, samples: list[Sample], *, is_joint: bool) -> tuple[float, float, int, dict[str, Tensor]]:
        """Mean loss of the model and of the block, number of tokens of the latter, and every gradient of the objective
        by stored name."""
        for tensor in (*self.model.parameters(), *self.own.values()):
            tensor.grad = None
        both = [self.losses(sample, is_joint=is_joint) for sample in samples]
        first, second = (torch.cat(part) for part in zip(*both))
        (first.mean() + WEIGHT * second.mean()).backward()
        layers = num_layers(self.family)
        found = stored_gradients(self.model)
        found |= {f"model.layers.{layers}.{n}.weight": x.grad for n, x in self.own.items() if x.grad is not None}
        named = {stored_name(self.family, name): gradient for name, gradient in found.items()}
        return first.mean().item(), second.mean().item(), len(second), named


def is_of_block(family: str, name: str) -> bool:
    return name.startswith("mtp.") or bool(re.match(rf"model\.layers\.{num_layers(family)}\.", name))
