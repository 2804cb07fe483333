"""Checks that no document of a pack has an effect on the others.

The probe replaces token ids of one document of a real pack, and keeps all lengths.  It does this twice:

    whole  all tokens of the document are replaced.  Nothing may change in other documents
    end    the last quarter is replaced.  Nothing may change in other documents, or in the document's earlier tokens

Branches that continue replaced tokens may change.  The parent of a replaced branch and its siblings may not.

At every token that may not change, the hidden states after every layer and the loss must be bitwise equal.  In
backward, the sum of the losses of these tokens must have a gradient of exactly 0 at all other tokens.  In this probe
every token that has a next token in its document has a loss, whether it is supervised or not.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sft.batch import Microbatch, Sample
from sft.errors import ConfigError
from sft.mcore.engine import Engine
from sft.mcore.hidden_states import observed, rows_of, sketch
from sft.parallel.collectives import all_gather_objects
from sft.parallel.layout import Layout
from sft.parallel.messages import message
from sft.probe import inputs
from sft.probe.report import ProbeReport
from sft.probe.session import Session, model, session
from sft.recipe.resolved import Recipe

# Relative change above which a token counts as changed.  In a dense model, the shapes of the matrix products do not
# depend on token ids, so nothing may change.  In a model with experts, the product of an expert has one row for each
# token that chose the expert.  With another number of rows, a kernel may add in another order and round differently.
DENSE = 0.0
EXPERTS = {"fp32": 1e-5, "bf16": 3e-2}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The pack of this rank, and the document whose tokens are replaced."""

    samples: list[Sample]
    document: int
    microbatch: Microbatch

    @property
    def length(self) -> int:
        """Number of tokens of the document."""
        return int(self.microbatch.lengths[self.document])

    @property
    def sample(self) -> Sample:
        return self.samples[self.microbatch.samples_of_documents[self.document]]

    def stays(self, first: int) -> Tensor:
        """bool [t]: the tokens that may not change if the document is replaced from its token `first` on."""
        mb = self.microbatch
        limits = np.full(len(mb.lengths), np.iinfo(np.int64).max)  # the first token of each document that may change
        limits[self.document] = first
        if mb.branches is not None:
            for document in np.flatnonzero(mb.branches.parents >= 0).tolist():
                if mb.branches.forks[document] > limits[mb.branches.parents[document]]:
                    limits[document] = 0
        return _in_documents(mb) < torch.from_numpy(limits)[mb.documents[0]]

    def replaced(self, first: int, vocab_size: int) -> list[Sample]:
        """The samples, with another id for each token of the document from its token `first` on."""
        samples, sample = list(self.samples), self.sample
        tokens, stop = sample.tokens.copy(), len(sample.tokens)
        number = self.microbatch.samples_of_documents[self.document]
        if sample.tree is not None:
            of_sample = self.document - int((self.microbatch.samples_of_documents < number).sum())
            first, stop = first + int(sample.tree.starts[of_sample]), int(sample.tree.starts[of_sample + 1])
        steps = np.random.default_rng(first).integers(1, vocab_size, size=stop - first)
        tokens[first:stop] = (tokens[first:stop] + steps) % vocab_size
        samples[number] = replace(sample, tokens=tokens)
        return samples


def _in_documents(mb: Microbatch) -> Tensor:
    """int64 [t]: the position of each token in its document."""
    return torch.from_numpy(inputs.in_documents(mb))


@message
@dataclass(frozen=True, kw_only=True)
class Leak:
    """Tokens of one document that changed, or have a gradient, after one layer, although they must not.

    layer   0 is the embedding; the number of layers + 1 stands for the losses
    tokens  number of these tokens, on one rank or over all ranks of a pack
    size    forward: the largest relative change of a token; gradient: the largest absolute value
    """

    dp_rank: int
    direction: str  # forward or gradient
    replaced: str  # whole or end
    document: int
    layer: int
    stage: int
    tokens: int
    size: float

    def sentence(self, num_layers: int) -> str:
        effect = {
            ("forward", "whole"): "changes with another document",
            ("forward", "end"): "changes with the end of a document",
            ("gradient", "whole"): "has a gradient of losses of other documents",
            ("gradient", "end"): "has, at its end, a gradient of earlier losses or other documents",
        }[self.direction, self.replaced]
        layer = f"after layer {self.layer}" if self.layer <= num_layers else "in the losses"
        return (
            f"dp rank {self.dp_rank}: document {self.document} {effect}, first {layer} (stage {self.stage}): "
            f"{self.tokens:,} tokens, {self.size:.1e}"
        )


Observation = dict[int, tuple[Tensor, Tensor]]  # {layer: (indices of local tokens [m], their sketches float64 [m, n])}


