// What blas.c uses of cuBLASLt; see cuda_runtime_api.h.
#ifndef STANDIN_CUBLASLT_H
#define STANDIN_CUBLASLT_H

#include <cublas_v2.h>

typedef struct cublasLtContext *cublasLtHandle_t;
typedef struct cublasLtProduct *cublasLtMatmulDesc_t;
typedef struct cublasLtLayout *cublasLtMatrixLayout_t;
typedef struct cublasLtPreference *cublasLtMatmulPreference_t;
typedef struct cublasLtAlgorithm cublasLtMatmulAlgo_t;
typedef struct { char all[96]; } cublasLtMatmulHeuristicResult_t;

#endif
