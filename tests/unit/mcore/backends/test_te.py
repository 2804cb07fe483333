"""Transformer Engine without a GPU: the layers that are built from it, and the modules that megatron-core makes of it.

Skipped if Transformer Engine is not installed.  Nothing is computed here; tests/gpu computes.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed", exc_type=ImportError)

ROOT = Path(__file__).parents[4]
DENSE = ["model.qk_norm=true", "model.qkv_bias=true"]
EXPERTS = "lora={rank: 8, targets: [all-linear, experts.*]}"
STACKED = "lora={rank: 8, target_parameters: [experts.gate_up_proj, experts.down_proj]}"
LATENT = ["model.qk_norm=false", "model.num_query_groups=null", "model.head_dim=null", "model.qkv_bias=false"]
LATENT += ["model.latent_attention={kv_lora_rank: 32, q_lora_rank: 16, qk_nope_head_dim: 16, qk_rope_head_dim: 8}"]
ROUTER = ["model.moe={num_experts: 4, top_k: 2, score_function: sigmoid, correction_bias: true, dense_layers: 1}"]
ROUTER += ["model.moe.shared_ffn_hidden_size=32"]
MODELS = {
    "dense": DENSE,
    "tied": ["model.tie_embeddings=true"],
    "experts": ["model.qk_norm=true", "model.moe.num_experts=4", "model.moe.top_k=2"],
    "latent": LATENT,
    "adapted latent": [*LATENT, *ROUTER, "lora.rank=8"],
    "adapted": ["model.qk_norm=true", "lora.rank=8"],  # norms are separate from projections
    "adapted experts": ["model.qk_norm=true", "model.moe={num_experts: 4, top_k: 2}", EXPERTS],
}

GATED = ["model.activation=clamped_swiglu", "model.activation_limit=7", "model.activation_alpha=1.702"]
SINKS = ["model.sliding_window=64", "model.sliding_window_layers=[1]", "model.attention_sinks=true"]
BIASES = [f"model.{key}=true" for key in ("qkv_bias", "attention_output_bias", "mlp_bias")]
GPT_OSS = [*SINKS, *BIASES, *GATED, "model.moe={num_experts: 4, top_k: 2, router_bias: true}"]
GEMMA_4 = ["model.qk_norm=true", "model.norm_placement=both", "model.activation=geglu", "model.value_norm=true"]
GEMMA_4 += ["model.layer_scalar=true", "model.sliding_window=64", "model.sliding_window_layers=[1]"]
GEMMA_4 += ["model.full_attention={head_dim: 32, num_query_groups: 1, keys_as_values: true}"]
GEMMA_4 += ["model.rope={window_base: 1e4, scaling: proportional, fraction: 0.25}"]
GEMMA_4 += ["model.moe={num_experts: 4, top_k: 2, own_norms: true, shared_ffn_hidden_size: 32}"]
QWEN_36 = ["model.qk_norm=true", "model.norm_zero_centered=true", "model.attention_output_gate=true"]
QWEN_36 += ["model.linear_attention={layers: [1], num_key_heads: 2, num_value_heads: 4, key_head_dim: 8}"]
QWEN_36 += ["model.linear_attention.value_head_dim=8", "model.moe={num_experts: 4, top_k: 2, shared_gate: true}"]
QWEN_36 += ["model.moe.shared_ffn_hidden_size=32"]
# Models whose attention is portable.
PORTABLE = {
    "gpt-oss": GPT_OSS,
    "Gemma 3": [*GEMMA_4[:3], *SINKS[:2], "model.norm_zero_centered=true"],
    "Gemma 4": GEMMA_4,
    "Qwen3.6": QWEN_36,
    "GLM-4.7-Flash": [*LATENT, *ROUTER],
    "MiniMax-M2": ["model.qk_norm=true", "model.qk_norm_across_heads=true", *ROUTER[:1]],
    "Olmo 2": ["model.qk_norm=true", "model.qk_norm_across_heads=true", "model.norm_placement=post"],
    "adapted gpt-oss": [*GPT_OSS, STACKED],
    "adapted Qwen3.6": [*QWEN_36, "lora={rank: 8, exclude: [mlp.shared_expert_gate]}"],
}

# A process of its own: what stands in for CUDA is there for its lifetime.
PREAMBLE = """
import sys, types
import torch
from sft.mcore import device
here = device.start("cpu")
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *a: (9, 0)
torch.cuda.get_device_properties = lambda *a: types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
import transformer_engine.pytorch.utils
transformer_engine.pytorch.utils._get_device_compute_capability = lambda device: (9, 0)
from sft.weights.trained import trained_weights
from sft.mcore import process_groups
from sft.mcore.backends.portable import Portable
from sft.mcore.backends import kernels
from sft.mcore.backends.transformer_engine import TransformerEngine
from sft.mcore.checkpoint_io import fp8_state
from sft.mcore.lora import adapted as lora
from sft.mcore.model import chunks as model
from sft.mcore.model.core_config import transformer_config
from sft.mcore.modules.library import TransformerEngineLibrary
from sft.mcore.modules.stored import sharded_tensors
from sft.parallel.layout import Layout
from sft.recipe.load import parse_recipe
from tests.builders import RECIPE

