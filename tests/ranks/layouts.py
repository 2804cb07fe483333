"""The dimensions of a layout, the values that fit together, and the recipe overrides for them."""

from tests.covering import Case

DIMENSIONS = {
    "model": ["dense", "experts", "gemma", "gpt_oss", "linear", "linear_experts", "routers", "latent", "gemma4"],
    "tp": [1, 2, 4],
    "sequence_parallel": [False, True],
    "cp": [1, 2, 4],
    "dynamic_cp": [False, True],
    "pp": [1, 2, 4],
    "virtual_stages": [1, 2],
    "dp": [1, 2, 4],
    "ep": [1, 2, 4],
    "distributed_optimizer": [False, True],
    "shard": ["optimizer", "gradients", "weights"],
    "shard_size": [None, 2],
    "recompute": ["none", "selective", "attention_kept", "full"],
    "head_chunks": [None, 2],
    "activation_offload": [0, 1],
    "optimizer_offload": [0, 1],
    "precision": ["fp32", "bf16"],
    "loss": ["fused", "chunked", "full"],
    "trees": [False, True],
}
CP, TP, PP, EP = ["parallel.cp=2"], ["parallel.tp=2"], ["parallel.pp=2"], ["parallel.ep=2"]
SP = [*TP, "parallel.sequence_parallel=true"]
SHARDED = ["parallel.distributed_optimizer=true"]
NUM_LAYERS, NUM_EXPERTS, TOP_K, GLOBAL_BATCH_SIZE = 4, 4, 2, 4  # values of scenarios.RECIPE and of MOE
NUM_KEY_HEADS = 4  # the same
MOE = [
    f"model.moe.num_experts={NUM_EXPERTS}",
    f"model.moe.top_k={TOP_K}",
    "model.moe.ffn_hidden_size=24",
    "model.init_std=0.2",  # distinct router scores: with 0.02, two scores could differ by one rounding
]
AUX = ["model.moe.aux_loss_coef=0.1", "model.moe.z_loss_coef=0.01"]
# Windows shorter and longer than documents and chunks.
WINDOWS = ["model.sliding_window=20", "model.sliding_window_layers=[1, 2, 4]"]
GPT_OSS = [
    *(f"model.{key}=true" for key in ("attention_sinks", "attention_output_bias", "mlp_bias", "moe.router_bias")),
    *("model.activation=clamped_swiglu", "model.activation_limit=0.8", "model.activation_alpha=1.702"),
    "model.qk_norm=false",
]
GEMMA = [
    *WINDOWS,
    *("model.rope.window_base=3000", "model.rope.base=100000", "model.norm_placement=both"),
    *("model.norm_zero_centered=true", "model.activation=geglu", "model.tie_embeddings=true"),
    "model.embedding_multiplier=5.656854249492381",  # the root of 32
    *("model.round_embedding_multiplier=true", "model.attention_multiplier=0.25"),
    *("model.attention_softcap=1.5", "model.logits_softcap=2.5"),
]  # Gemma 2 with the positions and norms of Gemma 3
# Without experts.  With scale 1, as in released models, softmax is so steep that rounding becomes 2e-6 of a later
# gradient norm.
GEMMA4 = [
    *WINDOWS,
    *("model.full_attention={head_dim: 12, num_query_groups: 8, keys_as_values: true}", "model.value_norm=true"),
    *("model.rope={base: 1e5, window_base: 3000, scaling: proportional, fraction: 0.5}", "model.qkv_bias=false"),
    *("model.norm_placement=both", "model.activation=geglu", "model.tie_embeddings=true", "model.layer_scalar=true"),
    *("model.embedding_multiplier=5.656854249492381", "model.round_embedding_multiplier=true"),
    *("model.attention_multiplier=0.25", "model.logits_softcap=2.5"),
]
GEMMA4_EXPERTS = ["model.moe.shared_ffn_hidden_size=16", "model.moe.own_norms=true"]
LINEAR = [
    *("model.linear_attention.layers=[1, 2, 4]", "model.attention_output_gate=true"),
    *("model.linear_attention.num_key_heads=4", "model.linear_attention.num_value_heads=8"),
    *("model.linear_attention.key_head_dim=6", "model.linear_attention.value_head_dim=10"),
    *("model.norm_zero_centered=true", "model.rope.fraction=0.5", "model.qkv_bias=false"),
]  # settings of Qwen3.5
MAMBA = [
    "model.mamba={layers: [1, 2, 4], num_heads: 8, num_groups: 4, head_dim: 6, state_dim: 10, min_time_step: 0.01}",
    "model.qkv_bias=false",
]  # settings of Nemotron 3
# From weights with standard deviation 0.2, a step of Adam turns gradient rounding into 5e-5 of the next norm.
QWEN_MOE = [*("model.moe.shared_ffn_hidden_size=16", "model.moe.shared_gate=true", "model.init_std=0.05")]
ROUTERS = [
    *("model.moe.score_function=sigmoid", "model.moe.correction_bias=true", "model.moe.bias_update_rate=0.03"),
    *("model.moe.scaling_factor=1.7", "model.moe.shared_ffn_hidden_size=16", "model.moe.dense_layers=1"),
    *("model.rope.fraction=0.5", "model.qk_norm_across_heads=true"),
]  # settings of GLM-4.5 and MiniMax-M2
LATENT = [
    *("model.latent_attention.kv_lora_rank=20", "model.latent_attention.q_lora_rank=14"),
    *("model.latent_attention.qk_nope_head_dim=6", "model.latent_attention.qk_rope_head_dim=4"),
    *("model.latent_attention.v_head_dim=7", "model.rope.interleaved=true"),
    *("model.num_query_groups=null", "model.qk_norm=false", "model.qkv_bias=false"),
]  # settings of DeepSeek-V3 without experts
MODELS = {
    "dense": [],
    "experts": [*MOE, *AUX],
    "gemma": GEMMA,
    "gemma4": [*MOE, *AUX, *GEMMA4, *GEMMA4_EXPERTS],
    "linear": LINEAR,
    "latent": LATENT,
    "gpt_oss": [*MOE, *AUX, *WINDOWS, *GPT_OSS],
    "linear_experts": [*MOE, *AUX, *LINEAR, *QWEN_MOE],
    "routers": [*MOE, *AUX, *ROUTERS],
}
SLOW_CP = ["parallel.intra_node_gb_s=1e-6"]  # so slow that the planner chooses small groups for tiny packs
SWITCHES = ("sequence_parallel", "distributed_optimizer", "dynamic_cp")  # keys of the section `parallel`
CHUNKED = ("dense", "experts", "gemma", "gpt_oss", "gemma4")  # keys of MODELS
MIXTURES = ("experts", "gemma4", "gpt_oss", "linear_experts", "routers")  # keys of MODELS
ALL_ON = ["parallel.sequence_parallel=true", "parallel.distributed_optimizer=true", "train.recompute=full"]
# fp32 sums taken in another order: measured 1e-8 (loss) and 4e-8 (norm) over five steps.
LOSS_TOLERANCE = 1e-6
NORM_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5  # relative to the gradient's norm, per parameter
STEP_TOLERANCE = 1e-4  # relative to the norm of a weight's change; Adam divides by the root of small numbers
# Relative tolerances of losses and gradient norms in fp32, as in docs/concepts/numerics.md.  The norm in Gated DeltaNet
# multiplies a head's output, and its rounding, by up to 1 / sqrt(norm_epsilon): 10 here, 1,000 in released models.
CURVE_TOLERANCES = {
    "attention, MLP, experts": (LOSS_TOLERANCE, NORM_TOLERANCE),
    "linear attention, `norm_epsilon` 1e-2": (LOSS_TOLERANCE, NORM_TOLERANCE),
    "linear attention, `norm_epsilon` 1e-6": (1e-5, 5e-4),
}


