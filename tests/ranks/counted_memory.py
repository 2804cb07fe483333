"""Compares the bytes of torch's CPU allocator at its peak, by category, with sft/estimate/memory.py, as JSON lines.

    python -m tests.ranks.counted_memory             all rows
    python -m tests.ranks.counted_memory full cp     rows by name

Runs real steps on real ranks over gloo, with messages and expert routing.  The row of the rank that allocates most is
compared.
"""

import json
import sys
from collections.abc import Sequence

from sft.estimate import memory
from sft.estimate.memory import Memory
from sft.weights.trained import trained_weights
from tests.allocations.categories import Peak, peak
from tests.allocations.compare import Comparison
from tests.allocations.recorded import cpu_events
from tests.allocations.standing import standing_bytes
from tests.ranks import scenarios
from tests.ranks.pool import RankPool

VOCAB = 4096
SMALL = [
    *("model.num_layers=4", "model.hidden_size=128", "model.ffn_hidden_size=512", "model.num_attention_heads=4"),
    *("model.num_query_groups=2", "model.head_dim=32", "model.qkv_bias=false", "data.seq_length=2048"),
]
WIDE = [
    *("model.num_layers=4", "model.hidden_size=320", "model.ffn_hidden_size=832", "model.num_attention_heads=4"),
    *("model.num_query_groups=2", "model.head_dim=64", "model.qkv_bias=false", "data.seq_length=1536"),
]
_EXPERTS = ["model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.aux_loss_coef=1e-2"]
_LINEAR = [
    "model.linear_attention={layers: [1, 2, 3], num_key_heads: 2, num_value_heads: 4, key_head_dim: 32, "
    "value_head_dim: 32}"
]
_MAMBA = ["model.mamba={layers: [1, 2, 3], num_heads: 8, num_groups: 2, head_dim: 32, state_dim: 32}"]
_LATENT = [
    *("model.latent_attention.kv_lora_rank=64", "model.latent_attention.q_lora_rank=64"),
    *("model.latent_attention.qk_nope_head_dim=32", "model.latent_attention.qk_rope_head_dim=16"),
    *("model.latent_attention.v_head_dim=32", "model.head_dim=null", "model.num_query_groups=null"),
    "model.qk_norm=false",
]
_SHARD = ["parallel.distributed_optimizer=true"]
_HEADS = ["model.num_attention_heads=16", "model.num_query_groups=4", "model.ffn_hidden_size=128"]
_CHUNKS = ["train.head_chunks=4", "data.seq_length=4096"]
_TP = ["parallel.tp=2", "parallel.sequence_parallel=true"]
# The overrides and the number of ranks of each row.
ROWS: dict[str, tuple[list[str], int]] = {
    "none": (["train.recompute=none"], 1),
    "selective": (["train.recompute=selective"], 1),
    "full": (["train.recompute=full"], 1),
    "kept": (["train.recompute=attention_kept"], 1),
    "kept, cp": (["train.recompute=attention_kept", "parallel.cp=2"], 2),
    "kept, linear": ([*WIDE, *_LINEAR, "train.recompute=attention_kept"], 1),
    "kept, latent": ([*_LATENT, "train.recompute=attention_kept", "train.offload_fraction=1"], 1),
    "tile": (["train.recompute=full", "train.mlp_tile=256"], 1),
    "chunks": ([*_HEADS, *_CHUNKS, "train.recompute=full", "train.mlp_tile=256"], 1),
    "chunks, selective": ([*_HEADS, *_CHUNKS, "train.recompute=selective", "model.qk_norm=true"], 1),
    "bf16": (["train.recompute=selective", "run.precision=bf16"], 1),
    "wide none": ([*WIDE, "train.recompute=none"], 1),
    "wide full": ([*WIDE, "train.recompute=full"], 1),
    "lora": (["train.recompute=selective", "lora.rank=8"], 1),
    "offload": (["train.recompute=full", "train.offload_fraction=1", "model.num_layers=6"], 1),
    "cp": (["train.recompute=selective", "parallel.cp=2"], 2),
    "cp 4, wide": ([*WIDE, "train.recompute=none", "parallel.cp=4"], 4),
    "tp": ([*_TP, "train.recompute=selective"], 2),
    "tp, wide": ([*WIDE, *_TP, "train.recompute=none"], 2),
    "pp": (["parallel.pp=2", "train.recompute=selective", "train.global_batch_size=4"], 2),
    "virtual": (["parallel.pp=2", "parallel.virtual_stages=2", "train.recompute=none", "train.global_batch_size=4"], 2),
    "dp": (["train.recompute=full", "parallel.distributed_optimizer=true", "train.global_batch_size=2"], 2),
    "gradients": ([*_SHARD, "parallel.shard=gradients", "train.recompute=selective", "parallel.cp=2"], 2),
    "weights": ([*WIDE, *_SHARD, "parallel.shard=weights", "train.recompute=selective", "parallel.cp=2"], 2),
    "weights, bf16 gradients": (
        [*WIDE, *_SHARD, "parallel.shard=weights", "train.recompute=attention_kept", "parallel.cp=2"]
        + ["run.precision=bf16", "optim.grad_dtype=bf16"],
        2,
    ),
    "experts": ([*_EXPERTS, "model.moe.ffn_hidden_size=256", "train.recompute=none"], 1),
    "ep": (
        [*_EXPERTS, "model.moe.ffn_hidden_size=256", "parallel.ep=2", "train.recompute=selective"]
        + ["train.global_batch_size=2"],
        2,
    ),
    "linear": ([*_LINEAR, "train.recompute=none"], 1),
    "linear, full": ([*WIDE, *_LINEAR, "train.recompute=full"], 1),
    "Mamba-2": ([*_MAMBA, "train.recompute=none"], 1),
    "Mamba-2, cp": ([*WIDE, *_MAMBA, "train.recompute=selective", "parallel.cp=2"], 2),
    "latent": ([*_LATENT, "train.recompute=selective"], 1),
    "windows": (["model.sliding_window=256", "train.recompute=full", "parallel.cp=2"], 2),
}


