"""Compares the peak memory of torch's allocator in training steps with sft/estimate/memory.py, as JSON lines.

    python -m tests.standin.memory_rows                                            all rows that are tested
    python -m tests.standin.memory_rows 1.7b:64k:one@te 8b:64k:one:full@cp=2,tp=2  rows: a case of `step`, @, a layout
    python -m tests.standin.memory_rows 1.7b:64k:one@windows,cp=2                  and kinds of layers (KINDS)

measured: the largest memory that torch allocated on any rank in two steps; device: the estimate for the rank that needs
most; host_measured and host: the same for page-locked memory.  All sizes are in bytes.
"""

import json
import sys
from typing import Any

from sft.estimate import memory
from sft.parallel.layout import Layout
from tests.standin import launch
from tools.bench.steps.case import StepCase
from tools.bench.steps.trainer import documents_of

ROWS = (
    "1.7b:64k:one:selective",
    "1.7b:32k:chat:selective",
    "1.7b:64k:one:selective@dp=2",
    "1.7b:64k:one:full+tile4k",
    "1.7b:128k:one:selective+offload",
    "4b:64k:one:selective+offload",
    "4b:128k:one:selective+offload0.8",
    "4b:128k:one:full",
    "0.6b:32k:one:none",
    "0.6b:512k:one:full+offload",
    "4b:128k:one:selective@cp=2",
    "4b:256k:one:selective+offload@cp=4",
    "4b:64k:one:selective@tp=2",
    "4b:64k:one:selective@pp=2",
    "8b:64k:one:selective@cp=2,tp=2",
    "4b:128k:one:full@cp=2,shard=weights",
    "4b:128k:one:selective@cp=2,shard=weights",
    "4b:128k:one:selective@cp=2,shard=gradients",
    "0.6b:64k:one:full+tile4k+offload@cp=2",  # here and below, most of all in attention
    "0.6b:64k:one:full+tile4k+offload@chunks,cp=2",
    "0.6b:64k:one:full+tile4k+offload@windows",
    "0.6b:64k:one:full+tile4k+offload@windows,cp=2",
    "0.6b:64k:one:full+tile4k+offload@half,cp=2",
    "0.6b:128k:one:full+tile4k+offload@windows,cp=4",
    "0.6b:16k:one:full+tile4k@gemma2",
    "0.6b:64k:one:selective@gemma3,cp=2",
    "8b:64k:one:selective@gpt_oss",
    "8b:64k:one:full+tile4k@gpt_oss,cp=2",
    "1.7b:32k:one:selective@latent",
    "1.7b:32k:one:full@latents",
    "1.7b:32k:one:selective@latents,cp=2",
    "1.7b:32k:one:selective@gemma4,cp=2",
    "0.6b:64k:one:selective@linear,cp=2",
    "1.7b:32k:one:selective@mamba,cp=2",
    "1.7b:32k:one:selective@kda,cp=2",
    "1.7b:32k:one:full@olmo_hybrid,cp=2",
    "1.7b:32k:one:selective@mimo,cp=2",
    "1.7b:32k:one:selective@muse,tp=2,sequence_parallel=true",
)
ROWS_TE = (
    "1.7b:64k:one:selective@te",
    "1.7b:64k:one:full@te",
    "1.7b:32k:one:none@te",
    "1.7b:64k:one:selective+offload@te",
    "1.7b:128k:one:selective@te,cp=2",
    "1.7b:128k:one:selective@te,cp=2,cp_comm=all_gather",
    "1.7b:128k:one:selective@te,cp=4,cp_comm=all_gather",
    "1.7b:128k:one:selective@te,cp=2,cp_comm=a2a",
    "1.7b:128k:one:selective@te,cp=4,cp_comm=a2a+p2p,cp_a2a=2",
    "1.7b:32k:one:selective+offload@te,latent",
    "1.7b:32k:one:none@te,latents",
    "1.7b:64k:one:selective@te,latents,cp=2",
)


def _keys(**keys: object) -> list[str]:
    return [f"model.{key}={str(value).lower()}" for key, value in keys.items()]


