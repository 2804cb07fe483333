"""Supervised fine-tuning on Megatron for long context.

    recipe = sft.load("recipe.yaml", {"data.train": "my.jsonl"})
    sft.prepare(recipe)
    outcome = sft.train(recipe)
    sft.export(outcome.folder, "models/mine")

`import sft` imports none of these functions.  Each is imported when it is first named, and torch only when a call needs
it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sft.api.checks import Checked, check
    from sft.api.data import Prepared, PreparedSet, prepare
    from sft.api.evaluation import Evaluated, evaluate
    from sft.api.generation import Generated, Prompt, generate
    from sft.api.models import Exported, export
    from sft.api.plans import Plan, PlanOptions, plan
    from sft.api.recipes import load
    from sft.api.training import train
    from sft.errors import ConfigError, SftError
    from sft.recipe.resolved import Recipe
    from sft.run.outcome import Outcome

__version__ = "0.2.0"
__all__ = [
    "__version__",
    "load",
    "check",
    "prepare",
    "train",
    "evaluate",
    "export",
    "plan",
    "generate",
    "Recipe",
    "Checked",
    "Prepared",
    "PreparedSet",
    "Outcome",
    "Evaluated",
    "Exported",
    "Plan",
    "PlanOptions",
    "Generated",
    "Prompt",
    "ConfigError",
    "SftError",
]
_HOMES = {
    "load": "sft.api.recipes",
    "check": "sft.api.checks",
    "prepare": "sft.api.data",
    "train": "sft.api.training",
    "evaluate": "sft.api.evaluation",
    "export": "sft.api.models",
    "plan": "sft.api.plans",
    "generate": "sft.api.generation",
    "Recipe": "sft.recipe.resolved",
    "Checked": "sft.api.checks",
    "Prepared": "sft.api.data",
    "PreparedSet": "sft.api.data",
    "Outcome": "sft.run.outcome",
    "Evaluated": "sft.api.evaluation",
    "Exported": "sft.api.models",
    "Plan": "sft.api.plans",
    "PlanOptions": "sft.api.plans",
    "Generated": "sft.api.generation",
    "Prompt": "sft.api.generation",
    "ConfigError": "sft.errors",
    "SftError": "sft.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
