"""The properties of the kernels of softmax attention that decide the memory of their backward passes."""

from typing import NamedTuple


class KernelMemory(NamedTuple):
    """Properties of an attention kernel, read in its source, that decide the memory of its backward pass.

    is_flash      its keys are copied into the order of the documents' tokens; it does not store scores
    sums_queries  it also holds the gradient of queries in fp32
    sums_pairs    it also holds the gradients of keys and values in fp32
    is_unsummed   it holds the gradients of keys and values for each query head, before it sums them per key head
    copies_views  it copies its keys and values, and with several head groups also the queries of a group
    starts_all_blocks  it starts the same number of blocks for each sequence (sft/parallel/length_classes.py)
    pads_values   it needs values as wide as keys, so values, outputs and their gradients are copied and padded
    """

    is_flash: bool = True
    sums_queries: bool = False
    sums_pairs: bool = False
    is_unsummed: bool = False
    copies_views: bool = False
    starts_all_blocks: bool = False
    pads_values: bool = False


PLAIN = KernelMemory(is_flash=False)
# FlashAttention-4 may run instead, and takes no more memory.
FLASH2 = KernelMemory(sums_queries=True, is_unsummed=True, starts_all_blocks=True, pads_values=True)
FLASH4 = KernelMemory(sums_queries=True, sums_pairs=True)
FFPA = KernelMemory(copies_views=True)
