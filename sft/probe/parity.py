"""Compares the loss and the gradients that two layouts, or two backends, compute from the same global batch.

Both layouts run in the same processes, one after the other.  The gradients of the first layout are divided among the
ranks and kept in host memory, which takes 4 bytes per parameter over all ranks together.  Then each rank compares its
share with the gradients of the second layout.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sft.batch import Microbatch
from sft.config import ModelConfig
from sft.errors import ConfigError
from sft.mcore.engine import Engine
from sft.mcore.gradients import gradient_chunks
from sft.mcore.hidden_states import SKETCH_SIZE, observed, rows_of, sketch
from sft.parallel.collectives import all_gather_objects
from sft.parallel.layout import Layout
from sft.parallel.rendezvous import shared_store
from sft.probe.report import ProbeReport
from sft.probe.session import Session, model, session
from sft.recipe.resolved import Recipe


@dataclass(frozen=True, kw_only=True)
class LayoutTolerance:
    """The largest relative differences that two correct layouts may have."""

    loss: float
    grad_norm: float
    gradient: float  # norm of the difference over the norm of the gradient, per parameter
    hidden: float  # norm of the difference over the norm of the hidden states, per layer


# fp32: ten times what the tests allow small models (docs/concepts/numerics.md), because deep models round more often.
# bf16: a number has 8 significant bits, so a rounding changes it by up to 0.4%.  Layouts round at different places.
# fp8: a number of type e4m3 has 4 significant bits, so a rounding changes it by up to 6%.  The values are not measured.
TOLERANCES = {
    "fp32": LayoutTolerance(loss=1e-5, grad_norm=1e-5, gradient=1e-4, hidden=1e-4),
    "bf16": LayoutTolerance(loss=2e-3, grad_norm=2e-2, gradient=1e-1, hidden=5e-2),
    "fp8": LayoutTolerance(loss=2e-2, grad_norm=1e-1, gradient=3e-1, hidden=2e-1),
}
# The smallest scale of a difference, as a share of the norm of all gradients.  A smaller gradient may consist of
# rounding errors, for example if the loss does not depend on the weight.
NEGLIGIBLE = 1e-6
SHOWN = 10  # parameters with the largest differences


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The results of one layout."""

    weights: str
    samples: list[int]
    loss: float
    grad_norm: float
    hidden: Tensor  # float64 [layers + 1, samples, SKETCH_SIZE]: sketches, summed over the tokens of each sample


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """The gradients of one parameter on both layouts."""

    name: str
    norms: tuple[float, float]
    norm_difference: float  # relative to the first norm
    cosine: float
    difference: float  # norm of the difference, relative to the first norm

    def __str__(self) -> str:
        return f"{self.name} ({self.difference:.1e}, norm {self.norm_difference:+.1e}, cosine {self.cosine:.9f})"


def run(recipe: Recipe, layout: Layout, against: Recipe, against_layout: Layout, *, step: int) -> ProbeReport:
    """Compare step `step`, counted from 1, of two recipes on the same processes.  Collective."""
    if _model_of(recipe) != _model_of(against):
        raise ConfigError("--against changes the model.  Only layouts and backends of one model can be compared.")
    recipe, against = _unclipped(recipe), _unclipped(against)
    store = shared_store(recipe.config.run.timeout_s) if "RANK" in os.environ else None
    first_store, second_store = (None if store is None else dist.PrefixStore(f"layout {i}", store) for i in (1, 2))
    with session(recipe, layout, first_store) as s, model(s) as (engine, weights):
        first = _run(s, engine, weights, step - 1)
        gradients = {name: whole for name, whole in _gathered(s, engine) if whole is not None}
    with session(against, against_layout, second_store) as s, model(s) as (engine, weights):
        second = _run(s, engine, weights, step - 1)
        if first.samples != second.samples:
            raise ConfigError(
                f"--against changes the data: step {step} has {len(first.samples)} samples, but {len(second.samples)} "
                "other samples with --against.  Leave out the keys that change the samples or their order."
            )
        parameters = _compare_gradients(s, engine, gradients)
    precisions = ("fp8" if r.config.run.fp8 else r.config.run.precision for r in (recipe, against))
    tolerance = TOLERANCES[max(precisions, key=list(TOLERANCES).index)]
    return _report((layout, against_layout), (first, second), parameters, tolerance, step)


