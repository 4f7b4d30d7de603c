/* cuSOLVER, and what cuBLAS factors and solves. Nothing is computed and nothing fails, since the device's error codes read as zero.
 * No workspace is asked for: what these calls really need is not known here. */
#include "mock.h"
#include <stdlib.h>

typedef struct { void *stream; } Handle;
typedef void *Any;

API int cusolverDnCreate(Handle **handle) { *handle = calloc(1, sizeof **handle); return SUCCESS; }
API int cusolverDnDestroy(Handle *handle) { free(handle); return SUCCESS; }
API int cusolverDnSetStream(Handle *handle, void *stream) { handle->stream = stream; return SUCCESS; }
#define OPAQUE(what) \
    API int cusolverDnCreate##what(void **d) { *d = (void *)new_handle(); return SUCCESS; } \
    API int cusolverDnDestroy##what(void *d) { return SUCCESS; }
OPAQUE(Params) OPAQUE(GesvdjInfo) OPAQUE(SyevjInfo)
#define IGNORED(what) API int cusolverDnX##what(void *d) { return SUCCESS; }
IGNORED(gesvdjSetMaxSweeps) IGNORED(gesvdjSetSortEig) IGNORED(gesvdjSetTolerance)
IGNORED(syevjSetMaxSweeps) IGNORED(syevjSetSortEig) IGNORED(syevjSetTolerance)

#define RUN(name) API int name(Handle *handle) { note("kernel", handle->stream, #name, 0, 0, 0, 0); return SUCCESS; }
/* A size comes back by the last of so many arguments, or the last two. */
#define A4 Any a, Any b, Any c
#define A5 A4, Any d
#define A6 A5, Any e
#define A8 A6, Any f, Any g
#define A12 A8, Any h, Any i, Any j, Any k
#define A13 A12, Any l
#define A17 A13, Any m, Any n, Any o, Any p
#define SIZED(name, before) RUN(cusolverDn##name) API int cusolverDn##name##_bufferSize(before, int *size) { *size = 0; return SUCCESS; }
#define SIZED_X(name, before) \
    RUN(cusolverDnX##name) \
    API int cusolverDnX##name##_bufferSize(before, size_t *here, size_t *host) { *here = *host = 0; return SUCCESS; }
#define COMMA ,
#define OF_TYPE(T) \
    SIZED(T##potrf, A6) SIZED(T##getrf, A6) SIZED(T##geqrf, A6) SIZED(T##sytrf, A5) SIZED(T##gesvd, A4) SIZED(T##gesvdj, A13) \
    SIZED(T##gesvdjBatched, A12) SIZED(T##gesvdaStridedBatched, A17) \
    RUN(cusolverDn##T##potrfBatched) RUN(cusolverDn##T##potrs) RUN(cusolverDn##T##potrsBatched) RUN(cusolverDn##T##getrs) \
    RUN(cublas##T##getrfBatched) RUN(cublas##T##trsm_v2) RUN(cublas##T##trsmBatched)
OF_TYPE(S) OF_TYPE(D) OF_TYPE(C) OF_TYPE(Z)
#define OF_REAL(T) SIZED(T##orgqr, A8) SIZED(T##ormqr, A12) SIZED(T##syevd, A8) SIZED(T##syevj, A8) SIZED(T##syevjBatched, A8)
#define OF_COMPLEX(T) SIZED(T##ungqr, A8) SIZED(T##unmqr, A12) SIZED(T##heevd, A8) SIZED(T##heevj, A8) SIZED(T##heevjBatched, A8)
OF_REAL(S) OF_REAL(D) OF_COMPLEX(C) OF_COMPLEX(Z)
RUN(cusolverDnXpotrs)
SIZED_X(potrf, A8 COMMA Any h) SIZED_X(geqrf, A8 COMMA Any h COMMA Any i COMMA Any j) SIZED_X(syevd, A12) SIZED_X(syevBatched, A12) SIZED_X(sytrs, A12)
SIZED_X(geev, A17 COMMA Any q)

/* What an error of cuSPARSE is called. The mock has none of its other calls. */
API const char *cusparseGetErrorString(int status) { return "an error of the mock of cuSPARSE"; }

/* Whether an argument was wrong comes back to the host, by the argument behind these. */
#define CHECKED(name, before) \
    API int name(Handle *handle, before, int *info) { *info = 0; note("kernel", handle->stream, #name, 0, 0, 0, 0); return SUCCESS; }
#define A9 A8, Any h
#define OF_TYPE_CHECKED(T) CHECKED(cublas##T##gelsBatched, A9) CHECKED(cublas##T##getrsBatched, A9) CHECKED(cublas##T##geqrfBatched, A6)
OF_TYPE_CHECKED(S) OF_TYPE_CHECKED(D) OF_TYPE_CHECKED(C) OF_TYPE_CHECKED(Z)