def world_size(case: Case) -> int:
    return case["tp"] * case["cp"] * case["pp"] * case["dp"]


# The combinations that the documentation allows.  The rules are repeated here, so that a wrong refusal fails a test.
RULES = (
    lambda tp, cp, pp, dp: tp * cp * pp * dp <= 4,
    lambda tp, sequence_parallel: sequence_parallel <= (tp > 1),
    lambda cp, dynamic_cp: dynamic_cp <= (cp > 1),
    lambda model, tp, sequence_parallel: model not in MIXTURES or tp == 1 or sequence_parallel,
    lambda pp, virtual_stages: virtual_stages == 1 or (pp > 1 and NUM_LAYERS % (pp * virtual_stages) == 0),
    lambda pp, virtual_stages, dp: virtual_stages == 1 or GLOBAL_BATCH_SIZE // dp % pp == 0,
    lambda model, tp, cp, dp, ep: ep == 1 or (model in MIXTURES and tp * cp * dp % ep == 0),
    # Activations can be offloaded if most of them are recomputed.
    lambda recompute, activation_offload: not activation_offload or recompute != "none",
    # Chunks of heads are of softmax attention without a gate and without norms over all heads.
    lambda model, tp, head_chunks: head_chunks is None or (model in CHUNKED and tp < NUM_KEY_HEADS),
    # Sharding divides the work of the distributed optimizer among copies; a pipeline does not shard weights.
    lambda cp, dp, distributed_optimizer, shard: shard == "optimizer" or (distributed_optimizer and dp * cp > 1),
    lambda pp, shard: shard != "weights" or pp == 1,
    lambda cp, dp, shard, shard_size: shard_size is None or (shard != "optimizer" and dp * cp == 4),
    # megatron-core's CPU optimizer
    lambda distributed_optimizer, optimizer_offload, precision: not optimizer_offload
    or (precision == "bf16" and distributed_optimizer),
)


def overrides(case: Case) -> list[str]:
    return [
        *MODELS[case["model"]],
        *(f"parallel.{key}={case[key]}" for key in ("tp", "cp", "pp", "virtual_stages", "ep")),
        *(f"parallel.{key}={str(case[key]).lower()}" for key in SWITCHES),
        f"parallel.shard={case['shard']}",
        f"parallel.shard_size={case['shard_size'] or 'null'}",
        *(SLOW_CP if case["dynamic_cp"] else []),
        f"train.recompute={case['recompute']}",
        f"train.head_chunks={case['head_chunks'] or 'null'}",
        f"train.offload_fraction={case['activation_offload']}",
        f"optim.offload_fraction={case['optimizer_offload']}",
        f"run.precision={case['precision']}",
        f"data.turns={'each' if case['trees'] else 'chat'}",
        f"loss.impl={case['loss']}",
        f"loss.chunk_size={'null' if case['loss'] == 'full' else 24}",
    ]


def name(case: Case) -> str:
    """The differences from a plain run on one rank: "experts cp 2 ep 2 recompute full"."""
    plain = {key: values[0] for key, values in DIMENSIONS.items()}
    parts = [f"{key} {value}" for key, value in case.items() if value != plain[key] and key not in ("model",)]
    return " ".join([case["model"], *parts])
