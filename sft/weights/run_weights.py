"""Loads the weights of a checkpoint or of a new run into an engine, without the state of the optimizer."""

from functools import partial
from pathlib import Path

from sft.checkpoint import continuation, resume
from sft.config import Config
from sft.console import Console
from sft.mcore.checkpoint_io import engine_state, safe_reader
from sft.mcore.engine import Engine
from sft.parallel.collectives import broadcast_from_rank0
from sft.weights.initial import load_initial
from sft.weights.lora import initial_adapters
from sft.weights.lora.base_digest import base_digest


def load_for_reading(engine: Engine, config: Config, checkpoint: Path | None, console: Console) -> str:
    """Load the weights of the checkpoint, or those from which a new run starts.  Returns a text that names them.

    With LoRA, a checkpoint has only the adapters.  The frozen weights are then loaded as for a new run.
    Collective.  Raises CheckpointError if the recipe names other frozen weights than the checkpoint, or as
    `load_initial` does.
    """
    is_used, control = config.lora.is_used, engine.groups.control
    if checkpoint is None:
        if not is_used:
            return load_initial(engine, config, console)
        describe = partial(initial_adapters.describe, config, engine.trained)
        broadcast_from_rank0(describe, control)  # refuses before minutes of reading
        initial = load_initial(engine, config, console)
        return f"{initial} with {initial_adapters.load_new_adapters(engine, config, console)}"
    point = resume.verified(checkpoint, config.checkpoint.verify, engine.groups)
    if is_used:
        _check_base(engine, config, checkpoint)
        load_initial(engine, config, console)
    engine_state.load_weights(engine, point.path, trained=True)
    return f"the weights of {point.path} ({point.verification})"


def _check_base(engine: Engine, config: Config, checkpoint: Path) -> None:
    """Raise CheckpointError if the adapters of the checkpoint were trained beside other weights.  Collective."""
    bases = broadcast_from_rank0(lambda: _stored_bases(checkpoint), engine.groups.control)
    for stored in bases:
        base = base_digest(config, checkpoint.parent.parent, engine.groups, remembers=False)
        continuation.check_base(checkpoint, stored, base)


def _stored_bases(checkpoint: Path) -> list[str | None]:
    """The digest of the frozen weights of the checkpoint's run, in a list; [] if another program wrote the checkpoint.

    The digest is None if the run had no adapters.
    """
    stored = safe_reader.common_state(checkpoint).get("sft")
    return [] if stored is None else [stored.get("base")]
