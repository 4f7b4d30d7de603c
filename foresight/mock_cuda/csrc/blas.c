/* cuBLAS and cuBLASLt: products are noted with their shapes, and not computed. */
#include "mock.h"
#include <stdlib.h>
#include <string.h>

typedef struct { void *stream; int math_mode, pointer_mode; } Handle;
static void *stream_of(const Handle *handle) { return handle ? handle->stream : NULL; }

API int cublasCreate_v2(Handle **handle) { *handle = calloc(1, sizeof **handle); return SUCCESS; }
API int cublasDestroy_v2(Handle *handle) { free(handle); return SUCCESS; }
API int cublasSetStream_v2(Handle *handle, void *stream) { handle->stream = stream; return SUCCESS; }
API int cublasGetStream_v2(Handle *handle, void **stream) { *stream = handle->stream; return SUCCESS; }
API int cublasSetWorkspace_v2(Handle *handle, void *workspace, size_t bytes) { return SUCCESS; }
API int cublasSetMathMode(Handle *handle, int mode) { handle->math_mode = mode; return SUCCESS; }
API int cublasGetMathMode(Handle *handle, int *mode) { *mode = handle->math_mode; return SUCCESS; }
API int cublasSetPointerMode_v2(Handle *handle, int mode) { handle->pointer_mode = mode; return SUCCESS; }
API int cublasGetPointerMode_v2(Handle *handle, int *mode) { *mode = handle->pointer_mode; return SUCCESS; }
API int cublasSetAtomicsMode(Handle *handle, int mode) { return SUCCESS; }
API int cublasGetVersion_v2(Handle *handle, int *version) { *version = device()->version * 10; return SUCCESS; }
API int cublasGetProperty(int which, int *value) { *value = which ? 0 : device()->version / 1000; return SUCCESS; }

#define PRODUCT(name, a, b, c, batch) note("product", stream_of(handle), name, (uint64_t)(a), (uint64_t)(b), (uint64_t)(c), (uint64_t)(batch)); return SUCCESS

API int cublasGemmEx(Handle *handle, int ta, int tb, int m, int n, int k) { PRODUCT("gemm", m, n, k, 1); }
API int cublasGemmStridedBatchedEx(Handle *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int at,
                                   int lda, long long sa, const void *b, int bt, int ldb, long long sb, const void *beta, void *c,
                                   int ct, int ldc, long long sc, int batch) { PRODUCT("gemm", m, n, k, batch); }
#define GEMM(name) API int name(Handle *handle, int ta, int tb, int m, int n, int k) { PRODUCT("gemm", m, n, k, 1); }
GEMM(cublasSgemm_v2) GEMM(cublasDgemm_v2) GEMM(cublasSgemmEx) GEMM(cublasHgemm)
#define GEMM_BATCHED(name) API int name(Handle *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda, long long sa, \
    const void *b, int ldb, long long sb, const void *beta, void *c, int ldc, long long sc, int batch) { PRODUCT("gemm", m, n, k, batch); }
GEMM_BATCHED(cublasSgemmStridedBatched) GEMM_BATCHED(cublasDgemmStridedBatched) GEMM_BATCHED(cublasHgemmStridedBatched)
/* A complex product is four real ones. */
#define GEMM_COMPLEX(name) API int name(Handle *handle, int ta, int tb, int m, int n, int k) { PRODUCT("gemm", m, n, 4 * (uint64_t)k, 1); }
#define GEMM_COMPLEX_BATCHED(name) API int name(Handle *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda, long long sa, \
    const void *b, int ldb, long long sb, const void *beta, void *c, int ldc, long long sc, int batch) { PRODUCT("gemm", m, n, 4 * (uint64_t)k, batch); }
