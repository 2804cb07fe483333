"""Runs Transformer Engine's grouped layers of experts with adapters on the stand-in, and prints which tensors have
gradients.  The numbers of rows are arguments, because no kernel of the stand-in counts them.

python -m tests.standin.grouped run.fp8=delayed
"""

import json
import sys
from unittest import mock

import torch
from megatron.core.fp8_utils import get_fp8_context

from sft.mcore import device, process_groups
from sft.mcore.backends.transformer_engine import TransformerEngine
from sft.mcore.model import chunks
from sft.mcore.model.core_config import transformer_config
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from sft.weights.trained import trained_weights
from tests.builders import RECIPE

EXPERTS = ["model.qk_norm=true", "model.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 64}", "model.hidden_size=64"]
LORA = ["lora={rank: 8, targets: [experts.*]}", "run.device=cuda", "run.precision=bf16"]
COUNTS = [64, 0, 32, 16]


def main(overrides: list[str]) -> None:
    config = parse_recipe(RECIPE, "tests", [*EXPERTS, *LORA, *overrides]).config
    layout = Layout.resolve(config, 1)
    place = process_groups.start(layout, device.start("cuda"), seed=1, timeout_s=60)
    backend = TransformerEngine(config)
    core = transformer_config(config, layout, place.device.type, backend)
    (chunk,) = chunks.build(config, layout, place, core, 300, backend, trained=trained_weights(config, 300))
    core, experts = chunk.config, chunk.module.decoder.layers[0].mlp.experts
    adapted = [experts.linear_fc1, experts.linear_fc2]
    tokens = torch.ones(sum(COUNTS), config.model.hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weights = torch.ones(sum(COUNTS), device="cuda", requires_grad=True)
    grouped_mm = mock.Mock(side_effect=torch.nn.functional.grouped_mm)
    for _ in range(2):
        with get_fp8_context(core, 0), mock.patch.object(torch.nn.functional, "grouped_mm", grouped_mm):
            output, _ = experts(tokens, torch.tensor(COUNTS), weights)
            output.sum().backward()
    described = {
        "layers": [f"{type(layer).__name__} {type(layer.base).__name__}" for layer in adapted],
        "output": list(output.shape),
        "input has a gradient": tokens.grad is not None,
        "frozen weights have gradients": any(p.grad is not None for layer in adapted for p in layer.base.parameters()),
        "factors": [list(factor.shape) for layer in adapted for factor in layer.factors.parameters()],
        "grouped products": grouped_mm.call_count,
    }
    print("> " + json.dumps(described))
    process_groups.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
