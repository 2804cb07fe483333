"""Adapters in peft and in our engine with the same random values: token losses, gradients and steps of both."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file

from sft.batch import Sample
from sft.layers.adapters import names_of
from sft.mcore.engine import Engine
from sft.mcore.gradients import gradient_chunks
from sft.mcore.lora import adapted
from sft.mcore.lora.factors import PREFIX
from sft.mcore.optimizer import build
from tests.ranks import scenarios
from tests.ranks.hf_models import Part, assembled, hf_losses, in_float64, load, parts_of, recipe_of
from tests.unit.fixtures import hf

RANK, ALPHA = 3, 5.0
HEAD = "base_model.model."  # prefix of names in peft
WHOLE = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
VALUES = 0.2  # standard deviation of the factors, so that adapters change losses visibly
# With wider adapters, weights of the delta rule magnify the rounding of fp32: 1.1e-5 of a loss of Olmo Hybrid.
SMALL = 0.05


def factors(shapes: dict[str, tuple[int, ...]], std: float = VALUES) -> dict[str, torch.Tensor]:
    """Random factors by their names in peft, without the prefix."""
    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(shape, generator=generator) * std for name, shape in sorted(shapes.items())}


def peft_model(
    folder: Path, targets: Any, *, exact: bool = False, std: float = VALUES, load: Any = hf.load, **fields: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A transformers model with adapters, and the values of the adapters.

    exact: computes in float64; load: reads the model from the folder
    """
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM", **fields)
    model = peft.get_peft_model(in_float64(load(folder)) if exact else load(folder), settings)
    stored = {name.removeprefix(HEAD): tensor for name, tensor in peft.get_peft_model_state_dict(model).items()}
    values = factors({name: tuple(tensor.shape) for name, tensor in stored.items()}, std)
    peft.set_peft_model_state_dict(model, {HEAD + name: value for name, value in values.items()})
    return model.eval(), values


def stored_name(name: str) -> str:
    """The name that a parameter of peft's model has in files."""
    return name.removeprefix(HEAD).replace(".modules_to_save", "").replace(".default.", ".")


def fill(engine: Engine, values: dict[str, torch.Tensor]) -> None:
    """Sets these values in our adapters; checks that every value is used."""
    used = set()
    with torch.no_grad():
        for shard in adapted.linear_tensors(engine.chunks):
            name = shard.key.removeprefix(PREFIX)
            value = values[name]
            assert tuple(shard.global_shape) == tuple(value.shape), name
            shard.data.copy_(value[tuple(slice(o, o + n) for o, n in zip(shard.global_offset, shard.local_shape))])
            used.add(name)
    engine.optimizer.reload_model_params()
    if engine.layout.pp == 1 and engine.layout.ep == 1 and engine.config.parallel.shard != "weights":
        assert used == values.keys(), used ^ values.keys()


def lora_recipe(source: Path, targets: Sequence[str] | str, parameters: Sequence[str] = ()) -> list[str]:
    """parameters: lora.target_parameters"""
    named = targets if isinstance(targets, str) else f"[{', '.join(targets)}]"
    keys = f"rank: {RANK}, alpha: {ALPHA}, targets: {named}, target_parameters: [{', '.join(parameters)}]"
    return [*recipe_of(source), f"model.hf={source}", f"lora={{{keys}}}"]


def losses_and_gradients(
    overrides: list[str], folder: str, values: dict[str, torch.Tensor], packs: Sequence[Sequence[Sample]]
) -> dict[str, Any]:
    """This rank's token losses; and the mean loss over supervised tokens of all packs, this rank's parts of its
    gradients, and their norm."""
    with scenarios.running(overrides) as engine:
        load(engine, folder)
        fill(engine, values)
        losses = scenarios.losses_of(engine, packs)
        totals = engine._run(scenarios.microbatches_of(engine, packs), forward_only=False)
        chunks = parts_of(gradient_chunks(engine))
        engine.optimizer.prepare_grads()
        norm = build._norm(engine.optimizer, engine.groups.device)
        loss = totals.objective / totals.num_tokens
        return {"losses": losses, "gradients": chunks, "loss": loss, "norm": norm}


def shapes_of(overrides: list[str]) -> dict[str, tuple[int, ...]]:
    with scenarios.running(overrides) as engine:
        shards = adapted.linear_tensors(engine.chunks)
        return {shard.key.removeprefix(PREFIX): tuple(shard.global_shape) for shard in shards}


