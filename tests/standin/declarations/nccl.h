// What nccl.c uses of NCCL; see cuda_runtime_api.h.
#ifndef STANDIN_NCCL_H
#define STANDIN_NCCL_H

#include <cuda_runtime_api.h>

#define NCCL_VERSION_CODE 22809

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5
} ncclResult_t;
typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3 } ncclRedOp_t;
typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
} ncclDataType_t;

typedef struct ncclComm *ncclComm_t;
typedef struct ncclConfig ncclConfig_t;
typedef struct { char internal[128]; } ncclUniqueId;

#endif
