"""Small random transformers models, and the same weights in our engine: token losses and gradients of both."""

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from sft.batch import Sample
from sft.console import QUIET
from sft.hf.architecture import architecture, read
from sft.hf.source import open_source
from sft.mcore.engine import Engine
from sft.mcore.gradients import GradientChunk, gradient_chunks
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.weights.load import load_weights
from tests.ranks import scenarios
from tests.unit.fixtures import hf, vision
from tests.unit.fixtures.recurrence import recurrence

# Two fp32 implementations; one rounding of a loss of 8 to 16 nats is 1e-6; the measured maximum is 4.8e-6.
TOKEN_LOSS_TOLERANCE = 1e-5
MEAN_LOSS_TOLERANCE = 1e-6  # relative; the roundings of some 100 tokens average out
GRADIENT_TOLERANCE = 1e-5  # relative to the norm of a parameter's gradient; the measured maximum is 3.4e-6
# A wrong model must differ by at least this; otherwise, equality within the tolerance would prove nothing.
VISIBLE = 1e-2
# Two steps of Adam whose epsilon is so large that a step does not magnify the rounding of small gradients.
CURVE = [
    *("optim.lr=1e-2", "optim.epsilon=1e-2", "optim.clip_grad=1e9", "optim.schedule=constant"),
    *("optim.warmup_steps=null", "train.num_steps=2"),
]
# The step of torch.optim.AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1) after clip_grad_norm_(..., 0.5).
ADAMW = [
    *("optim.schedule=constant", "optim.lr=1e-3", "optim.warmup_steps=null", "optim.clip_grad=0.5"),
    *("optim.weight_decay=0.1", "train.num_steps=11"),
]
# What transformers saves, in the form of released files.
RELEASED: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "olmo_hybrid": hf.olmo_as_released,
    "kimi_k25": vision.kimi_as_released,
}
LONG, SHORT = (200, 37, 64, 5, 90), (60, 33, 20, 41, 64)  # numbers of tokens of five documents


def packs_of(lengths: Sequence[int] = LONG) -> list[list[Sample]]:
    """Two packs of documents of which only the last quarter is supervised."""
    corpus = scenarios.SkewedCorpus(lengths)
    return [[corpus.sample(i) for i in pack] for pack in ((0, 1), (4, 2, 3))]


def load(engine: Engine, folder: str) -> None:
    """Loads the weights from the files of the Hugging Face folder."""
    load_weights(engine, open_source(Path(folder), has_mtp=engine.config.model.has_mtp), QUIET)


def packed_losses(overrides: Sequence[str], folder: str, packs: Sequence[Sequence[Sample]]) -> list[Any]:
    """-log p(label) of every local token of each pack, and the positions of these tokens in the pack."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        return scenarios.losses_of(engine, packs)


def chunked_gradients(overrides: Sequence[str], folder: str, packs: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """The mean loss over supervised tokens of all packs, and this rank's parts of its gradients; a copied part comes
    from its first rank only."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        totals = engine._run(scenarios.microbatches_of(engine, packs), forward_only=False)
        return {
            "chunks": parts_of(gradient_chunks(engine)),
            "loss": totals.objective / totals.num_tokens,
            "num_tokens": totals.num_tokens,
        }


def computed(
    overrides: Sequence[str],
    folder: str,
    packs: Sequence[Sequence[Sample]],
    trained: Sequence[Sequence[Sample]],
) -> dict[str, Any]:
    """What `packed_losses` and `chunked_gradients` return, and the losses and gradient norms of two steps.

    trained: the packs of a step
    """
    with scenarios.running([*overrides, *CURVE], has_weights=False) as engine:
        load(engine, folder)
        losses = scenarios.losses_of(engine, packs)
        first = engine.train_step(scenarios.microbatches_of(engine, trained))
        chunks = parts_of(gradient_chunks(engine))
        second = engine.train_step(scenarios.microbatches_of(engine, trained))
        return {
            "losses": losses,
            "chunks": chunks,
            "loss": first.objective / first.num_tokens,
            "num_tokens": first.num_tokens,
            "curve": [(step.objective / step.num_tokens, step.grad_norm) for step in (first, second)],
        }


# name, shape of the whole parameter, offset of the part, values
Part = tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]


def parts_of(chunks: Iterable[GradientChunk]) -> list[Part]:
    return [(c.parameter, c.shape, c.offset, c.data.numpy().copy()) for c in chunks]


def assembled(parts: Iterable[Part]) -> dict[str, np.ndarray]:
    """Whole parameters by name; NaN where no part has a value."""
    whole: dict[str, np.ndarray] = {}
    for name, shape, offset, data in parts:
        target = whole.setdefault(name, np.full(shape, np.nan, dtype=np.float32))
        target[tuple(slice(start, start + size) for start, size in zip(offset, data.shape))] = data
    return whole