GEMM_COMPLEX(cublasCgemm_v2) GEMM_COMPLEX(cublasZgemm_v2)
GEMM_COMPLEX_BATCHED(cublasCgemmStridedBatched) GEMM_COMPLEX_BATCHED(cublasZgemmStridedBatched)
API int cublasGemmBatchedEx(Handle *handle, int ta, int tb, int m, int n, int k) { PRODUCT("gemm", m, n, k, 1); }
#define VECTOR(name) API int name(Handle *handle, int n) { PRODUCT("vector", n, 1, 1, 1); }
VECTOR(cublasSdot_v2) VECTOR(cublasDdot_v2) VECTOR(cublasDotEx)
VECTOR(cublasCdotc_v2) VECTOR(cublasCdotu_v2) VECTOR(cublasZdotc_v2) VECTOR(cublasZdotu_v2)
#define GEMV(name) API int name(Handle *handle, int t, int m, int n) { PRODUCT("gemv", m, n, 1, 1); }
GEMV(cublasSgemv_v2) GEMV(cublasDgemv_v2) GEMV(cublasCgemv_v2) GEMV(cublasZgemv_v2)

/* cuBLASLt: a layout keeps its shape, a description whether its operands are transposed. */
typedef struct { uint64_t type, rows, columns, batch; } Layout;
typedef struct { int compute, scale, transposed_a, transposed_b; } Description;
enum { TRANSPOSE_A = 3, TRANSPOSE_B = 4, BATCH_COUNT = 5 };

API int cublasLtCreate(void **handle) { *handle = calloc(1, sizeof(Handle)); return SUCCESS; }
API int cublasLtDestroy(void *handle) { free(handle); return SUCCESS; }
API size_t cublasLtGetVersion(void) { return (size_t)device()->version * 10; }
API int cublasLtMatmulDescCreate(Description **d, int compute, int scale) {
    *d = calloc(1, sizeof **d); (*d)->compute = compute; (*d)->scale = scale; return SUCCESS;
}
API int cublasLtMatmulDescInit_internal(Description *d, size_t size, int compute, int scale) {
    memset(d, 0, size); d->compute = compute; d->scale = scale; return SUCCESS;
}
API int cublasLtMatmulDescDestroy(Description *d) { free(d); return SUCCESS; }
API int cublasLtMatmulDescSetAttribute(Description *d, int which, const void *value, size_t size) {
    if (which == TRANSPOSE_A && size >= 4) d->transposed_a = *(const int *)value;
    if (which == TRANSPOSE_B && size >= 4) d->transposed_b = *(const int *)value;
    return SUCCESS;
}
API int cublasLtMatrixLayoutCreate(Layout **l, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    *l = malloc(sizeof **l); **l = (Layout){(uint64_t)type, rows, columns, 1}; return SUCCESS;
}
API int cublasLtMatrixLayoutInit_internal(Layout *l, size_t size, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    memset(l, 0, size); *l = (Layout){(uint64_t)type, rows, columns, 1}; return SUCCESS;
}
API int cublasLtMatrixLayoutDestroy(Layout *l) { free(l); return SUCCESS; }
API int cublasLtMatrixLayoutSetAttribute(Layout *l, int which, const void *value, size_t size) {
    if (which == BATCH_COUNT && size >= 4) l->batch = *(const uint32_t *)value;
    return SUCCESS;
}
API int cublasLtMatmulPreferenceCreate(void **p) { *p = calloc(1, 64); return SUCCESS; }
API int cublasLtMatmulPreferenceInit_internal(void *p, size_t size) { memset(p, 0, size); return SUCCESS; }
API int cublasLtMatmulPreferenceDestroy(void *p) { free(p); return SUCCESS; }
API int cublasLtMatmulPreferenceSetAttribute(void *p, int which, const void *value, size_t size) { return SUCCESS; }

typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } Heuristic;
API int cublasLtMatmulAlgoGetHeuristic(void *handle, Description *d, Layout *a, Layout *b, Layout *c, Layout *out, void *preference,
                                       int wanted, Heuristic *results, int *returned) {
    memset(results, 0, sizeof *results);
    *returned = 1;
    return SUCCESS;
}
API int cublasLtMatmul(void *handle, Description *d, const void *alpha, const void *pa, Layout *a, const void *pb, Layout *b,
                       const void *beta, const void *pc, Layout *c, void *po, Layout *out, const void *algorithm, void *workspace,
                       size_t bytes, void *stream) {
    note("product", stream, "matmul", out->rows, out->columns, d->transposed_a ? a->rows : a->columns, out->batch);
    return SUCCESS;
}
