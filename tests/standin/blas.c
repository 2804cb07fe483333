// libcublas and libcublasLt: a product of matrices is a kernel, which does nothing, on the stream of its handle.  Those
// of half and single precision are here; others are not counted.

#include <cublasLt.h>
#include <cublas_v2.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

API cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    *handle = calloc(1, sizeof(void *));
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    *(void **)handle = stream;
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
    *mode = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}

API size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int wanted,
    cublasLtMatmulHeuristicResult_t *results, int *found
) {
    memset(results, 0, wanted * sizeof *results);
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

// --- products --------------------------------------------------------------------------------------------------------

static cublasStatus_t multiply(void *stream) {
    count_kernel(stream);
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasGemmEx(
    cublasHandle_t handle, cublasOperation_t of_a, cublasOperation_t of_b, int m, int n, int k, const void *alpha,
    const void *a, cudaDataType type_a, int lda, const void *b, cudaDataType type_b, int ldb, const void *beta, void *c,
    cudaDataType type_c, int ldc, cublasComputeType_t type, cublasGemmAlgo_t algorithm
) {
    return multiply(*(void **)handle);
}

API cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t of_a, cublasOperation_t of_b, int m, int n, int k, const void *alpha,
    const void *a, cudaDataType type_a, int lda, long long stride_a, const void *b, cudaDataType type_b, int ldb,
    long long stride_b, const void *beta, void *c, cudaDataType type_c, int ldc, long long stride_c, int batch,
    cublasComputeType_t type, cublasGemmAlgo_t algorithm
) {
    return multiply(*(void **)handle);
}

API cublasStatus_t cublasSgemm_v2(
    cublasHandle_t handle, cublasOperation_t of_a, cublasOperation_t of_b, int m, int n, int k, const float *alpha,
    const float *a, int lda, const float *b, int ldb, const float *beta, float *c, int ldc
) {
    return multiply(*(void **)handle);
}

API cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void *alpha, const void *a,
    cublasLtMatrixLayout_t layout_a, const void *b, cublasLtMatrixLayout_t layout_b, const void *beta, const void *c,
    cublasLtMatrixLayout_t layout_c, void *d, cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t *algorithm,
    void *workspace, size_t bytes, cudaStream_t stream
) {
    return multiply(stream);
}
