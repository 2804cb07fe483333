"""Reads the sliding window of each layer from config.json, and writes it back.

Each function returns the two computed keys `sliding_window`, the size in tokens, and `sliding_window_layers`, the
layers with a window, for families with one rule about these layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sft.hf.model_keys import Computed, is_true

ALL_LAYERS = {"sliding_window": "sliding_window"}  # for families in which all layers have the window, or none has
LAYER_KINDS = FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR_KINDS = FULL, LINEAR = "full_attention", "linear_attention"
_TYPES, _WINDOW, _USES = "layer_types", "sliding_window", "use_sliding_window"
BASES = "layer_rope_theta"


def linear_layer_types(layers: list[int], count: int) -> dict[str, Any]:
    """layer_types of a model with linear attention in `layers`, counted from 1; count: number of layers"""
    return {_TYPES: [LINEAR if number in layers else FULL for number in range(1, count + 1)]}


def in_all_layers(switch: str | None = _USES) -> dict[str, Computed]:
    """The computed keys for families with a window in all layers.

    switch: key of config.json that must be true for windows; None: windows do not depend on such a key
    """
    return _computed(lambda content, layer: True, switch)


def from_a_layer_on(default: int = 28, switch: str | None = _USES) -> dict[str, Computed]:
    """The computed keys for windows in the layers from max_window_layers on.

    default: max_window_layers if config.json has none; switch: as in `in_all_layers`
    """

    def has_window(content: Mapping[str, Any], layer: int) -> bool:
        first = content.get("max_window_layers", default)
        if type(first) is not int:
            raise ValueError(f"max_window_layers = {first} is not a number of layers")
        return layer >= first

    return _computed(has_window, switch=switch)


def where_listed(default: int | None) -> dict[str, Computed]:
    """The computed keys for families with windows in the layers that layer_types names; without layer_types in none.

    default: size of the window in tokens, if config.json has no sliding_window
    """
    return _computed(lambda content, layer: False, default=default)


def all_but_every(
    interval: int,
    name: str | None = None,
    *,
    default: int = 4096,
    first_is_full: bool = False,
    starts_full: bool = False,
    last_is_full: bool = False,
) -> dict[str, Computed]:
    """The computed keys for families with windows in all layers except interval, 2 * interval, ..., counted from 1.

    layer_types in config.json overrides this rule.
    name: key of config.json that replaces `interval`, if config.json has the key
    default: size of the window in tokens, if config.json has no sliding_window
    first_is_full: the layers with full attention are 1, 1 + interval, 1 + 2 * interval, ... instead
    starts_full: the first layer also has full attention
    last_is_full: the last layer also has full attention
    """

    def has_window(content: Mapping[str, Any], layer: int) -> bool:
        count = content.get(name, interval) if name else interval
        if type(count) is not int or count < 1:
            raise ValueError(f"{name} = {count} is not supported without {_TYPES}")
        is_last = (last_is_full and layer + 1 == content.get("num_hidden_layers")) or (starts_full and layer == 0)
        return (layer if first_is_full else layer + 1) % count != 0 and not is_last

    return _computed(has_window, default=default)


def without_base(content: Mapping[str, Any], unlisted: Callable[[int], list[int]]) -> list[int]:
    """The layers without rotary positions, from 1, whose base is 0: "layer_rope_theta": [1e4, 0, 1e4] -> [2]

    All bases but 0 must be equal.  unlisted: number of layers -> these layers, if config.json has no layer_rope_theta
    """
    count, bases = content.get("num_hidden_layers"), content.get(BASES)
    if type(count) is not int or count < 1:
        raise ValueError(f"num_hidden_layers = {count} is not a positive integer")
    if bases is None:
        return unlisted(count)
    if not isinstance(bases, list) or len(bases) != count or len({base for base in bases if base}) > 1:
        raise ValueError(f"{BASES} is not a list of {count} numbers, one for each layer, of which all but 0 are equal")
    return [number for number, base in enumerate(bases, 1) if not base]


def _computed(
    has_window: Callable[[Mapping[str, Any], int], bool], switch: str | None = None, default: int | None = 4096
) -> dict[str, Computed]:
    """The computed keys sliding_window and sliding_window_layers.

    has_window: whether a layer, counted from 0, has a window, if config.json has no layer_types
    """

    def read(content: Mapping[str, Any]) -> tuple[int | None, list[int] | None]:
        window, count = content.get(_WINDOW, default), content.get("num_hidden_layers")
        if window is None or (switch is not None and not is_true(content, switch, False)) or type(count) is not int:
            return None, None
        kinds = content.get(_TYPES)
        if kinds is None:
            kinds = [SLIDING if has_window(content, layer) else FULL for layer in range(count)]
        if not isinstance(kinds, list) or len(kinds) != count or any(kind not in LAYER_KINDS for kind in kinds):
            raise ValueError(f"{_TYPES} is not a list of {count} names {' and '.join(LAYER_KINDS)}, one for each layer")
        layers = [number for number, kind in enumerate(kinds, 1) if kind == SLIDING]
        if not layers:
            return None, None
        return window, None if len(layers) == count else layers

    def write_window(window: int | None, count: int) -> dict[str, Any]:
        return {_WINDOW: window} | ({} if switch is None else {switch: window is not None})

    def write_layers(layers: list[int] | None, count: int) -> dict[str, Any]:
        return {_TYPES: [SLIDING if layers is None or n + 1 in layers else FULL for n in range(count)]}

    return {
        "sliding_window": Computed(_WINDOW, lambda content: read(content)[0], write_window),
        "sliding_window_layers": Computed(_TYPES, lambda content: read(content)[1], write_layers, LAYER_KINDS),
    }
