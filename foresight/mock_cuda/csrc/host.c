/* Large memory of the host: counted, and not needed. A model's fp32 weights and optimizer state may be many times what this
 * machine has, and nothing that is simulated depends on their values. So all of it is one file of a few MiB, mapped again and
 * again. Small memory is what it always was. */
#define _GNU_SOURCE
#include "mock.h"
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

static const size_t LARGE = 16u << 20, WINDOW = 16u << 20, ROOM = 1ull << 44;
enum { MOST = 1 << 16 };

extern void *__libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void *address);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { char *address; size_t bytes; } large[MOST];
static int count, file = -1;
static char *begin, *end, *next_free;
static size_t in_use, in_use_peak;

/* From now on, large memory of the host shares its pages. */
API int mock_share_host_memory(void) {
    file = memfd_create("mock of host memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)WINDOW)) return INVALID_VALUE;
    char *room = mmap(NULL, ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return OUT_OF_MEMORY;
    end = room + ROOM;
    next_free = room + (WINDOW - (uintptr_t)room % WINDOW) % WINDOW;
    /* Few large pages, at addresses that they divide: else each 4 KiB of a tensor that is touched costs a fault, and there are
     * millions. A system that has none goes on with small pages. */
    if (mmap(next_free, WINDOW, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    memset(next_free, 0, WINDOW);
    madvise(next_free, WINDOW, MADV_COLLAPSE);
    begin = next_free;
    return SUCCESS;
}
API size_t mock_host_peak_bytes(void) { return in_use_peak; }

int shares_pages(size_t bytes) { return begin && bytes >= LARGE; }

/* Fill a place in the address space with the one file, window by window. Addresses are not used twice. */
void *map_shared(size_t bytes) {
    size_t whole = (bytes + WINDOW - 1) / WINDOW * WINDOW;
    char *address = NULL;
    pthread_mutex_lock(&lock);
    if (next_free + whole <= end) {
        address = next_free;
        next_free += whole;
    }
    pthread_mutex_unlock(&lock);
    for (size_t at = 0; address && at < whole; at += WINDOW)
        if (mmap(address + at, WINDOW, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) return NULL;
    return address;
}
void unmap_shared(void *address, size_t bytes) {
    size_t whole = (bytes + WINDOW - 1) / WINDOW * WINDOW;
    if (whole) mmap(address, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
int is_shared(const void *address) { return begin && (const char *)address >= begin && (const char *)address < end; }

/* torch allocates each tensor of the CPU by this call. */
API int posix_memalign(void **address, size_t alignment, size_t bytes) {
    int is_large = shares_pages(bytes) && count < MOST;
    *address = is_large ? map_shared(bytes) : __libc_memalign(alignment, bytes);
    if (!*address) return ENOMEM;
    if (is_large) {
        pthread_mutex_lock(&lock);
        large[count].address = *address;
        large[count++].bytes = bytes;
        in_use += bytes;
        if (in_use > in_use_peak) in_use_peak = in_use;
        pthread_mutex_unlock(&lock);
    }
    return 0;
}

API void free(void *address) {
    if (!is_shared(address)) {
        __libc_free(address);
        return;
    }
    pthread_mutex_lock(&lock);
    for (int i = count - 1; i >= 0; i--) {
        if (large[i].address != address) continue;
        unmap_shared(address, large[i].bytes);
        in_use -= large[i].bytes;
        large[i] = large[--count];
        break;
    }
    pthread_mutex_unlock(&lock);
}
