"""The elements of stored tensors that make each rank's parts, for the sizes of a real model, without data."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from sft.config import ModelConfig
from sft.hf.families import FAMILIES
from sft.hf.family import TensorMapping, views_by_tensor
from sft.weights.load import WeightPiece, pieces_of

QWEN3_8B = ModelConfig(
    num_layers=36,
    hidden_size=4096,
    ffn_hidden_size=12288,
    num_attention_heads=32,
    num_query_groups=8,
    head_dim=128,
    qk_norm=True,
)
VOCAB, PADDED, TP = 151_936, 152_064, 8
NUMBERS = 8_190_735_360  # parameters of the released model
BY_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_fc1.weight")
BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def parts_of(mapping: TensorMapping, rank: int) -> Iterator[Any]:
    """The parts of one tp rank in Megatron's form: linear_fc1 has a part of gate and a part of up."""
    whole = mapping.shape(PADDED if mapping.form == "vocabulary" else None)
    axes, matrices = len(mapping.stack), 2 if mapping.key.endswith("linear_fc1.weight") else 1
    for number in range(matrices):
        shape, offset = list(whole[axes:]), [0] * (len(whole) - axes)
        shape[0] //= matrices
        offset[0] = number * shape[0]
        axis = 0 if mapping.key.endswith(BY_ROWS) else 1 if mapping.key.endswith(BY_COLUMNS) else None
        if axis is not None:
            shape[axis] //= TP
            offset[axis] += rank * shape[axis]
        yield SimpleNamespace(
            key=mapping.key,
            data=torch.empty(shape, device="meta"),
            global_shape=whole,
            global_offset=(*mapping.stack_index, *offset),
            prepend_axis_num=axes,
        )


MAPPINGS = list(FAMILIES["qwen3"].mappings(QWEN3_8B, VOCAB))


def pieces(rank: int, key: str = "", layer: int | None = None) -> list[WeightPiece]:
    found = [mapping for mapping in MAPPINGS if key in mapping.key and layer in (None, *mapping.stack_index)]
    return [piece for mapping in found for part in parts_of(mapping, rank) for piece in pieces_of(part, mapping)]


def test_the_parts_of_eight_ranks_hold_every_number_once() -> None:
    read = {tensor.name: 0 for tensor in views_by_tensor(MAPPINGS)}
    corners = set()
    for rank in range(TP):
        kept = requested = 0
        for piece in pieces(rank):
            kept += piece.target.numel()
            if piece.view is None:
                continue
            requested += piece.target.numel()
            width = piece.view.shape[1] if piece.target.dim() == 2 else 0
            assert piece.first_row + piece.target.shape[0] <= piece.view.num_rows
            assert piece.first_column + (piece.target.shape[1] if width else 0) <= width
            if width:
                read[piece.view.name] += piece.target.numel()
                corners.add((piece.view.name, piece.first_row, piece.first_column))
            elif rank == 0:
                read[piece.view.name] += piece.target.numel()  # every rank has whole norms
        padding = 2 * 128 * 4096 if rank == TP - 1 else 0  # padding of embedding and output
        assert kept - requested == padding
    assert read == {tensor.name: math.prod(tensor.shape) for tensor in views_by_tensor(MAPPINGS)}
    assert sum(read.values()) == NUMBERS
    # For a layer, each rank has one block of queries, keys, values, output, gate, up and down; also embedding and
    # output.
    assert len(corners) == TP * (36 * 7 + 2)


def test_the_parts_of_one_rank_written_out() -> None:
    def told(key: str, layer: int | None = None, rank: int = 3) -> list[tuple[Any, ...]]:
        return [
            (piece.view and piece.view.name.split(".")[-2], piece.first_row, piece.first_column, *piece.target.shape)
            for piece in pieces(rank, key, layer)
        ]

    assert told("linear_qkv.weight", 5) == [
        ("q_proj", 1536, 0, 512, 4096),  # the four query heads of the fourth group
        ("k_proj", 384, 0, 128, 4096),
        ("v_proj", 384, 0, 128, 4096),
    ]
    assert told("linear_proj.weight", 5) == [("o_proj", 0, 1536, 4096, 512)]
    assert told("linear_fc1.weight", 5) == [("gate_proj", 4608, 0, 1536, 4096), ("up_proj", 4608, 0, 1536, 4096)]
    assert told("linear_fc2.weight", 5) == [("down_proj", 0, 4608, 4096, 1536)]
    assert told("k_layernorm.weight", 5) == [("k_norm", 0, 0, 128)]
    # Each rank has 19,008 rows; those of the last rank are 18,880 of the 151,936 tokens, and 128 rows of padding.
    assert told("word_embeddings") == [("embed_tokens", 57_024, 0, 19_008, 4096)]
    assert told("word_embeddings", rank=7) == [("embed_tokens", 133_056, 0, 18_880, 4096), (None, 0, 0, 128, 4096)]
