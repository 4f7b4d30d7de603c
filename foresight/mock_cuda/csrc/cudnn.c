/* cuDNN: its attention is asked for by descriptions of graphs. All of them are accepted, with one engine and no workspace: what
 * cuDNN really asks for is in foresight/memory/constants.py. */
#include "mock.h"
#include <stdlib.h>
#include <string.h>

typedef struct { int type; } Descriptor;
typedef struct { void *stream; } Handle;
enum { TYPE_NUMERICAL_NOTE = 11, TYPE_DESCRIPTOR = 15, TYPE_BEHAVIOR_NOTE = 19, HEURISTICS_RESULTS = 202 };
static const int VERSION = 91900;

API int cudnnCreate(Handle **handle) { *handle = calloc(1, sizeof **handle); return SUCCESS; }
API int cudnnDestroy(Handle *handle) { free(handle); return SUCCESS; }
API int cudnnSetStream(Handle *handle, void *stream) { handle->stream = stream; return SUCCESS; }
API int cudnnGetStream(Handle *handle, void **stream) { *stream = handle->stream; return SUCCESS; }
API size_t cudnnGetVersion(void) { return VERSION; }
API size_t cudnnGetCudartVersion(void) { return (size_t)device()->version; }
API int cudnnGetProperty(int which, int *value) { *value = which == 0 ? 9 : which == 1 ? 19 : 0; return SUCCESS; }
API const char *cudnnGetErrorString(int status) { return status ? "an error of the mock of cuDNN" : "no error"; }
API void cudnnGetLastErrorString(char *text, size_t size) { if (size) *text = 0; }

API int cudnnBackendCreateDescriptor(int type, Descriptor **d) { *d = calloc(1, sizeof **d); (*d)->type = type; return SUCCESS; }
API int cudnnBackendDestroyDescriptor(Descriptor *d) { free(d); return SUCCESS; }
API int cudnnBackendSetAttribute(Descriptor *d, int name, int type, int64_t count, const void *values) { return SUCCESS; }
API int cudnnBackendFinalize(Descriptor *d) { return SUCCESS; }
API int cudnnBackendGetAttribute(Descriptor *d, int name, int type, int64_t wanted, int64_t *count, void *values) {
    /* Without notes: an engine that says it uses tensor cores is not taken for fp32. */
    int64_t found = type == TYPE_DESCRIPTOR ? name == HEURISTICS_RESULTS : type != TYPE_NUMERICAL_NOTE && type != TYPE_BEHAVIOR_NOTE;
    if (count) *count = found;
    if (values && found && type != TYPE_DESCRIPTOR && wanted > 0) memset(values, 0, 8);
    return SUCCESS;
}
API int cudnnBackendExecute(Handle *handle, Descriptor *plan, Descriptor *pack) {
    note("kernel", handle->stream, "cudnn graph", 0, 0, 0, 0);
    return SUCCESS;
}

/* Batch norm, of vision models. It is asked for by the older functions. */
API int cudnnCreateTensorDescriptor(Descriptor **d) { return cudnnBackendCreateDescriptor(0, d); }
API int cudnnDestroyTensorDescriptor(Descriptor *d) { return cudnnBackendDestroyDescriptor(d); }
API int cudnnSetTensorNdDescriptor(Descriptor *d, int type, int dims, const int *sizes, const int *strides) { return SUCCESS; }
API int cudnnDeriveBNTensorDescriptor(Descriptor *derived, const Descriptor *x, int mode) { return SUCCESS; }
/* The size in bytes is the last argument. */
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(Handle *handle, int mode, int ops, Descriptor *x, Descriptor *z, Descriptor *y,
                                                                 Descriptor *statistics, Descriptor *activation, size_t *bytes) { *bytes = 0; return SUCCESS; }
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(Handle *handle, int mode, int ops, Descriptor *x, Descriptor *y, Descriptor *dy, Descriptor *dz,
                                                          Descriptor *dx, Descriptor *statistics, Descriptor *activation, size_t *bytes) { *bytes = 0; return SUCCESS; }
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(Handle *handle, int mode, int ops, Descriptor *activation, Descriptor *x, size_t *bytes) { *bytes = 0; return SUCCESS; }
#define BATCH_NORM(name) API int name(Handle *handle) { note("kernel", handle->stream, "cudnn batch norm", 0, 0, 0, 0); return SUCCESS; }
BATCH_NORM(cudnnBatchNormalizationForwardTrainingEx) BATCH_NORM(cudnnBatchNormalizationBackwardEx) BATCH_NORM(cudnnBatchNormalizationForwardInference)
