"""Keys of the model."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from sft.config import conflicts, megatron_fields
from sft.config.full_attention import FullAttentionConfig
from sft.config.halves import HalvesConfig, MlpKind
from sft.config.latent_attention import LatentAttentionConfig
from sft.config.linear_attention import LinearAttentionConfig
from sft.config.mamba import MambaConfig
from sft.config.mixer_section import LayerKind, MixerSection
from sft.config.moe import MoeConfig
from sft.config.pretrained import Pretrained
from sft.config.rope import RopeConfig
from sft.config.section import UNREPORTED, Path, Positive, Section, divisors

MOST_LAYERS = 4096  # Llama 3.1 405B has 126; a larger number in a damaged config.json would take very long to check
RANDOM = "random"  # value of init_from; a folder of this name is given as ./random
# Groups of keys for kinds of layers.  A layer has the kind of the first group whose `has_layer` is true.  Latent
# attention comes last, because its `has_layer` is true for all layers.
MIXER_SECTIONS: dict[str, type[MixerSection]] = {
    "linear_attention": LinearAttentionConfig,
    "mamba": MambaConfig,
    "latent_attention": LatentAttentionConfig,
}


class ModelConfig(Section):
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    """Number of layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    ffn_hidden_size: Positive
    """Width of the MLP."""
    activation: Literal["swiglu", "geglu", "clamped_swiglu", "relu2"] = "swiglu"
    """Activation of MLP and experts.  swiglu: silu(gate) * up.  geglu: gelu in tanh form (Gemma).  clamped_swiglu:
    gpt-oss.  relu2: max(x, 0)^2 of one projection x, without a gate (Nemotron-H)."""
    activation_limit: Annotated[float, Field(gt=0.0)] | None = None
    """clamped_swiglu: gate is at most this number, and up is between -limit and limit."""
    activation_alpha: Annotated[float, Field(gt=0.0)] | None = None
    """clamped_swiglu computes gate * sigmoid(alpha * gate) * (up + 1)."""
    swiglu_limits: list[Annotated[float, Field(ge=0.0)]] = []
    """For each layer the limit L of its MLP or shared expert, which computes min(silu(gate), L) * up with up between -L
    and L (Step-3.5); 0: no limit.  []: no limit in any layer.  Needs activation = swiglu."""
    num_attention_heads: Positive
    """Query heads."""
    num_query_groups: Positive | None = None
    """Key/value heads (GQA); null: as many as query heads."""
    head_dim: Positive | None = None
    """Width of a head; null: hidden_size / num_attention_heads."""
    value_head_dim: Positive | None = None
    """Width of a value and of a head's output (MiMo-V2-Flash: 128, keys 192); null: head_dim."""
    value_multiplier: Annotated[float, Field(gt=0.0)] = 1.0
    """Values are multiplied by this number (MiMo-V2-Flash: 0.707)."""
    vocab_size: Positive | None = None
    """Vocabulary size without padding rows; null: the size of the tokenizer."""
    norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-5
    """Epsilon inside RMSNorm."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """RMSNorm on the inputs of attention and MLP (pre), on their outputs before the residual sum (post), or both."""
    norm_zero_centered: bool = False
    """Weights of norms are offsets from 1 (Gemma, Qwen3-Next)."""
    final_norm_zero_centered: bool | None = None
    """norm_zero_centered for the norm after the last layer (Muse Glimmer: false); null: as in all other norms."""
    output_norm_epsilon: Annotated[float, Field(gt=0.0)] | None = None
    """Epsilon of norms on outputs of attention and MLP (Muse Glimmer: 1e-8); null: norm_epsilon."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, per head (Qwen3) unless qk_norm_across_heads."""
    qk_norm_across_heads: bool = False
    """One RMSNorm over all query heads of a token, and one over all its key heads (Olmo 2).  Needs qk_norm."""
    qk_norm_weights: bool = True
    """Norms on queries and keys have weights (Muse Glimmer: false)."""
    qk_norm_after_rotary: bool = False
    """Queries and keys are normed after the rotation (Hunyuan)."""
    value_norm: bool = False
    """RMSNorm without a weight on values, per head (Gemma 4)."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen2)."""
    attention_output_bias: bool = False
    """Bias on the output projection of attention (gpt-oss)."""
    mlp_bias: bool = False
    """Biases on the projections of MLPs, or of experts (gpt-oss)."""
    attention_sinks: bool = False
    """Each query head has a learned score that takes part in the softmax and has no value (gpt-oss)."""
    tie_embeddings: bool = False
    """Input embedding and output layer share one weight."""
    embedding_multiplier: Annotated[float, Field(gt=0.0)] = 1.0
    """The output of the input embedding is multiplied by this number (Granite)."""
    round_embedding_multiplier: bool = False
    """Round embedding_multiplier to the precision of the weights (Gemma: in bf16 sqrt(5376) = 73.32 is 73.5)."""
    embedding_norm: bool = False
    """RMSNorm without a weight on the output of the input embedding (Muse Glimmer)."""
    residual_multiplier: Annotated[float, Field(gt=0.0)] = 1.0
    """Outputs of attention and MLP are multiplied by this number before they are added to the residual stream
    (Granite)."""
    layer_scalar: bool = False
    """Multiply the output of each layer by a number that comes with the weights and is not trained (Gemma 4)."""
    attention_multiplier: Annotated[float, Field(gt=0.0)] | None = None
    """Query-key products are multiplied by this number (Granite); null: 1 / sqrt(head_dim)."""
    logits_scaling: Annotated[float, Field(gt=0.0)] = 1.0
    """Logits are divided by this number (Granite)."""
    logits_softcap: Annotated[float, Field(gt=0.0)] | None = None
    """Limit c of the logits, which become c * tanh(logits / c) (Gemma 2); null: no limit."""
    init_std: Annotated[float, Field(gt=0.0)] = 0.02
    """Standard deviation of random initial weights."""
    sliding_window: Positive | None = None
    """Window w: a token attends to itself and to the w - 1 tokens before it; null: no window."""
    sliding_window_layers: list[Positive] | None = None
    """Layers with a sliding window, counted from 1; null: all layers with attention."""
    full_attention: FullAttentionConfig = FullAttentionConfig()
    """Sizes of layers without a sliding window, where they differ from those of layers with one."""
    attention_softcap: Annotated[float, Field(gt=0.0)] | None = None
    """Limit c of attention scores, which become c * tanh(score / c) (Gemma 2); null: no limit."""
    attention_output_gate: bool = False
    """Multiply the output of attention by sigmoid(a projection of the token), before the output projection."""
    attention_head_gate: Literal["sigmoid", "softplus"] | None = None
    """Multiply the output of each head by this function of one number, a projection of the token (Step-3.5: sigmoid,
    Laguna: softplus); null: no gate."""
    linear_attention: LinearAttentionConfig = LinearAttentionConfig()
    """Layers with linear attention (Gated DeltaNet)."""
    mamba: MambaConfig = MambaConfig()
    """Layers with Mamba-2 (Nemotron 3)."""
    latent_attention: LatentAttentionConfig = LatentAttentionConfig()
    """Multi-head latent attention (DeepSeek-V3), in all layers but those of linear_attention and mamba."""
    halves: HalvesConfig = HalvesConfig()
    """Layers that have only one of the halves of a layer: only attention, or only an MLP."""
    rope: RopeConfig = RopeConfig()
    """Rotary position embedding."""
    moe: MoeConfig = MoeConfig()
    """Mixture of experts."""
    has_mtp: bool = False
    """The model has a block for multi-token prediction.  train.mtp sets this key."""
    hf: Path | None = None
    """Hub name (org/name or org/name@revision), folder, or checkpoint of `sft import`, which gives sizes, weights and
    tokenizer."""
    hf_read_once: bool = Field(False, json_schema_extra=UNREPORTED)
    """One rank reads each weight of `hf` and sends it to the other ranks that hold it; for a slow shared file
    system."""
    added_rows: Literal["mean", "random"] = "mean"
    """First values of the rows of data.add_tokens.  mean: the mean of the rows of the pieces that the token had before;
    random: normal with standard deviation init_std."""
    base_dtype: Literal["as_stored", "nf4", "bf16"] = "bf16"
    """Frozen matrices of layers beside adapters.  as_stored: in the low bits in which `hf` stores them; nf4: 4 bits a
    number (NF4, as in QLoRA), quantised when they are loaded; bf16: in the precision of the run."""
    init_from: Path | None = None
    """Initial weights of a new run: `random`, or the folder of a Megatron checkpoint; null: those of `hf`."""
    pretrained: Pretrained | None = Field(None, exclude=True)
    """The model that `hf` names.  No key: the reader of recipes sets it."""
    megatron: dict[str, Any] = {}  # megatron_fields.py says which values
    """Fields of megatron-core's TransformerConfig.  Only the fields below can be set, because a test trained a step
    with each."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        heads, groups, width = self.num_attention_heads, self.resolved_query_groups, self.resolved_head_dim
        has_own_width = self.head_dim is not None or self.latent_attention.is_used
        uneven = not has_own_width and self.hidden_size % heads != 0
        if uneven:
            yield "num_attention_heads", f"does not divide hidden_size {self.hidden_size}; set head_dim"
        if width % 2 == 1 and not uneven:
            yield "head_dim", f"makes heads of width {width}, but rotary positions need an even width"
        elif not uneven and (self.rotary_dim % 2 == 1 or self.rotary_dim == 0):
            yield "rope.fraction", f"rotates {self.rotary_dim} of {width} numbers of a head; the number must be even"
        if heads % groups != 0:
            fitting = ", ".join(map(str, divisors(heads)))
            yield "num_query_groups", f"does not divide {heads} heads; use one of {fitting}"
        yield from conflicts.of_mlp(self)
        if self.mlp_bias and self.moe.shared_ffn_hidden_size is not None:
            yield "mlp_bias", "is not supported with moe.shared_ffn_hidden_size; use mlp_bias = false"
        yield from conflicts.of_norms(self)
        layers = self.sliding_window_layers
        if layers is not None and self.sliding_window is None:
            yield "sliding_window_layers", "has no effect without sliding_window"
        elif layers is not None and layers != sorted(set(layers)):
            yield "sliding_window_layers", "must be in increasing order, each layer once"
        elif layers and layers[-1] > self.num_layers:
            yield "sliding_window_layers", f"names layer {layers[-1]} of {self.num_layers}"
        elif layers == []:
            yield "sliding_window_layers", "is empty; use sliding_window = null"
        if self.rope.window_base is not None and self.sliding_window is None:
            yield "rope.window_base", "has no effect without sliding_window"
        yield from conflicts.of_values(self)
        if self.rope.skip_layers and self.rope.skip_layers[-1] > self.num_layers:
            yield "rope.skip_layers", f"names layer {self.rope.skip_layers[-1]} of {self.num_layers}"
        if self.moe.dense_layers >= self.num_layers:
            yield "moe.dense_layers", f"leaves no layer of {self.num_layers} for experts; use moe.num_experts = null"
        if self.moe.layers and self.moe.layers[-1] > self.num_layers:
            yield "moe.layers", f"names layer {self.moe.layers[-1]} of {self.num_layers}"
        for name, section in self.mixer_sections.items():
            if section.named and section.named[-1] > self.num_layers:
                yield f"{name}.layers", f"names layer {section.named[-1]} of {self.num_layers}"
            yield from section.conflicts_with(self)
        yield from self.full_attention.conflicts_with(self)
        yield from self.halves.conflicts_with(self)
        if self.moe.own_norms and self.norm_placement != "both":
            yield "moe.own_norms", "needs norm_placement = both, whose norm on the output follows those of its parts"
        if self.value_norm and self.latent_attention.is_used:
            yield "value_norm", "is not supported with latent_attention; use false"
        if self.rope.is_proportional and self.latent_attention.is_used:
            yield "rope.scaling", "must not be proportional with latent_attention; use none or yarn"
        if self.rope.mscale_all_dim is not None and not self.latent_attention.is_used:
            yield "rope.mscale_all_dim", "has no effect without latent_attention.kv_lora_rank; use null"
        release = megatron_fields.installed() if self.megatron else None
        for name, value in self.megatron.items():
            if (why := megatron_fields.why_not(name, value, release)) is not None:
                yield f"megatron.{name}", why
        if self.megatron.get(megatron_fields.PERMUTE_FUSION) is False and self.moe.num_experts is None:
            yield f"megatron.{megatron_fields.PERMUTE_FUSION}", "has no effect without moe.num_experts; leave it out"

    @property
    def resolved_head_dim(self) -> int:
        """Width of a query and a key: latent_attention.qk_head_dim, `head_dim` or hidden_size / num_attention_heads."""
        latent = self.latent_attention
        return latent.qk_head_dim if latent.is_used else self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def resolved_value_head_dim(self) -> int:
        """Width of a value and of a head's output: latent_attention.v_head_dim, `value_head_dim` or that of a key."""
        latent = self.latent_attention
        return latent.v_head_dim if latent.is_used else self.value_head_dim or self.resolved_head_dim

    @property
    def rotary_dim(self) -> int:
        """The number of elements of a head that are rotated.  With proportional positions, these are all elements, some
        rotated by an angle of 0."""
        latent = self.latent_attention
        if self.rope.is_proportional:
            return self.resolved_head_dim
        return latent.qk_rope_head_dim if latent.is_used else int(self.resolved_head_dim * self.rope.fraction)

    @property
    def resolved_query_groups(self) -> int:
        """Key/value heads: `num_query_groups`, or as many as query heads."""
        return self.num_query_groups or self.num_attention_heads

    def window_of(self, layer_number: int) -> int | None:
        """The sliding window of a layer in tokens; None: the layer attends to all earlier tokens.  Layers count from
        1."""
        has_window = self.sliding_window_layers is None or layer_number in self.sliding_window_layers
        return self.sliding_window if has_window else None

    def kind_of(self, layer_number: int) -> LayerKind:
        """The kind of the first half of a layer, counted from 1: the kind of its mixer, or "no mixer"."""
        if layer_number in self.halves.without_mixer:
            return "no mixer"
        for section in self.mixer_sections.values():
            if section.has_layer(layer_number):
                return section.kind
        return "full attention" if self.window_of(layer_number) is None else "window attention"

    def mlp_kind_of(self, layer_number: int) -> MlpKind:
        """The kind of the second half of a layer, counted from 1: dense MLP, experts or none."""
        if layer_number in self.halves.without_mlp:
            return "no MLP"
        return "experts" if self.moe.has_layer(layer_number) else "dense"

    def has_experts(self, layer_number: int) -> bool:
        """Whether a layer, counted from 1, has experts in place of an MLP."""
        return self.mlp_kind_of(layer_number) == "experts"

    @property
    def mixer_sections(self) -> dict[str, MixerSection]:
        """The sections for kinds of layers, by name."""
        return {name: getattr(self, name) for name in MIXER_SECTIONS}

    @property
    def has_own_windows(self) -> bool:
        """Whether layers with a window differ from others in more than the window: in heads or in rotated numbers."""
        return self.full_attention.is_used or self.rope.window_fraction is not None

    @property
    def stacks_layers(self) -> bool:
        """Whether a checkpoint has each weight of all layers in one stacked tensor, which needs layers of equal
        shapes."""
        is_mixed = any(section.named for section in self.mixer_sections.values())
        is_mixed = is_mixed or self.moe.is_mixed or self.halves.is_used
        return not (is_mixed or self.full_attention.is_used)

    @property
    def kinds(self) -> set[LayerKind]:
        """The kinds of the model's layers."""
        return {self.kind_of(number + 1) for number in range(self.num_layers)}

    @property
    def portable_only(self) -> str | None:
        """Keys of the model's attention that only the portable backend supports, as text; None: none."""
        kinds = {
            "model.sliding_window": self.sliding_window is not None,
            "model.attention_output_gate": self.attention_output_gate,
            **{
                f"model.{name}": section.is_used and not section.has_te for name, section in self.mixer_sections.items()
            },
            "model.rope.interleaved": self.rope.interleaved and not self.latent_attention.is_used,
            "model.rope.scaling = proportional": self.rope.is_proportional,
            "model.full_attention": self.full_attention.is_used,
            "model.qk_norm_after_rotary": self.qk_norm_after_rotary,
            "model.value_head_dim": self.value_head_dim is not None,
            "model.value_multiplier": self.value_multiplier != 1.0,
            "model.attention_head_gate": self.attention_head_gate is not None,
            "model.value_norm": self.value_norm,
            "model.attention_softcap": self.attention_softcap is not None,
            "model.attention_sinks": self.attention_sinks,
        }
        return ", ".join(key for key, is_used in kinds.items() if is_used) or None

    @property
    def num_layer_norms(self) -> int:
        """The number of norms on hidden states in a layer, each of which has a weight."""
        return (4 if self.norm_placement == "both" else 2) + 3 * self.moe.own_norms

    @property
    def resolved_expert_ffn(self) -> int:
        """Width of an expert: `moe.ffn_hidden_size`, or that of a dense MLP."""
        return self.moe.ffn_hidden_size or self.ffn_hidden_size
