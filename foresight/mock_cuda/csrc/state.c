/* The device that is played, its memory, and the list of what was asked of it. */
#define _GNU_SOURCE
#include "mock.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Device played;
__thread int current_device = 0;

static long long setting(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoll(text) : otherwise;
}

/* The environment describes the device, see foresight/mock_cuda/devices.py. Without it the mock shows no device at all. */
__attribute__((constructor)) static void read_device(void) {
    const char *name = getenv("GPTSCALE_MOCK_NAME");
    snprintf(played.name, sizeof played.name, "mock of %s", name ? name : "nothing");
    played.devices = name ? (int)setting("GPTSCALE_MOCK_DEVICES", 1) : 0;
    played.version = (int)setting("GPTSCALE_MOCK_VERSION", 13000);
    played.major = (int)setting("GPTSCALE_MOCK_MAJOR", 9);
    played.minor = (int)setting("GPTSCALE_MOCK_MINOR", 0);
    played.code = (int)setting("GPTSCALE_MOCK_CODE", 10 * played.major + played.minor);
    played.multiprocessors = (int)setting("GPTSCALE_MOCK_MULTIPROCESSORS", 132);
    played.threads_per_multiprocessor = (int)setting("GPTSCALE_MOCK_THREADS", 2048);
    played.blocks_per_multiprocessor = (int)setting("GPTSCALE_MOCK_BLOCKS", 32);
    played.shared_per_block = (int)setting("GPTSCALE_MOCK_SHARED_BLOCK", 232448);
    played.shared_per_multiprocessor = (int)setting("GPTSCALE_MOCK_SHARED_MULTIPROCESSOR", 233472);
    played.l2_bytes = (int)setting("GPTSCALE_MOCK_L2", 50 << 20);
    played.bus_bits = (int)setting("GPTSCALE_MOCK_BUS", 5120);
    played.memory = (size_t)setting("GPTSCALE_MOCK_MEMORY", 80ll << 30);
}

const Device *device(void) { return &played; }

uintptr_t new_handle(void) {
    static uintptr_t next = 0x1000;
    return __sync_fetch_and_add(&next, 16);
}

/* ---- memory ---- */

enum { BUCKETS = 4096 };
static Block *blocks[BUCKETS];
static size_t in_use[MAX_DEVICES], in_use_peak[MAX_DEVICES], pinned, pinned_peak;

static unsigned bucket_of(uintptr_t address) { return (unsigned)((address >> 12) % BUCKETS); }

static void keep(uintptr_t address, size_t bytes, int kind) {
    Block *block = malloc(sizeof *block);
    *block = (Block){address, bytes, kind, current_device, blocks[bucket_of(address)]};
    blocks[bucket_of(address)] = block;
}

void *take(size_t bytes, int kind) {
    /* CUDA gives out whole pages of 2 MiB; small requests share one, which matters little here. */
    size_t page = kind == ON_DEVICE ? 2u << 20 : 4096, whole = (bytes + page - 1) / page * page;
    size_t mapped = kind == ON_DEVICE ? whole + page : whole;
    if (!bytes) return NULL;
    pthread_mutex_lock(&lock);
    void *address = NULL;
    if (kind == PINNED || in_use[current_device] + whole <= played.memory) {
        if (kind == PINNED && shares_pages(whole)) address = map_shared(whole);
        else address = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (address == MAP_FAILED) address = NULL;
    }
    if (address) {
        if (kind == ON_DEVICE) { /* aligned to its page, as the device's memory is */
            uintptr_t start = ((uintptr_t)address + page - 1) / page * page;
            if (start > (uintptr_t)address) munmap(address, start - (uintptr_t)address);
            munmap((void *)(start + whole), (uintptr_t)address + mapped - start - whole);
            address = (void *)start;
        }
        size_t *now = kind == PINNED ? &pinned : &in_use[current_device];
        size_t *peak = kind == PINNED ? &pinned_peak : &in_use_peak[current_device];
        *now += whole;
        if (*now > *peak) *peak = *now;
        keep((uintptr_t)address, whole, kind);
    }
    pthread_mutex_unlock(&lock);
    return address;
}

int give_back(void *address) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (Block **at = &blocks[bucket_of((uintptr_t)address)]; *at; at = &(*at)->next) {
        Block *block = *at;
        if (block->address != (uintptr_t)address) continue;
        *at = block->next;
        if (is_shared(address)) unmap_shared(address, block->kind == PINNED ? block->bytes : 0);
        else if (block->kind != REGISTERED) munmap(address, block->bytes);
        if (block->kind == ON_DEVICE) in_use[block->device] -= block->bytes;
        else pinned -= block->bytes;
        free(block);
        found = 1;
        break;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

int find_block(const void *pointer, Block *found) {
    uintptr_t address = (uintptr_t)pointer;
    int is_found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BUCKETS && !is_found; i++)
        for (Block *block = blocks[i]; block; block = block->next)
            if (address >= block->address && address < block->address + block->bytes) {
                *found = *block;
                is_found = 1;
                break;
            }
    pthread_mutex_unlock(&lock);
    return is_found;
}

