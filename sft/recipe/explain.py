"""Says where the value of a key comes from, and what the key means (`sft check --explain`)."""

from sft.config.keys import OPEN, RENAMED, expected, leaves, show, unknown, values
from sft.errors import ConfigError
from sft.recipe.resolved import Recipe, derived


def explain(recipe: Recipe, key: str) -> str:
    """The value, origin, type and meaning of `key`, or of every key in the group `key`.

    model.head_dim = 128
        from     derived: hidden_size / num_attention_heads
        type     a whole number of at least 1 or null; default null
        meaning  Width of a head; null means hidden_size / num_attention_heads.
    """
    current, substitutes = values(recipe.config), derived(recipe.config)
    paragraphs = [f"{key} is now called {RENAMED[key]}"] if key in RENAMED else []
    key = RENAMED.get(key, key)
    for name in (k for k in current if k == key or k.startswith(f"{key}.")):
        value = substitutes[name][0] if name in substitutes else current[name]
        info = leaves()[name if name in leaves() else OPEN]
        default = "; required" if info.is_required() else f"; default {show(info.default)}"
        paragraphs.append(
            f"{name} = {show(value)}\n    from     {recipe.origins[name]}\n"
            f"    type     {expected(name)}{default if name in leaves() else ''}\n"
            f"    meaning  {info.description}"
        )
    if not paragraphs:
        raise ConfigError(unknown(key, f"command line: --explain {key}"))
    return "\n".join(paragraphs)
