"""The ways in which layers mix tokens: one file for each, and the table of all."""

from collections.abc import Mapping

from sft.config.model import LayerKind
from sft.layers.mixer import Mixer
from sft.layers.mixers.delta import DeltaRule
from sft.layers.mixers.latent import LatentAttention
from sft.layers.mixers.softmax import FullAttention
from sft.layers.mixers.window import WindowAttention

MIXERS: Mapping[LayerKind, type[Mixer]] = {
    mixer.kind: mixer for mixer in (FullAttention, WindowAttention, DeltaRule, LatentAttention)
}