def built(name, overrides):
    config = parse_recipe(RECIPE, "a.yaml", ["run.device=cuda", *overrides]).config
    layout = Layout.resolve(config, 1)
    library = TransformerEngineLibrary(config) if name == "te modules" else None
    portable = Portable(config, "", kernels.choose(config, "cpu"), library)
    backend = TransformerEngine(config) if name == "te" else portable
    core = transformer_config(config, layout, "cuda", backend)
    core.use_cpu_initialization = True
    return config, core, model._build_chunk(config, layout, place, core, backend, 300, 0)

place = process_groups.start(
    Layout.resolve(parse_recipe(RECIPE, "a.yaml", ["run.device=cuda"]).config, 1), here, seed=1, timeout_s=60
)
"""


def out_of(code: str, *arguments: str) -> list[str]:
    """The lines that the code prints after PREAMBLE."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PREAMBLE + code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [line.removeprefix("> ") for line in done.stdout.splitlines() if line.startswith("> ")]


KEYS = """
config, _, chunk = built(sys.argv[1], sys.argv[2:])
if config.lora.is_used:
    lora.attach(chunk, trained_weights(config, 300).adapted, config.lora, place)
for s in sharded_tensors([chunk.sharded_state_dict(), *lora.leaves([chunk])]):
    print(">", s.key, s.global_shape, s.global_offset, s.dtype, tuple(s.data.shape))
"""


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS.keys())
def test_both_backends_store_the_same_tensors(overrides: list[str]) -> None:
    """Key, shape, part and type of each tensor agree."""
    te, portable = (sorted(out_of(KEYS, backend, *overrides)) for backend in ("te", "portable"))
    assert te == portable
    assert len(te) >= 16 + (12 if any(key.startswith("lora") for key in overrides) else 0)


@pytest.mark.parametrize("overrides", PORTABLE.values(), ids=PORTABLE.keys())
def test_both_libraries_store_the_same_tensors(overrides: list[str]) -> None:
    te, local = (sorted(out_of(KEYS, backend, *overrides)) for backend in ("te modules", "portable"))
    assert te == local
    assert len(te) >= 20


ADAPTED = """
from megatron.core.extensions import transformer_engine as te
config, _, chunk = built("te", sys.argv[1:])
chunk.requires_grad_(False)
lora.attach(chunk, trained_weights(config, 300).adapted, config.lora, place)
layer = chunk.decoder.layers[0]
mlp = getattr(layer.mlp, "experts", layer.mlp)
for adapted in (layer.self_attention.linear_qkv, layer.self_attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
    print(">", type(adapted).__name__, type(adapted.base).__name__, tuple(adapted.factors[0].a.shape)[:-2])
print(">", type(layer.input_layernorm).__name__, type(layer.pre_mlp_layernorm).__name__)
print(">", {name for name, parameter in chunk.named_parameters() if parameter.requires_grad != (".factors." in name)})
"""


def test_adapters_stand_beside_layers_without_norms() -> None:
    """Adapters of experts are beside Transformer Engine's grouped layers; one factor holds four experts."""
    norms, nothing_else = "RMSNorm RMSNorm", "set()"
    attention = ["AdaptedLinear TEColumnParallelLinear ()", "AdaptedLinear TERowParallelLinear ()"]
    assert out_of(ADAPTED, *MODELS["adapted"]) == [*attention, *attention, norms, nothing_else]
    experts = [f"AdaptedExperts TE{kind}ParallelGroupedLinear (4,)" for kind in ("Column", "Row")]
    assert out_of(ADAPTED, *MODELS["adapted experts"]) == [*attention, *experts, norms, nothing_else]


ROTARY = """
for length in ("1048576", "1048608"):
    config, core, chunk = built("te", ["model.qk_norm=true", "model.head_dim=512", "data.seq_length=" + length])
    attention = chunk.decoder.layers[0].self_attention.core_attention
    print(">", type(attention).__name__, core.apply_rope_fusion, chunk.position_embedding_type)
"""


def test_attention_rotates_where_the_fused_kernel_cannot() -> None:
    """The fused kernel rotates at most 1,048,576 tokens of 4 x 512 elements; attention rotates longer packs."""
    assert out_of(ROTARY) == ["TEDotProductAttention True rope", "RotatingAttention False none"]


