"""Writes and reads adapter_config.json, and refuses adapters with options that this trainer does not support.

An option that is absent, null, false, zero or empty is off.  An option that is on is accepted only if this module reads
it, or if it does not change the computation W + scale * B A.  So unknown options of later versions of PEFT are refused.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.config.lora import LoraConfig
from sft.errors import CheckpointError
from sft.files.folder_files import CONFIG_BYTES, read_json
from sft.hf.hub import ADAPTERS as CONFIG
from sft.weights.lora.peft import token_rows
from sft.weights.lora.peft.targets import expert_options
from sft.weights.lora.peft.token_rows import TokenRows

_READ = ("peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "init_lora_weights")
# Options that do not change the computation, or that name the modules with adapters, which the tensors name as well.
_FREE = {
    *("target_modules", "exclude_modules", "modules_to_save", "ensure_weight_tying", token_rows.OPTION),
    *("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version", "megatron_core"),
    *("layers_pattern", "qalora_group_size", "eva_config"),
}
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # initialisations that do not change the base weights
_WHY = {
    "use_dora": "DoRA also scales the rows of the weight",
    "use_qalora": "it averages inputs, for quantised weights",
    "use_bdlora": "its factors are block-diagonal",
    "rank_pattern": "adapters of different ranks are not supported",
    "alpha_pattern": "adapters of different scales are not supported",
    "target_parameters": "it is no list of names",
    "layers_to_transform": "name the layers in target_modules",
    "layer_replication": "it repeats layers of the base model",
    "lora_bias": "biases are not trained",
    "megatron_config": "it is for models of Megatron in PEFT",
    "loftq_config": "LoftQ quantises the base weights",
    "fan_in_fan_out": "its weights are transposed",
    "corda_config": "CorDA changes the base weights",
    "lora_ga_config": "LoRA-GA changes the base weights",
    "kasa_config": "KaSA changes the base weights",
    "alora_invocation_tokens": "aLoRA applies the adapter to some tokens only",
}


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The fields of adapter_config.json that this trainer uses."""

    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    base: str | None = None  # name of the base model; None: unknown
    revision: str | None = None
    tied: bool = False  # whether embedding and output weight are trained as one weight (ensure_weight_tying)
    target_parameters: tuple[str, ...] = ()  # names, or ends of names, of stacked experts with adapters; sorted


