"""A stand-in for CUDA, so that what is not a number can be tested of GPU runs on a machine without a GPU.

torch's own CUDA build runs on it, unchanged: a library that is loaded before torch answers for CUDA's runtime and
driver, for cuBLAS, cuDNN and NCCL.  Memory, streams, events, copies and collectives between processes exist.  Kernels
are launched and do nothing, so device memory stays zero but for what is copied there.

    make test                                 our C alone, where there is gcc: tests/unit/test_standin_library.py
    make test-standin                         all tests, in an environment of their own (6 GB: torch for CUDA)
    python -m tests.standin.memory_rows       a table of measured memory against sft/estimate/memory.py, as JSON lines

True on it: peak memory by torch's allocator, how often a step waits for the GPU, tensors on the wrong device, NCCL
calls of ranks that do not match, an end for want of memory, checkpoints, exits; with Transformer Engine, too, where it
is installed.  Not: losses, gradients, times, and experts, whose sizes are numbers that a kernel computes.

    cuda.c     runtime            driver.c   driver              build.py     compiles them, and says how to load them
    nccl.c     collectives        blas.c     products            dnn.c        cuDNN's graphs, the runtime compiler
    answers.py what only a kernel could have told                steps.py   training steps of one rank
    calls.py   what is asked of our C, and what a process did    declarations/ instead of CUDA's headers, for C alone
"""
