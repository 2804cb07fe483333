"""The `portable` backend: attention over packed documents in torch, on any device.

The kernel is torch's own flash kernel (CUDA in bf16) or plain torch (everywhere).  Attention rotates queries and keys
(core does not), and all-gathers keys and values over the context-parallel group (packed_attention.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from sft.config import Config, ModelConfig
from sft.layers.kinds import of_layer
from sft.mcore.attention import rope
from sft.mcore.attention.flash_kernel import FlashKernel
from sft.mcore.attention.packed_attention import Kernel, packed_attention
from sft.mcore.backend import AttentionBackend, PackedDocuments
from sft.mcore.latent_attention.core_attention import SharedLatents
from sft.mcore.linear_attention.delta_rule import Kernel as DeltaKernel
from sft.mcore.modules.norm import RMSNorm
from sft.mcore.modules.qk_norm import KeyNorm, QueryNorm
from sft.parallel.cp_group import CpGroup

MakeKernel = Callable[..., Kernel]  # cu_seqlens of the whole pack, cp size, cp rank, device; window


@dataclass(frozen=True)
class KernelByWindow:
    """A `MakeKernel` for layers whose kernels differ.  makers: by sliding window; None: no window"""

    makers: Mapping[int | None, MakeKernel]

    def __call__(self, *args: Any, window: int | None) -> Kernel:
        return self.makers[window](*args, window=window)


class Portable(AttentionBackend):
    """make_kernel: makes the kernel of a microbatch, `FlashKernel.of`, `TorchKernel.of`, or one of them by the window

    delta_kernel: of layers with linear attention; None: there are none
    """

    name = "portable"
    final_norm = RMSNorm
    has_te_kernels = False
    latent_attention = SharedLatents
    attention_rotates = True

    def __init__(
        self, config: Config, reason: str, make_kernel: MakeKernel, delta_kernel: DeltaKernel | None = None
    ) -> None:
        super().__init__(config, f"{reason}; linear attention on {delta_kernel}" if delta_kernel else reason)
        self.delta_kernel = delta_kernel
        self._make_kernel, model = make_kernel, config.model
        self._windows = {model.window_of(number + 1) for number in range(model.num_layers)}

    @property
    def has_flash_kernel(self) -> bool:
        return self._make_kernel is FlashKernel.of

    def layer_spec(self, *, has_experts: bool) -> ModuleSpec:
        model = self.config.model
        spec = get_gpt_layer_local_spec(
            num_experts=model.moe.num_experts if has_experts else None, qk_layernorm=model.qk_norm
        )
        input_norm = IdentityOp if model.norm_placement == "post" else RMSNorm
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = input_norm
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = partial(PortableAttention, model=model)
        if model.qk_norm:
            across = model.qk_norm_across_heads
            attention.q_layernorm, attention.k_layernorm = (QueryNorm, KeyNorm) if across else (RMSNorm, RMSNorm)
        return spec

    def documents(self, cu_seqlens: Tensor, max_seqlen: int, positions: Tensor, cp: CpGroup) -> PackedDocuments:
        packed = super().documents(cu_seqlens, max_seqlen, positions, cp)
        boundaries = cu_seqlens.cpu().numpy()
        packed.kernels = {
            window: self._make_kernel(boundaries, cp.size, cp.rank, positions.device, window=window)
            for window in self._windows
        }
        return packed


class PortableAttention(torch.nn.Module):
    """Implements megatron-core's CoreAttention protocol with `packed_attention`, for one kind of layer."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: Any,
        softmax_scale: float,
        model: ModelConfig,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.window = model.window_of(layer_number)
        self.rotates = layer_number not in model.rope.skip_layers
        self.has_own_base = self.window is not None and model.rope.window_base is not None
        is_scaled = self.rotates and not self.has_own_base
        self.scale = softmax_scale if is_scaled else rope.plain_scale(of_layer(model, layer_number))
        self._tp_group = pg_collection.tp
        self.softmax_offset = None  # core's name for the scores of sinks
        if model.attention_sinks:
            num_heads = model.num_attention_heads // self._tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,  # [t, heads, d]
        key: Tensor,  # [t, key heads, d]
        value: Tensor,  # [t, key heads, d]
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: PackedDocuments | None = None,
        attention_bias: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        documents = packed_seq_params
        assert documents is not None and documents.cp is not None and attention_mask is None and attention_bias is None
        rotation, kernel = None, documents.kernels[self.window]
        if self.rotates:
            rotation = documents.window_rotation if self.has_own_base else documents.rotation
            assert rotation is not None
        cp_group = documents.cp.members
        out = packed_attention(query, key, value, kernel, self.scale, cp_group, rotation, self.softmax_offset)
        return out.flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
