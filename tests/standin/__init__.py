"""A stand-in for CUDA.  It tests GPU runs on a machine without a GPU, except for results that kernels compute.

The CUDA build of torch runs unchanged.  Before torch, the process loads a library that replaces CUDA's runtime and
driver, cuBLAS, cuDNN and NCCL.  The library implements memory, streams, events, copies and collectives between
processes.  A launched kernel does nothing, so device memory is zero unless a copy writes it.

    make test                                 tests our C code, if gcc is installed (tests/unit/repository)
    make test-standin                         runs all tests in a separate environment (6 GB: torch for CUDA)
    python -m tests.standin.memory_rows       compares measured memory with sft/estimate/memory.py, as JSON lines
    python -m tests.standin.categories        the same by category, of one rank
    python -m tests.standin.proposals         the same of the planner's proposals

As on a GPU: peak memory of torch's allocator, the number of waits for the GPU in a step, tensors on a wrong device,
NCCL calls that differ between ranks, out-of-memory errors, checkpoints and exit codes; also with Transformer Engine, if
it is installed.  Not as on a GPU: losses, gradients, times, and experts, whose sizes a kernel computes; one_rank.py
gives all experts equal shares.

    cuda.c     runtime            driver.c   driver              build.py     compiles the C files, sets the environment
    nccl.c     collectives        blas.c     matrix products     dnn.c        cuDNN's graphs, the runtime compiler
    nvml.c     NVML               fla_shapes.py  replaces the kernels of linear attention
    answers.py replaces results of kernels                       steps.py     training steps of one rank
    calls.py   calls our C code, reads its counters              declarations/ replaces absent CUDA headers
    te_modules.py, te_checkpoints.py, te_determinism.py, grouped.py  Transformer Engine, in one process
    grids.py   thread blocks of torch's flash kernel
"""
