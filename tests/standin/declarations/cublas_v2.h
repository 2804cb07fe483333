// What blas.c uses of cuBLAS; see cuda_runtime_api.h.
#ifndef STANDIN_CUBLAS_V2_H
#define STANDIN_CUBLAS_V2_H

#include <cuda_runtime_api.h>

#define CUBLAS_VERSION 130100

typedef enum { CUBLAS_STATUS_SUCCESS = 0 } cublasStatus_t;
typedef enum { CUBLAS_DEFAULT_MATH = 0 } cublasMath_t;
typedef enum { CUBLAS_POINTER_MODE_HOST = 0 } cublasPointerMode_t;
typedef int cublasOperation_t, cudaDataType, cublasComputeType_t, cublasGemmAlgo_t;
typedef struct cublasContext *cublasHandle_t;

#endif
