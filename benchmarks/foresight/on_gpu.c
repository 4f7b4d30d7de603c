/* Peers for one rank on a real GPU: with nccl.c and state.c of the mock of CUDA it stands in for NCCL, and for nothing else. */
#define _GNU_SOURCE
#include "mock.h"
#include <dlfcn.h>

typedef int (*Copy)(void *, const void *, size_t, int);
typedef int (*Wait)(void);

/* What a program reads back, such as a pickled object, is small. Large tensors keep what their memory held. */
void copy(void *to, const void *from, size_t bytes) {
    Copy device_copy = (Copy)dlsym(RTLD_DEFAULT, "cudaMemcpy");
    Wait wait = (Wait)dlsym(RTLD_DEFAULT, "cudaDeviceSynchronize");
    if (!to || !from || to == from || bytes > SMALL_COPY || !device_copy || !wait) return;
    wait();
    device_copy(to, from, bytes, 4); /* cudaMemcpyDefault */
    wait();
}

API int mock_share_host_memory(void) { return 0; }
API size_t mock_host_peak_bytes(void) { return 0; }
