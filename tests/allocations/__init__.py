"""Counts the bytes that an allocator has given out, by what they are for, where a training step has most.

    categories.py  sorts allocations by the Python stack of each, and finds the peak
    cpu.py         allocations of torch's CPU allocator, from its profiler
    cuda.py        allocations of torch's CUDA allocator, from its history of memory
    standing.py    bytes of weights, gradients and optimizer states, by their storages

Nothing here reads sft/estimate or sft/mcore/*bytes.py: the numbers are those of the allocator.
"""
