"""What is kept of a step whose loss or gradient is not a number: what somebody needs who looks for the reason.

run.dir/bad_steps/step_0000012/
    samples.json     the samples of the global batch, by number, and where each comes from
    ranks.json       of every rank: place in the layout, and the summed loss of each of its microbatches
    recipe.yaml
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sft.atomic_files import replace_text


def keep(
    folder: Path, step: int, *, samples: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]], recipe: str
) -> Path:
    """Write it down; the folder that was made."""
    made = folder / "bad_steps" / f"step_{step:07d}"
    made.mkdir(parents=True, exist_ok=True)
    for name, content in (("samples", samples), ("ranks", ranks)):
        replace_text(made / f"{name}.json", json.dumps(content, indent=1) + "\n")
    replace_text(made / "recipe.yaml", recipe)
    return made
