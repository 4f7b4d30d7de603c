/* The CUDA driver: what torch, Triton and DeepSpeed ask it directly. Kernels are in launch.c. */
#define _GNU_SOURCE
#include "mock.h"
#include <dlfcn.h>
#include <string.h>

int cudaDeviceGetAttribute(int *value, int attribute, int number);
int cudaSetDevice(int number);
int cudaStreamIsCapturing(void *stream, int *status);
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream);
static void *const CONTEXT = (void *)0x10; /* contexts of all devices: this, and the device's number more */

API int cuInit(unsigned flags) { return device()->devices ? SUCCESS : 100; }
API int cuDriverGetVersion(int *version) { *version = device()->version; return SUCCESS; }
API int cuDeviceGetCount(int *count) { *count = device()->devices; return SUCCESS; }
API int cuDeviceGet(int *handle, int number) { *handle = number; return SUCCESS; }
API int cuDeviceGetName(char *name, int length, int number) { strncpy(name, device()->name, (size_t)length - 1); name[length - 1] = 0; return SUCCESS; }
API int cuDeviceGetUuid(char *uuid, int number) { memset(uuid, 0x6d, 16); memcpy(uuid, &number, sizeof number); return SUCCESS; }
API int cuDeviceGetUuid_v2(char *uuid, int number) { return cuDeviceGetUuid(uuid, number); }
API int cuDeviceGetAttribute(int *value, int attribute, int number) { return cudaDeviceGetAttribute(value, attribute, number); }
API int cuDeviceTotalMem_v2(size_t *bytes, int number) { *bytes = device()->memory; return SUCCESS; }
API int cuDevicePrimaryCtxGetState(int number, unsigned *flags, int *active) { *flags = 0; *active = 1; return SUCCESS; }
API int cuDevicePrimaryCtxRetain(void **context, int number) { *context = (char *)CONTEXT + number; return SUCCESS; }
API int cuDevicePrimaryCtxRelease_v2(int number) { return SUCCESS; }
API int cuCtxGetCurrent(void **context) { *context = (char *)CONTEXT + current_device; return SUCCESS; }
API int cuCtxSetCurrent(void *context) { return context ? cudaSetDevice((int)((char *)context - (char *)CONTEXT)) : SUCCESS; }
API int cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
API int cuCtxPopCurrent_v2(void **context) { if (context) cuCtxGetCurrent(context); return SUCCESS; }
API int cuCtxPushCurrent(void *context) { return cuCtxSetCurrent(context); }
API int cuCtxPopCurrent(void **context) { return cuCtxPopCurrent_v2(context); }
API int cuCtxGetDevice(int *number) { *number = current_device; return SUCCESS; }
API int cuCtxGetLimit(size_t *value, int limit) { *value = 1 << 20; return SUCCESS; }
API int cuCtxSetLimit(int limit, size_t value) { return SUCCESS; }
API int cuCtxSynchronize(void) { note("sync", NULL, "device", 0, 0, 0, 0); return SUCCESS; }
API int cuGetErrorString(int error, const char **text) { *text = error == OUT_OF_MEMORY ? "out of memory" : "an error of the mock of CUDA"; return SUCCESS; }
API int cuGetErrorName(int error, const char **text) { return cuGetErrorString(error, text); }
API int cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
    Block block;
    int is_known = find_block((void *)address, &block);
    if (attribute == 3) *(uint64_t *)value = address; /* the device's pointer, for which Triton asks */
    else if (attribute == 2) *(unsigned *)value = is_known && block.kind == ON_DEVICE ? 2 : 1;
    else if (attribute == 9) *(int *)value = is_known ? block.device : 0;
    else *(uint64_t *)value = is_known ? (uint64_t)block.address : 0;
    return is_known || attribute == 3 ? SUCCESS : INVALID_VALUE;
}
API int cuMemGetAddressRange_v2(uint64_t *start, size_t *bytes, uint64_t address) {
    Block block;
    if (!find_block((void *)address, &block)) return INVALID_VALUE;
    if (start) *start = block.address;
    if (bytes) *bytes = block.bytes;
    return SUCCESS;
}
API int cuMemAlloc_v2(uint64_t *address, size_t bytes) { return (*address = (uint64_t)take(bytes, ON_DEVICE)) ? SUCCESS : OUT_OF_MEMORY; }
API int cuMemFree_v2(uint64_t address) { give_back((void *)address); return SUCCESS; }
API int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) { return cudaMemcpyAsync(to, (void *)from, bytes, 2, stream); }
API int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) { return cudaMemcpyAsync((void *)to, from, bytes, 1, stream); }
API int cuMemsetD32Async(uint64_t address, unsigned value, size_t count, void *stream) { note("set", stream, "memset", 4 * count, 0, 0, 0); return SUCCESS; }
API int cuMemsetD8Async(uint64_t address, unsigned char value, size_t count, void *stream) { note("set", stream, "memset", count, 0, 0, 0); return SUCCESS; }
API int cuStreamSynchronize(void *stream) { note("sync", stream, "stream", 0, 0, 0, 0); return SUCCESS; }
API int cuStreamIsCapturing(void *stream, int *status) { return cudaStreamIsCapturing(stream, status); } /* Triton 3.9 */
API int cuStreamWriteValue32(void *stream, uint64_t address, uint32_t value, unsigned flags) { return SUCCESS; }
API int cuTensorMapEncodeTiled(void) { return SUCCESS; }
API int cuTensorMapEncodeIm2col(void) { return SUCCESS; }
API int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : 500;
}
API int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) { return cuGetProcAddress_v2(name, function, version, flags, NULL); }

