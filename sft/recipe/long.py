"""Decides which questions the long-context evaluation of a recipe asks, and with which length of packs."""

from dataclasses import replace
from fractions import Fraction
from math import lcm

from sft.config.distill import DistillConfig
from sft.config.teacher import TeacherConfig
from sft.data.long.suite import SuiteSettings
from sft.errors import ConfigError
from sft.parallel.alignment import pack_multiple
from sft.recipe.resolved import Recipe
from sft.recipe.run_checks import reached_positions


def suite_settings(recipe: Recipe) -> SuiteSettings:
    """The questions that data.long asks.  Lengths are lengths that packs may have.

    Raises ConfigError if the model has too few positions for every length.
    """
    config, long = recipe.config, recipe.config.data.long
    multiple, reached = pack_multiple(config), reached_positions(recipe)
    if config.parallel.dynamic_cp:  # as for data.seq_length: a pack on one rank holds this length / cp tokens
        multiple = lcm(multiple, config.data.doc_multiple * config.parallel.cp)
    # A fraction of the decimal digits, because 0.1 * 320 is 32.00000000000001 in floating point.
    asked = [int(Fraction(str(share)) * config.data.seq_length) // multiple * multiple for share in long.lengths]
    lengths = sorted({length for length in asked if length and (reached is None or length <= reached)})
    if not lengths:
        raise ConfigError(
            f"data.long.lengths = {long.lengths} with data.seq_length = {config.data.seq_length:,} gives questions of "
            f"{', '.join(f'{length:,}' for length in asked)} tokens, but lengths must be at least {multiple:,}"
            + (f", and model.hf = {config.model.hf} has {reached:,} positions" if reached is not None else "")
            + ".  Set data.long.lengths to multiples of data.seq_length in between, such as "
            f"data.long.lengths=[{multiple / config.data.seq_length:g}]"
            + (", or scale the positions (model.rope.scaling)." if reached is not None else ".")
        )
    depths = (0.5,) if long.depths == 1 else tuple(i / (long.depths - 1) for i in range(long.depths))
    return SuiteSettings(
        tasks=tuple(long.tasks), lengths=tuple(lengths), depths=depths, questions=long.questions, seed=long.seed
    )


def asking(recipe: Recipe, settings: SuiteSettings) -> Recipe:
    """The recipe with packs of the longest questions, without held-out sets, and without a teacher."""
    config = recipe.config
    data = {"seq_length": max(settings.lengths), "eval": None, "teacher": TeacherConfig()}
    changed = {
        "data": config.data.model_copy(update=data),
        "loss": config.loss.model_copy(update={"distill": DistillConfig()}),
        # keep_best names a held-out set, and export_hf may need keep_best.
        "checkpoint": config.checkpoint.model_copy(update={"keep_best": None, "export_hf": "none"}),
    }
    return replace(recipe, config=config.model_copy(update=changed))
