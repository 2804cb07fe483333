// libcudnn and libnvrtc, as far as Transformer Engine asks: its attention is a graph of cuDNN's, its norms are compiled
// when they are first used.
//
// Every graph can be built: there is one engine for it, which wants no workspace, and executing it is a kernel that does
// nothing.  Every program compiles, to nothing.  What cuDNN would refuse is not refused, and the memory that it works in
// is missing from what torch's allocator counts.

#include <cudnn.h>
#include <nvrtc.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

#define A_PROGRAM 16  // bytes of one that was compiled

// --- cuDNN's graphs --------------------------------------------------------------------------------------------------

API cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    *handle = calloc(1, sizeof(void *));
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    *(void **)handle = stream;
    return CUDNN_STATUS_SUCCESS;
}

API size_t cudnnGetVersion(void) { return CUDNN_VERSION; }

// 91900 is 9.19.0.
API cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value) {
    int parts[] = {CUDNN_VERSION / 10000, CUDNN_VERSION / 100 % 100, CUDNN_VERSION % 100};
    *value = parts[type];
    return CUDNN_STATUS_SUCCESS;
}

API size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }

API const char *cudnnGetErrorString(cudnnStatus_t status) { return "an error of the stand-in"; }

API void cudnnGetLastErrorString(char *text, size_t n) {
    if (n) *text = 0;
}

API cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *made) {
    *made = calloc(1, 64);
    return CUDNN_STATUS_SUCCESS;
}

// One of whatever is asked for; numbers are 0, descriptors those that are there.
API cudnnStatus_t cudnnBackendGetAttribute(
    cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t wanted,
    int64_t *found, void *values
) {
    if (found) *found = 1;
    if (!values || wanted < 1 || type == CUDNN_TYPE_BACKEND_DESCRIPTOR) return CUDNN_STATUS_SUCCESS;
    int is_wide = type == CUDNN_TYPE_INT64 || type == CUDNN_TYPE_DOUBLE || type == CUDNN_TYPE_HANDLE;
    memset(values, 0, is_wide ? 8 : 4);
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
    count_kernel(*(void **)handle);
    return CUDNN_STATUS_SUCCESS;
}

// --- the runtime compiler --------------------------------------------------------------------------------------------

API nvrtcResult nvrtcCreateProgram(
    nvrtcProgram *program, const char *source, const char *name, int n, const char *const *headers,
    const char *const *names
) {
    *program = calloc(1, 64);
    return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t *n) {
    *n = 1;
    return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char *text) {
    *text = 0;
    return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t *n) {
    *n = A_PROGRAM;
    return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *n) {
    *n = A_PROGRAM;
    return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char *expression, const char **name) {
    *name = "a kernel of the stand-in";
    return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetNumSupportedArchs(int *n) {
    *n = 1;
    return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetSupportedArchs(int *found) {
    *found = 90;  // as cuda.c says of the device
    return NVRTC_SUCCESS;
}