def counted(overrides: Sequence[str]) -> tuple[Peak, Memory]:
    """The peak of this rank in the second step, and the prediction."""
    recipe = ["train.global_batch_size=1", "loss.chunk_size=256", *overrides]
    with scenarios.running(recipe, VOCAB) as engine:
        length = engine.config.data.seq_length
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus([length] * 16, VOCAB))
        engine.train_step(loader.microbatches(0))
        standing = standing_bytes(engine, "cpu")
        microbatches = loader.microbatches(1)
        found = peak(cpu_events(lambda: engine.train_step(microbatches)), standing)
        config, layout = engine.config, engine.layout
        expected = memory.estimate(config, layout, VOCAB, trained=trained_weights(config, VOCAB))
        return found, expected


def measure(pool: RankPool, name: str) -> Comparison:
    overrides, ranks = ROWS[name]
    return compare(pool, name, [*SMALL, *overrides], ranks)


def compare(pool: RankPool, name: str, overrides: Sequence[str], ranks: int = 1) -> Comparison:
    """name: of the comparison; overrides: all that differs from scenarios.RECIPE"""
    found = max(pool.run(counted, overrides), key=lambda pair: pair[0].total)
    return Comparison.of(name, ranks, *found)


def main(names: Sequence[str]) -> None:
    chosen = list(names or ROWS)
    for ranks in sorted({ROWS[name][1] for name in chosen}):
        pool = RankPool(ranks)
        try:
            for name in chosen:
                if ROWS[name][1] == ranks:
                    try:
                        print(json.dumps(measure(pool, name).as_json(2**20)), flush=True)
                    except AssertionError as error:
                        print(f"failed: {name}: {str(error)[-1500:]}", flush=True)
                        pool.close()
                        pool = RankPool(ranks)
        finally:
            pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
