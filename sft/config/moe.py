"""Keys of a mixture of experts."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from sft.config.section import Positive, Section, divisors

MOST_EXPERTS = 16_384  # experts of a layer; Qwen3-Next has 512


class MoeConfig(Section):
    num_experts: Annotated[int, Field(ge=1, le=MOST_EXPERTS)] | None = None
    """Experts that replace the MLP of every layer but dense_layers; null: a dense model."""
    dense_layers: Annotated[int, Field(ge=0)] = 0
    """Number of first layers that have an MLP of width model.ffn_hidden_size, no experts (GLM-4.5, DeepSeek-V3)."""
    layers: list[Positive] | None = None
    """Layers with experts, counted from 1 (Nemotron-H); null: all but dense_layers."""
    top_k: Positive | None = None
    """Experts that each token goes to; required with num_experts."""
    ffn_hidden_size: Positive | None = None
    """Width of an expert's MLP; null: model.ffn_hidden_size."""
    swiglu_limits: list[Annotated[float, Field(ge=0.0)]] = []
    """model.swiglu_limits for experts: a limit for each layer; 0: no limit."""
    shared_ffn_hidden_size: Positive | None = None
    """Width of the shared expert, an MLP that every token goes to (Qwen2-MoE); null: no shared expert."""
    latent_size: Positive | None = None
    """Width to which a token is projected before experts read it; their sum is projected back (Nemotron 3 Super).
    Router and shared expert read the token.  null: so do experts."""
    shared_gate: bool = False
    """Multiply the output of the shared expert by sigmoid(token * learned vector) (Qwen2-MoE)."""
    own_norms: bool = False
    """Router, shared expert and experts each norm the residual stream, and the last two norm their outputs.  The router
    scales its input, and the weight of each expert, by learned numbers (Gemma 4)."""
    normalize_top_k: bool = True
    """true: the weights of a token's experts sum to 1 (Mixtral, Qwen3).  false: the weights are the scores."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of experts: softmax over experts, or sigmoid of each (DeepSeek-V3, GLM-4.5)."""
    scaling_factor: Annotated[float, Field(gt=0.0)] = 1.0
    """Factor on the weights of a token's experts (DeepSeek-V3: 2.5)."""
    num_groups: Positive = 1
    """Groups of experts, of equal size.  A token first chooses top_groups groups, by the sum of their two largest
    scores."""
    top_groups: Positive = 1
    """Groups whose experts a token may choose."""
    correction_bias: bool = False
    """Each expert has a number that is added to its score for the choice, not for the weight (DeepSeek-V3)."""
    bias_update_rate: Annotated[float, Field(ge=0.0)] = 0.0
    """Amount by which a step raises the correction_bias of experts with few tokens and lowers the others; 1e-3 is usual
    in pre-training, 0 in fine-tuning."""
    aux_loss_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Coefficient of the load-balancing loss, summed over layers; 1e-3 is usual."""
    router_bias: bool = False
    """Bias on the scores of experts, before softmax or sigmoid (gpt-oss)."""
    z_loss_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Coefficient of the router z-loss (squared log-sum-exp of router scores), summed over layers; 1e-3 is usual."""
    capacity_factor: Annotated[float, Field(gt=0.0)] | None = None
    """A rank sends an expert at most capacity_factor * tokens * top_k / num_experts tokens; null: no limit."""

    @property
    def is_mixed(self) -> bool:
        """Whether only some layers have experts."""
        return bool(self.dense_layers) or self.layers is not None

    def has_layer(self, number: int) -> bool:
        """Whether layer `number`, counted from 1, has experts, unless it is a layer without an MLP."""
        is_named = self.layers is None or number in self.layers
        return self.num_experts is not None and number > self.dense_layers and is_named

    def conflicts(self) -> Iterator[tuple[str, str]]:
        experts, top_k = self.num_experts, self.top_k
        if experts is None:
            yield from ((name, "has no effect without model.moe.num_experts") for name in self.changed)
        elif top_k is None:
            yield "top_k", "is required with num_experts"
        if experts and top_k and top_k > experts:
            yield "top_k", f"is more than num_experts = {experts}"
        if self.shared_gate and experts is not None and self.shared_ffn_hidden_size is None:
            yield "shared_gate", "has no effect without shared_ffn_hidden_size"
        if self.own_norms and experts is not None:
            if self.shared_ffn_hidden_size is None:
                yield "own_norms", "needs shared_ffn_hidden_size, the MLP that experts are added to"
            for name in ("shared_gate", "router_bias", "correction_bias", "latent_size"):
                if getattr(self, name):
                    yield name, "is not supported with own_norms: no released model has both"
        if self.layers is not None and (not self.layers or self.layers != sorted(set(self.layers))):
            yield "layers", "must be in increasing order, each layer once, and not empty"
        if self.layers is not None and self.dense_layers:
            yield "dense_layers", "has no effect with layers; use 0"
        if top_k == 1 and self.normalize_top_k:
            yield "normalize_top_k", "= true makes all weights 1 with top_k = 1; use false, or a larger top_k"
        if experts is not None:
            yield from self._sigmoid_conflicts(experts)

    def _sigmoid_conflicts(self, experts: int) -> Iterator[tuple[str, str]]:
        if self.score_function == "softmax":
            if "num_groups" in self.changed:
                yield "num_groups", "needs score_function = sigmoid"
            if self.correction_bias and not self.normalize_top_k:
                yield "correction_bias", "needs score_function = sigmoid, or normalize_top_k = true (ERNIE 4.5)"
        if self.bias_update_rate and not self.correction_bias:
            yield "bias_update_rate", "has no effect without correction_bias"
        if experts % self.num_groups or (self.num_groups > 1 and experts < 2 * self.num_groups):
            fitting = ", ".join(str(size) for size in divisors(experts) if 2 * size <= experts)
            yield "num_groups", f"does not cut {experts} experts into groups of two or more; use one of {fitting}"
        elif self.top_groups > self.num_groups:
            yield "top_groups", f"is more than num_groups = {self.num_groups}"
        elif self.top_k and self.top_k > (possible := self.top_groups * experts // self.num_groups):
            yield "top_groups", f"leaves a token {possible} experts, but top_k = {self.top_k}"