def peft_gradients(model: Any, packs: Sequence[Sequence[Sample]]) -> tuple[dict[str, torch.Tensor], float]:
    """The gradients, by stored name, of the mean loss over supervised tokens; and this loss."""
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in (sample for pack in packs for sample in pack):
        losses, supervised = hf_losses(model, sample), torch.from_numpy(sample.weights[1:] > 0)
        total, count = total + losses[supervised].sum(), count + int(supervised.sum())
    (total / count).backward()
    gradients = {stored_name(name): p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    return gradients, float(total.detach()) / count


def adapted_weights(model: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of the transformers model plus the product of every adapter, as differentiable functions of the
    factors.

    transformers stacks the experts' matrices: one matrix for each expert, with gate above up.
    """
    weights = dict(model.named_parameters())
    for name in values:
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removesuffix(".lora_A.weight")
        delta = ALPHA / RANK * values[f"{module}.lora_B.weight"] @ values[name]
        block, is_expert, rest = module.partition(".experts.")
        if not is_expert:
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + delta
            continue
        number, kind = rest.split(".")
        kind = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(kind, kind)  # names in files of Mixtral
        block = block.replace("block_sparse_moe", "mlp")
        stack = f"{block}.experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"
        height = weights[stack].shape[1]
        half = height // 2
        rows = {"gate_proj": (0, half), "up_proj": (half, height), "down_proj": (0, height)}[kind]
        padded = torch.nn.functional.pad(delta, (0, 0, rows[0], height - rows[1]))
        is_it = torch.nn.functional.one_hot(torch.tensor(int(number)), len(weights[stack]))[:, None, None]
        weights[stack] = weights[stack] + is_it * padded
    return weights


def merged(source: Path, folder: Path, values: dict[str, torch.Tensor]) -> Path:
    """Writes the model in `source` with adapters merged, in float64."""
    shutil.copytree(source, folder)
    weights = {name: tensor.double() for name, tensor in hf.tensors(source).items()}
    for module, a, b in _products(values):
        _matrix(weights, module).add_(ALPHA / RANK * b @ a)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def gradients_of_factors(
    gradients: Mapping[str, torch.Tensor], values: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The gradients of the factors of W + s B A, from those of merged weights: s B^T dW of A, and s dW A^T of B."""
    found = {}
    for module, a, b in _products(values):
        of_weight = ALPHA / RANK * _matrix(gradients, module)
        found |= {f"{module}.lora_A.weight": b.T @ of_weight, f"{module}.lora_B.weight": of_weight @ a.T}
    return found


def _matrix(weights: Mapping[str, torch.Tensor], module: str) -> torch.Tensor:
    """The weight of a Linear, or of one of stacked experts, whose module ends with the expert's number."""
    if f"{module}.weight" in weights:
        return weights[f"{module}.weight"]
    tensor, _, number = module.rpartition(".")
    return weights[tensor][int(number)]


def _products(values: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The name of each adapted Linear, and A and B in float64."""
    for name in values:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            yield module, values[name].double(), values[f"{module}.lora_B.weight"].double()


@dataclass(frozen=True)
class Adapted:
    """A transformers model whose adapters are added to its weights; it is called as the model itself."""

    model: Any
    values: dict[str, torch.Tensor]

    def __call__(self, **given: Any) -> Any:
        return torch.func.functional_call(self.model, adapted_weights(self.model, self.values), (), given)

    def named_parameters(self) -> Any:
        return self.values.items()

    def zero_grad(self) -> None:
        for value in self.values.values():
            value.grad = None


def whole(results: Sequence[dict[str, Any]], key: str) -> dict[str, torch.Tensor]:
    """Whole tensors by their names in peft, from the parts of all ranks: one for each expert, and without padding
    rows."""
    found = {}
    for key_of_part, array in assembled(part for result in results for part in result[key]).items():
        if key_of_part in WHOLE:
            found[WHOLE[key_of_part]] = torch.from_numpy(array[: scenarios.VOCAB])
            continue
        name = key_of_part.removeprefix(PREFIX)
        for linear, part in zip(names_of(name, range(len(array))), array if array.ndim == 3 else [array]):
            found[linear] = torch.from_numpy(part)
    return found


def shard_parts(shards: Iterable[Any]) -> list[Part]:
    return [(s.key, s.global_shape, s.global_offset, s.data.detach().float().numpy().copy()) for s in shards]


def steps(model: Any, packs: Any, count: int, adam: Any = None) -> None:
    """Runs steps of a new AdamW, or of `adam`, on the trained parameters of peft's model."""
    trained = [param for _, param in model.named_parameters() if param.requires_grad]
    adam = adam or torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(count):
        peft_gradients(model, packs)
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        adam.step()


def trained_of(model: Any) -> dict[str, torch.Tensor]:
    """The trained parameters of peft's model, by stored name."""
    return {stored_name(name): p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
