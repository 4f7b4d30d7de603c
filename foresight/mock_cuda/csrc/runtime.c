/* The CUDA runtime: memory, streams, events, launches. Streams and events are numbers, and everything is always done. */
#define _GNU_SOURCE
#include "mock.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread int last_error = SUCCESS;
static int fail(int error) { return last_error = error; }

/* ---- devices ---- */

API int cudaGetDeviceCount(int *count) { *count = device()->devices; return device()->devices ? SUCCESS : fail(100); }
API int cudaGetDevice(int *number) { *number = current_device; return SUCCESS; }
API int cudaSetDevice(int number) {
    if (number < 0 || number >= device()->devices) return fail(101);
    current_device = number;
    return SUCCESS;
}
API int cudaInitDevice(int number, unsigned flags, unsigned more) { return SUCCESS; }
API int cudaDeviceSynchronize(void) { note("sync", NULL, "device", 0, 0, 0, 0); return SUCCESS; }
API int cudaDriverGetVersion(int *version) { *version = device()->version; return SUCCESS; }
API int cudaRuntimeGetVersion(int *version) { *version = device()->version; return SUCCESS; }
API int cudaDeviceCanAccessPeer(int *can, int number, int peer) { *can = 1; return SUCCESS; }
API int cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return SUCCESS; }
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
API int cudaDeviceGetPCIBusId(char *text, int length, int number) { snprintf(text, (size_t)length, "0000:%02x:00.0", number + 1); return SUCCESS; }
API int cudaDeviceGetLimit(size_t *value, int limit) { *value = 1024; return SUCCESS; }
API int cudaDeviceSetLimit(int limit, size_t value) { return SUCCESS; }

/* Numbers of enum cudaDeviceAttr. An attribute that is not here is 1: a 0 would be divided by somewhere. */
API int cudaDeviceGetAttribute(int *value, int attribute, int number) {
    const Device *d = device();
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;                  /* threads per block, block x, y */
    case 4: *value = 64; break;                                    /* block z */
    case 5: *value = 2147483647; break;                            /* grid x */
    case 6: case 7: *value = 65535; break;                         /* grid y, z */
    case 8: *value = 49152; break;                                 /* shared memory per block */
    case 9: *value = 65536; break;                                 /* constant memory */
    case 10: *value = 32; break;                                   /* warp */
    case 11: *value = 2147483647; break;                           /* pitch */
    case 12: case 82: *value = 65536; break;                       /* registers per block, per multiprocessor */
    case 13: *value = 1700000; break;                              /* kHz */
    case 14: *value = 512; break;                                  /* texture alignment */
    case 16: *value = d->multiprocessors; break;
    case 17: case 18: case 20: *value = 0; break;                  /* kernel timeout, integrated, compute mode */
    case 33: *value = number + 1; break;                           /* PCI bus */
    case 34: case 50: *value = 0; break;                           /* PCI device, domain */
    case 36: *value = 2600000; break;                              /* memory's kHz */
    case 37: *value = d->bus_bits; break;
    case 38: *value = d->l2_bytes; break;
    case 39: *value = d->threads_per_multiprocessor; break;
    case 75: *value = d->major; break;
    case 76: *value = d->minor; break;
    case 81: *value = d->shared_per_multiprocessor; break;
    case 97: *value = d->shared_per_block; break;
    case 106: *value = d->blocks_per_multiprocessor; break;
    case 111: *value = 1024; break;                                /* reserved shared memory per block */
    case 116: case 132: *value = 0; break;                         /* GPUDirect RDMA, multicast */
    default: *value = 1;
    }
    return SUCCESS;
}

static void put(void *properties, size_t offset, int value) { memcpy((char *)properties + offset, &value, sizeof value); }
static void put_size(void *properties, size_t offset, size_t value) { memcpy((char *)properties + offset, &value, sizeof value); }

