// NVML, libnvidia-ml.so.1: torch asks it for the links between GPUs, and sft for the compute capability.
//
// Handles are device numbers plus 1.  Nothing is connected, and no process runs.

#include <cuda_runtime_api.h>

#include "standin.h"

enum { NOT_SUPPORTED = 3 };  // values of nvmlReturn_t

API int nvmlInit_v2(void) {
    return 0;
}

API int nvmlShutdown(void) {
    return 0;
}

API int nvmlDeviceGetCount_v2(unsigned *n) {
    return cudaGetDeviceCount((int *)n);
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(size_t)(index + 1);
    return 0;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
    return nvmlDeviceGetHandleByIndex_v2(0, device);
}

API int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, 0);
    return cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, 0);
}

API int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) {
    return 0;  // the caller has set the state to "not supported"
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) {
    return NOT_SUPPORTED;
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) {
    return NOT_SUPPORTED;
}

API int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *n, void *processes) {
    *n = 0;
    return 0;
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    return cudaDriverGetVersion(version);
}