def _model_of(recipe: Recipe) -> ModelConfig:
    """The model without model.megatron, which may choose how megatron-core computes it."""
    return recipe.config.model.model_copy(update={"megatron": {}})


def _unclipped(recipe: Recipe) -> Recipe:
    """The recipe without clipping, which would change the gradients before they are compared."""
    config = recipe.config
    return replace(
        recipe, config=config.model_copy(update={"optim": config.optim.model_copy(update={"clip_grad": 0.0})})
    )


def _run(s: Session, engine: Engine, weights: str, step: int) -> Pass:
    """A forward pass that observes hidden states, then a training step as `sft train` makes it."""
    batch = s.data.batch(step)
    samples = sorted(batch.samples)
    with s.console.track("parity", 2, "passes") as progress:
        hidden = _hidden(s, engine, batch.microbatches, samples)
        progress.advance(1)
        result = engine.train_step(batch.microbatches)
        progress.advance(1)
    if result.lm_loss is None:
        raise ConfigError(f"--step {step + 1} has no supervised token, so it has no gradient.  Give another --step.")
    return Pass(weights=weights, samples=samples, loss=result.lm_loss, grad_norm=result.grad_norm, hidden=hidden)


def _hidden(s: Session, engine: Engine, microbatches: Sequence[Microbatch], samples: list[int]) -> Tensor:
    """The value of `Pass.hidden`.  Collective.

    Each token's sketch is added with a sign, which is random but depends only on the token's position, so that the
    differences of two tokens do not cancel.  Padding is left out, because layouts may pad differently.
    """
    signs = torch.randint(0, 2, (s.config.data.seq_length,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    order = {sample: index for index, sample in enumerate(samples)}
    table = torch.zeros(s.config.model.num_layers + 1, len(samples), SKETCH_SIZE, dtype=torch.float64)
    num_processed = dict[int, int]()  # {layer: number of microbatches}
    counts = s.groups.tp_rank == 0 or s.layout.sequence_parallel  # otherwise the tp ranks hold the same tokens

    def add(layer: int, hidden: Tensor) -> None:
        mb = microbatches[num_processed.setdefault(layer, 0)]
        num_processed[layer] += 1
        rows = rows_of(engine, mb.tokens.shape[1])
        real = ~mb.is_padding[0, rows]
        of_samples = np.array([order[sample] for sample in mb.sample_ids])
        of_documents = mb.samples_of_documents
        index = torch.from_numpy(of_samples[of_documents[of_documents < len(of_samples)]])
        signed = sketch(hidden) * signs[mb.position_ids[0, rows] % len(signs)][:, None]
        if counts:
            table[layer].index_add_(0, index[mb.documents[0, rows][real].long()], signed[real])

    with observed(engine, on_hidden=add):
        engine.measure(microbatches, forward_only=True)
    dist.all_reduce(table, group=s.groups.control)
    return table


def _whole_gradients(engine: Engine) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name, whole gradient) of each parameter, in the same order on all ranks and layouts.

    The gradient is fp32, on the CPU.  Only one rank gets the gradient of a parameter, in turn; the others get None.
    Each step of the iterator is collective.
    """
    control, rank = engine.groups.control, engine.groups.rank
    local: dict[str, list[Tensor]] = {}
    descriptions = []
    for chunk in gradient_chunks(engine):
        local.setdefault(chunk.parameter, []).append(chunk.data)
        descriptions.append((chunk.parameter, chunk.shape, chunk.offset, tuple(chunk.data.shape), rank))
    by_name: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]]] = {}
    for of_rank in all_gather_objects(lambda: descriptions, control):
        for name, *described in of_rank:
            by_name.setdefault(name, []).append(tuple(described))  # type: ignore[arg-type]
    for index, (name, chunks) in enumerate(sorted(by_name.items())):
        owner, shape = index % engine.layout.world_size, chunks[0][0]
        num_held = sum(math.prod(size) for _, _, size, _ in chunks)
        assert num_held == math.prod(shape), f"the chunks of {name} are not the whole"
        own = [data.cpu().float().contiguous() for data in local.get(name, [])]
        if rank != owner:
            for data in own:
                dist.send(data, owner, group=control)
            yield name, None
            continue
        whole = torch.empty(shape, dtype=torch.float32)
        for _, offset, size, holder in chunks:
            data = own.pop(0) if holder == rank else torch.empty(size, dtype=torch.float32)
            if holder != rank:
                dist.recv(data, holder, group=control)
            whole[tuple(slice(o, o + n) for o, n in zip(offset, size))] = data
        yield name, whole


def _gathered(s: Session, engine: Engine) -> Iterator[tuple[str, Tensor | None]]:
    """The results of `_whole_gradients`, with progress on the console."""
    with s.console.track("gathering gradients", None, "parameters") as progress:
        for name, gradient in _whole_gradients(engine):
            progress.advance(1)
            yield name, gradient


def _compare_gradients(s: Session, engine: Engine, first: dict[str, Tensor]) -> list[Parameter]:
    """The comparison of all parameters, sorted by name; equal on every rank.  Collective."""
    sums: list[tuple[str, list[float]]] = []
    for name, b in _gathered(s, engine):
        if b is not None:
            a = first.pop(name)
            common = tuple(slice(0, min(sizes)) for sizes in zip(a.shape, b.shape))  # padded vocabularies may differ
            a, b = a[common].double(), b[common].double()
            products = (float((x * y).sum()) for x, y in ((a, a), (b, b), (a, b), (a - b, a - b)))
            sums.append((name, list(products)))
    everywhere = sorted(entry for of_rank in all_gather_objects(lambda: sums, s.groups.control) for entry in of_rank)
    floor = NEGLIGIBLE * math.sqrt(sum(squares for _, (squares, *_) in everywhere))
    return [_parameter(name, numbers, floor) for name, numbers in everywhere]


def _parameter(name: str, sums: list[float], floor: float) -> Parameter:
    aa, bb, ab, dd = sums
    a, b = math.sqrt(aa), math.sqrt(bb)
    scale = max(a, floor) or 1.0
    return Parameter(
        name=name,
        norms=(a, b),
        norm_difference=(b - a) / scale,
        cosine=ab / (a * b) if a * b else 1.0,
        difference=math.sqrt(dd) / scale,
    )


def _report(
    layouts: tuple[Layout, Layout],
    passes: tuple[Pass, Pass],
    parameters: list[Parameter],
    allowed: LayoutTolerance,
    step: int,
) -> ProbeReport:
    first, second = passes
    hidden = ((second.hidden - first.hidden).flatten(1).norm(dim=1) / first.hidden.flatten(1).norm(dim=1)).tolist()
    layer = next((i for i, difference in enumerate(hidden) if not difference <= allowed.hidden), None)
    wrong = sorted((p for p in parameters if not p.difference <= allowed.gradient), key=lambda p: -p.difference)
    worst = max(parameters, key=lambda p: p.difference)
    checks = [
        (
            "hidden states",
            max(hidden) if layer is None else hidden[layer],
            allowed.hidden,
            "the largest difference" if layer is None else f"after layer {layer}, the first that differs",
        ),
        ("loss", _relative(first.loss, second.loss), allowed.loss, f"{first.loss:.9g} and {second.loss:.9g}"),
        ("gradients", worst.difference, allowed.gradient, f"{len(wrong)} of {len(parameters)} differ, {worst}"),
        (
            "gradient norm",
            _relative(first.grad_norm, second.grad_norm),
            allowed.grad_norm,
            f"{first.grad_norm:.9g} and {second.grad_norm:.9g}",
        ),
    ]
    texts = [f"{name}: relative {size:.1e}, allowed {most:.0e}: {detail}" for name, size, most, detail in checks]
    sizes = [" ".join(f"{key} {value}" for key, value in layout.sizes.items()) for layout in layouts]
    return ProbeReport(
        probe="parity",
        problems=[text for text, (_, size, most, _) in zip(texts, checks) if not size <= most],  # also if NaN
        checked=f"loss, gradient norm, {len(hidden) - 1} layers and {len(parameters)} gradients agree",
        lines=[
            f"step {step}, {len(first.samples)} samples, {first.weights}",
            *(f"{name} layout: {text}" for name, text in zip(("first", "second"), sizes)),
            *texts,
            *(f"  {parameter}" for parameter in wrong[:SHOWN]),
        ],
        facts={
            "step": step,
            "weights": first.weights,
            "layouts": [layout.sizes for layout in layouts],
            "tolerance": asdict(allowed),
            "loss": [first.loss, second.loss],
            "grad_norm": [first.grad_norm, second.grad_norm],
            "hidden": hidden,
            "parameters": [asdict(parameter) for parameter in parameters],
        },
    )


def _relative(a: float, b: float) -> float:
    return abs(b - a) / max(abs(a), 1e-300)
