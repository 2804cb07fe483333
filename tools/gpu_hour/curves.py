"""Losses and gradient norms of one small model on several layouts, precisions and backends, from the same weights.

Declares the curves and judges them; ranks.py measures them.  The first curve of a group is the reference of the others.
A curve is written like "tp=2 cp=4 precision=bf16"; dp follows from the other sizes.
"""

from collections.abc import Iterator, Mapping, Sequence

from sft.config import Config
from sft.recipe.load import parse_recipe
from tools.bench.harness import Bar, Row

RECIPE = """
run: {dir: unused, seed: 7, precision: fp32}
model: {num_layers: 4, hidden_size: 128, ffn_hidden_size: 256, num_attention_heads: 8, num_query_groups: 4,
        head_dim: 64, qk_norm: true, init_from: random}
data: {train: unused, seq_length: 2048, doc_multiple: 32}
attention: {backend: portable}
train: {num_steps: 6, global_batch_size: 8}
optim: {lr: 1e-3, schedule: constant, weight_decay: 0.1}
"""
TINY_SIZES = ("data.seq_length=256", "train.global_batch_size=2", "train.num_steps=2")
SECTIONS = {
    **dict.fromkeys(("tp", "cp", "pp", "virtual_stages", "cp_comm", "cp_a2a"), "parallel"),
    **dict.fromkeys(("precision", "deterministic"), "run"),
    **dict.fromkeys(("recompute", "offload_fraction"), "train"),
    "backend": "attention",
}
# Relative differences, the same bounds as in tests/gpu.  fp32: kernels of other sizes add in another order.  bf16 has 8
# bits of mantissa, and four layers round at other points.
FP32_BOUND, BF16_BOUND, BF16_NORM_BOUND = 1e-4, 1e-2, 3e-2

Curves = Mapping[int, Sequence[str]]  # number of processes -> curves
LAYOUTS: Curves = {
    1: ["dp=1", "dp=1 recompute=full offload_fraction=1", "dp=1 precision=bf16"],
    2: ["dp=2", "cp=2", "tp=2", "pp=2 precision=bf16"],
    8: [
        "dp=8",
        "cp=8",
        "tp=2 cp=4",
        "tp=4 dp=2",
        "tp=2 cp=2 pp=2",
        "cp=4 pp=2 virtual_stages=2",
        "cp=4 dp=2 recompute=full offload_fraction=1",
        "tp=2 cp=4 precision=bf16",
    ],
}
BACKENDS: Curves = {
    1: ["dp=1", "dp=1 backend=te precision=bf16"],
    2: ["dp=2", "cp=2 backend=te precision=bf16"],
    8: [
        "dp=8",
        "dp=8 backend=te precision=bf16",
        "tp=2 cp=4 backend=te precision=bf16",
        "cp=8 backend=te precision=bf16 cp_comm=p2p",
        "cp=8 backend=te precision=bf16 cp_comm=all_gather",
        "cp=4 dp=2 backend=te precision=bf16 cp_comm=a2a",
        "cp=8 backend=te precision=bf16 cp_comm=a2a+p2p cp_a2a=2",
    ],
}
DETERMINISTIC: Curves = {
    1: ["dp=1 precision=bf16 deterministic=true"] * 2,
    2: ["cp=2 precision=bf16 deterministic=true"] * 2,
    8: ["tp=2 cp=4 precision=bf16 deterministic=true"] * 2,
}
GROUPS = {"layouts": LAYOUTS, "backends": BACKENDS, "deterministic": DETERMINISTIC}


def config(overrides: Sequence[str], device_type: str) -> Config:
    return parse_recipe(RECIPE, "gpu hour", [f"run.device={device_type}", *overrides]).config


def overrides(curve: str) -> list[str]:
    """The overrides of a recipe for a curve: `dp=2 tp=2 precision=bf16` -> ["parallel.tp=2", "run.precision=bf16"]"""
    words = [word for word in curve.split() if not word.startswith("dp=")]
    return [f"{SECTIONS[word.partition('=')[0]]}.{word}" for word in words]


def difference(row: Row, reference: Row, key: str) -> float:
    """The largest relative difference of a step: {"losses": [2.0, 1.0]} against {"losses": [2.0, 1.25]} -> 0.2.  It is
    infinite if a value is NaN."""
    pairs = zip(row[key], reference[key], strict=True)
    errors = [abs(a - b) / abs(b) if b else float(a != b) for a, b in pairs]
    return max(error if error == error else float("inf") for error in errors)


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """Bars of the losses and gradient norms of every curve, compared with those of the first curve."""
    for row in rows[1:]:
        is_bf16 = "precision=bf16" in row["case"]
        loss_bound, norm_bound = (BF16_BOUND, BF16_NORM_BOUND) if is_bf16 else (FP32_BOUND, FP32_BOUND)
        title = f"{row['case']} beside {rows[0]['case']}"
        yield Bar(name=f"{title}, losses", value=difference(row, rows[0], "losses"), bound=loss_bound)
        yield Bar(name=f"{title}, gradient norms", value=difference(row, rows[0], "norms"), bound=norm_bound)


def deterministic_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """The bar that the second run of a curve equals the first run bit for bit."""
    if len(rows) < 2:
        return
    same = [all(a == b for a, b in zip(rows[0][key], rows[1][key], strict=True)) for key in ("losses", "norms")]
    yield Bar(name=f"{rows[0]['case']} twice, bitwise equal", value=int(all(same)), bound=1, relation="exactly")