/* ---- memory that is mapped page by page: torch's expandable segments ---- */

typedef struct { size_t bytes; int device; } Chunk;
#include <stdlib.h>
#include <sys/mman.h>
API int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { *bytes = 2 << 20; return SUCCESS; }
API int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t fixed, uint64_t flags) {
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (uint64_t)start;
    return start == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}
API int cuMemAddressFree(uint64_t address, size_t bytes) { munmap((void *)address, bytes); return SUCCESS; }
API int cuMemCreate(uint64_t *handle, size_t bytes, const void *properties, uint64_t flags) {
    /* The budget is kept by a block of address space that nobody uses. */
    return (*handle = (uint64_t)take(bytes, ON_DEVICE)) ? SUCCESS : OUT_OF_MEMORY;
}
API int cuMemRelease(uint64_t handle) { give_back((void *)handle); return SUCCESS; }
API int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) { return SUCCESS; }
API int cuMemUnmap(uint64_t address, size_t bytes) { return SUCCESS; }
API int cuMemSetAccess(uint64_t address, size_t bytes, const void *access, size_t count) { return SUCCESS; }

/* torch looks these up together with the calls above. */
API int cuCtxFromGreenCtx(void) { return missing("cuCtxFromGreenCtx", NOT_SUPPORTED); }
API int cuDevResourceGenerateDesc(void) { return missing("cuDevResourceGenerateDesc", NOT_SUPPORTED); }
API int cuDevSmResourceSplitByCount(void) { return missing("cuDevSmResourceSplitByCount", NOT_SUPPORTED); }
API int cuDeviceGetDevResource(void) { return missing("cuDeviceGetDevResource", NOT_SUPPORTED); }
API int cuGreenCtxCreate(void) { return missing("cuGreenCtxCreate", NOT_SUPPORTED); }
API int cuGreenCtxDestroy(void) { return missing("cuGreenCtxDestroy", NOT_SUPPORTED); }
API int cuGreenCtxStreamCreate(void) { return missing("cuGreenCtxStreamCreate", NOT_SUPPORTED); }
API int cuMemExportToShareableHandle(void) { return missing("cuMemExportToShareableHandle", NOT_SUPPORTED); }
API int cuMemGetAllocationPropertiesFromHandle(void) { return missing("cuMemGetAllocationPropertiesFromHandle", NOT_SUPPORTED); }
API int cuMemImportFromShareableHandle(void) { return missing("cuMemImportFromShareableHandle", NOT_SUPPORTED); }
API int cuMemRetainAllocationHandle(void) { return missing("cuMemRetainAllocationHandle", NOT_SUPPORTED); }
API int cuMulticastAddDevice(void) { return missing("cuMulticastAddDevice", NOT_SUPPORTED); }
API int cuMulticastBindMem(void) { return missing("cuMulticastBindMem", NOT_SUPPORTED); }
API int cuMulticastCreate(void) { return missing("cuMulticastCreate", NOT_SUPPORTED); }
API int cuMulticastUnbind(void) { return missing("cuMulticastUnbind", NOT_SUPPORTED); }