/* Memory of the host that a program pins after it has allocated it. */
API int mock_register(void *address, size_t bytes) {
    pthread_mutex_lock(&lock);
    keep((uintptr_t)address, bytes, REGISTERED);
    pinned += bytes;
    if (pinned > pinned_peak) pinned_peak = pinned;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

size_t bytes_in_use(int number) { return in_use[number]; }
API size_t mock_peak_bytes(int number) { return in_use_peak[number]; }
API size_t mock_pinned_peak_bytes(void) { return pinned_peak; }

/* Where small values were written, by pieces as small as torch's allocator gives out. */
enum { PIECE = 512, PIECES = 1 << 16 };
static uintptr_t written[PIECES];

void copy(void *to, const void *from, size_t bytes) {
    if (!to || !from || bytes > SMALL_COPY) return;
    memmove(to, from, bytes);
    for (uintptr_t piece = (uintptr_t)to / PIECE; piece * PIECE < (uintptr_t)to + bytes; piece++) written[piece % PIECES] = piece;
}

/* Torch gives memory to another tensor, which has none of the values that were written there: a kernel that counts would seem to
 * have counted what the last tensor held. */
static void forget(uintptr_t address, size_t bytes) {
    for (uintptr_t piece = address / PIECE; address && bytes <= SMALL_COPY && piece * PIECE < address + bytes; piece++)
        if (written[piece % PIECES] == piece) {
            written[piece % PIECES] = 0;
            memset((void *)(piece * PIECE), 0, PIECE);
        }
}

/* Its allocator is an object of C++. Of its virtual functions the third is DataPtr allocate(size_t); a DataPtr begins with the address. */
enum { VIRTUALS = 128, ABOVE = 2, ALLOCATE = 2 };
typedef void **(*Allocate)(void **result, void *self, size_t bytes);
static Allocate allocate;

static void **allocate_anew(void **result, void *self, size_t bytes) {
    allocate(result, self, bytes);
    forget((uintptr_t)*result, bytes);
    return result;
}

API void mock_watch_allocator(void) {
#ifdef __x86_64__ /* elsewhere a result that is an object comes back in another way */
    static void *functions[VIRTUALS];
    /* Python keeps the names of torch's libraries to itself. */
    void *library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void ***allocator = library ? dlsym(library, "_ZN3c104cuda20CUDACachingAllocator9allocatorE") : NULL;
    if (!allocator || !*allocator || allocate) return;
    void **theirs = **allocator;
    memcpy(functions, theirs - ABOVE, sizeof functions);
    allocate = (Allocate)theirs[ALLOCATE];
    functions[ABOVE + ALLOCATE] = (void *)allocate_anew;
    **allocator = functions + ABOVE;
#endif
}

/* ---- what was asked ---- */

static FILE *list;
static char list_path[4096];
static int listens = 0;
unsigned long long capturing = 0;
__thread int after_collective = 0;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* A process that the program forks, as a loader's worker, would write its own operations into the midst of the list. */
static void before_fork(void) {
    pthread_mutex_lock(&lock);
    if (list) fflush(list);
}
static void in_parent(void) { pthread_mutex_unlock(&lock); }
static void in_child(void) {
    list = NULL;
    *list_path = 0;
    pthread_mutex_unlock(&lock);
}
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(before_fork, in_parent, in_child); }

/* Where to write the list: a line of tab-separated fields for each call. NULL ends it. */
API void mock_list(const char *path) {
    pthread_mutex_lock(&lock);
    if (list) fclose(list);
    list = NULL;
    snprintf(list_path, sizeof list_path, "%s", path ? path : "");
    pthread_mutex_unlock(&lock);
}

/* List all calls from now on. Before, only those that a CUDA graph captures are listed. */
API void mock_listen(void) { listens = 1; }

void note(const char *kind, const void *stream, const char *name, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    after_collective = !strcmp(kind, "collective");
    if (!listens && !capturing) return;
    pthread_mutex_lock(&lock);
    if (!list && *list_path) list = fopen(list_path, "w");
    if (list)
        fprintf(list, "%.9f\t%s\t%llx\t%s\t%llu\t%llu\t%llu\t%llu\n", seconds(), kind, (unsigned long long)(uintptr_t)stream,
                name ? name : "?", (unsigned long long)a, (unsigned long long)b, (unsigned long long)c, (unsigned long long)d);
    pthread_mutex_unlock(&lock);
}

/* Where the program's own marks (a step begins, a module is entered) join the list. */
API void mock_mark(const char *name) { note("mark", NULL, name, 0, 0, 0, 0); }

/* An operation of the program begins, without a name, or ends, with its floating-point operations and bytes: record.py. */
API void mock_operation(const char *name, uint64_t a, uint64_t b, uint64_t c, uint64_t d) { note("operation", NULL, name, a, b, c, d); }

API int mock_is_loaded(void) { return 1; }

int missing(const char *name, int error) {
    static __thread const char *last;
    if (last != name) fprintf(stderr, "gptscale: mock of CUDA: the program called %s, which the mock lacks\n", name);
    last = name;
    return error;
}