def content_of(
    config: AdapterConfig,
    adapted: Iterable[str],
    saved: Iterable[str],
    target_modules: list[str],
    rows: Mapping[str, TokenRows],
) -> dict[str, Any]:
    """The content of adapter_config.json.

    adapted: modules with adapters; saved: modules that are trained whole; rows: modules of which rows are trained
    """
    alpha = int(config.alpha) if float(config.alpha).is_integer() else config.alpha  # PEFT's type is int
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "revision": config.revision,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": target_modules,
        "modules_to_save": sorted(saved) or None,
        "ensure_weight_tying": config.tied,
        **token_rows.option_of(rows, "embed_tokens"),
        **expert_options(adapted, config.rank, alpha),
        **({"target_parameters": list(config.target_parameters)} if config.target_parameters else {}),
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json.  Raises CheckpointError if it is missing, damaged or not a mapping."""
    path = folder / CONFIG
    if not path.exists():
        raise CheckpointError(
            f"{folder} is no PEFT folder, because it has no {CONFIG}.  Name a folder that PEFT's save_pretrained or "
            "`sft export` wrote."
        )
    try:
        content = read_json(folder, CONFIG, CONFIG_BYTES)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}).  Copy it again.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds {_shown(content)}, not a mapping.  Copy it again.")
    return content


def modules_to_save(content: Mapping[str, Any]) -> list[str]:
    """The value of modules_to_save: names, or ends of names, of the modules whose weights are trained whole."""
    names = content.get("modules_to_save")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def parsed(content: Mapping[str, Any], adapted: Iterable[str]) -> tuple[AdapterConfig | None, list[str]]:
    """The configuration in `content`, and all reasons why this trainer cannot continue the adapter.

    The configuration is None if an option is not supported or has a wrong value.
    content: content of adapter_config.json; adapted: the modules with adapters
    """
    problems = [*_unsupported(content), *_wrong(content)]
    if problems:
        return None, problems
    rank, alpha = content["r"], float(content["lora_alpha"])
    ours, named = expert_options(adapted, rank, alpha), content.get("target_parameters")
    is_list = isinstance(named, list) and all(isinstance(name, str) for name in named)
    parameters = sorted(named) if is_list and named else []
    config = AdapterConfig(
        rank=rank,
        alpha=alpha,
        rslora=bool(content.get("use_rslora")),
        dropout=float(content.get("lora_dropout", 0.0)),
        base=content.get("base_model_name_or_path"),
        revision=content.get("revision"),
        tied=bool(content.get("ensure_weight_tying")),
        target_parameters=() if parameters == ours.get("target_parameters") else tuple(parameters),
    )
    for option in ("target_parameters", "rank_pattern", "alpha_pattern"):
        if option == "target_parameters" and config.target_parameters:
            continue
        value = content.get(option)
        value = sorted(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else value
        if value and value != ours.get(option):
            problems.append(_refused(option, content[option]))
    return config, problems


def disagreements(config: AdapterConfig, lora: LoraConfig) -> list[str]:
    """One phrase with both values for each setting that differs between the recipe and adapter_config.json."""
    pairs = (
        ("rank", lora.rank, "r", config.rank),
        ("alpha", lora.alpha, "lora_alpha", config.alpha),
        ("rslora", lora.rslora, "use_rslora", config.rslora),
    )
    return [
        f"lora.{key} = {_shown(recipe_value)}, but {name} = {_shown(value)}"
        for key, recipe_value, name, value in pairs
        if recipe_value != value
    ]


def _unsupported(content: Mapping[str, Any]) -> list[str]:
    """One phrase for each option that is on and that this trainer does not support."""
    kind, task, bias = content.get("peft_type"), content.get("task_type"), content.get("bias")
    start = content.get("init_lora_weights")
    problems = []
    if kind != "LORA":
        problems.append(f"peft_type = {_shown(kind)} is not supported, only LORA")
    if task not in ("CAUSAL_LM", None):
        problems.append(f"task_type = {_shown(task)} is not supported, only CAUSAL_LM")
    if bias not in ("none", None):
        problems.append(f"bias = {_shown(bias)} is not supported, only none: biases are not trained")
    if not any(start is known or (isinstance(start, str) and start == known) for known in _STARTS):
        problems.append(
            f"init_lora_weights = {_shown(start)} is not supported, because it may change the base weights.  PEFT "
            "converts such an adapter: save_pretrained with path_initial_model_for_weight_conversion"
        )
    decided_later = ("target_parameters", "rank_pattern", "alpha_pattern")
    known = {*_READ, *_FREE, *decided_later}
    return problems + [_refused(name, value) for name, value in content.items() if name not in known and value]


def _wrong(content: Mapping[str, Any]) -> list[str]:
    """One phrase for each value of a wrong type or size."""
    rank, alpha, dropout = content.get("r"), content.get("lora_alpha"), content.get("lora_dropout", 0.0)
    names = content.get("modules_to_save")
    problems = []
    if type(rank) is not int or rank < 1:
        problems.append(f"r = {_shown(rank)} is not a whole number of at least 1")
    if not isinstance(alpha, int | float) or alpha is True or not 0.0 < alpha <= sys.float_info.max:
        problems.append(f"lora_alpha = {_shown(alpha)} is not a number above 0")
    if not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
        problems.append(f"lora_dropout = {_shown(dropout)} is not a number from 0 to 1")
    if names is not None and modules_to_save(content) != names:
        problems.append(f"modules_to_save = {_shown(names)} is no list of names")
    for name in ("use_rslora", "ensure_weight_tying"):
        if content.get(name) not in (True, False, None):
            problems.append(f"{name} = {_shown(content[name])} is neither true nor false")
    for name in ("base_model_name_or_path", "revision"):
        if not isinstance(content.get(name), str | None):
            problems.append(f"{name} = {_shown(content[name])} is no text")
    return problems


def _refused(option: str, value: Any) -> str:
    why = _WHY.get(option, "this trainer does not know what it means")
    return f"{option} = {_shown(value)} is not supported: {why}"


def _shown(value: Any) -> str:
    """The value as JSON, shortened to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