def run(recipe: Recipe, layout: Layout, *, step: int, document: int | None) -> ProbeReport:
    """Probe one pack of step `step`, counted from 1, on every data-parallel rank.  Collective.

    document: number of the document in its pack, counted from 0; None: the document in the middle of the pack
    """
    with session(_without_balancing_losses(recipe), layout) as s, model(s) as (engine, weights):
        subject = _choose(s, step, document)
        problems = inputs.problems_of([subject.microbatch], [subject.samples], s.groups, s.data.row_name)
        leaks, blind = _examine(s, engine, subject)
        packs = dict(all_gather_objects(lambda: (s.groups.dp_rank, _describe(s, subject)), s.groups.control))
        largest = max(all_gather_objects(lambda: int((subject.microbatch.lengths > 0).sum()), s.groups.control))
    num_layers = recipe.config.model.num_layers
    first = {(x.dp_rank, x.direction, x.replaced, x.document): x for x in reversed(leaks)}
    problems += [*blind, *(leak.sentence(num_layers) for leak in reversed(first.values()))]
    return ProbeReport(
        probe="leak",
        problems=problems,
        checked=f"no token depends on {'another document or ' if largest > 1 else ''}a later token "
        f"({num_layers} layers, {layout.pp} pipeline stages)",
        lines=[f"step {step}, {weights}", *(f"dp rank {rank}: {text}" for rank, text in sorted(packs.items()))],
        facts={
            "step": step,
            "weights": weights,
            "layout": layout.sizes,
            "packs": packs,
            "leaks": list(map(asdict, leaks)),
        },
    )


def _without_balancing_losses(recipe: Recipe) -> Recipe:
    """The recipe without the balancing losses of experts, which give every document a gradient of its own."""
    config = recipe.config
    if config.run.fp8 is not None:
        raise ConfigError(
            f"run.fp8 = {config.run.fp8}: FP8 scales tensors by values of several documents, so every document changes "
            "the rounding of others, and a leak cannot be distinguished from it.  Probe the recipe with run.fp8=null."
        )
    moe = config.model.moe.model_copy(update={"aux_loss_coef": 0.0, "z_loss_coef": 0.0})
    return replace(recipe, config=config.model_copy(update={"model": config.model.model_copy(update={"moe": moe})}))


def _choose(s: Session, step: int, document: int | None) -> Subject:
    """The pack with most documents among the packs of this dp rank, all of whose cp ranks compute it.  Collective."""
    row = s.data.train.grid(step - 1)[s.groups.dp_rank * s.layout.cp :][: s.layout.cp]
    slot = max((slot for slots in row for slot in slots), key=lambda slot: len(slot.samples))
    samples = s.data.train.samples_of(slot)
    microbatch = s.data.train.microbatch(samples, slot.cp_size)
    fewest = min(all_gather_objects(lambda: int((microbatch.lengths > 0).sum()), s.groups.control))
    if fewest == 0:
        raise ConfigError(f"--step {step}: a data-parallel rank has no samples in this step.  Give another --step.")
    if document is not None and document >= fewest:
        raise ConfigError(f"--document {document} is not in the pack.  Give --document 0 to {fewest - 1}.")
    chosen = int((microbatch.lengths > 0).sum()) // 2 if document is None else document
    return Subject(samples=samples, document=chosen, microbatch=microbatch)


def _describe(s: Session, subject: Subject) -> str:
    mb, count = subject.microbatch, int((subject.microbatch.lengths > 0).sum())
    is_branch = mb.branches is not None and bool(mb.branches.parents[subject.document] >= 0)
    row = s.data.row_name(subject.sample.sample_id) + ", a branch" * is_branch
    return (
        f"a pack of {mb.cu_seqlens[-1]:,} tokens and {count} documents; document {subject.document} ({row}, "
        f"{subject.length:,} tokens) is replaced"
    )


