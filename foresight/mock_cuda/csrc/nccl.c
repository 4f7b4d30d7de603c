/* NCCL: collectives are noted with their bytes. In small ones every peer is taken to hold what this rank holds, so that exchanged
 * objects (a list of options, a size) can be read. */
#include "mock.h"
#include <stdlib.h>
#include <string.h>

typedef struct { int ranks, rank, device; uint64_t sent; } Comm;
typedef struct { char bytes[128]; } UniqueId;
static const int BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* of a number of each of NCCL's types */
static size_t size_of(size_t count, int type) { return count * (size_t)(type >= 0 && type < 12 ? BYTES[type] : 1); }

static int communicators = 0; /* of more than one rank: each has buffers on the device, which torch does not know of */
API int mock_communicators(void) { return communicators; }

static int begin(Comm **comm, int ranks, int rank) {
    if (ranks > 1) __sync_fetch_and_add(&communicators, 1);
    *comm = malloc(sizeof **comm);
    **comm = (Comm){ranks, rank, current_device, 0};
    return SUCCESS;
}
API int ncclGetVersion(int *version) { *version = 22809; return SUCCESS; }
API int ncclGetUniqueId(UniqueId *id) { memset(id, 7, sizeof *id); return SUCCESS; }
API int ncclCommInitRank(Comm **comm, int ranks, UniqueId id, int rank) { return begin(comm, ranks, rank); }
API int ncclCommInitRankConfig(Comm **comm, int ranks, UniqueId id, int rank, void *config) { return begin(comm, ranks, rank); }
API int ncclCommInitRankScalable(Comm **comm, int ranks, int rank, int ids, UniqueId *id, void *config) { return begin(comm, ranks, rank); }
API int ncclCommInitAll(Comm **comms, int count, const int *devices) {
    for (int i = 0; i < count; i++) begin(&comms[i], count, i);
    return SUCCESS;
}
/* How many ranks share a color is not known to one rank of several. boot.py says it around the calls of torch that split. */
static int split_ranks = 0, split_rank = 0;
API void mock_split(int ranks, int rank) { split_ranks = ranks; split_rank = rank; }
API int ncclCommSplit(Comm *comm, int color, int key, Comm **out, void *config) {
    if (comm->ranks > 1 && !split_ranks) return missing("ncclCommSplit", 3);
    *out = NULL;
    if (color < 0) return SUCCESS; /* NCCL_SPLIT_NOCOLOR is -1 */
    return comm->ranks > 1 ? begin(out, split_ranks, split_rank) : begin(out, 1, 0);
}
API int ncclCommShrink(Comm *comm, int *excluded, int count, Comm **out, void *config, int flags) { return begin(out, comm->ranks - count, comm->rank); }
API int ncclCommFinalize(Comm *comm) { return SUCCESS; }
API int ncclCommDestroy(Comm *comm) { free(comm); return SUCCESS; }
API int ncclCommAbort(Comm *comm) { free(comm); return SUCCESS; }
API int ncclCommGetAsyncError(Comm *comm, int *error) { *error = SUCCESS; return SUCCESS; }
API int ncclCommCount(const Comm *comm, int *count) { *count = comm->ranks; return SUCCESS; }
API int ncclCommUserRank(const Comm *comm, int *rank) { *rank = comm->rank; return SUCCESS; }
API int ncclCommCuDevice(const Comm *comm, int *number) { *number = comm->device; return SUCCESS; }
API int ncclCommRegister(Comm *comm, void *buffer, size_t size, void **handle) { *handle = (void *)new_handle(); return SUCCESS; }
API int ncclCommDeregister(Comm *comm, void *handle) { return SUCCESS; }
API int ncclCommWindowRegister(Comm *comm, void *buffer, size_t size, void **window, int flags) { *window = (void *)new_handle(); return SUCCESS; }
API int ncclCommWindowDeregister(Comm *comm, void *window) { return SUCCESS; }
API int ncclMemAlloc(void **address, size_t bytes) { return (*address = take(bytes, ON_DEVICE)) ? SUCCESS : 1; }
API int ncclMemFree(void *address) { give_back(address); return SUCCESS; }
API const char *ncclGetErrorString(int error) { return error ? "an error of the mock of NCCL" : "no error"; }
API const char *ncclGetLastError(const Comm *comm) { return ""; }

