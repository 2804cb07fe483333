"""Softmax attention over a window: the last `model.sliding_window` tokens, including the token itself."""

from dataclasses import dataclass

from sft.config import Config, ModelConfig
from sft.config.full_attention import FullAttentionConfig
from sft.layers.mixers.softmax import SoftmaxAttention
from sft.layers.traffic import HaloTraffic, Passes


@dataclass(frozen=True)
class WindowAttention(SoftmaxAttention):
    kind = "window attention"

    @staticmethod
    def narrowed(model: ModelConfig) -> ModelConfig:
        if not model.has_own_windows:
            return model
        return model.model_copy(
            update={
                "sliding_window_layers": None,
                "full_attention": FullAttentionConfig(),
                "rope": model.rope.window_rope or model.rope,
            }
        )

    @classmethod
    def described(cls, model: ModelConfig) -> str:
        base = "" if model.rope.window_base is None else f" and rope.base {model.rope.window_base:g}"
        return f"windows of {model.sliding_window:,} tokens{base}"

    @property
    def window(self) -> int | None:
        return self.model.sliding_window

    def traffic(self, config: Config, passes: Passes) -> HaloTraffic:
        assert self.window is not None
        return HaloTraffic(token_bytes=self.sent(config) * passes.key_bytes, window=self.window)
