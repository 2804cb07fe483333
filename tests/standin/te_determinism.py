"""Asks Transformer Engine which attention it takes for the pack of a recipe with most scores, and prints ours beside.

    python -m tests.standin.te_determinism

A line for each GPU and recipe: {"gpu", "pack": [documents, longest], "te": whether cuDNN's attention stays with
run.deterministic, "ours": whether attention.backend = te is accepted}.  What cuDNN itself supports is not asked: its
answer is replaced.
"""

import json
from typing import Any
from unittest import mock

import torch
from transformer_engine.pytorch.attention.dot_product_attention import utils

from sft.config import Config
from sft.mcore.backends import transformer_engine
from sft.recipe.load import parse_recipe
from tests.builders import RECIPE

GPUS = ((9, 0), (10, 0))
HEADS, TOKENS = 16, (
    1024,
    2400,
    2432,
    131_072,
)  # of a pack; its documents have multiples of 32 tokens
CUDNN = 92_000


def pack(config: Config) -> tuple[int, int]:
    """The number of documents, and the length of the longest one, of a pack with most scores."""
    tokens, multiple = config.data.seq_length, config.data.doc_multiple
    packs = ((1 + (tokens - length) // multiple, length) for length in range(multiple, tokens + 1, multiple))
    return max(packs, key=lambda documents: documents[0] * documents[1] ** 2)


def stays(documents: int, longest: int) -> bool:
    asked: dict[str, Any] = dict(batch_size=documents, num_heads=HEADS, num_gqa_groups=HEADS)
    asked |= dict(
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        head_dim_qk=128,
        head_dim_v=128,
        is_training=True,
    )
    asked |= dict(
        qkv_dtype=torch.bfloat16,
        qkv_layout="thd_thd_thd",
        attn_mask_type="padding_causal",
    )
    asked |= dict(
        core_attention_bias_requires_grad=False,
        context_parallel=True,
        cp_size=2,
        deterministic=True,
    )
    found = utils.get_attention_backend(utils.AttentionParams(**asked))
    return bool(found[2])  # cuDNN's; without it, no attention is left with cp


def main() -> None:
    answer = utils.FusedAttnBackend.F16_arbitrary_seqlen.value, ""
    chosen = mock.patch.object(utils, "_get_fused_attn_backend", lambda **unused: answer)
    version = mock.patch.object(torch.backends.cudnn, "version", lambda: CUDNN)
    for gpu in GPUS:
        capability = mock.patch.object(torch.cuda, "get_device_capability", lambda *_: gpu)
        theirs = mock.patch.object(utils, "get_device_compute_capability", lambda: gpu)
        for tokens in TOKENS:
            keys = (
                "run.deterministic=true",
                f"data.seq_length={tokens}",
                f"model.num_attention_heads={HEADS}",
            )
            config = parse_recipe(RECIPE, "a.yaml", list(keys)).config
            documents, longest = pack(config)
            with chosen, version, capability, theirs:
                ours = transformer_engine._not_repeatable(config) is None
                found = stays(documents, longest)
            print(
                json.dumps(
                    {
                        "gpu": gpu,
                        "pack": [documents, longest],
                        "te": found,
                        "ours": ours,
                    }
                )
            )


if __name__ == "__main__":
    main()
