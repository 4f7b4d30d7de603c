/* What the parts of the mock share: the device that it plays, its memory, and the list of what was asked of it.
 *
 * Nothing is computed. Memory of the device is address space of the host that nobody touches, but for small copies: what a
 * program sends to the device and reads back, such as a pickled object, it reads back unchanged. All else reads as zeros.
 * Declarations follow the public interfaces of CUDA 12 and 13, which need not be installed. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_READY = 600, NOT_SUPPORTED = 801 };
enum { MAX_DEVICES = 64, SMALL_COPY = 1 << 18 };

typedef struct { uint32_t x, y, z; } Dim3;

typedef struct {
    char name[256];
    int version;  /* of CUDA: 13000 is 13.0 */
    int devices;  /* how many of its kind this machine has */
    int code;     /* the capability that loaded kernels were compiled for, the highest that runs here: 86 on 8.9 */
    int major, minor, multiprocessors, threads_per_multiprocessor, blocks_per_multiprocessor;
    int shared_per_block, shared_per_multiprocessor, l2_bytes, bus_bits;
    size_t memory;
} Device;
const Device *device(void);
extern __thread int current_device;

enum { ON_DEVICE = 0, PINNED = 1, REGISTERED = 2 };
typedef struct Block { uintptr_t address; size_t bytes; int kind, device; struct Block *next; } Block;
/* Give out address space, or NULL when the budget of the device is spent. */
void *take(size_t bytes, int kind);
int give_back(void *address);
/* The block that holds an address is copied to *found; 0 if there is none. */
int find_block(const void *address, Block *found);
size_t bytes_in_use(int device);
void copy(void *to, const void *from, size_t bytes);

/* Memory of the host that shares its pages with all other such memory, see host.c. */
int shares_pages(size_t bytes);
int is_shared(const void *address);
void *map_shared(size_t bytes);
void unmap_shared(void *address, size_t bytes);

/* A number for something that the program only passes on: a stream, an event, a handle. */
uintptr_t new_handle(void);
/* Note what would have run: kinds are kernel, product, copy, set, collective, graph. Up to four sizes belong to it. */
extern unsigned long long capturing; /* the number of the CUDA graph that is being captured, or 0 */
extern __thread int after_collective; /* whether this thread has noted nothing since a collective */
void note(const char *kind, const void *stream, const char *name, uint64_t a, uint64_t b, uint64_t c, uint64_t d);
/* Say once on stderr which call the mock lacks, and return the error. */
int missing(const char *name, int error);