/* cudaDeviceProp has the same beginning in CUDA 12 and 13. Behind it, offsets of 13 come first, those of 12 second. */
static int properties_of(char *p, int number, int is_12, size_t size) {
    const Device *d = device();
    if (number < 0 || number >= d->devices) return fail(101);
    memset(p, 0, size);
    memcpy(p, d->name, sizeof d->name);
    memset(p + 256, 0x6d, 16); /* UUID */
    put(p, 256, number);
    put_size(p, 288, d->memory);
    put_size(p, 296, 49152);
    put(p, 304, 65536), put(p, 308, 32), put(p, 320, 1024);
    put(p, 324, 1024), put(p, 328, 1024), put(p, 332, 64);
    put(p, 336, 2147483647), put(p, 340, 65535), put(p, 344, 65535);
    put_size(p, 352, 65536);
    put(p, 360, d->major), put(p, 364, d->minor);
    put_size(p, 368, 512);
    const struct { int of_13, of_12, value; } rest[] = {
        {384, 388, d->multiprocessors}, {392, 400, 1}, {560, 576, 1}, {568, 584, number + 1}, {584, 600, 3}, {588, 604, 1},
        {592, 612, d->bus_bits}, {596, 616, d->l2_bytes}, {604, 624, d->threads_per_multiprocessor}, {636, 652, 1},
        {632, 648, 65536}, {688, 712, d->blocks_per_multiprocessor}, {668, 688, 1},
    };
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++) put(p, (size_t)(is_12 ? rest[i].of_12 : rest[i].of_13), rest[i].value);
    put_size(p, is_12 ? 640 : 624, (size_t)d->shared_per_multiprocessor);
    put_size(p, is_12 ? 696 : 672, (size_t)d->shared_per_block);
    return SUCCESS;
}
API int cudaGetDeviceProperties(void *p, int number) { return properties_of(p, number, 0, 1008); }
API int cudaGetDeviceProperties_v2(void *p, int number) { return properties_of(p, number, 1, 1032); }

/* ---- errors ---- */

API int cudaGetLastError(void) { int error = last_error; last_error = SUCCESS; return error; }
API int cudaPeekAtLastError(void) { return last_error; }
API const char *cudaGetErrorName(int error) { return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : error ? "cudaErrorOfTheMock" : "cudaSuccess"; }
API const char *cudaGetErrorString(int error) {
    return error == OUT_OF_MEMORY ? "out of memory" : error == NOT_SUPPORTED ? "the mock of CUDA lacks this call" : error ? "an error of the mock of CUDA" : "no error";
}

/* ---- memory ---- */

API int cudaMalloc(void **address, size_t bytes) {
    *address = take(bytes, ON_DEVICE);
    return *address || !bytes ? SUCCESS : fail(OUT_OF_MEMORY);
}
API int cudaFree(void *address) { give_back(address); return SUCCESS; }
API int cudaMallocAsync(void **address, size_t bytes, void *stream) { return cudaMalloc(address, bytes); }
API int cudaFreeAsync(void *address, void *stream) { return cudaFree(address); }
API int cudaMallocManaged(void **address, size_t bytes, unsigned flags) { return cudaMalloc(address, bytes); }
API int cudaMemGetInfo(size_t *unused, size_t *total) {
    *total = device()->memory;
    *unused = *total - bytes_in_use(current_device);
    return SUCCESS;
}
API int cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    *address = take(bytes, PINNED);
    return *address || !bytes ? SUCCESS : fail(OUT_OF_MEMORY);
}
API int cudaMallocHost(void **address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
API int cudaFreeHost(void *address) { give_back(address); return SUCCESS; }
int mock_register(void *address, size_t bytes);
API int cudaHostRegister(void *address, size_t bytes, unsigned flags) { return mock_register(address, bytes); }
API int cudaHostUnregister(void *address) { give_back(address); return SUCCESS; }
API int cudaHostGetDevicePointer(void **out, void *address, unsigned flags) { *out = address; return SUCCESS; }
API int cudaPointerGetAttributes(void *attributes, const void *address) {
    struct { int type, device; void *on_device, *on_host; } found = {0, -2, NULL, NULL}; /* memory that CUDA does not know */
    Block block;
    if (find_block(address, &block)) {
        found.type = block.kind == ON_DEVICE ? 2 : 1;
        found.device = block.device;
        found.on_device = (void *)address;
        found.on_host = block.kind == ON_DEVICE ? NULL : (void *)address;
    }
    memcpy(attributes, &found, sizeof found);
    return SUCCESS;
}

API int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    static const char *const names[] = {"host to host", "host to device", "device to host", "device to device", "default"};
    note("copy", stream, names[kind >= 0 && kind < 4 ? kind : 4], bytes, 0, 0, 0);
    copy(to, from, bytes);
    /* No kernel wrote: a bool that is read is what its memory held before. A byte that is no bool is taken for false. */
    if (kind == 2 && bytes == 1 && *(unsigned char *)to > 1) *(unsigned char *)to = 0;
    return SUCCESS;
}
int cudaStreamSynchronize(void *stream);
API int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { cudaMemcpyAsync(to, from, bytes, kind, NULL); return cudaStreamSynchronize(NULL); }
API int cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, void *stream) { return cudaMemcpyAsync(to, from, bytes, 3, stream); }
API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream) {
    note("copy", stream, "2d", width * height, 0, 0, 0);
    for (size_t i = 0; i < height && width * height <= SMALL_COPY; i++) copy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    return SUCCESS;
}
API int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, int kind) { return SUCCESS; }
API int cudaGetSymbolAddress(void **address, const void *symbol) { return (*address = take(4096, ON_DEVICE)) ? SUCCESS : fail(OUT_OF_MEMORY); }
API int cudaMemsetAsync(void *address, int value, size_t bytes, void *stream) {
    note("set", stream, "memset", bytes, 0, 0, 0);
    if (bytes <= SMALL_COPY) memset(address, value, bytes);
    return SUCCESS;
}
API int cudaMemset(void *address, int value, size_t bytes) { return cudaMemsetAsync(address, value, bytes, NULL); }

