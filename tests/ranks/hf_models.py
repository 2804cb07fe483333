"""Small random models of transformers and the same weights in our engine: token losses and gradients of both."""

import copy
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from sft.batch import Sample
from sft.console import QUIET
from sft.hf.architecture import architecture, read
from sft.hf.source import open_source
from sft.mcore.engine import Engine
from sft.mcore.gradients import gradient_chunks
from sft.mcore.linear_attention.delta_rule import Inputs
from sft.parallel import context_parallel
from sft.weights.load import load_weights
from tests.ranks import scenarios
from tests.unit.fixtures.recurrence import recurrence

LAYERS, HEADS, GROUPS, HEAD_DIM, WIDTH, FFN, EXPERTS = 2, 8, 4, 8, 32, 64, 4
# fp32, two implementations; one rounding of a loss of 8 to 16 nats is 1e-6; measured at most 4.8e-6.
TOKEN_LOSS_TOLERANCE = 1e-5
MEAN_LOSS_TOLERANCE = 1e-6  # relative; the roundings of some 100 tokens average out
GRADIENT_TOLERANCE = 1e-5  # of the gradient's norm, per parameter; measured at most 3.4e-6
# What a wrong model must differ by, so that an equality within the tolerance says something.
VISIBLE = 1e-2
PACKS = ((0, 1), (4, 2, 3))


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, as LlamaForCausalLM without its end."""

    hf: str
    tied: bool = False


def load(engine: Engine, folder: str) -> None:
    """The weights of the Hugging Face folder, straight from its files."""
    load_weights(engine, open_source(Path(folder), has_mtp=engine.config.model.has_mtp), QUIET)


def packed_losses(overrides: Sequence[str], folder: str, packs: Sequence[Sequence[Sample]]) -> list[Any]:
    """-log p(label) of every local token of each pack, and the pack positions they belong to."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        return losses_of(engine, packs)


def losses_of(engine: Engine, packs: Sequence[Sequence[Sample]]) -> list[Any]:
    return [_losses(engine, samples) for samples in packs]


def _losses(engine: Engine, samples: Sequence[Sample]) -> Any:
    microbatch = scenarios.microbatch_of(engine, samples)
    losses = scenarios.local_token_losses(engine, microbatch)
    where = context_parallel.local_indices(microbatch.cu_seqlens.numpy(), engine.layout.cp, engine.groups.cp_rank)
    return None if losses is None else (where, losses.numpy())


