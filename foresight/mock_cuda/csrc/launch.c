/* Kernels: those that a library registers are known by name, and a launch is noted and not done. */
#include "mock.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* The host's function that stands for a kernel, and the kernel's name, in an open hash table that grows. */
typedef struct { const void *function; const char *name; } Kernel;
static Kernel *kernels;
static size_t room, known;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Kernel *place_of(const void *function) {
    size_t at = ((uintptr_t)function >> 4) * 2654435761u & (room - 1);
    while (kernels[at].function && kernels[at].function != function) at = (at + 1) & (room - 1);
    return &kernels[at];
}

static void learn(const void *function, const char *name) {
    pthread_mutex_lock(&lock);
    if (2 * known >= room) {
        Kernel *before = kernels;
        size_t count = room;
        room = room ? 2 * room : 1 << 16;
        kernels = calloc(room, sizeof *kernels);
        for (size_t i = 0; i < count; i++)
            if (before[i].function) *place_of(before[i].function) = before[i];
        free(before);
    }
    Kernel *place = place_of(function);
    known += !place->function;
    *place = (Kernel){function, name};
    pthread_mutex_unlock(&lock);
}

static const char *name_of(const void *function) {
    const char *name = NULL;
    pthread_mutex_lock(&lock);
    if (room) name = place_of(function)->name;
    pthread_mutex_unlock(&lock);
    return name;
}

static int launched(const void *function, Dim3 grid, Dim3 block, size_t shared, const void *stream) {
    note("kernel", stream, name_of(function), (uint64_t)grid.x * grid.y * grid.z, (uint64_t)block.x * block.y * block.z, shared, 0);
    return SUCCESS;
}

API void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }
API void __cudaRegisterFatBinaryEnd(void **handle) {}
API void __cudaUnregisterFatBinary(void **handle) { free(handle); }
API char __cudaInitModule(void **handle) { return 1; }
API void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name) { learn(function, name); }
API void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name) {}
API void __cudaRegisterManagedVar(void **handle, void **variable, char *address, const char *name) {}

static __thread struct { Dim3 grid, block; size_t shared; void *stream; } pushed;
API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return SUCCESS;
}
API int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *stream = pushed.stream;
    return SUCCESS;
}
API int __cudaGetKernel(const void **kernel, const void *function) { *kernel = function; return SUCCESS; }
API int __cudaLaunchKernel(const void *kernel, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) {
    return launched(kernel, grid, block, shared, stream);
}
API int cudaLaunchKernel(const void *function, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) {
    return launched(function, grid, block, shared, stream);
}
API int cudaLaunchCooperativeKernel(const void *function, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) {
    return launched(function, grid, block, shared, stream);
}
typedef struct { Dim3 grid, block; size_t shared; void *stream; } Launch; /* as cudaLaunchConfig_t and CUlaunchConfig begin */
API int cudaLaunchKernelExC(const Launch *launch, const void *function, void **arguments) {
    return launched(function, launch->grid, launch->block, launch->shared, launch->stream);
}

typedef struct { size_t shared, constant, local; int threads, registers, ptx, binary, cached, dynamic_shared, rest[25]; } FunctionAttributes;
API int cudaFuncGetAttributes(FunctionAttributes *attributes, const void *function) {
    const Device *d = device();
    memset(attributes, 0, sizeof *attributes);
    attributes->threads = 1024;
    attributes->registers = 32;
    attributes->ptx = attributes->binary = d->code;
    attributes->dynamic_shared = d->shared_per_block;
    return SUCCESS;
}
API int cudaFuncSetAttribute(const void *function, int attribute, int value) { return SUCCESS; }
API int cudaFuncSetCacheConfig(const void *function, int config) { return SUCCESS; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) { *blocks = 2; return SUCCESS; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared, unsigned flags) { *blocks = 2; return SUCCESS; }
API int cudaOccupancyMaxPotentialClusterSize(int *size, const void *function, const void *launch) { *size = 8; return SUCCESS; }

/* ---- kernels that a program compiles itself (Triton), through the driver ---- */

API int cuModuleLoadData(void **module, const void *image) { *module = (void *)new_handle(); return SUCCESS; }
API int cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) { return cuModuleLoadData(module, image); }
API int cuModuleLoad(void **module, const char *path) { return cuModuleLoadData(module, path); }
API int cuModuleUnload(void *module) { return SUCCESS; }
API int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = calloc(1, 1);
    learn(*function, strdup(name));
    return SUCCESS;
}
API int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* threads, registers */
    return SUCCESS;
}
API int cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
API int cuFuncSetCacheConfig(void *function, int config) { return SUCCESS; }
API int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
    return launched(function, (Dim3){gx, gy, gz}, (Dim3){bx, by, bz}, shared, stream);
}
typedef struct { unsigned gx, gy, gz, bx, by, bz, shared; void *stream; } DriverLaunch;
API int cuLaunchKernelEx(const DriverLaunch *l, void *function, void **arguments, void **extra) {
    return launched(function, (Dim3){l->gx, l->gy, l->gz}, (Dim3){l->bx, l->by, l->bz}, l->shared, l->stream);
}
API int cuLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments) {
    return launched(function, (Dim3){gx, gy, gz}, (Dim3){bx, by, bz}, shared, stream);
}
API int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *launch) { *clusters = 1; return SUCCESS; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) { *blocks = 2; return SUCCESS; }