/* ---- streams, events, graphs ---- */

static void *capture_stream;

API int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { *stream = (void *)new_handle(); return SUCCESS; }
API int cudaStreamCreateWithFlags(void **stream, unsigned flags) { *stream = (void *)new_handle(); return SUCCESS; }
API int cudaStreamCreate(void **stream) { *stream = (void *)new_handle(); return SUCCESS; }
API int cudaStreamDestroy(void *stream) { return SUCCESS; }
API int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return SUCCESS; }
API int cudaStreamQuery(void *stream) { return SUCCESS; }
API int cudaStreamSynchronize(void *stream) { note("sync", stream, "stream", 0, 0, 0, 0); return SUCCESS; }
API int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { note("wait", stream, "event", (uintptr_t)event, 0, 0, 0); return SUCCESS; }
API int cudaStreamAddCallback(void *stream, void (*call)(void *, int, void *), void *data, unsigned flags) { call(stream, SUCCESS, data); return SUCCESS; }
API int cudaLaunchHostFunc(void *stream, void (*call)(void *), void *data) { call(data); return SUCCESS; }
API int cudaStreamIsCapturing(void *stream, int *status) { *status = capturing && capture_stream == stream; return SUCCESS; }
API int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph, const void ***dependencies, const void **edges, size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (id) *id = *status ? capturing : 0;
    if (graph) *graph = (void *)0x8;
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return SUCCESS;
}
API int cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **graph, const void ***dependencies, size_t *count) {
    return cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, NULL, count);
}
API int cudaStreamBeginCapture(void *stream, int mode) {
    capture_stream = stream, capturing = new_handle();
    note("capture", stream, "begins", 0, 0, 0, 0);
    return SUCCESS;
}
API int cudaStreamEndCapture(void *stream, void **graph) {
    *graph = (void *)new_handle();
    note("capture", stream, "ends", (uintptr_t)*graph, 0, 0, 0);
    capturing = 0;
    return SUCCESS;
}
API int cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }
API int cudaGraphInstantiate(void **out, void *graph, unsigned long long flags) { *out = graph; return SUCCESS; }
API int cudaGraphInstantiateWithFlags(void **out, void *graph, unsigned long long flags) { *out = graph; return SUCCESS; }
API int cudaGraphLaunch(void *graph, void *stream) { note("graph", stream, "launch", (uintptr_t)graph, 0, 0, 0); return SUCCESS; }
API int cudaGraphDestroy(void *graph) { return SUCCESS; }
API int cudaGraphExecDestroy(void *graph) { return SUCCESS; }
API int cudaGraphGetNodes(void *graph, void **nodes, size_t *count) { *count = 0; return SUCCESS; }

API int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = (void *)new_handle(); return SUCCESS; }
API int cudaEventCreate(void **event) { *event = (void *)new_handle(); return SUCCESS; }
API int cudaEventDestroy(void *event) { return SUCCESS; }
API int cudaEventElapsedTime(float *milliseconds, void *begin, void *end) { *milliseconds = 1; return SUCCESS; }
/* Torch 2.15 waits for a collective only if its event, asked at once, has not happened. Other threads ask later. */
static __thread void *just_recorded = NULL;
API int cudaEventQuery(void *event) {
    if (event != just_recorded) return SUCCESS;
    just_recorded = NULL;
    return NOT_READY;
}
API int cudaEventRecord(void *event, void *stream) {
    just_recorded = after_collective ? event : NULL;
    note("record", stream, "event", (uintptr_t)event, 0, 0, 0);
    return SUCCESS;
}
API int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
API int cudaEventSynchronize(void *event) { note("sync", NULL, "event", (uintptr_t)event, 0, 0, 0); return SUCCESS; }
API int cudaProfilerStart(void) { return SUCCESS; }
API int cudaProfilerStop(void) { return SUCCESS; }

API int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *status) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (status) *status = *function ? 0 : 1;
    return SUCCESS;
}
API int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, status);
}