def _examine(s: Session, engine: Engine, subject: Subject) -> tuple[list[Leak], list[str]]:
    """(leaks, reasons why the probe proves nothing even without a leak), equal on every rank.  Collective."""
    length = subject.length
    leaks: list[Leak] = []
    reached: set[int] = set()  # layers with a gradient
    with s.console.track("leak", 6, "passes") as progress:
        base = _observe(engine, subject.microbatch)
        progress.advance(1)
        unstable = _different(base, _observe(engine, subject.microbatch))
        progress.advance(1)
        for name, first in (("end", length - max(1, length // 4)), ("whole", 0)):
            samples = subject.replaced(first, engine.vocab_size)
            other = s.data.train.microbatch(samples, subject.microbatch.cp_size)
            changed = _observe(engine, other)
            progress.advance(1)
            has_label = other.labels[0] == subject.microbatch.labels[0]  # else the label of the token was replaced
            leaks += _forward_leaks(s, subject, name, (subject.stays(first), has_label), base, changed)
            leaks += _gradient_leaks(s, engine, subject, name, first, reached)
            progress.advance(1)
        moved = _different(base, changed)
    gathered = all_gather_objects(lambda: (leaks, unstable, moved, reached), s.groups.control)
    unstable, moved, reached = (set[int]().union(*sets) for sets in list(zip(*gathered))[1:])
    blind = []
    if unstable:
        blind.append(
            f"two passes over the same pack differ, first after layer {min(unstable)}: kernels are not deterministic, "
            "so comparing hidden states proves nothing; try run.deterministic=true"
        )
    layers = set(range(s.config.model.num_layers + 1))
    if layers - moved:
        blind.append(f"replacing a document changed nothing after layer {min(layers - moved)}, not even in itself")
    if layers - reached:
        blind.append(f"no loss has a gradient after layer {max(layers - reached)}, so zero gradients prove nothing")
    return _merged(leak for of_rank, *_ in gathered for leak in of_rank), blind


def _different(base: Observation, other: Observation) -> set[int]:
    return {layer for layer, (_, values) in base.items() if not torch.equal(values, other[layer][1])}


def _with_losses(mb: Microbatch, stays: Tensor) -> Microbatch:
    """The microbatch with weight 1 on those tokens of `stays` that have a next token in their document."""
    has_next = _in_documents(mb) + 1 < torch.from_numpy(mb.lengths)[mb.documents]
    return replace(mb, loss_weights=(has_next & stays).float(), label_counts=None, further=None)


def _passes(engine: Engine, mb: Microbatch) -> list[Microbatch]:
    """One microbatch; with virtual stages several equal ones, because the schedule needs a multiple of pp."""
    return [mb] * (engine.layout.pp if engine.layout.virtual_stages > 1 else 1)


def _observe(engine: Engine, mb: Microbatch) -> Observation:
    mb = _with_losses(mb, torch.tensor(True))
    tokens, observation = torch.arange(mb.tokens.shape[1]), Observation()

    def keep(layer: int, hidden: Tensor) -> None:
        observation[layer] = tokens[rows_of(engine, len(tokens))], sketch(hidden)

    with observed(engine, on_hidden=keep):
        measured = engine.measure(_passes(engine, mb), forward_only=True)
    for _, statistics in measured[:1]:
        losses = -statistics.logprob.double().cpu()
        observation[engine.config.model.num_layers + 1] = tokens[mb.loss_mask[0]], losses[:, None]
    return observation


def _forward_leaks(
    s: Session, subject: Subject, replaced: str, stays: tuple[Tensor, Tensor], base: Observation, changed: Observation
) -> Iterator[Leak]:
    """Yield the leaks of a forward pass: differences of `changed`, after tokens were replaced, from `base`.

    stays: two tensors bool [t], the tokens that may not change, and the tokens whose label was not replaced
    """
    model = s.config.model
    tolerance = EXPERTS[s.config.run.precision] if model.moe.num_experts else DENSE
    for layer, (tokens, values) in base.items():
        difference, norm = (changed[layer][1] - values).norm(dim=1), values.norm(dim=1)
        leaked = (stays[0] if layer <= model.num_layers else stays[0] & stays[1])[tokens]
        leaked &= ~(difference <= tolerance * norm)  # also if a number is NaN
        yield from _leaks(s, subject, "forward", replaced, layer, tokens[leaked], (difference / norm)[leaked])


def _gradient_leaks(
    s: Session, engine: Engine, subject: Subject, replaced: str, first: int, reached: set[int]
) -> list[Leak]:
    """The leaks of a backward pass.  Adds the layers with a gradient to `reached`."""
    mb, stays = subject.microbatch, subject.stays(first)
    tokens = torch.arange(mb.tokens.shape[1])[rows_of(engine, mb.tokens.shape[1])]
    leaks: list[Leak] = []

    def check(layer: int, gradient: Tensor) -> None:
        largest = gradient.abs().amax(dim=1).double().cpu()
        reached.update({layer} if bool(largest.any()) else ())
        leaked = ~stays[tokens] & ~(largest == 0)
        leaks.extend(_leaks(s, subject, "gradient", replaced, layer, tokens[leaked], largest[leaked]))

    with observed(engine, on_gradient=check):
        engine.measure(_passes(engine, _with_losses(mb, stays)), forward_only=False)
    return leaks


def _leaks(
    s: Session, subject: Subject, direction: str, replaced: str, layer: int, tokens: Tensor, sizes: Tensor
) -> Iterator[Leak]:
    """Yield one leak for each document that has some of these local tokens."""
    documents = subject.microbatch.documents[0][tokens]
    counts = s.groups.tp_rank == 0 or s.layout.sequence_parallel  # otherwise all tp ranks hold the same tokens
    for document in documents.unique().tolist():
        yield Leak(
            dp_rank=s.groups.dp_rank,
            direction=direction,
            replaced=replaced,
            document=document,
            layer=layer,
            stage=s.groups.pp_rank,
            tokens=int((documents == document).sum()) * counts,
            size=float(sizes[documents == document].max()),
        )


def _merged(leaks: Iterable[Leak]) -> list[Leak]:
    """The leaks of all ranks, one for each layer of a document, in the order in which the layers compute."""
    merged: dict[tuple[object, ...], Leak] = {}
    for leak in leaks:
        order = leak.layer if leak.direction == "forward" else -leak.layer
        key = leak.dp_rank, leak.direction, leak.replaced != "whole", leak.document, order
        if key in merged:
            leak = replace(leak, tokens=leak.tokens + merged[key].tokens, size=max(leak.size, merged[key].size))
        merged[key] = leak
    return [merged[key] for key in sorted(merged)]
