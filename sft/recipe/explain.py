"""Makes the texts of `sft explain` and `sft check --explain`: what a key means, and where its value comes from."""

from collections.abc import Callable

from sft.config.keys import OPEN, RENAMED, expected, in_schema, leaves, show, unknown, values
from sft.errors import ConfigError
from sft.parallel.layout import Layout
from sft.recipe.resolved import Recipe, derived

# Sizes that are no keys, because the number of processes decides them: (the values that decide it, its meaning).
_SIZES = {
    "world_size": ("the number of processes", "Number of processes of the run, one for each GPU."),
    "dp": ("world_size / (tp * cp * pp)", "Data-parallel size: groups of ranks that train on different packs."),
    "num_microbatches": ("global_batch_size / dp", "Packs of a step that a data-parallel rank computes in turn."),
}


def explain(recipe: Recipe, key: str, layout: Callable[[], Layout]) -> str:
    """The value, origin, type and meaning of `key`, or of every key in the group `key`.

    layout: returns the layout; called only if `key` is a size such as parallel.dp
    Raises ConfigError if there is no such key.

    model.head_dim = 128
        from     derived: hidden_size / num_attention_heads
        type     a whole number of at least 1 or null; default null
        meaning  Width of a head; null means hidden_size / num_attention_heads.

    parallel.dp = 2
        from     derived: world_size / (tp * cp * pp), for 8 processes
        type     not a key
        meaning  Data-parallel size: groups of ranks that train on different packs.
    """
    current, substitutes = values(recipe.config), derived(recipe.config)
    paragraphs, key = _renamed(key)
    for name in (k for k in current if k == key or k.startswith(f"{key}.")):
        value = substitutes[name][0] if name in substitutes else current[name]
        paragraphs.append(f"{name} = {show(value)}\n    from     {recipe.origins[name]}\n{_type_and_meaning(name)}")
    if not paragraphs and (size := key.rpartition(".")[2]) in _SIZES:
        sizes, (source, meaning) = layout(), _SIZES[size]
        value = getattr(sizes, size)
        if size == "num_microbatches" and sizes.cp_sizes:
            value, source = "differs from step to step", "the plan, because of parallel.dynamic_cp"
        paragraphs.append(
            f"{key} = {value}\n    from     derived: {source}, for {sizes.world_size} processes\n"
            f"    type     not a key\n    meaning  {meaning}"
        )
    if not paragraphs:
        raise ConfigError(unknown(key, f"command line: --explain {key}"))
    return "\n".join(paragraphs)


def meaning(key: str) -> str:
    """The type and the meaning of `key`, or of every key in the group `key`.  Raises ConfigError for an unknown key.

    optim.lr
        type     a number above 0.0; required
        meaning  Peak learning rate: often 1e-5 for all weights, and 2e-4 for LoRA.
    """
    paragraphs, key = _renamed(key)
    names = [name for name in leaves() if name == key or name.startswith(f"{key}.")]
    if not names and in_schema(key) in leaves():  # data.train.chat.weight
        names = [in_schema(key)]
    paragraphs += [f"{name}\n{_type_and_meaning(name)}" for name in names]
    if not names and (size := key.rpartition(".")[2]) in _SIZES:
        source, about = _SIZES[size]
        paragraphs.append(f"{key}\n    type     not a key; it is {source}\n    meaning  {about}")
    if not paragraphs:
        raise ConfigError(unknown(key, f"command line: {key}"))
    return "\n".join(paragraphs)


def _renamed(key: str) -> tuple[list[str], str]:
    """A line if the key has a new name, and the current name."""
    return ([f"{key} is now called {RENAMED[key]}"] if key in RENAMED else []), RENAMED.get(key, key)


def _type_and_meaning(name: str) -> str:
    info = leaves()[name if name in leaves() else OPEN]
    default = "; required" if info.is_required() else f"; default {show(info.default)}"
    return f"    type     {expected(name)}{default if name in leaves() else ''}\n" f"    meaning  {info.description}"
