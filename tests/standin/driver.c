// The driver, libcuda.so.1: what torch takes from it for expandable segments, and what Triton starts kernels with.
//
// Physical memory (cuMemCreate) is counted; addresses are reserved, and mapping one to the other does nothing.  Kernels
// that Triton compiled are loaded as nothing and counted.  What is not here succeeds and does nothing: build.py makes
// every other function that cuda.h declares.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#include "standin.h"

#define GRANULARITY ((size_t)2 << 20)

static void *const SOMETHING = (void *)1;  // a handle that is not null and that nobody looks into

// --- the device ------------------------------------------------------------------------------------------------------

API CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int *n) {
    cudaGetDeviceCount(n);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int index) {
    *device = index;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int n, CUdevice device) {
    snprintf(name, n, "stand-in for an H100");
    return CUDA_SUCCESS;
}

// The runtime's attributes have the driver's numbers.
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = 1;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = SOMETHING;
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the stand-in";
    return CUDA_SUCCESS;
}

// --- memory that is mapped piece by piece ----------------------------------------------------------------------------

API CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t alignment, CUdeviceptr at, unsigned long long flags) {
    return reserve_addresses((void **)p, n) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

API CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
    release_addresses((void *)p);
    return CUDA_SUCCESS;
}

API CUresult cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t n, const CUmemAllocationProp *what, unsigned long long flags
) {
    if (take_bytes(n)) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t *taken = malloc(sizeof *taken);
    *taken = n;
    *handle = (CUmemGenericAllocationHandle)taken;
    return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    give_back_bytes(*(size_t *)handle);
    free((void *)handle);
    return CUDA_SUCCESS;
}

API CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
    forget_pages((void *)p, n);
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAllocationGranularity(
    size_t *granularity, const CUmemAllocationProp *what, CUmemAllocationGranularity_flags option
) {
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

// --- Triton's kernels ------------------------------------------------------------------------------------------------

API CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = SOMETHING;
    return CUDA_SUCCESS;
}

API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *o, void **values) {
    return cuModuleLoadData(module, image);
}

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = SOMETHING;
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = 0;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) *value = 1024;
    if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS) *value = 32;
    return CUDA_SUCCESS;
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction f, void **arguments, void **extra) {
    count_kernel(how->hStream);
    return CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(
    CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared, CUstream stream, void **arguments, void **extra
) {
    count_kernel(stream);
    return CUDA_SUCCESS;
}
