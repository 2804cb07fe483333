// What dnn.c uses of cuDNN; see cuda_runtime_api.h.
#ifndef STANDIN_CUDNN_H
#define STANDIN_CUDNN_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#define CUDNN_VERSION 91900

typedef enum { CUDNN_STATUS_SUCCESS = 0 } cudnnStatus_t;
typedef enum libraryPropertyType_t { MAJOR_VERSION = 0, MINOR_VERSION = 1, PATCH_LEVEL = 2 } libraryPropertyType;
typedef enum {
    CUDNN_TYPE_HANDLE = 0,
    CUDNN_TYPE_INT64 = 3,
    CUDNN_TYPE_DOUBLE = 5,
    CUDNN_TYPE_BACKEND_DESCRIPTOR = 15,
} cudnnBackendAttributeType_t;
typedef int cudnnBackendDescriptorType_t, cudnnBackendAttributeName_t;
typedef struct cudnnContext *cudnnHandle_t;
typedef void *cudnnBackendDescriptor_t;

#endif
