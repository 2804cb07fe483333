"""Runs steps of plain transformers on one document, in code that a user would write without a trainer.

It uses scaled_dot_product_attention, fp32 weights under bf16 autocast, gradient checkpointing, fused AdamW and full
logits.
"""

from typing import Any

import numpy as np
import torch

from sft.layers.flops import TrainFlops
from tools.bench.steps.case import StepCase
from tools.bench.steps.loop import StepOptions, measured
from tools.bench.steps.roofline import constants
from tools.bench.steps.trainer import RandomCorpus


def measure(case: StepCase, options: StepOptions) -> dict[str, Any]:
    device = torch.device(options.device)
    rates = constants(case, options.kernels, device)
    network = network_of(case, device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, weight_decay=0.1, fused=device.type == "cuda")
    sample = RandomCorpus(np.array([case.length]), case.vocab).sample(0)
    tokens = torch.from_numpy(sample.tokens).long()[None].to(device)
    labels = tokens.masked_fill(torch.from_numpy(sample.weights == 0).to(device), -100)

    attention_flops = TrainFlops.of(case.model, case.vocab).attention(np.array([case.length]))

    def step(index: int) -> dict[str, float]:
        with torch.autocast(device.type, torch.bfloat16):
            loss = network(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        return {
            "tokens": case.length, "labels": sample.num_supervised, "data_wait_s": 0.0,
            "attention_flops": attention_flops, "peak_bytes": peak, "loss": float(loss),
        }  # fmt: skip

    row = measured(step, options, {"optimizer": (optimizer, "step")})
    return {**row, "constants": rates, "backend": "transformers, torch SDPA, gradient checkpointing, full logits"}


def network_of(case: StepCase, device: torch.device) -> Any:
    """A transformers model of the case's shape, with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = case.model
    config = Qwen3Config(
        vocab_size=case.vocab, hidden_size=model.hidden_size, intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups, head_dim=model.head_dim, tie_word_embeddings=model.tie_embeddings,
        max_position_embeddings=case.length, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with device:
        network = Qwen3ForCausalLM(config).float().train()
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return network
