"""Counts the bytes that an allocator has handed out, by category, at the peak of a training step.

    categories.py  sorts allocations by the Python stack of each allocation, and finds the peak
    recorded.py    records allocations of torch's allocators: on CPUs from its profiler, on CUDA from the memory history
    standing.py    bytes of weights, gradients and optimizer states, by their storages

Nothing here reads sft/estimate or sft/mcore/*bytes.py: the numbers come from the allocator alone.
"""
