// libnccl: collectives between the processes of one machine, through shared memory.
//
// Every rank of a communicator tells what it is about to do; where two differ, in operation or size, both abort.  Data
// of up to SLOT bytes a rank is exchanged; of more, only the meeting takes place.  Half-precision numbers are not
// summed: each rank keeps its own.  All happens when it is given, so where the GPUs of ranks would hang their hosts do,
// and abort after STANDIN_PATIENCE_S seconds.
//
// A communicator of several ranks takes STANDIN_NCCL_BYTES of the device; standin_open_all_to_all() takes what all-to-alls
// take beyond that.  Here they are groups of messages like others.

#include <fcntl.h>
#include <nccl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "standin.h"

#define SLOT ((size_t)1 << 20)
#define MOST_RANKS 8
#define MOST_MESSAGES 256  // of a group
#define PATIENCE_S 90

typedef struct {
    atomic_int is_full;
    size_t bytes;
    char data[SLOT];
} Message;

typedef struct {
    atomic_int members, arrived, round;
    struct { char name[16]; size_t bytes; } told[MOST_RANKS];
    char slots[MOST_RANKS][SLOT];
    Message messages[MOST_RANKS][MOST_RANKS];  // from, to
} Shared;

struct ncclComm {
    int size, rank;
    size_t taken;  // bytes of the device
    Shared *shared;
};

// --- meetings --------------------------------------------------------------------------------------------------------

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static void wait_on(ncclComm_t comm, const char *what, double since) {
    const char *told = getenv("STANDIN_PATIENCE_S");
    if (seconds() - since > (told ? atof(told) : PATIENCE_S)) {
        fprintf(stderr, "stand-in: rank %d of %d waits for %s in vain\n", comm->rank, comm->size, what);
        abort();
    }
    usleep(20);
}

static void meet(ncclComm_t comm, const char *what) {
    Shared *shared = comm->shared;
    int round = shared->round;
    double since = seconds();
    if (atomic_fetch_add(&shared->arrived, 1) == comm->size - 1) {
        shared->arrived = 0;
        shared->round++;
        return;
    }
    while (shared->round == round) wait_on(comm, what, since);
}

static void agree(ncclComm_t comm, const char *name, size_t bytes) {
    Shared *shared = comm->shared;
    snprintf(shared->told[comm->rank].name, sizeof shared->told->name, "%s", name);
    shared->told[comm->rank].bytes = bytes;
    meet(comm, name);
    for (int other = 0; other < comm->size; other++) {
        if (!strcmp(shared->told[other].name, name) && shared->told[other].bytes == bytes) continue;
        fprintf(
            stderr, "stand-in: rank %d is at %s of %zu bytes, rank %d at %s of %zu\n", comm->rank, name, bytes, other,
            shared->told[other].name, shared->told[other].bytes
        );
        abort();
    }
}

// Whether the data of all ranks is in their slots now.  Where it is, the caller meets again when it has read them.
static int exchange(ncclComm_t comm, const char *name, const void *mine, size_t bytes, cudaStream_t stream) {
    give_work(MESSAGE, stream, bytes);
    if (comm->size == 1) return 0;
    agree(comm, name, bytes);
    if (bytes <= SLOT) memcpy(comm->shared->slots[comm->rank], mine, bytes);
    meet(comm, name);
    return bytes <= SLOT;
}

// --- communicators ---------------------------------------------------------------------------------------------------

API ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static atomic_int made;
    memset(id, 0, sizeof *id);
    const char *folder = getenv("STANDIN_SHARED");
    snprintf(id->internal, sizeof id->internal, "%s/%d-%d", folder ? folder : "/dev/shm", getpid(), made++);
    return ncclSuccess;
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (size > MOST_RANKS || rank < 0 || rank >= size) return ncclInvalidArgument;
    const char *told = getenv("STANDIN_NCCL_BYTES");
    size_t buffers = told && size > 1 ? strtoull(told, NULL, 10) : 0;
    if (take_bytes(buffers)) return ncclUnhandledCudaError;
    int file = open(id.internal, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared))) return ncclSystemError;
    ncclComm_t made = calloc(1, sizeof *made);
    made->size = size;
    made->rank = rank;
    made->taken = buffers;
    made->shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (made->shared == MAP_FAILED) return ncclSystemError;
    atomic_fetch_add(&made->shared->members, 1);
    for (double since = seconds(); made->shared->members < size;) wait_on(made, "the others", since);
    if (rank == 0) unlink(id.internal);  // all have it
    *comm = made;
    return ncclSuccess;
}

