"""Extends megatron-core's transformer layer.  Backward can recompute the second half of the layer.

The second half is the norm before the MLP, the MLP, and the residual sum.  A recomputed second half saves only its
input.  The second half can run in tiles of tokens, forward and backward, so that the wide activations inside an MLP
exist for one tile at a time.  The first half, attention, is computed once; activations/saved_tensors.py decides how its
tensors are saved.
In a layer with experts, backward recomputes only the experts (experts/layer.py).  With train.recompute = full, core
recomputes whole layers.

The layer also has features that core's layer lacks: norms on the outputs of attention and MLP, a factor on these
outputs, and a factor on the layer's output.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import te_checkpoint
from megatron.core.transformer.identity_op import IdentityFuncOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from sft.mcore.activations.kept_calls import leaving_out_products
from sft.mcore.activations.recompute import recomputed
from sft.mcore.activations.saved_tensors import SavePolicy
from sft.mcore.backend import PackedDocuments
from sft.mcore.experts.layer import ExpertLayer
from sft.mcore.experts.router import TokenDocuments


class Layer(TransformerLayer):
    """A transformer layer.

    recompute            whether backward recomputes the second half
    tile                 tokens per tile of the second half; None: no tiles
    residual_multiplier  factor on the outputs of attention and MLP before they are added to the residual stream
    output_norm          class of a norm on each of these outputs; None: no norm
    has_scalar           whether the layer multiplies its output by a scalar, a buffer that checkpoints hold (Gemma 4)
    frees_memory         whether the weights, which have no values yet, give back their memory, so that the whole model
                         is never in memory (sharding/flat.py, low_bits/frozen_base.py)
    """

    save_policy: SavePolicy | None = None
    layer_scalar: Tensor | None  # [1]

    def __init__(
        self,
        config: Any,
        *args: Any,
        recompute: bool = False,
        tile: int | None = None,
        residual_multiplier: float = 1.0,
        output_norm: type[torch.nn.Module] | None = None,
        has_scalar: bool = False,
        frees_memory: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self._recompute, self._tile = recompute, tile
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype) if has_scalar else None)
        self.post_self_attn_layernorm = self.post_mlp_layernorm = None
        if output_norm is not None:
            sizes = dict(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
            self.post_self_attn_layernorm, self.post_mlp_layernorm = output_norm(**sizes), output_norm(**sizes)
        own_sums = {"self_attn_bda": self.post_self_attn_layernorm, "mlp_bda": self.post_mlp_layernorm}
        for name, norm in own_sums.items() if output_norm is not None or residual_multiplier != 1.0 else ():
            if not isinstance(getattr(self, name), IdentityFuncOp):  # of a half that the layer lacks
                setattr(self, name, _ResidualSum(norm, residual_multiplier))
        for weight in self.parameters() if frees_memory else ():
            stays = weight.is_cuda or not torch.cuda.is_available()  # the others are moved to the GPU later
            if stays and weight.dtype == config.params_dtype:
                weight.untyped_storage().resize_(0)

    def forward(
        self, *args: Any, packed_seq_params: PackedDocuments, padding_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Compute the layer.  The arguments and results are those of core's TransformerLayer.

        padding_mask: int32 [1, t], the number of each token's document or part, -1 for padding; None: the model has no
            experts.  It is core's only argument about tokens that reaches the layers with pipeline stages, with
            sequence parallelism, and when layers are recomputed
        """
        if self.save_policy is not None:
            self.save_policy.start_layer()
        if isinstance(self.mlp, ExpertLayer):
            assert padding_mask is not None and packed_seq_params.cp is not None
            pack = packed_seq_params.num_parts, packed_seq_params.cp.members, packed_seq_params.in_text
            kwargs["padding_mask"] = TokenDocuments(padding_mask.view(-1), *pack)
        with leaving_out_products(packed_seq_params.kept):
            output, context = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        if self._is_repeated:
            output.untyped_storage().resize_(0)  # core keeps the output during backward, but nothing reads it
        return output, context

    @property
    def _is_repeated(self) -> bool:
        """Whether core computes this layer again, in backward."""
        return self.config.recompute_granularity == "full" and torch._C._current_graph_task_id() != -1

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        core_forward_mlp = super()._forward_mlp

        def second_half(tokens: Tensor) -> Any:
            output = core_forward_mlp(tokens, *args, **kwargs)
            return output if self.layer_scalar is None else output * self.layer_scalar

        # Evaluation also uses tiles, because it has no more free memory than training.
        if not self._recompute or not (self.training or self._tile):
            return second_half(hidden_states)
        # With FP8 there are no tiles.  Transformer Engine's checkpoint restores the scales of the first pass.
        if self.config.fp8:
            tracker = tensor_parallel.random.get_cuda_rng_tracker
            return te_checkpoint(second_half, False, tracker, self.pg_collection.tp, hidden_states)
        modules = (self.pre_mlp_layernorm, self.mlp, self.post_mlp_layernorm)
        weights = [weight for module in modules if module is not None for weight in module.parameters()]
        return recomputed(second_half, hidden_states, weights, tile=self._tile, is_last=self._is_repeated)


@dataclass(frozen=True)
class _ResidualSum:
    """Computes residual + multiplier * norm(output + bias), instead of core's sum `bias_dropout_add`."""

    norm: torch.nn.Module | None
    multiplier: float

    def __call__(self, training: bool, fused: bool) -> Any:
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_and_bias
        assert dropout == 0.0
        if bias is not None:
            output = output + bias
        if self.norm is not None:
            output = self.norm(output)
        return torch.add(residual, output, alpha=self.multiplier)
