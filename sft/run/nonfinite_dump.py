"""What is kept of a step whose loss or gradient is not finite: what is needed to find the reason.

run.dir/bad_steps/step_0000012/
    samples.json     the samples of the global batch, by number, and the row of the data file each comes from
    ranks.json       of every rank: its position in the layout, and the summed loss of each of its microbatches
    recipe.yaml
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sft.atomic_files import replace_text
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0
from sft.parallel.position import Position


def write(
    folder: Path,
    step: int,
    *,
    samples: Sequence[dict[str, Any]],
    losses: Sequence[float],
    recipe: str,
    position: Position,
) -> Path:
    """Write the dump of `step` into the run's `folder`, and return the folder that was made.  Collective.

    losses  summed loss of each microbatch of this rank
    """
    entry = {"rank": position.rank, "summed loss of each microbatch": [repr(loss) for loss in losses]}
    entry |= {f"{kind}_rank": getattr(position, f"{kind}_rank") for kind in ("dp", "cp", "tp", "pp", "ep")}
    ranks = all_gather_objects(lambda: entry, position.control)
    target = folder / "bad_steps" / f"step_{step:07d}"
    return broadcast_from_rank0(lambda: _write(target, samples, ranks, recipe), position.control)


def _write(target: Path, samples: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]], recipe: str) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    for name, content in (("samples", samples), ("ranks", ranks)):
        replace_text(target / f"{name}.json", json.dumps(content, indent=1) + "\n")
    replace_text(target / "recipe.yaml", recipe)
    return target
