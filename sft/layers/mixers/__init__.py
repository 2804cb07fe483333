"""The kinds of mixers, one file each, and the table of all kinds."""

from collections.abc import Mapping

from sft.config.mixer_section import LayerKind
from sft.layers.mixer import Mixer
from sft.layers.mixers.delta import DeltaRule
from sft.layers.mixers.latent import LatentAttention
from sft.layers.mixers.mamba import Mamba
from sft.layers.mixers.none import NoMixer
from sft.layers.mixers.softmax import FullAttention
from sft.layers.mixers.window import WindowAttention

MIXERS: Mapping[LayerKind, type[Mixer]] = {
    mixer.kind: mixer for mixer in (FullAttention, WindowAttention, DeltaRule, Mamba, LatentAttention, NoMixer)
}