def in_stored_names(
    source: Path, results: Sequence[dict[str, Any]], *, has_mtp: bool = False
) -> dict[str, torch.Tensor]:
    """The gradients of all ranks under the names of the tensors in `source`; checks that every gradient is used."""
    whole = assembled(chunk for result in results for chunk in result["chunks"])
    found: dict[str, torch.Tensor] = {}
    used = set()
    for mapping in open_source(source, has_mtp=has_mtp).mappings:
        name, expert = mapping.key, () if mapping.expert is None else (mapping.expert,)
        if mapping.layer is not None:
            inner = name.removeprefix("decoder.layers.").removeprefix(f"{mapping.layer}.")
            name = f"layer {mapping.layer + 1} {inner}"
        if name not in whole:  # frozen parameters
            continue
        used.add(name)
        for span in mapping.spans():
            view, rows = mapping.sources[span.source or 0], whole[name][expert][span.target :][: span.num_rows]
            gradient = found.setdefault(view.name, torch.full(view.tensor.shape, torch.nan))[view.index]
            matrix = gradient.T if view.transposed else gradient
            where = [view.row(number) for number in range(span.start, span.start + span.num_rows)]
            matrix[where] = torch.from_numpy(rows).reshape(matrix[where].shape)
    assert used == whole.keys()
    return found


def stored_gradients(
    model: Any, of: Callable[[torch.Tensor], torch.Tensor | None] = lambda param: param.grad
) -> dict[str, torch.Tensor]:
    """The gradients of the transformers model under the tensor names of its files, which transformers converts.

    of: returns the tensor of a parameter; None if the parameter has no tensor
    """
    found = {name: tensor for name, param in model.named_parameters() if (tensor := of(param)) is not None}
    stored = {name: tensor.clone() for name, tensor in revert_weight_conversion(model, found).items()}
    return RELEASED.get(model.config.model_type, dict)(stored)


def hf_losses(model: Any, sample: Sample) -> torch.Tensor:
    """-log p of each token except the first, given the tokens before it: [n - 1].  The sample is computed alone,
    without padding."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    return torch.nn.functional.cross_entropy(model(input_ids=tokens).logits[0, :-1], tokens[0, 1:], reduction="none")


# These functions of transformers compute in fp32 whatever the type of their arguments.
_IN_FP32 = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")


def in_float64(model: Any) -> Any:
    """A float64 copy of a transformers model.  Its sums whose terms cancel, such as the gradient of a router's bias,
    are exact.

    With linear attention, token losses of transformers in fp32 differ by up to 2.0e-5 from those in float64, ours by
    0.8e-5.
    """
    wide = copy.deepcopy(model).double()
    if getattr(wide.config, "_experts_implementation", None):
        wide.set_experts_implementation("eager")  # the grouped product has no float64
    module = sys.modules[type(model).__module__]
    for name in filter(partial(hasattr, module), _IN_FP32):
        forward = wide.forward

        def with_recurrence(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(module, name, gated_delta_rule):
                return forward(*args, use_cache=False, **kwargs)

        wide.forward = with_recurrence
    return wide


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Computes one document in float64; replaces the transformers function with the same arguments.  q: [1, t, heads,
    K]"""
    inputs = Inputs(*(x[0].double() for x in (q, k, v, g, beta)))
    return recurrence(inputs, [0, q.shape[1]], [None])[0][None], None


def expected_losses(model: Any, packs: Sequence[Sequence[Sample]]) -> list[list[torch.Tensor]]:
    """The token losses of transformers for each sample of each pack."""
    with torch.no_grad():
        return [[hf_losses(model, sample) for sample in samples] for samples in packs]


def check_losses(
    results: list[Any], model: Any, packs: list[list[Sample]], tolerance: float = TOKEN_LOSS_TOLERANCE
) -> None:
    """Every sample of every pack has the token losses of the transformers model, whichever rank holds its tokens."""
    exact = in_float64(model) if isinstance(model, torch.nn.Module) else model
    check_token_losses(results, expected_losses(exact, packs), packs, tolerance)


def check_token_losses(
    results: list[Any],
    expected: Sequence[Sequence[torch.Tensor]],
    packs: Sequence[Sequence[Sample]],
    tolerance: float = TOKEN_LOSS_TOLERANCE,
) -> float:
    """Checks the loss of every token.  Returns the largest difference."""
    worst = 0.0
    for number, (samples, losses_of_pack) in enumerate(zip(packs, expected, strict=True)):
        aligned = [-(-len(sample.tokens) // 32) * 32 for sample in samples]
        found = scenarios.in_pack_order(results, number, sum(aligned))
        for start, loss in zip(np.cumsum([0, *aligned]), losses_of_pack):
            ours = found[start : start + len(loss)]
            np.testing.assert_allclose(ours, loss.detach().numpy(), rtol=0, atol=tolerance)
            worst = max(worst, float(np.abs(ours - loss.detach().numpy()).max(initial=0.0)))
    return worst


def backward(model: Any, samples: Sequence[Sample]) -> tuple[float, int]:
    """The mean loss over the supervised tokens of all samples, and the number of these tokens.  The gradients stay in
    the model's parameters."""
    model.zero_grad()
    masks = [torch.from_numpy(sample.weights[1:] > 0) for sample in samples]
    count = sum(int(mask.sum()) for mask in masks)
    total = 0.0
    for sample, mask in zip(samples, masks):
        loss = hf_losses(model, sample)[mask].sum() / count
        loss.backward()
        total += float(loss.detach())
    return total, count


def recipe_of(source: Path) -> list[str]:
    """The overrides that give the tests' recipe the values of config.json."""
    found = architecture(read(source), str(source)).values
    return ["train.global_batch_size=2"] + [f"model.{k}={str(v).lower()}" for k, v in found.items() if v is not None]