_HALF = _keys(sliding_window=1024, sliding_window_layers=list(range(1, 28, 2)))
_GEMMA = _keys(norm_placement="both", norm_zero_centered=True, activation="geglu", embedding_multiplier=48)
_GEMMA_2 = _keys(num_layers=4, hidden_size=2304, ffn_hidden_size=9216, num_attention_heads=8, num_query_groups=4)
_GEMMA_2 += _keys(head_dim=256, qk_norm=False, attention_softcap=50, logits_softcap=30)
_GEMMA_3 = _keys(num_layers=12, hidden_size=2560, ffn_hidden_size=10_240, num_attention_heads=8, num_query_groups=4)
_GEMMA_3 += ["model.head_dim=256", "model.rope.window_base=1e4"]
# The experts of a token as one MLP, because the sizes of experts are the result of a kernel.
_GPT_OSS = _keys(num_layers=12, hidden_size=2880, ffn_hidden_size=4 * 2880, num_attention_heads=64, num_query_groups=8)
_GPT_OSS += _keys(head_dim=64, qk_norm=False, qkv_bias=True, attention_output_bias=True, mlp_bias=True)
_GPT_OSS += _keys(attention_sinks=True, activation="clamped_swiglu", activation_limit=7, activation_alpha=1.702)
# Moonlight without experts, and with a latent of queries and twice as many heads.
_LATENT = _keys(num_layers=12, hidden_size=2048, ffn_hidden_size=11_264, num_attention_heads=16, qk_norm=False)
_LATENT += ["model.num_query_groups=null", "model.head_dim=null", "model.latent_attention.kv_lora_rank=512"]
_LATENT += ["model.rope.interleaved=true"]
_TORCH = "attention.delta_rule=torch"  # FLA's kernels give sizes that only a GPU computes, and the estimate expects FLA
_LINEAR = [
    "model.linear_attention={layers: [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26, 27], "
    "num_key_heads: 16, num_value_heads: 32, key_head_dim: 128, value_head_dim: 128}",
    _TORCH,
]
# Seven layers of Nemotron-3-Nano-4B, each only a mixer or only an MLP.
_MAMBA = [
    *_keys(num_layers=7, hidden_size=3136, ffn_hidden_size=12_544, num_attention_heads=40, num_query_groups=8),
    *_keys(head_dim=128, qk_norm=False, activation="relu2"),
    "model.mamba={layers: [1, 3, 6], num_heads: 96, num_groups: 8, head_dim: 80, min_time_step: 0.001}",
    "model.halves={without_mixer: [2, 5, 7], without_mlp: [1, 3, 4, 6]}",
    *("model.rope.skip_layers=[4]", _TORCH),
]
# Eight layers of Kimi-Linear-48B-A3B without experts.
KDA = [
    *_keys(num_layers=8, hidden_size=2304, ffn_hidden_size=9216, num_attention_heads=32, qk_norm=False),
    *("model.head_dim=null", "model.num_query_groups=null", "model.latent_attention.kv_lora_rank=512"),
    "model.linear_attention={layers: [1, 2, 3, 5, 6, 7], num_key_heads: 32, num_value_heads: 32, decay: channel, "
    "low_rank: 128, gate: sigmoid}",
    *("model.rope.skip_layers=[4, 8]", _TORCH),
]
# Four layers of Olmo Hybrid 7B.
_OLMO_HYBRID = [
    *_keys(num_layers=4, hidden_size=3840, ffn_hidden_size=11_008, num_attention_heads=30, num_query_groups=30),
    *_keys(head_dim=128, norm_placement="post", qk_norm_across_heads=True),
    "model.linear_attention={layers: [1, 2, 3], num_key_heads: 30, num_value_heads: 30, key_head_dim: 96, "
    "value_head_dim: 192, beta_factor: 2, norm_epsilon: 1e-5, norm_placement: pre}",
    _TORCH,
]
# Six layers of MiMo-V2-Flash without experts: in layers with a window twice the key heads, and sinks.
MIMO = [
    *_keys(num_layers=6, hidden_size=4096, ffn_hidden_size=16_384, num_attention_heads=64, num_query_groups=8),
    *_keys(head_dim=192, value_head_dim=128, value_multiplier=0.707, qk_norm=False, attention_sinks=True),
    *_keys(sliding_window=129, sliding_window_layers=[2, 3, 4, 5]),
    *("model.full_attention={num_query_groups: 4, sinks: false}", "model.rope={fraction: 0.334, window_base: 1e4}"),
]
# Four layers of Muse Glimmer 30B.
_MUSE = [
    *_keys(num_layers=4, hidden_size=6656, ffn_hidden_size=19_968, num_attention_heads=32, num_query_groups=2),
    *_keys(head_dim=128, norm_placement="both", norm_zero_centered=True, final_norm_zero_centered=False),
    *_keys(output_norm_epsilon=1e-8, qk_norm_weights=False, embedding_norm=True, attention_output_gate=True),
    *_keys(attention_multiplier=0.342, logits_scaling=5.1, logits_softcap=20, sliding_window=2048),
    *("model.sliding_window_layers=[1, 2, 3]", "model.rope.skip_layers=[4]"),
]
# Six layers of Gemma 4 26B-A4B without experts, the last without a window.
GEMMA_4 = [
    *(f"model.{key}={value}" for key, value in dict(
        num_layers=6, hidden_size=2816, ffn_hidden_size=2112, num_attention_heads=16, num_query_groups=8, head_dim=256,
        norm_placement="both", activation="geglu", value_norm="true", layer_scalar="true", attention_multiplier=1,
        logits_softcap=30, sliding_window=1024, sliding_window_layers=[1, 2, 3, 4, 5],
    ).items()),
    *(f"model.full_attention.{key}" for key in ("head_dim=512", "num_query_groups=2", "keys_as_values=true")),
    *(f"model.rope.{key}" for key in ("window_base=1e4", "scaling=proportional", "fraction=0.25")),
]  # fmt: skip
KINDS = {  # of layers, by a word after the @; the models have their own sizes, too
    "windows": _keys(sliding_window=1024),
    "half": _HALF,
    "softcap": _keys(sliding_window=1024, attention_softcap=50),
    "gemma2": [*_GEMMA, *_GEMMA_2, *_keys(sliding_window=4096, sliding_window_layers=[1, 3])],
    "gemma3": [*_GEMMA, *_GEMMA_3, *_keys(sliding_window=1024, sliding_window_layers=[1, 2, 3, 4, 5, 7, 8, 9, 10, 11])],
    "latent": _LATENT,
    "latents": [*_LATENT, *_keys(num_attention_heads=32), "model.latent_attention.q_lora_rank=1536"],
    "linear": _LINEAR,
    "gemma4": GEMMA_4,
    "chunks": ["train.head_chunks=8"],
    "mamba": _MAMBA,
    "kda": KDA,
    "olmo_hybrid": _OLMO_HYBRID,
    "mimo": MIMO,
    "muse": _MUSE,
    "gpt_oss": [*_GPT_OSS, *_keys(sliding_window=128, sliding_window_layers=[1, 3, 5, 7, 9, 11])],
}


