/* Peers for one rank on a real GPU: the mock of CUDA stands in for NCCL, and for nothing else. */
#define _GNU_SOURCE
/* What is copied lies on a real device, and a program is not to take this for the whole mock. */
#define copy unused_copy
#define mock_is_loaded unused_is_loaded
#include "state.c"
#undef copy
#include <dlfcn.h>

typedef int (*Copy)(void *, const void *, size_t, int);
typedef int (*Wait)(void);

/* What a program reads back, such as a pickled object, is small. Large tensors keep what their memory held. */
static void copy(void *to, const void *from, size_t bytes) {
    Copy device_copy = (Copy)dlsym(RTLD_DEFAULT, "cudaMemcpy");
    Wait wait = (Wait)dlsym(RTLD_DEFAULT, "cudaDeviceSynchronize");
    if (!to || !from || to == from || bytes > SMALL_COPY || !device_copy || !wait) return;
    wait();
    device_copy(to, from, bytes, 4); /* cudaMemcpyDefault */
    wait();
}

#include "nccl.c"

/* The address space of the host is the program's own. */
int is_shared(const void *address) { return 0; }
int shares_pages(size_t bytes) { return 0; }
void *map_shared(size_t bytes) { return NULL; }
void unmap_shared(void *address, size_t bytes) {}
API int mock_share_host_memory(void) { return 0; }
API size_t mock_host_peak_bytes(void) { return 0; }
