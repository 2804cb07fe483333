"""Counts the bytes that an allocator has given out, by what they are for, where a training step has most.

    categories.py  sorts allocations by the Python stack of each, and finds the peak
    recorded.py    allocations of torch's allocators: of the CPU from its profiler, of CUDA from its history of memory
    standing.py    bytes of weights, gradients and optimizer states, by their storages

Nothing here reads sft/estimate or sft/mcore/*bytes.py: the numbers are those of the allocator.
"""
