"""Compares the bytes of torch's allocator at its peak, by category, with sft/estimate/memory.py, as JSON lines.

    python -m tests.standin.categories                               all rows
    python -m tests.standin.categories 1.7b:64k:one:selective@tp=2   rows as in memory_rows.py, and more kinds of layers

Each row runs one rank, of the stage that needs most (one_rank.py).
"""

import json
import os
import sys
import traceback
from typing import Any

import numpy as np

from sft.config import Config
from sft.estimate import memory
from sft.parallel.layout import Layout
from tests.allocations.compare import Comparison
from tests.standin import build, launch
from tests.standin.memory_rows import GEMMA_4, KDA, KINDS, MIMO, read
from tools.bench.steps.trainer import documents_of

_EXPERTS = [
    *(f"model.moe.{key}={value}" for key, value in dict(num_experts=32, top_k=4, ffn_hidden_size=768).items()),
    "model.moe.aux_loss_coef=1e-3",
]
_LATENT = [
    *("model.latent_attention.kv_lora_rank=512", "model.latent_attention.q_lora_rank=768"),
    *("model.latent_attention.qk_nope_head_dim=128", "model.latent_attention.qk_rope_head_dim=64"),
    *("model.latent_attention.v_head_dim=128", "model.head_dim=null", "model.num_query_groups=null"),
    "model.qk_norm=false",
]
_GEMMA_4_EXPERTS = [
    *GEMMA_4,
    *(f"model.moe.{key}" for key in ("num_experts=128", "top_k=8", "ffn_hidden_size=704", "own_norms=true")),
    "model.moe.shared_ffn_hidden_size=2112",
]
# Six layers of GLM-4.5-Air, the first dense, with few experts.
_GLM = [
    *(f"model.{key}={value}" for key, value in dict(
        num_layers=6, hidden_size=4096, ffn_hidden_size=10_944, num_attention_heads=96, num_query_groups=8,
        head_dim=128, qkv_bias="true", qk_norm="false",
    ).items()),
    "model.rope.fraction=0.5",
    *(f"model.moe.{key}={value}" for key, value in dict(
        num_experts=16, top_k=4, ffn_hidden_size=1408, dense_layers=1, shared_ffn_hidden_size=1408,
        score_function="sigmoid", correction_bias="true",
    ).items()),
]  # fmt: skip
_SIGMOID = ["model.moe.score_function=sigmoid", "model.moe.correction_bias=true", "model.moe.aux_loss_coef=1e-3"]
_FEW_EXPERTS = ["model.moe.num_experts=16", "model.moe.top_k=4", *_SIGMOID]
# Eight layers of Nemotron 3, each only a mixer or only experts.
_NEMOTRON = [
    *("model.num_layers=8", "model.qk_norm=false", "model.activation=relu2", "model.num_attention_heads=32"),
    *("model.num_query_groups=2", "model.head_dim=128", "model.rope.skip_layers=[6]"),
    *("model.halves={without_mixer: [2, 4, 7], without_mlp: [1, 3, 5, 6, 8]}", "model.moe.layers=[2, 4, 7]"),
    *("attention.delta_rule=torch", *_FEW_EXPERTS),
]
_NANO = [
    *("model.hidden_size=2688", "model.ffn_hidden_size=1856", "model.moe.ffn_hidden_size=1856"),
    "model.mamba={layers: [1, 3, 5, 8], num_heads: 64, num_groups: 8, min_time_step: 0.001}",
    "model.moe.shared_ffn_hidden_size=3712",
]
_SUPER = [
    *("model.hidden_size=4096", "model.ffn_hidden_size=2688", "model.moe.ffn_hidden_size=2688"),
    "model.mamba={layers: [1, 3, 5, 8], num_heads: 128, num_groups: 8, min_time_step: 0.001}",
    *("model.moe.shared_ffn_hidden_size=5376", "model.moe.latent_size=1024"),
]
# Four layers of Laguna: query heads and rotated widths by kind of layer, a gate for each head.
_LAGUNA = [
    *("model.num_layers=4", "model.hidden_size=2048", "model.ffn_hidden_size=8192", "model.num_attention_heads=64"),
    *("model.num_query_groups=8", "model.attention_head_gate=softplus", "model.sliding_window=512"),
    *("model.sliding_window_layers=[2, 3, 4]", "model.full_attention.num_attention_heads=48"),
    "model.rope={fraction: 0.5, window_base: 1e4, window_fraction: 1.0}",
    *("model.moe.ffn_hidden_size=512", "model.moe.shared_ffn_hidden_size=512", "model.moe.dense_layers=1"),
    *_FEW_EXPERTS,
]
_KIMI = [*KDA, "model.moe={dense_layers: 1, ffn_hidden_size: 1024, shared_ffn_hidden_size: 1024}", *_FEW_EXPERTS]
_MIMO = [*MIMO, "model.moe={dense_layers: 1, ffn_hidden_size: 2048}", *_FEW_EXPERTS]
MORE_KINDS = {
    "nemotron": [*_NEMOTRON, *_NANO],
    "nemotron_super": [*_NEMOTRON, *_SUPER],
    "kimi": _KIMI,
    "mimo_experts": _MIMO,
    "laguna": _LAGUNA,
    "experts": _EXPERTS,
    "latent": _LATENT,
    "gemma4_experts": _GEMMA_4_EXPERTS,
    "glm": _GLM,
    "glm_mtp": [*_GLM, "train.mtp=joint"],
    "plainopt": ["parallel.distributed_optimizer=false"],
}
ROWS = (
    "1.7b:32k:one:none",
    "1.7b:64k:one:selective",
    "1.7b:64k:one:full",
    "1.7b:64k:one:full+tile4k",
    "0.6b:128k:one:full+tile4k",
    "4b:64k:one:selective+offload",
    "0.6b:512k:one:full+offload",
    "1.7b:64k:one:selective+lora16",
    "1.7b:64k:one:full+lora16",
    "1.7b:64k:one:selective+optim1",
    "4b:128k:one:selective@cp=2",
    "1.7b:256k:one:none@cp=8",
    "4b:256k:one:full+tile4k@cp=4",
    "4b:64k:one:selective@tp=2,sequence_parallel=true",
    "4b:64k:one:none@tp=4,sequence_parallel=true",
    "4b:64k:one:full@tp=2,sequence_parallel=true",
    "4b:64k:one:selective@pp=2",
    "1.7b:32k:one:selective@pp=2,virtual_stages=7",
    "1.7b:64k:one:selective@dp=2,plainopt",
    "8b:64k:one:selective@cp=2,tp=2,sequence_parallel=true,dp=2",
    "0.6b:64k:one:none@experts",
    "0.6b:64k:one:selective@experts,ep=4,dp=4",
    "0.6b:64k:one:full@experts,ep=4,dp=2,cp=2",
    "1.7b:32k:one:none@experts,ep=2,dp=2",
    "0.6b:64k:one:selective+offload@experts,ep=2,tp=2,sequence_parallel=true,dp=2",
    "0.6b:64k:one:selective@linear",
    "1.7b:32k:one:none@linear",
    "1.7b:64k:one:full@linear,cp=2",
    "0.6b:64k:one:selective@latent",
    "1.7b:64k:one:full@latent,cp=2",
    "1.7b:32k:one:none@latent,tp=2,sequence_parallel=true",
    "0.6b:64k:one:selective@windows,cp=2",
    "0.6b:64k:one:full+tile4k@half,cp=2",
    "0.6b:64k:one:selective@gemma3,cp=2",
    "0.6b:16k:one:full@gemma2",
    "8b:64k:one:selective@gpt_oss",
    "1.7b:32k:one:selective@glm",
    "1.7b:32k:one:selective@glm_mtp",
    "1.7b:64k:one:full@glm_mtp,cp=2",
    "1.7b:16k:one:none@glm_mtp,tp=2,sequence_parallel=true",
    "1.7b:32k:one:selective@glm_mtp,pp=2",
    "1.7b:32k:one:selective@gemma4",
    "1.7b:32k:one:selective@gemma4_experts",
    "1.7b:64k:one:full@gemma4_experts,ep=4,cp=4",
    "1.7b:16k:one:none@gemma4_experts,ep=2,dp=2",
    "0.6b:64k:one:selective@experts,ep=2,etp=2,tp=2,sequence_parallel=true,dp=2",
    "1.7b:32k:one:selective@nemotron",
    "1.7b:32k:one:none@nemotron",
    "1.7b:64k:one:full@nemotron,cp=2,ep=2",
    "1.7b:32k:one:selective@nemotron,tp=2,sequence_parallel=true,ep=2",
    "1.7b:32k:one:selective@nemotron_super",
    "1.7b:64k:one:full@nemotron_super,cp=4,ep=4",
    "1.7b:32k:one:none@mamba",
    "1.7b:32k:one:selective@mamba,tp=2,sequence_parallel=true",
    "1.7b:32k:one:selective@kimi",
    "1.7b:32k:one:none@kda",
    "1.7b:64k:one:full@kimi,cp=2,ep=2",
    "1.7b:32k:one:selective@kda,tp=2,sequence_parallel=true",
    "1.7b:32k:one:selective@olmo_hybrid",
    "1.7b:32k:one:selective@mimo_experts",
    "1.7b:32k:one:none@mimo",
    "1.7b:64k:one:full@mimo_experts,cp=2,ep=2",
    "1.7b:32k:one:selective@muse",
    "1.7b:64k:one:full@muse,cp=4",
    "1.7b:32k:one:selective@laguna,cp=2,ep=2",
)
# A kernel of attention keeps its output and log-sum-exp; linear attention keeps states, and a ring what it received.
ROWS_KEPT = (
    "1.7b:64k:one:attention_kept",
    "8b:64k:one:attention_kept@gpt_oss,cp=2",
    "1.7b:32k:one:attention_kept@gemma4,cp=2",
    "1.7b:32k:one:attention_kept@latents",
    "0.6b:64k:one:attention_kept@linear,cp=2",
)
ROWS_KEPT_TE = (
    "1.7b:64k:one:attention_kept@te",
    "1.7b:128k:one:attention_kept@te,cp=2",
    "1.7b:32k:one:attention_kept@te,latents",
)


