"""Says whether Transformer Engine's fused rotary kernel can rotate a recipe's queries and keys.  Needs no torch.

The kernel computes the offset of an element as an int32 (`t_id * stride_s_or_t` in fused_rope.cu, Transformer Engine up
to 2.20).  The stride is the distance between two tokens of a tensor, in elements.  If an offset exceeds an int32, the
kernel reads and writes outside of the tensor.  For such packs the te backend rotates in plain torch, as portable does.
"""

from sft.config import Config

_INT32_OFFSETS = 2**31


def token_stride(config: Config) -> int:
    """The largest distance between two tokens, in elements, of a tensor that the kernel reads or writes on a rank.

    Without qk_norm, keys are a view of the projection's output, which holds queries, keys and values: in both supported
    versions of core, the kernel gets this view.  A norm writes queries and keys to tensors of their own.

        Llama-8B: (32 + 8 + 8) heads x 128 = 6,144        Qwen3-1.7B, which has qk_norm: 16 heads x 128 = 2,048
    """
    model = config.model
    heads = model.num_attention_heads + (0 if model.qk_norm else 2 * model.resolved_query_groups)
    return heads * model.resolved_head_dim // config.parallel.tp


def why_not(config: Config) -> str | None:
    """The reason why the kernel cannot rotate this recipe's model or its longest packs; None if it can."""
    if config.model.latent_attention.is_used:
        return "rotary embedding in plain torch: of a key only the part that all heads share is rotated"
    rope = config.model.rope
    unknown = {
        "skip_layers": bool(rope.skip_layers),
        "query_scale_beta": rope.query_scale_beta is not None,
        "scaling = yarn with model.rope.fraction": rope.scaling == "yarn" and rope.fraction < 1.0,
    }
    for key in (name for name, is_used in unknown.items() if is_used):
        return f"rotary embedding in plain torch: Transformer Engine's fused kernel does not know model.rope.{key}"
    if config.parallel.dynamic_cp:
        return "rotary embedding in plain torch: core's fused kernel uses the cp group of the run, not that of a pack"
    tokens, stride = config.data.seq_length // config.parallel.cp, token_stride(config)
    if tokens * stride <= _INT32_OFFSETS:
        return None
    return (
        f"rotary embedding in plain torch: {tokens:,} tokens of a rank x {stride:,} elements exceed the int32 offsets "
        f"of Transformer Engine's fused kernel, which rotates at most {_INT32_OFFSETS // stride:,} tokens"
    )