RECIPES = """
from megatron.core.fp8_utils import get_fp8_context, get_fp8_recipe
for name in ("delayed", "tensorwise", "blockwise", "mxfp8"):
    config, core, chunk = built("te", ["run.fp8=" + name])
    attention = chunk.decoder.layers[0].self_attention.core_attention
    assert type(attention).__mro__[1].__module__.startswith("transformer_engine"), type(attention)
    recipe = get_fp8_recipe(core)
    get_fp8_context(core, 0)
    print(">", name, type(recipe).__name__, recipe.fp8_format.name, recipe.fp8_dpa, recipe.fp8_mha)
    if name == "delayed":
        print("> history", recipe.amax_history_len, recipe.amax_compute_algo, recipe.margin)
    weights = {type(p).__name__ for p in chunk.parameters()}
    print("> weights", *sorted(weights))
"""


def test_megatron_core_makes_these_recipes_of_run_fp8() -> None:
    assert out_of(RECIPES) == [
        "delayed TEDelayedScaling HYBRID False False",
        "history 1024 max 0",
        "weights Parameter",
        "tensorwise Float8CurrentScaling HYBRID False False",
        "weights Parameter",
        "blockwise Float8BlockScaling E4M3 False False",
        "weights Parameter",
        "mxfp8 MXFP8BlockScaling E4M3 False False",
        "weights Parameter",
    ]


ALIGNMENT = """
from megatron.core.fp8_utils import get_fp8_align_size
from sft.parallel.alignment import FP8_TOKENS, FP8_WIDTHS
for name in ("delayed", "tensorwise", "blockwise", "mxfp8"):
    needed = get_fp8_align_size(name)
    print(">", name, FP8_TOKENS[name] % needed, FP8_WIDTHS[name] % needed)
from transformer_engine.pytorch import Float8BlockQuantizer, MXFP8Quantizer
import transformer_engine_torch as tex
for cls, name, kind in ((Float8BlockQuantizer, "blockwise", dict(block_scaling_dim=1)), (MXFP8Quantizer, "mxfp8", {})):
    quantizer = cls(tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, **kind)
    n = FP8_TOKENS[name]
    print(">", name, quantizer.is_quantizable(torch.empty(n, 128)), quantizer.is_quantizable(torch.empty(n // 2, 128)))
"""


def test_the_alignment_is_what_they_take() -> None:
    """Half of the alignment is refused, if the quantizer itself says so."""
    assert out_of(ALIGNMENT) == [
        "delayed 0 0",
        "tensorwise 0 0",
        "blockwise 0 0",
        "mxfp8 0 0",
        "blockwise True False",
        "mxfp8 True False",
    ]


SCALES = """
import dataclasses
from megatron.core.fp8_utils import get_fp8_recipe
config, core, chunk = built("te", ["run.fp8=delayed"])

def layer(steps):
    found = built("te", ["run.fp8=delayed"])[2].decoder.layers[0].mlp.linear_fc1
    recipe = get_fp8_recipe(dataclasses.replace(core, fp8_amax_history_len=steps))
    found.fp8_meta.update(recipe=recipe, fp8_checkpoint=True, num_gemms=1)
    return found

def values(of):
    ways = ("scaling_fwd", of.fp8_meta["scaling_fwd"]), ("scaling_bwd", of.fp8_meta["scaling_bwd"])
    return [(name, tuple(m.amax_history.shape), m.scale.tolist(), m.amax_history[0].tolist()) for name, m in ways]

before = layer(4)
before.init_fp8_meta_tensors(before.fp8_meta["recipe"])
before.fp8_meta["scaling_fwd"].scale.fill_(3.0)
before.fp8_meta["scaling_bwd"].amax_history.fill_(2.0)
stored = before.get_extra_state()
numbers = fp8_state._scales([stored], "k", None)
after = chunk.decoder.layers[1].mlp.linear_fc1
with fp8_state._pickles_allowed():
    after.set_extra_state(fp8_state._payload(numbers, core))
for line in values(after):
    print(">", *line)
print(">", type(after.fp8_meta["recipe"]).__name__, after.fp8_meta["recipe"].amax_history_len)
try:
    chunk.decoder.layers[0].mlp.linear_fc1.set_extra_state(stored)
except RuntimeError as error:
    print("> refused:", str(error).split(".")[0])
"""


def test_scales_go_through_a_checkpoint_into_its_layers() -> None:
    """The pickle comes from `fp8_state.py`, with a history of this run's length; the stored pickle is refused."""
    *found, refused = out_of(SCALES)
    assert found == [
        "scaling_fwd (1024, 3) [3.0, 3.0, 3.0] [0.0, 0.0, 0.0]",
        "scaling_bwd (1024, 2) [1.0, 1.0] [2.0, 2.0]",
        "TEDelayedScaling 1024",
    ]
    if tuple(int(part) for part in importlib.metadata.version("transformer-engine").split(".")[:2]) >= (2, 18):
        assert refused.startswith("refused: Refusing to load pickled Transformer Engine extra state")
