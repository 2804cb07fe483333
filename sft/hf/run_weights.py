"""Loads weights for the steps or the evaluation of a run with or without LoRA: of a checkpoint, or of a new run."""

from pathlib import Path

from sft.checkpoint import resume
from sft.config import Config
from sft.console import Console
from sft.hf.initial import load_initial
from sft.mcore import lora
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.engine import Engine, weights_changed


def load_for_reading(engine: Engine, config: Config, checkpoint: Path | None, console: Console) -> str:
    """Load the weights of the checkpoint, or those from which a new run starts.  Returns which weights these are.

    With LoRA a checkpoint holds the adapters only.  Collective.
    """
    initial = load_initial(engine, config, console) if checkpoint is None or config.lora.is_used else ""
    if checkpoint is None:
        return f"{initial} with {load_new_adapters(engine, config)}" if config.lora.is_used else initial
    point = resume.verified(checkpoint, config.checkpoint.verify, engine.groups)
    load = engine_state.load_trained if config.lora.is_used else engine_state.load_weights
    load(engine, point.path)
    return f"the weights of {point.path} ({point.verification})"


def load_new_adapters(engine: Engine, config: Config) -> str:
    """Give the adapters of `engine` the values with which a new run starts.  Collective.  Returns which these are."""
    lora.initialise(engine.chunks, config.run.seed)
    weights_changed(engine)
    return f"new adapters (rank {config.lora.rank}, seed {config.run.seed})"
