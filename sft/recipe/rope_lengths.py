"""Explains to which lengths a recipe's rotary positions reach, for `sft check`.

A pair of dimensions of a head turns by an angle per position.  A pair that makes a whole turn within the trained length
has shown every angle in training.  The slower pairs have not, so positions beyond give them new angles ("critical
dimension", Liu et al., 2023, arXiv:2310.05209).  Scaling and a larger base slow these pairs down.
"""

import math

from sft.config import RopeConfig
from sft.hf.pretrained import model_keys, read_pretrained
from sft.recipe.resolved import Recipe
from sft.recipe.run_checks import reached_positions


def rope_lengths(recipe: Recipe) -> list[str]:
    """Lines of a table: which lengths are trained, extended and beyond.  Empty if the trained length is unknown.

    trained   to 32,768     40 of 64 pairs of a head turn around once or more, and have shown every angle
    extended  to 131,072    by model.rope.scaling = yarn with factor 4
    beyond    from 131,073  the other 24 pairs get angles that they have not shown: expect wrong answers
    packs hold documents of up to 131,072 tokens: extended
    """
    model, pretrained = recipe.config.model, recipe.config.model.pretrained
    rope = model.rope
    own = RopeConfig() if pretrained is None else _own(pretrained.name)
    known = None if pretrained is None else pretrained.max_positions
    # A model whose files name a scaling was trained with it.
    trained = known if own.scaling not in ("none", "proportional") else rope.original_max_position or known
    if trained is None or not model.rotary_dim:
        return []
    reached, by = _reached(recipe, own, trained)
    shown, unshown = _pairs(own, trained, model.rotary_dim)
    rows = [("trained", f"to {trained:,}", shown)]
    if reached > trained:
        rows.append(("extended", f"to {reached:,}", by))
    rows.append(("beyond", f"from {reached + 1:,}", f"{unshown}: expect wrong answers"))
    width = max(len(length) for _, length, _ in rows)
    longest = recipe.config.data.seq_length
    where = "trained" if longest <= trained else "extended" if longest <= reached else "beyond"
    return [
        *(f"{name:8}  {length:{width}}  {text}" for name, length, text in rows),
        f"packs hold documents of up to {longest:,} tokens: {where}",
    ]


def _own(name: str) -> RopeConfig:
    """The rotary positions in the config.json of the model."""
    keys = model_keys(*read_pretrained(name))
    prefix = "model.rope."
    return RopeConfig(**{key.removeprefix(prefix): value for key, (value, _) in keys.items() if key.startswith(prefix)})


def _reached(recipe: Recipe, own: RopeConfig, trained: int) -> tuple[int, str]:
    """The length that the recipe's positions reach, and by which setting."""
    model = recipe.config.model
    rope = model.rope
    if rope.base != own.base and recipe.is_from_user("model.rope.base"):
        # The slowest pair turns over this length as far as it did over the trained one.
        slower = _slowest(own, model.rotary_dim) / _slowest(rope, model.rotary_dim)
        bases = f"by model.rope.base = {rope.base:,.0f} (before: {own.base:,.0f})"
        return math.floor(trained * max(1.0, slower)), f"{bases}: there the slowest pair has turned as far"
    by = f"by model.rope.scaling = {rope.scaling} with factor {rope.factor:g}"
    if model.pretrained is None:
        return math.floor(trained * rope.factor), by
    return max(trained, reached_positions(recipe) or trained), by


def _slowest(rope: RopeConfig, rotary_dim: int) -> float:
    """The angle per position of the slowest pair, which every scaling divides by the whole factor."""
    return float(rope.base ** (2.0 / rotary_dim - 1.0) / rope.factor)


def _pairs(own: RopeConfig, trained: int, rotary_dim: int) -> tuple[str, str]:
    """Texts about the angles of the pairs of a head: within the trained length, and beyond."""
    pairs = rotary_dim // 2
    whole = sum(trained >= 2.0 * math.pi * own.base ** (i / pairs) for i in range(pairs))
    if own.scaling != "none" or whole == pairs:
        return "the model has seen these positions", "the model has not seen these positions"
    return (
        f"{whole} of {pairs} pairs of a head turn around once or more, and have shown every angle",
        f"the other {pairs - whole} pairs get angles that they have not shown",
    )