def packed_gradients(overrides: Sequence[str], folder: str, packs: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Gradient of the mean loss over supervised tokens of all packs, by parameter name; needs tp 1, pp 1.

    Data-parallel ranks take turns with the packs.  Experts are named by their number among all.
    """
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        (chunk,) = engine.chunks
        chunk.train()
        chunk.zero_grad_buffer()
        mine = packs[engine.groups.dp_rank :: engine.layout.dp]
        totals = engine._run([scenarios.microbatch_of(engine, samples) for samples in mine], forward_only=False)
        gradients = {
            global_name(engine, name): param.main_grad.numpy().copy() for name, param in chunk.module.named_parameters()
        }
        return {
            "gradients": gradients,
            "loss": totals.objective / totals.num_tokens,
            "num_tokens": totals.num_tokens,
        }


def chunked_gradients(overrides: Sequence[str], folder: str, packs: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """As `packed_gradients`, on any layout: the chunks of gradients that this rank holds first."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        mine = packs[engine.groups.dp_rank :: engine.layout.dp]
        totals = engine._run([scenarios.microbatch_of(engine, samples) for samples in mine], forward_only=False)
        chunks = [(c.parameter, c.shape, c.offset, c.data.numpy().copy()) for c in gradient_chunks(engine)]
        return {"chunks": chunks, "loss": totals.objective / totals.num_tokens, "num_tokens": totals.num_tokens}


def in_stored_names(
    source: Path, results: Sequence[dict[str, Any]], *, has_mtp: bool = False
) -> dict[str, torch.Tensor]:
    """The gradients of all ranks under the names of the tensors in `source`; each of ours is used."""
    whole: dict[str, np.ndarray] = {}
    for name, shape, offset, data in (chunk for result in results for chunk in result["chunks"]):
        target = whole.setdefault(name, np.full(shape, np.nan, dtype=np.float32))
        target[tuple(slice(start, start + size) for start, size in zip(offset, data.shape))] = data
    found: dict[str, torch.Tensor] = {}
    used, arch = set(), architecture(read(source), str(source))
    for mapping in arch.family.mappings(arch.model.model_copy(update={"has_mtp": has_mtp}), arch.vocab_size):
        name, expert = mapping.key, () if mapping.expert is None else (mapping.expert,)
        if mapping.layer is not None:
            inner = name.removeprefix("decoder.layers.").removeprefix(f"{mapping.layer}.")
            name = f"layer {mapping.layer + 1} {inner}"
        if name not in whole:  # frozen
            continue
        used.add(name)
        for span in mapping.spans():
            view, rows = mapping.sources[span.source or 0], whole[name][expert][span.target :][: span.num_rows]
            gradient = found.setdefault(view.name, torch.full(view.tensor.shape, torch.nan))[view.index]
            matrix = gradient.T if view.transposed else gradient
            where = [view.row(number) for number in range(span.start, span.start + span.num_rows)]
            matrix[where] = torch.from_numpy(rows)
    assert used == whole.keys()
    return found


_AS_IN_MEMORY = ("gpt_oss", "gemma4_text")  # types of models


def stored_gradients(
    model: Any, of: Callable[[torch.Tensor], torch.Tensor | None] = lambda param: param.grad
) -> dict[str, torch.Tensor]:
    """The gradients of transformers' model under the names of its files, where each expert has its own matrices.

    Files of some families hold the tensors of all experts as they are in memory.
    of: the tensor of a parameter; None: the parameter has none
    """
    found = {}
    for name, param in model.named_parameters():
        tensor = of(param)
        if tensor is None:
            continue
        block, _, kind = ("", "", name) if model.config.model_type in _AS_IN_MEMORY else name.rpartition(".experts.")
        for number, grad in enumerate(tensor if block else ()):
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
            if model.config.model_type == "minimax_m2":
                parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[kind]
            for part, rows in zip(parts, grad.chunk(len(parts))):
                found[f"{block}.experts.{number}.{part}.weight"] = rows.clone()
        if not block:
            found[name] = tensor.clone()
    if model.config.model_type == "minimax_m2":
        return {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in found.items()}
    return found


def global_name(engine: Engine, name: str) -> str:
    """local_experts.0 on the second of two expert-parallel ranks that share four experts is local_experts.2."""
    first = engine.groups.collection.ep.rank() * (engine.config.model.moe.num_experts or 0) // engine.layout.ep
    return re.sub(r"(?<=local_experts\.)\d+", lambda found: str(int(found[0]) + first), name)


def in_hf_names(arch: Architecture, ours: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Our parameters, or their gradients, under transformers' names; each of ours is used exactly once."""
    left = {name: torch.from_numpy(value.copy()) for name, value in ours.items()}
    padding = left["embedding.word_embeddings.weight"][scenarios.VOCAB :]
    assert padding.shape == (83, WIDTH)  # 301 tokens in 384 rows
    named = {
        "model.embed_tokens.weight": left.pop("embedding.word_embeddings.weight")[: scenarios.VOCAB],
        "model.norm.weight": left.pop("decoder.final_layernorm.weight"),
    }
    if not arch.tied:
        named["lm_head.weight"] = left.pop("output_layer.weight")[: scenarios.VOCAB]
    for i in range(LAYERS):
        us, them = f"decoder.layers.{i}", f"model.layers.{i}"
        for kind in ("weight", "bias"):
            fused = left.pop(f"{us}.self_attention.linear_qkv.{kind}", None)
            if fused is not None:
                for name, part in zip(("q_proj", "k_proj", "v_proj"), apart(fused)):
                    named[f"{them}.self_attn.{name}.{kind}"] = part
        if f"{us}.mlp.router.weight" in left:
            named[f"{them}.mlp.gate.weight"] = left.pop(f"{us}.mlp.router.weight")
            for ours, theirs in (("fc1", "gate_up_proj"), ("fc2", "down_proj")):  # gate above up in both
                stack = [left.pop(f"{us}.mlp.experts.local_experts.{e}.linear_{ours}.weight") for e in range(EXPERTS)]
                named[f"{them}.mlp.experts.{theirs}"] = torch.stack(stack)
        else:
            gate_and_up = left.pop(f"{us}.mlp.linear_fc1.weight")
            named[f"{them}.mlp.gate_proj.weight"] = gate_and_up[:FFN]
            named[f"{them}.mlp.up_proj.weight"] = gate_and_up[FFN:]
            named[f"{them}.mlp.down_proj.weight"] = left.pop(f"{us}.mlp.linear_fc2.weight")
        named[f"{them}.self_attn.o_proj.weight"] = left.pop(f"{us}.self_attention.linear_proj.weight")
        named[f"{them}.input_layernorm.weight"] = left.pop(f"{us}.input_layernorm.weight")
        named[f"{them}.post_attention_layernorm.weight"] = left.pop(f"{us}.pre_mlp_layernorm.weight")
        if arch.hf.startswith("Qwen3"):
            named[f"{them}.self_attn.q_norm.weight"] = left.pop(f"{us}.self_attention.q_layernorm.weight")
            named[f"{them}.self_attn.k_norm.weight"] = left.pop(f"{us}.self_attention.k_layernorm.weight")
    assert not left, f"not in the table: {sorted(left)}"
    return named


def apart(fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows group by group, [its query heads, its key, its value] each -> queries, keys, values."""
    per_group = HEADS // GROUPS
    rows = fused.view(GROUPS, per_group + 2, HEAD_DIM, *fused.shape[1:])
    parts = rows[:, :per_group], rows[:, per_group], rows[:, per_group + 1]
    return tuple(part.reshape(-1, *fused.shape[1:]) for part in parts)


def hf_losses(model: Any, sample: Sample) -> torch.Tensor:
    """-log p of each token but the first, given those before it: [n - 1]; the sample alone, unpadded."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    return torch.nn.functional.cross_entropy(model(input_ids=tokens).logits[0, :-1], tokens[0, 1:], reduction="none")


def in_float64(model: Any) -> Any:
    """A copy of transformers' model whose sums that cancel, as of the gradient of a router's bias, are exact.

    In fp32, transformers' token losses with linear attention are up to 2.0e-5 from these, ours up to 0.8e-5.
    """
    wide = copy.deepcopy(model).double()
    if getattr(wide.config, "_experts_implementation", None):
        wide.set_experts_implementation("eager")  # the grouped product has no float64
    module = sys.modules[type(model).__module__]
    if hasattr(module, "torch_chunk_gated_delta_rule"):  # computes in fp32 whatever it is given
        forward = wide.forward

        def with_recurrence(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(module, "torch_chunk_gated_delta_rule", gated_delta_rule):
                return forward(*args, use_cache=False, **kwargs)

        wide.forward = with_recurrence
    return wide


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    """In float64 for one document, in place of transformers' function of the same arguments.  q: [1, t, heads, K]"""
    inputs = Inputs(*(x[0].double() for x in (q, k, v, g, beta)))
    return recurrence(inputs, [0, q.shape[1]], [None])[0][None], None


@dataclass(frozen=True)
class Reference:
    """A Hugging Face folder, and transformers' model of the same weights."""

    folder: str
    model: Any


def check_losses(
    results: list[Any],
    reference: Reference,
    packs: list[list[Sample]],
    tolerance: float = TOKEN_LOSS_TOLERANCE,
) -> None:
    """Per-token losses of every sample of every pack, whichever rank has them."""
    exact = in_float64(reference.model) if isinstance(reference.model, torch.nn.Module) else reference.model
    for i, samples in enumerate(packs):
        aligned = [-(-len(sample.tokens) // 32) * 32 for sample in samples]
        losses = np.full(sum(aligned), np.nan, dtype=np.float32)
        for result in results:
            if result[i] is not None:
                where, values = result[i]
                losses[where] = values
        for sample, start in zip(samples, np.cumsum([0, *aligned])):
            with torch.no_grad():
                expected = hf_losses(exact, sample).numpy()
            found = losses[start : start + len(expected)]
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def backward(model: Any, samples: Sequence[Sample]) -> tuple[float, int]:
    """Mean loss over the supervised tokens of all samples, and their number; gradients stay on the model."""
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
    """config.json as overrides of the tests' recipe."""
    found = architecture(read(source), str(source)).values
    return ["train.global_batch_size=2"] + [f"model.{k}={str(v).lower()}" for k, v in found.items() if v is not None]


def check_parameters(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """All are there, and of each the difference is at most `tolerance` of its norm."""
    assert found.keys() == expected.keys()
    errors = {n: float((found[n] - one).norm() / one.norm()) for n, one in expected.items()}
    wrong = {n: error for n, error in errors.items() if not error <= tolerance}
    assert not wrong, wrong
