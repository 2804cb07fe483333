"""Computes the names and options with which PEFT finds the modules that have adapters.

PEFT 0.21.2 on transformers 5 reads adapters of single experts, and stacks them.  experts.gate_up_proj gets an adapter
of twice the rank, whose B has the blocks of gate and up on its diagonal.  experts.down_proj gets an adapter of the same
rank.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
_GATE_UP = ({"gate_proj", "up_proj"}, {"w1", "w3"})  # w1, w2, w3: Mixtral
_DOWN = ({"down_proj"}, {"w2"})
_BACKBONE = re.compile(r"^backbone\.")
_TEXT = re.compile(r"(?:model\.language_model|language_model\.model|model)\.(?=layers\.|embed_tokens\b|norm\b)")


def module_of(tensor: str, *, has_vision: bool = False) -> str:
    """The name that transformers 5 gives the module of a weight.

    tensor: name of the weight in files; has_vision: whether the model has a vision tower
    model.layers.0.self_attn.q_proj.weight -> model.layers.0.self_attn.q_proj, or with has_vision
    -> model.language_model.layers.0.self_attn.q_proj
    backbone.layers.0.mixer.q_proj.weight, in files of Nemotron-H -> model.layers.0.mixer.q_proj
    """
    module = tensor.removesuffix(".weight")
    if not has_vision:
        return _BACKBONE.sub("model.", module)
    if text := _TEXT.match(module):
        return f"model.language_model.{module[text.end() :]}"
    return module.removeprefix("language_model.")


def target_modules(adapted: Iterable[str], others: Iterable[str]) -> list[str]:
    """The value of target_modules: the shortest ending of each module in `adapted` that no module in `others` has.

    adapted a.0.q_proj, a.1.q_proj; others a.0.k_proj -> ["q_proj"]
    adapted a.1.q_proj; others a.0.q_proj -> ["1.q_proj"]
    PEFT adapts all modules whose names are the ending, or end with a dot and the ending.  If other modules have all
    endings of a name, the result has the whole name.  The result is sorted.
    """
    taken = {ending for name in others for ending in endings(name)}
    return sorted({next((ending for ending in endings(name) if ending not in taken), name) for name in adapted})


def endings(name: str) -> Iterator[str]:
    """All endings of a name that begin at a part, shortest first: a.0.q -> q, 0.q, a.0.q"""
    parts = name.split(".")
    return (".".join(parts[i:]) for i in reversed(range(len(parts))))


def expert_options(modules: Iterable[str], rank: int, alpha: float) -> dict[str, Any]:
    """The options of adapter_config.json with which PEFT stacks adapters of experts; {} if `modules` has no experts.

    For some families, such as qwen3_moe, PEFT derives these options from target_modules.  For others, such as
    qwen2_moe, it does not, and would leave the experts without adapters.
    """
    leaves = {match[3] for name in modules if (match := _EXPERT.fullmatch(name))}
    options: dict[str, Any] = {}
    if leaves & set().union(*_DOWN):
        options["target_parameters"] = ["experts.down_proj"]
    if leaves & set().union(*_GATE_UP):
        name = r".*\.gate_up_proj"
        options["target_parameters"] = [*options.get("target_parameters", ()), "experts.gate_up_proj"]
        options |= {"rank_pattern": {name: 2 * rank}, "alpha_pattern": {name: 2 * alpha}}
    return options


def is_of_one_expert(module: str) -> bool:
    """Whether the module is a matrix of a single expert, such as model.layers.0.mlp.experts.3.down_proj."""
    return _EXPERT.fullmatch(module) is not None


def is_refused(module: str) -> bool:
    """Whether PEFT refuses to adapt a module of this name, as it refuses the output projection of Mamba-2."""
    return module.endswith(".mixer.out_proj")


def lost_by_peft(modules: Iterable[str], *, rslora: bool) -> str | None:
    """Why PEFT would not compute the trained function with adapters of these modules; None if it would.

    PEFT 0.21.2 often reads such a folder without an error, but leaves adapters out or scales them wrongly.
    """
    modules = list(modules)
    if refused := next(filter(is_refused, modules), None):
        return f"PEFT refuses adapters of {refused}, which a kernel reads.  lora.exclude=[out_proj] leaves it out"
    blocks: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for module in modules:
        if match := _EXPERT.fullmatch(module):
            blocks[match[1]][match[3]].add(int(match[2]))
    for block, experts in blocks.items():  # experts: numbers of the experts with an adapter, by name of the matrix
        gate_up = next((pair for pair in _GATE_UP if pair & set(experts)), set())
        if gate_up - set(experts) or (gate_up and not any(down & set(experts) for down in _DOWN)):
            return (
                f"{block} has adapters of {', '.join(sorted(experts))} alone.  PEFT reads those of gate, up and down "
                "together, or of down alone"
            )
        if any(numbers != set(range(max(map(max, experts.values())) + 1)) for numbers in experts.values()):
            return f"{block} has adapters of some experts only.  PEFT stacks those of all experts"
        if gate_up and rslora:
            return f"{block} has adapters with rslora.  PEFT stacks gate and up, and scales them by sqrt(2) too much"
    return None
