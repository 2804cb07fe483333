"""Makes the recipe whose layout is planned: an existing recipe, or a new one for a model on the hub or in a folder.

A new recipe has the settings that the recipes of this project share: two epochs, the learning rates of full and LoRA
fine-tuning, and YaRN if packs are longer than the contexts that the model was trained on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft.config import ModelConfig, RopeConfig, yaml
from sft.config.keys import values
from sft.console import short_count
from sft.errors import ConfigError
from sft.hf.hub import CONFIG, is_hub_name, local_folder
from sft.hf.pretrained import read_pretrained
from sft.recipe.load import load_recipe, parse_recipe
from sft.recipe.resolved import Recipe
from sft.weights.lora.targets import not_adaptable

TOKENS_PER_STEP = 2**20  # the default of the project's recipes; a step has at least one pack
_FULL = {"lr": 1e-5, "min_lr": 1e-6, "schedule": "cosine", "warmup_fraction": 0.03, "weight_decay": 0.1}
_LORA = {"lr": 2e-4, "min_lr": 2e-5, "schedule": "cosine", "warmup_fraction": 0.03}
_NEW = "the planned recipe"
Keys = dict[str, Any]


def recipe_of(
    model: str,
    *,
    seq_length: int | None = None,
    packs: int | None = None,
    tokens_per_step: int | None = None,
    is_lora: bool = False,
    overrides: Sequence[str] = (),
) -> Recipe:
    """The recipe in the file `model`, or a new recipe for the model of this name or folder.

    seq_length       tokens of a pack; None: data.seq_length of the recipe.  A new recipe needs a value
    packs            packs of a step
    tokens_per_step  tokens of a step, instead of packs.  If both are None, a recipe with its own seq_length keeps its
                     packs.  In all other cases a step has TOKENS_PER_STEP tokens
    is_lora          whether to train adapters instead of all weights
    overrides        overrides of the recipe

    Raises ConfigError if `model` is neither a recipe nor a model, if a new recipe has no seq_length, or if the recipe
    is not valid.
    """
    is_file = Path(model).suffix in (".yaml", ".yml")
    changes = list(overrides)
    if is_file:
        recipe = load_recipe(model, changes)
        seq_length = seq_length or recipe.config.data.seq_length
        if seq_length != recipe.config.data.seq_length:
            changes.append(f"data.seq_length={seq_length}")
        if is_lora and not recipe.config.lora.is_used:
            changes += [f"lora.{key}={yaml.write(value)}" for key, value in lora_keys(recipe.config.model).items()]
            changes += ["optim.lr=2e-4", "optim.min_lr=2e-5"]
        batch = _packs(seq_length, packs, tokens_per_step)
        if packs is not None or tokens_per_step is not None or f"data.seq_length={seq_length}" in changes:
            changes.append(f"train.global_batch_size={batch}")
        return load_recipe(model, changes) if changes else recipe
    if not is_hub_name(model) and not (local_folder(model) / CONFIG).exists():
        raise ConfigError(
            f"{model} is neither a recipe (.yaml), nor a folder with {CONFIG}, nor a name on the hub such as "
            "Qwen/Qwen3-8B."
        )
    if seq_length is None:
        raise ConfigError(f"{model} is no recipe, so the length of packs is unknown.  Give seq_length.")
    text = text_of(_new(model, seq_length, _packs(seq_length, packs, tokens_per_step), is_lora=is_lora))
    return parse_recipe(text, _NEW, overrides)


def _packs(seq_length: int, packs: int | None, tokens_per_step: int | None) -> int:
    """The number of packs of a step.  seq_length 65536, tokens_per_step 1048576 -> 16"""
    return packs or max(1, (tokens_per_step or TOKENS_PER_STEP) // seq_length)


def _new(model: str, seq_length: int, packs: int, *, is_lora: bool) -> Keys:
    pretrained, described = read_pretrained(model, shown=model)
    config = described.model
    name = f"{slug(model)}_{short_count(seq_length).lower()}{'_lora' * is_lora}"
    keys: Keys = {
        "run.dir": f"runs/{name}",
        "model.hf": model,
        **_positions(config.rope, pretrained.max_positions, seq_length),
    }
    if config.moe.num_experts is not None and not is_lora:
        keys["model.moe.aux_loss_coef"] = 1e-3
    if is_lora:
        keys |= {f"lora.{key}": value for key, value in lora_keys(config).items()}
    keys |= {"data.train": "data/train.jsonl", "data.seq_length": seq_length}
    keys |= {"train.num_epochs": 2, "train.global_batch_size": packs}
    keys |= {f"optim.{key}": value for key, value in (_LORA if is_lora else _FULL).items()}
    keys |= {"checkpoint.save_every": 50, "checkpoint.keep_last": 3}
    return keys | ({"checkpoint.export_hf": "last"} if is_lora else {})


def lora_keys(model: ModelConfig) -> Keys:
    """Keys of the section `lora`: adapters of rank 16 on every Linear that can have one.  Other Linears are excluded.

    Qwen3.6-35B-A3B -> {"rank": 16, "alpha": 32, "exclude": ["shared_expert_gate"]}
    """
    keys: Keys = {"rank": 16, "alpha": 32}
    excluded = not_adaptable(model)
    return keys | ({"exclude": excluded} if excluded else {})


def _positions(rope: RopeConfig, trained: int | None, seq_length: int) -> Keys:
    """Keys of YaRN, if packs have more positions than the model was trained on; {} otherwise.

    trained: number of positions that the model was trained on; None: unknown

    Qwen3-8B, trained on 40,960 positions, packs of 131,072 -> original_max_position 32,768 (the power of two below
    40,960), factor 4
    """
    if trained is None or seq_length <= trained:
        return {}
    original = rope.original_max_position or 2 ** (trained.bit_length() - 1)
    factor = float(-(-seq_length // original))
    return {"model.rope.scaling": "yarn", "model.rope.factor": factor, "model.rope.original_max_position": original}


def slug(model: str) -> str:
    """A short name of the model: Qwen/Qwen3.6-27B -> qwen36_27b, meta-llama/Llama-3.1-8B-Instruct -> llama31_8b."""
    name = model.rstrip("/").rpartition("/")[2].partition("@")[0].lower().removeprefix("nvidia-")
    for long, short in (("nano-30b-a3b", "30b"), ("linear-48b-a3b", "linear-48b")):
        name = name.replace(long, short)
    for ending in ("-instruct", "-it", "-bf16"):
        name = name.removesuffix(ending)
    for family in ("qwen", "llama", "gemma", "nemotron"):
        name = name.replace(f"{family}-", family)
    for version in ("3.1", "3.6", "2.5"):
        name = name.replace(version, version.replace(".", ""))
    return name.replace(".", "p").replace("-", "_")


def user_keys(recipe: Recipe) -> Keys:
    """The keys that the recipe sets, with their values, without the keys from config.json and defaults."""
    return {key: value for key, value in values(recipe.config).items() if recipe.is_from_user(key)}


def text_of(keys: Mapping[str, Any]) -> str:
    """The keys as YAML: one line for each section, or one for each key if the section needs more than 100 columns.

    {"run.dir": "runs/a", "parallel.tp": 2, "parallel.cp": 8} -> run: {dir: runs/a}, parallel: {tp: 2, cp: 8}
    """
    tree: dict[str, dict[str, Any]] = {}
    for key, value in sorted(keys.items(), key=lambda item: item[0] not in ("model.hf", "data.train")):
        section, *groups, name = key.split(".")
        branch = tree.setdefault(section, {})
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[name] = value
    order = ("run", "model", "lora", "data", "parallel", "attention", "loss", "train", "optim")
    lines = []
    for section in sorted(tree, key=lambda name: order.index(name) if name in order else len(order)):
        line = f"{section}: {yaml.write(tree[section])}"
        whole = [line] if len(line) <= 100 else [f"{section}:", *_block(tree[section])]
        lines += whole
    return "\n".join(lines) + "\n"


def _block(values: Mapping[str, Any]) -> list[str]:
    return [f"  {name}: {yaml.write(value)}" for name, value in values.items()]