def read(row: str) -> tuple[StepCase, list[str], int]:
    """The case, overrides for its layout, and the number of processes.  A pipeline gets 2 * pp microbatches."""
    name, _, layout = row.partition("@")
    parts = [part for part in layout.split(",") if part]
    keys = dict(part.split("=") for part in parts if "=" in part)
    dp = int(keys.pop("dp", 1))
    tp, cp, pp = (int(keys.get(key, 1)) for key in ("tp", "cp", "pp"))
    also = [
        launch.TE if "te" in parts else launch.PORTABLE,
        *(override for part in parts for override in KINDS.get(part, [])),
        *(f"parallel.{key}={value}" for key, value in keys.items()),
        f"train.global_batch_size={dp * (2 * pp if pp > 1 else 1)}",
    ]
    return StepCase.read(name), also, dp * tp * cp * pp


def measure(row: str) -> dict[str, Any]:
    """Measures a row.  Raises AssertionError with the output of the processes if a step fails."""
    case, also, ranks = read(row)
    found = launch.steps(str(case), also, ranks=ranks)
    seq_length, multiple, _ = documents_of(case, 1)
    config = case.config("cuda", seq_length=seq_length, multiple=multiple, also=also)
    expected = memory.estimate(config, Layout.resolve(config, ranks), case.vocab)
    measured = max(rank["peak_bytes"] for rank in found)
    return {
        "row": row,
        "ranks": ranks,
        "measured": int(measured),
        "device": int(expected.device),
        "ratio": round(measured / expected.device, 4),
        "host_measured": max(rank["host_bytes"] for rank in found),
        "host": int(expected.host),
        "waits": [rank["step"]["waits"] for rank in found],
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or [*ROWS, *(ROWS_TE if launch.HAS_TE else ())]:
        print(json.dumps(measure(name)), flush=True)
