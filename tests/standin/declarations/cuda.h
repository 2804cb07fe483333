// What driver.c uses of the driver; see cuda_runtime_api.h.
#ifndef STANDIN_CUDA_H
#define STANDIN_CUDA_H

#define CUDA_VERSION 13000

typedef enum { CUDA_SUCCESS = 0, CUDA_ERROR_OUT_OF_MEMORY = 2 } CUresult;
typedef enum {
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4,
} CUfunction_attribute;
typedef int CUdevice, CUdevice_attribute, CUjit_option, CUmemAllocationGranularity_flags;
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle;

typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUmemAllocationProp_st CUmemAllocationProp;
typedef struct { CUstream hStream; } CUlaunchConfig;

#endif