/* In one group every rank may broadcast to all others: so torch gathers since 2.15. What a peer sends is then what this rank sends. */
enum { GROUP_MAX = 4096 };
static __thread struct { void *out; size_t bytes; } received[GROUP_MAX], own;
static __thread int group_depth = 0, received_count = 0;
static void broadcast_in_group(const void *in, void *out, size_t bytes, int is_root) {
    if (is_root) own.out = (void *)in, own.bytes = bytes;
    else if (group_depth && received_count < GROUP_MAX) received[received_count].out = out, received[received_count++].bytes = bytes;
}
API int ncclGroupStart(void) { if (!group_depth++) own.out = NULL, received_count = 0; return SUCCESS; }
API int ncclGroupEnd(void) {
    if (--group_depth || !own.out) return SUCCESS;
    for (int i = 0; i < received_count; i++)
        if (received[i].bytes == own.bytes) copy(received[i].out, own.out, own.bytes);
    return SUCCESS;
}
API int ncclGroupSimulateEnd(void *info) { return SUCCESS; }
API int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, Comm *comm) { *op = 5; return SUCCESS; }
API int ncclRedOpDestroy(int op, Comm *comm) { return SUCCESS; }

#define NOTE_TO(name, bytes, peer) note("collective", stream, name, (uint64_t)(bytes), (uint64_t)comm->ranks, (uint64_t)comm->rank, (uint64_t)(peer))
#define NOTE(name, bytes) NOTE_TO(name, bytes, 0)
API int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, Comm *comm, void *stream) {
    NOTE("all-reduce", size_of(count, type));
    copy(out, in, size_of(count, type));
    return SUCCESS;
}
API int ncclReduce(const void *in, void *out, size_t count, int type, int op, int root, Comm *comm, void *stream) {
    NOTE("reduce", size_of(count, type));
    if (comm->rank == root) copy(out, in, size_of(count, type));
    return SUCCESS;
}
API int ncclBroadcast(const void *in, void *out, size_t count, int type, int root, Comm *comm, void *stream) {
    NOTE("broadcast", size_of(count, type));
    copy(out, in, size_of(count, type));
    broadcast_in_group(in, out, size_of(count, type), comm->rank == root);
    return SUCCESS;
}
API int ncclBcast(void *buffer, size_t count, int type, int root, Comm *comm, void *stream) {
    NOTE("broadcast", size_of(count, type));
    return SUCCESS;
}
API int ncclAllGather(const void *in, void *out, size_t count, int type, Comm *comm, void *stream) {
    size_t bytes = size_of(count, type);
    NOTE("all-gather", bytes * (size_t)comm->ranks);
    for (int i = 0; i < comm->ranks && bytes * (size_t)comm->ranks <= SMALL_COPY; i++) copy((char *)out + bytes * (size_t)i, in, bytes);
    return SUCCESS;
}
API int ncclReduceScatter(const void *in, void *out, size_t count, int type, int op, Comm *comm, void *stream) {
    size_t bytes = size_of(count, type);
    NOTE("reduce-scatter", bytes * (size_t)comm->ranks);
    copy(out, (const char *)in + bytes * (size_t)comm->rank, bytes);
    return SUCCESS;
}
API int ncclAlltoAll(const void *in, void *out, size_t count, int type, Comm *comm, void *stream) {
    NOTE("all-to-all", size_of(count, type) * (size_t)comm->ranks);
    copy(out, in, size_of(count, type) * (size_t)comm->ranks);
    return SUCCESS;
}
API int ncclSend(const void *in, size_t count, int type, int peer, Comm *comm, void *stream) {
    NOTE_TO("send", size_of(count, type), peer);
    return SUCCESS;
}
API int ncclRecv(void *out, size_t count, int type, int peer, Comm *comm, void *stream) {
    NOTE_TO("receive", size_of(count, type), peer);
    return SUCCESS;
}
