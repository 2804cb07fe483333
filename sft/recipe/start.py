"""Checks whether the recipe, weights and checkpoints of a run allow its start.

`sft check` and every start call these functions before a model is built, so both refuse the same runs with the same
sentences.  A start may fail for further reasons of the cluster (docs/reference/config.md).
"""

from pathlib import Path

from sft.checkpoint import continuation, rates
from sft.checkpoint.continuation import Continuation
from sft.checkpoint.train_state import Conditions, with_current_names
from sft.config import Config
from sft.config.lora import LoraConfig
from sft.data.pipeline import DataPipeline
from sft.errors import CheckpointError
from sft.layers.adapters import Trained
from sft.weights import initial, run_folder
from sft.weights.export.announced import export_lines
from sft.weights.lora import initial_adapters
from sft.weights.trained import trained_names


def check_weights(config: Config, trained: Trained, vocab_size: int | None) -> dict[str, list[str]]:
    """Lines about the weights and adapters that the run loads: {"weights": lines, "adapters": lines,
    "exports": lines}.  Reads only headers and indexes of files.

    vocab_size: rows of the embedding without padding; None if they are unknown
    Raises ConfigError or CheckpointError if they are missing or do not fit the run.
    """
    run, is_lora = Path(config.run.dir), config.lora.is_used
    resumes = bool(continuation.selected(config.checkpoint, run / "checkpoints")[0])
    run_folder.check_exports(run, config.model, config.checkpoint, is_new=not resumes)
    exports = {"exports": described} if (described := export_lines(config, vocab_size)) else {}
    if resumes and not is_lora:
        return {"weights": ["those of the checkpoint"], **exports}
    # A checkpoint of adapters has no other weights.
    lines = {"weights": [initial.describe(config, vocab_size)], **exports}
    if is_lora:
        own = ["those of the checkpoint"]
        lines["adapters"] = own if resumes else initial_adapters.describe(config, trained)
    return lines


def check_resumed(config: Config, resumed: Continuation, vocab_size: int | None) -> None:
    """Raise CheckpointError if tensors or moments of the checkpoint do not fit the run.

    Both are compared if checkpoint.allow_changes names a key.  Tensors are also compared if another program wrote the
    checkpoint, because it then has no record of its model.
    """
    facts, changes = resumed.facts, config.checkpoint.allow_changes
    if (facts is None or changes) and not config.lora.is_used:
        initial.compare_tensors(Path(resumed.path), config, vocab_size)
    if facts is None or not changes:
        return
    before = with_current_names(facts["recipe"])
    lora = {key.removeprefix("lora."): value for key, value in before.items() if key.startswith("lora.")}
    train = config.train.model_copy(update={"freeze": before.get("train.freeze", [])})
    optim = config.optim.model_copy(update={"groups": []})  # their names may be those of weights trained only now
    then = config.model_copy(update={"train": train, "lora": LoraConfig.model_validate(lora), "optim": optim})
    rows = config.model.vocab_size or vocab_size or 0
    if then.lora.rank != config.lora.rank:
        raise _not_held(resumed, "its adapters", f"lora.rank was {then.lora.rank}, is {config.lora.rank}")
    if missing := sorted(trained_names(config, rows) - trained_names(then, rows)):
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise _not_held(resumed, f"{missing[0]}{more}", "the run that wrote it did not train them")


def _not_held(resumed: Continuation, weights: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{resumed.path} has no optimizer state that fits {weights}: {reason}.  Give train.freeze and the keys of lora "
        "the values of that run, which no change in checkpoint.allow_changes can replace here; or start a new run with "
        "another run.dir."
    )


def check_start(config: Config, conditions: Conditions, trained: Trained, data: DataPipeline) -> str | None:
    """A line if the recipe changes the learning rates of a run that continues.

    Raises ConfigError or CheckpointError if the run cannot start.
    """
    check_weights(config, trained, data.vocab_size)
    resumed = continuation.check(config, Path(config.run.dir) / "checkpoints", conditions)
    if resumed is None:
        return None
    check_resumed(config, resumed, data.vocab_size)
    changed = rates.change(resumed, config, data.num_steps, data.train.plans.total_steps)
    return changed and f"{'WARNING: ' if changed[1] else ''}{changed[0]}"