def in_this_process(config: Config, ranks: int, vocab: int, lengths: Any, name: str) -> dict[str, Any]:
    """Counts and predicts one row."""
    from sft.run import environment
    from sft.weights.trained import trained_weights
    from tests.standin import one_rank

    layout = Layout.resolve(config, ranks)
    environment.prepare(config, layout)
    trained = trained_weights(config, vocab)
    expected = memory.estimate(config, layout, vocab, trained=trained)
    rank = expected.stage * layout.tp * layout.cp * layout.dp
    counted, host = one_rank.count(config, layout, vocab, rank=rank, lengths=lengths)
    found = Comparison.of(name, ranks, counted, expected)
    hosts = {"host": [round(host / 2**30, 2), round(expected.host / 2**30, 2)]} if expected.host else {}
    return {**found.as_json(2**30), **hosts, "stage": expected.stage}


def of_row(name: str) -> dict[str, Any]:
    KINDS.update(MORE_KINDS)
    case, also, ranks = read(name)
    seq_length, multiple, _ = documents_of(case, 1)
    config = case.config("cuda", seq_length=seq_length, multiple=multiple, also=also)
    lengths = np.asarray(documents_of(case, 4 * config.train.global_batch_size)[2])
    return in_this_process(config, ranks, case.vocab, lengths, name)


def main(names: list[str]) -> int:
    """Counts one row after another in this process, because the imports take longest."""
    if os.environ.get("LD_PRELOAD") is None:
        os.environ.update(build.environment(build.library()))
        _again(names)
    names = names or [*ROWS, *ROWS_KEPT, *(ROWS_KEPT_TE if launch.HAS_TE else ())]
    for index, name in enumerate(names):
        try:
            print(json.dumps(of_row(name)), flush=True)
        except Exception:
            print(f"failed: {name}\n{traceback.format_exc()}", flush=True)
            if names[index + 1 :]:
                _again(names[index + 1 :])  # what a failed row has allocated ends with its process
            return 1
    return 0


def _again(names: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", "tests.standin.categories", *names])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
