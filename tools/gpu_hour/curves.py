"""Declares and judges curves: losses and gradient norms of small models on several layouts, precisions and backends.

measured.py measures the curves.  All curves of a model start from the same weights.  The first curve of a model in a
group is the reference for the others.  A curve is written like "kind=latent tp=2 cp=4 precision=bf16"; the kind is one
of kinds.py, and dp follows from the other sizes.
"""

from collections.abc import Iterator, Mapping, Sequence

from sft.config import Config
from sft.recipe.load import parse_recipe
from tools.bench.harness import DONE, Bar, Row
from tools.gpu_hour.kinds import KINDS

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
    **dict.fromkeys(
        ("tp", "cp", "pp", "ep", "virtual_stages", "cp_comm", "cp_a2a", "ep_comm", "dynamic_cp"), "parallel"
    ),
    **dict.fromkeys(("precision", "deterministic", "fp8"), "run"),
    **dict.fromkeys(("recompute", "offload_fraction"), "train"),
    **dict.fromkeys(("backend", "delta_rule"), "attention"),
}
KIND_SIZES = ("data.seq_length=512", "train.num_steps=12")  # settings of curves with a kind
SHORT_CP = ("parallel.intra_node_gb_s=1e-6",)  # with dynamic_cp: a network so slow that short packs get small groups
# Largest relative differences, the same as in tests/gpu.  In fp32, kernels of other sizes add in another order.  bf16
# has 8 bits of mantissa, and other layouts round at other points of the four layers.
FP32_BOUND, BF16_BOUND, BF16_NORM_BOUND = 1e-4, 1e-2, 3e-2
# Bounds of gradient norms of curves with a kind, over twelve steps in bf16.  On a CPU, the norms of toy sizes differed
# by up to 0.022, and with experts by up to 0.074: of two experts with nearly equal scores, bf16 may choose the other.
KIND_NORM_BOUND, EXPERTS_NORM_BOUND = 5e-2, 0.15
# FP8 has 3 bits of mantissa: a factor is wrong by up to 6%, and the errors of a sum's terms partly cancel.
FP8_BOUND, FP8_NORM_BOUND = 5e-2, 2e-1

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
    1: ["dp=1", "dp=1 backend=te precision=bf16", "dp=1 backend=te precision=bf16 recompute=attention_kept"],
    2: ["dp=2", "cp=2 backend=te precision=bf16"],
    8: [
        "dp=8",
        "dp=8 backend=te precision=bf16",
        "cp=8 backend=te precision=bf16 recompute=attention_kept",
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
_TE, _KEPT = "backend=te precision=bf16", "precision=bf16 recompute=attention_kept"
# Groups of their own, because compilation takes most of the time.
_RECURRENT, _MORE = ("qwen-3.6", "kimi-linear", "nemotron-3"), ("experts", "adapters")
_SOFTMAX = [kind for kind in KINDS if kind not in (*_RECURRENT, *_MORE)]
KINDS_OF_ATTENTION: Curves = {
    1: [f"kind={kind} dp=1{also}" for kind in _SOFTMAX for also in ("", " precision=bf16")]
    + [f"kind={kind} dp=1 {_KEPT}" for kind in ("windows", "latent")]
    + [f"kind=latent dp=1 {_TE}"],
    2: [f"kind={kind} {also}" for kind in _SOFTMAX for also in ("dp=2", "cp=2 precision=bf16")]
    + [f"kind=windows cp=2 {_KEPT}", "kind=windows cp=2 dynamic_cp=true"],
    8: [f"kind={kind} {also}" for kind in _SOFTMAX for also in ("dp=8", "cp=8 precision=bf16")]
    + ["kind=windows cp=8", "kind=windows cp=8 dynamic_cp=true", "kind=windows tp=2 cp=4 precision=bf16"]
    + [f"kind={kind} cp=8 {_KEPT}" for kind in ("windows", "latent")]
    + [f"kind=latent cp={cp} dp={8 // cp} {_TE}" for cp in (2, 8)]
    + ["kind=gpt-oss cp=4 dp=2 ep=8 precision=bf16", "kind=gemma-4 tp=2 cp=4 precision=bf16"],
}
RECURRENCES: Curves = {
    1: [
        f"kind={kind} dp=1{also}"
        for kind in _RECURRENT
        for also in ("", " precision=bf16", " precision=bf16 delta_rule=fla", f" {_KEPT}")
    ],
    2: [f"kind={kind} {also}" for kind in _RECURRENT for also in ("dp=2", "cp=2 precision=bf16")],
    8: [
        f"kind={kind} {also}"
        for kind in _RECURRENT
        for also in (
            *("dp=8", "cp=8 precision=bf16", "cp=2 dp=4 precision=bf16", "tp=2 cp=4 precision=bf16", f"cp=8 {_KEPT}"),
            *(f"cp={cp} dp={8 // cp} precision=bf16 delta_rule=fla" for cp in (2, 8)),
        )
    ],
}
MORE_KINDS: Curves = {
    1: [f"kind={kind} dp=1{also}" for kind in _MORE for also in ("", " precision=bf16")]
    + ["dp=1", f"dp=1 {_TE} fp8=delayed", f"dp=1 {_TE} fp8=blockwise"],
    2: [f"kind={kind} {also}" for kind in _MORE for also in ("dp=2", "cp=2 precision=bf16")]
    + ["kind=adapters dp=2 ep=2 precision=bf16"],
    8: [f"kind={kind} {also}" for kind in _MORE for also in ("dp=8", "cp=8 precision=bf16")]
    + [f"kind=experts dp=8 ep=8 precision=bf16{also}" for also in ("", " ep_comm=deepep")]
    + ["kind=adapters dp=8 ep=8 precision=bf16"]
    + ["dp=8", f"dp=8 {_TE} fp8=delayed", f"tp=2 cp=4 {_TE} fp8=blockwise"],
}
GROUPS = {
    "layouts": LAYOUTS,
    "kinds": KINDS_OF_ATTENTION,
    "recurrences": RECURRENCES,
    "more-kinds": MORE_KINDS,
    "backends": BACKENDS,
    "deterministic": DETERMINISTIC,
}
# Seconds, for the limits of steps.  Most of them are compilation: on an H100 that ran tests at the same time, the
# curves of three kinds of models took 235 s, and the benchmark of FLA's kernels did not end in 110 s.
START_S, KIND_S, FLA_S = 30, 80, 120


def config(overrides: Sequence[str], device_type: str) -> Config:
    return parse_recipe(RECIPE, "gpu hour", [f"run.device={device_type}", *overrides]).config


def overrides(curve: str) -> list[str]:
    """The overrides of a recipe for a curve: `dp=2 tp=2 precision=bf16` -> ["parallel.tp=2", "run.precision=bf16"]"""
    words = dict(word.split("=") for word in curve.split())
    words.pop("dp", None)
    kind = [*KIND_SIZES, *KINDS[words.pop("kind")]] if "kind" in words else []
    also = SHORT_CP if "dynamic_cp" in words else ()
    return [*kind, *also, *(f"{SECTIONS[key]}.{key}={value}" for key, value in words.items())]


def kind_of(case: str) -> str:
    """The kind of a curve: `kind=latent cp=2` -> "latent"; "" for the dense model of RECIPE"""
    return case.partition("kind=")[2].partition(" ")[0]


def limit_s(group: str) -> int:
    """The time limit, in seconds, of a step that computes curves of several kinds of models.

    Each kind of model, and FLA, needs time to compile its kernels.
    """
    cases = [case for cases in GROUPS[group].values() for case in cases]
    kinds, has_fla = {kind_of(case) for case in cases}, any("delta_rule=fla" in case for case in cases)
    return START_S + KIND_S * len(kinds) + FLA_S * has_fla


def difference(row: Row, reference: Row, key: str) -> float:
    """The largest relative difference over all steps; infinity if a value is NaN.

    {"losses": [2.0, 1.0]} and reference {"losses": [2.0, 1.25]} -> 0.2
    """
    pairs = zip(row[key], reference[key], strict=True)
    errors = [abs(a - b) / abs(b) if b else float(a != b) for a, b in pairs]
    return max(error if error == error else float("inf") for error in errors)


def bounds(case: str) -> tuple[float, float]:
    """The largest relative difference of losses, and of gradient norms."""
    if "fp8=" in case:
        return FP8_BOUND, FP8_NORM_BOUND
    if "precision=bf16" not in case:
        return FP32_BOUND, FP32_BOUND
    if not kind_of(case):
        return BF16_BOUND, BF16_NORM_BOUND
    has_experts = any("model.moe" in key for key in KINDS[kind_of(case)])
    return BF16_BOUND, EXPERTS_NORM_BOUND if has_experts else KIND_NORM_BOUND


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """Bars of the losses and gradient norms of every curve, compared with those of the first curve of its kind.

    A curve that could not be measured here has bars without a value.
    """
    references: dict[str, Row] = {}
    for row in rows:
        reference = references.setdefault(kind_of(row["case"]), row)
        if reference is row:
            continue
        title, is_measured = f"{row['case']} beside {reference['case']}", row.get("status", DONE) == DONE
        for key, name, bound in zip(("losses", "norms"), ("losses", "gradient norms"), bounds(row["case"])):
            value = difference(row, reference, key) if is_measured else None
            yield Bar(name=f"{title}, {name}", value=value, bound=bound)


def deterministic_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """The bar that the second run of a curve equals the first run bit for bit."""
    if len(rows) < 2:
        return
    same = [all(a == b for a, b in zip(rows[0][key], rows[1][key], strict=True)) for key in ("losses", "norms")]
    yield Bar(name=f"{rows[0]['case']} twice, bitwise equal", value=int(all(same)), bound=1, relation="exactly")