API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, size, id, rank, NULL);
}

API ncclResult_t ncclCommInitRankScalable(
    ncclComm_t *comm, int size, int rank, int num_ids, ncclUniqueId *id, ncclConfig_t *c
) {
    return ncclCommInitRankConfig(comm, size, *id, rank, c);
}

API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config) {
    return ncclInvalidUsage;
}

static void give_back_buffers(ncclComm_t comm) {
    give_back_bytes(comm->taken);
    comm->taken = 0;
}

API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    give_back_buffers(comm);
    munmap(comm->shared, sizeof(Shared));
    free(comm);
    return ncclSuccess;
}

API ncclResult_t ncclCommAbort(ncclComm_t comm) {
    give_back_buffers(comm);
    return ncclSuccess;  // and no more, because another thread may be in a meeting
}

API int standin_open_all_to_all(size_t bytes) { return take_bytes(bytes); }

API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

API ncclResult_t ncclCommCount(const ncclComm_t comm, int *size) {
    *size = comm->size;
    return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

API const char *ncclGetErrorString(ncclResult_t result) { return "an error of the stand-in"; }
API const char *ncclGetLastError(ncclComm_t comm) { return ""; }

// --- collectives -----------------------------------------------------------------------------------------------------

static size_t width(ncclDataType_t type) {
    switch (type) {
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 1;
    }
}

#define FOLD_AS(T)                                                                                                     \
    for (size_t i = first; i < first + n; i++) {                                                                       \
        T found = ((T *)slots[0])[i];                                                                                  \
        for (int rank = 1; rank < comm->size; rank++) {                                                                \
            T other = ((T *)slots[rank])[i];                                                                           \
            if (how == ncclMax) found = found > other ? found : other;                                                 \
            else if (how == ncclMin) found = found < other ? found : other;                                            \
            else if (how == ncclProd) found *= other;                                                                  \
            else found += other;                                                                                       \
        }                                                                                                              \
        ((T *)out)[i - first] = found;                                                                                 \
    }                                                                                                                  \
    break;

// n numbers from number `first` on.
static void fold(ncclComm_t comm, void *out, size_t first, size_t n, ncclDataType_t type, ncclRedOp_t how) {
    char(*slots)[SLOT] = comm->shared->slots;
    switch (type) {
    case ncclFloat32: FOLD_AS(float)
    case ncclFloat64: FOLD_AS(double)
    case ncclInt32: FOLD_AS(int)
    case ncclInt64: FOLD_AS(long)
    case ncclInt8: FOLD_AS(signed char)
    case ncclUint8: FOLD_AS(unsigned char)
    default: memcpy(out, slots[comm->rank] + first * width(type), n * width(type));
    }
}

API ncclResult_t ncclAllReduce(
    const void *in, void *out, size_t n, ncclDataType_t type, ncclRedOp_t how, ncclComm_t comm, cudaStream_t stream
) {
    if (exchange(comm, "all_reduce", in, n * width(type), stream)) {
        fold(comm, out, 0, n, type, how);
        meet(comm, "the end of an all_reduce");
    } else if (in != out) copy_bytes(out, in, n * width(type));
    return ncclSuccess;
}

API ncclResult_t ncclReduce(
    const void *in, void *out, size_t n, ncclDataType_t type, ncclRedOp_t how, int root, ncclComm_t comm,
    cudaStream_t stream
) {
    if (root < 0 || root >= comm->size) return ncclInvalidArgument;
    if (exchange(comm, "reduce", in, n * width(type), stream)) {
        if (comm->rank == root) fold(comm, out, 0, n, type, how);
        meet(comm, "the end of a reduce");
    } else if (in != out && comm->rank == root) copy_bytes(out, in, n * width(type));
    return ncclSuccess;
}

API ncclResult_t ncclBroadcast(
    const void *in, void *out, size_t n, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream
) {
    if (root < 0 || root >= comm->size) return ncclInvalidArgument;
    if (exchange(comm, "broadcast", in, n * width(type), stream)) {
        memcpy(out, comm->shared->slots[root], n * width(type));
        meet(comm, "the end of a broadcast");
    } else if (in != out) copy_bytes(out, in, n * width(type));
    return ncclSuccess;
}

API ncclResult_t ncclBcast(void *p, size_t n, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(p, p, n, type, root, comm, stream);
}

API ncclResult_t ncclAllGather(
    const void *in, void *out, size_t n, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream
) {
    size_t bytes = n * width(type);
    char *mine = (char *)out + comm->rank * bytes;
    if (exchange(comm, "all_gather", in, bytes, stream)) {
        for (int rank = 0; rank < comm->size; rank++)
            memcpy((char *)out + rank * bytes, comm->shared->slots[rank], bytes);
        meet(comm, "the end of an all_gather");
    } else if (in != mine) copy_bytes(mine, in, bytes);
    return ncclSuccess;
}

API ncclResult_t ncclReduceScatter(
    const void *in, void *out, size_t n, ncclDataType_t type, ncclRedOp_t how, ncclComm_t comm, cudaStream_t stream
) {
    const char *mine = (const char *)in + comm->rank * n * width(type);
    if (exchange(comm, "reduce_scatter", in, comm->size * n * width(type), stream)) {
        fold(comm, out, comm->rank * n, n, type, how);
        meet(comm, "the end of a reduce_scatter");
    } else if (mine != out) copy_bytes(out, mine, n * width(type));
    return ncclSuccess;
}

// --- messages --------------------------------------------------------------------------------------------------------

typedef struct {
    ncclComm_t comm;
    char *data;
    size_t bytes;
    int peer, is_sent, is_done;
} Transfer;

static __thread Transfer transfers[MOST_MESSAGES];
static __thread int num_transfers, depth;  // of groups within groups

static int try_to_send(Transfer *one) {
    Message *message = &one->comm->shared->messages[one->comm->rank][one->peer];
    if (message->is_full) return 0;
    message->bytes = one->bytes;
    if (one->bytes <= SLOT) memcpy(message->data, one->data, one->bytes);
    message->is_full = 1;
    return 1;
}

static int try_to_receive(Transfer *one) {
    Message *message = &one->comm->shared->messages[one->peer][one->comm->rank];
    if (!message->is_full) return 0;
    if (message->bytes != one->bytes) {
        fprintf(stderr, "stand-in: rank %d sent %zu bytes, ", one->peer, message->bytes);
        fprintf(stderr, "rank %d expects %zu\n", one->comm->rank, one->bytes);
        abort();
    }
    if (one->bytes <= SLOT) memcpy(one->data, message->data, one->bytes);
    message->is_full = 0;
    return 1;
}

// Messages from one rank to another arrive in order.
static int is_behind_another(const Transfer *one) {
    for (Transfer *first = transfers; first < one; first++)
        if (!first->is_done && first->comm == one->comm && first->peer == one->peer && first->is_sent == one->is_sent)
            return 1;
    return 0;
}

static void transfer_all(void) {
    int left = num_transfers;
    for (double since = seconds(); left;) {
        int before = left;
        for (Transfer *one = transfers; one < transfers + num_transfers; one++) {
            if (one->is_done || is_behind_another(one)) continue;
            one->is_done = one->is_sent ? try_to_send(one) : try_to_receive(one);
            left -= one->is_done;
        }
        if (left == before) wait_on(transfers[0].comm, "a message", since);
    }
    num_transfers = 0;
}

static ncclResult_t transfer(Transfer one, cudaStream_t stream) {
    give_work(MESSAGE, stream, one.bytes);
    if (one.peer < 0 || one.peer >= one.comm->size) return ncclInvalidArgument;
    if (num_transfers == MOST_MESSAGES) return ncclInvalidUsage;
    transfers[num_transfers++] = one;
    if (depth == 0) transfer_all();
    return ncclSuccess;
}

API ncclResult_t ncclGroupStart(void) {
    depth++;
    return ncclSuccess;
}

API ncclResult_t ncclGroupEnd(void) {
    if (depth == 0) return ncclInvalidUsage;  // of no group
    if (--depth == 0) transfer_all();
    return ncclSuccess;
}

API ncclResult_t ncclSend(
    const void *data, size_t n, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream
) {
    return transfer((Transfer){comm, (char *)data, n * width(type), peer, 1, 0}, stream);
}

API ncclResult_t ncclRecv(void *data, size_t n, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return transfer((Transfer){comm, data, n * width(type), peer, 0, 0}, stream);
}
