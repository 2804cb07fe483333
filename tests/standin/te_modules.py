"""Trains steps of models with Transformer Engine's modules, beside portable attention or its own, in one process on the
stand-in, and prints as JSON what ran, and how often the host waited.

python -m tests.standin.te_modules '["run.fp8=delayed"]' gpt-oss gemma qwen3.6
python -m tests.standin.te_modules '["parallel.tp=2", "parallel.sequence_parallel=true"]' dense

With a layout, the process is rank 0 of it (one_rank.py).
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core.transformer.moe import moe_utils
from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel
from transformer_engine.pytorch.module import grouped_linear, linear

from sft.config import Config
from sft.data.loader import make_loader
from sft.mcore import device, process_groups
from sft.mcore.attention.flash_kernel import FlashKernel
from sft.mcore.engine import Engine, release, weights_changed
from sft.mcore.linear_attention.torch_kernel import TorchDeltaKernel
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from sft.weights.trained import trained_weights
from tests.builders import RECIPE
from tests.standin import one_rank
from tests.standin.calls import counted
from tools.bench.steps.trainer import RandomCorpus

VOCAB, LENGTHS = 512, [1024, 512, 256, 256]
SIZES = ["model.num_layers=2", "model.hidden_size=192", "model.ffn_hidden_size=128", "model.num_attention_heads=4"]
SIZES += ["model.num_query_groups=2", "model.head_dim=64", "data.seq_length=2048", "model.rope.fraction=0.5"]
SIZES += ["run.device=cuda", "run.precision=bf16", "train.recompute=selective"]
EXPERTS = "num_experts: 8, top_k: 2, ffn_hidden_size: 64"
WINDOW = ["model.sliding_window=128", "model.sliding_window_layers=[1]"]
BIASES = [f"model.{key}=true" for key in ("qkv_bias", "attention_output_bias", "mlp_bias", "attention_sinks")]
GATED = ["model.activation=clamped_swiglu", "model.activation_limit=7", "model.activation_alpha=1.702"]
TE_ATTENTION = "attention.backend=te"
MODELS = {
    "dense": [TE_ATTENTION],
    "dense, latent": [
        TE_ATTENTION, "model.num_query_groups=null", "model.head_dim=null", "model.rope.fraction=1",
        "model.latent_attention={kv_lora_rank: 64, q_lora_rank: 96}",
    ],
    "gpt-oss": [*WINDOW, *BIASES, *GATED, f"model.moe={{{EXPERTS}, router_bias: true}}"],
    "gemma": [
        *WINDOW, "model.qk_norm=true", "model.norm_placement=both", "model.activation=geglu", "model.value_norm=true",
        "model.full_attention={head_dim: 128, num_query_groups: 1, keys_as_values: true}", "model.layer_scalar=true",
        "model.rope={window_base: 1e4, scaling: proportional, fraction: 0.25}",
        f"model.moe={{{EXPERTS}, own_norms: true, shared_ffn_hidden_size: 128}}",
    ],
    "qwen3.6": [
        "model.qk_norm=true", "model.norm_zero_centered=true", "model.attention_output_gate=true",
        "model.linear_attention={layers: [1], num_key_heads: 8, num_value_heads: 16, key_head_dim: 16, "
        "value_head_dim: 16}",
        f"model.moe={{{EXPERTS}, shared_gate: true, shared_ffn_hidden_size: 128}}",
    ],
    "latent": [
        "model.num_query_groups=null", "model.head_dim=null", "model.rope.fraction=1",
        "model.latent_attention={kv_lora_rank: 64, q_lora_rank: 96}",
        f"model.moe={{{EXPERTS}, score_function: sigmoid, correction_bias: true, dense_layers: 1}}",
    ],
}  # fmt: skip
# (module or class, function, name in the output); megatron-core calls those of moe_utils
CALLS = (
    (linear, "general_gemm", "products"),
    (grouped_linear, "general_grouped_gemm", "grouped products"),
    (moe_utils, "fused_permute_with_probs", "sorts"),
    (moe_utils, "fused_unpermute", "combinations"),
    (backends, "fused_attn_fwd", "attention forward"),
    (backends, "fused_attn_bwd", "attention backward"),
    (context_parallel, "fused_attn_fwd", "attention forward"),
    (context_parallel, "fused_attn_bwd", "attention backward"),
    (FlashKernel, "forward", "attention forward"),
    (FlashKernel, "backward", "attention backward"),
    (TorchDeltaKernel, "forward", "delta rule forward"),
    (TorchDeltaKernel, "backward", "delta rule backward"),
)


@contextmanager
def running(name: str, also: list[str], *, has_steps: bool) -> Iterator[tuple[Config, Layout, Engine]]:
    """The engine of a model, in a process that is rank 0 of the layout of `also`.

    has_steps: whether it takes steps; one_rank.py then gives the experts their tokens
    """
    config = parse_recipe(RECIPE, "tests", [*SIZES, *MODELS[name], *also]).config
    sizes = config.parallel
    whole = prod((sizes.tp, sizes.cp, sizes.pp))
    ranks = max(whole, sizes.ep * sizes.etp * sizes.pp)
    config = parse_recipe(
        RECIPE, "tests", [*SIZES, *MODELS[name], *also, f"train.global_batch_size={ranks // whole}"]
    ).config
    layout = Layout.resolve(config, ranks)
    with one_rank.alone(config.model, layout, 0) if has_steps or ranks > 1 else nullcontext():
        place = process_groups.start(layout, device.start("cuda"), seed=1, timeout_s=60)
        trained = trained_weights(config, VOCAB)
        engine = Engine(config, layout, place, vocab_size=VOCAB, num_steps=10, trained=trained)
        weights_changed(engine)
        yield config, layout, engine
        process_groups.stop()
        release(engine)


def main(name: str, also: list[str]) -> None:
    calls, waits = Counter[str](), list[int]()
    with running(name, also, has_steps=True) as (config, layout, engine):
        corpus: Any = RandomCorpus(np.array(LENGTHS * 4 * layout.dp), VOCAB)
        loader = make_loader(config, layout, corpus, pad_id=0, dp_rank=0, cp_rank=0)
        for step in range(2):
            calls.clear()
            waits.clear()
            with ExitStack() as patches:
                patches.enter_context(
                    mock.patch.object(engine, "_schedule", partial(_watched, engine._schedule, waits))
                )
                for where, what, key in CALLS:
                    patches.enter_context(mock.patch.object(where, what, _counting(where, what, calls, key)))
                engine.train_step(loader.microbatches(step))
        experts = getattr(engine.chunks[0].module.decoder.layers[-1].mlp, "experts", None)
        described = {"model": name, "modules": str(engine.backend.library), "attention": engine.backend.name}
        described |= {"experts": type(experts).__name__, "waits": sum(waits), **calls}
    print("> " + json.dumps(described), flush=True)


def _counting(where: Any, what: str, calls: Counter[str], key: str) -> Callable[..., Any]:
    function = getattr(where, what)

    def counting(*given: Any, **how: Any) -> Any:
        calls[key] += 1
        return function(*given, **how)

    return counting


def _watched(schedule: Callable[..., Any], waits: list[int], *given: Any, **how: Any) -> Any:
    before = counted()
    try:
        return schedule(*given, **how)
    finally:
        waits.append(counted().since(before).waits)


if __name__ == "__main__":
    for model in sys.argv[2:]:
        main(model, json.loads(sys.argv[1]))
        torch._dynamo.reset()
