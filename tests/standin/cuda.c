// The runtime, libcudart: memory, copies, devices, streams, events, kernels.
//
// Memory is address space of which no page is touched unless something small is copied there.  The bytes of a device
// are counted, and taking more than there are fails as on a GPU.  Copies of up to TOUCHED bytes are made, larger ones
// are not.  Work is done when it is given, so streams and events only tell whether the host had to wait.
//
// It does not: run kernels (device memory is zero where nothing was copied to), take time, capture graphs, share memory
// between processes, or count the memory of several devices of one process apart.

#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "standin.h"

#undef cudaGetDeviceProperties

#define TOUCHED ((size_t)1 << 20)
#define PAGE ((size_t)2 << 20)  // what allocations are aligned to
#define STAGED ((size_t)64 << 10)  // what comes from pageable memory with nobody waiting
#define H100_BYTES 85029158912ull

// --- what is counted -------------------------------------------------------------------------------------------------

// Names and order as in calls.py.
static struct {
    atomic_long waits;  // of the host, for work that it had not waited for
    atomic_long kernels;
    atomic_long host_bytes;  // page-locked now
    atomic_long most_host_bytes;  // page-locked at a time
    atomic_long deep_blocks;  // thread blocks of kernels whose grid has a third axis
} counts;

API void standin_counts(long *out) {
    atomic_long *each = (atomic_long *)&counts;
    for (size_t i = 0; i < sizeof counts / sizeof *each; i++) out[i] = atomic_load(each + i);
}

// --- memory ----------------------------------------------------------------------------------------------------------

enum kind { PAGEABLE, ON_DEVICE, PAGE_LOCKED };

typedef struct {
    char *start;
    size_t bytes;
    enum kind kind;
    int is_ours;  // else it is memory of the process that was page-locked later
    int is_counted;  // among the bytes taken
    int device;
} Region;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Region *regions;  // by address
static int num_regions, room;
static size_t device_bytes = H100_BYTES, lockable = SIZE_MAX, taken;
static __thread int current_device;
static __thread cudaError_t last_error;

__attribute__((constructor)) static void start(void) {
    const char *told = getenv("STANDIN_BYTES");
    if (told) device_bytes = strtoull(told, NULL, 10);
    if ((told = getenv("STANDIN_LOCKABLE"))) lockable = strtoull(told, NULL, 10);
}

static Region *region_of(const void *address) {
    int low = 0, high = num_regions - 1;
    while (low <= high) {
        int middle = (low + high) / 2;
        Region *found = regions + middle;
        if ((char *)address < found->start) high = middle - 1;
        else if ((char *)address >= found->start + found->bytes) low = middle + 1;
        else return found;
    }
    return NULL;
}

static void insert(Region added) {
    if (num_regions == room) regions = realloc(regions, (room = room ? 2 * room : 1024) * sizeof *regions);
    int at = num_regions++;
    for (; at > 0 && regions[at - 1].start > added.start; at--) regions[at] = regions[at - 1];
    regions[at] = added;
    if (added.kind == PAGE_LOCKED) {
        counts.host_bytes += added.bytes;
        if (counts.host_bytes > counts.most_host_bytes) counts.most_host_bytes = counts.host_bytes;
    }
}

static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static char *address_space(size_t bytes) {
    size_t mapped = whole_pages(bytes) + PAGE;
    char *found = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return NULL;
    char *aligned = (char *)whole_pages((size_t)found);
    if (aligned > found) munmap(found, aligned - found);
    if (aligned < found + PAGE) munmap(aligned + mapped - PAGE, found + PAGE - aligned);
    madvise(aligned, mapped - PAGE, MADV_NOHUGEPAGE);  // a number written is not two megabytes touched
    return aligned;
}

static cudaError_t allocate(void **found, size_t bytes, enum kind kind) {
    *found = NULL;
    if (bytes == 0) return cudaSuccess;
    int is_device = kind == ON_DEVICE;
    if (is_device && take_bytes(bytes)) return last_error = cudaErrorMemoryAllocation;
    char *memory = address_space(bytes);
    if (!memory) {
        if (is_device) give_back_bytes(bytes);
        return last_error = cudaErrorMemoryAllocation;
    }
    pthread_mutex_lock(&lock);
    insert((Region){memory, bytes, kind, 1, is_device, current_device});
    pthread_mutex_unlock(&lock);
    *found = memory;
    return cudaSuccess;
}

static cudaError_t release(void *memory) {
    pthread_mutex_lock(&lock);
    Region *found = memory ? region_of(memory) : NULL;
    if (found) {
        if (found->is_ours) munmap(found->start, whole_pages(found->bytes));
        if (found->is_counted) taken -= found->bytes;
        if (found->kind == PAGE_LOCKED) counts.host_bytes -= found->bytes;
        int at = found - regions;
        memmove(regions + at, regions + at + 1, (--num_regions - at) * sizeof *regions);
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

API void standin_forget_host_peak(void) { counts.most_host_bytes = counts.host_bytes; }

int take_bytes(size_t bytes) {
    pthread_mutex_lock(&lock);
    int is_too_much = bytes > device_bytes - taken;
    if (!is_too_much) taken += bytes;
    pthread_mutex_unlock(&lock);
    return is_too_much;
}

void give_back_bytes(size_t bytes) {
    pthread_mutex_lock(&lock);
    taken -= bytes;
    pthread_mutex_unlock(&lock);
}

int reserve_addresses(void **found, size_t bytes) {
    *found = address_space(bytes);
    if (!*found) return 1;
    pthread_mutex_lock(&lock);
    insert((Region){*found, bytes, ON_DEVICE, 1, 0, current_device});
    pthread_mutex_unlock(&lock);
    return 0;
}

void release_addresses(void *start) { release(start); }
void forget_pages(void *start, size_t bytes) { madvise(start, bytes, MADV_DONTNEED); }

API cudaError_t cudaMalloc(void **p, size_t n) { return allocate(p, n, ON_DEVICE); }
API cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return allocate(p, n, ON_DEVICE); }

API cudaError_t cudaFree(void *p) {
    cudaDeviceSynchronize();  // CUDA's waits, too
    return release(p);
}

API cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return release(p); }

static int is_lockable(size_t bytes) { return bytes <= lockable && (size_t)counts.host_bytes <= lockable - bytes; }

API cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) {
    return is_lockable(n) ? allocate(p, n, PAGE_LOCKED) : (last_error = cudaErrorMemoryAllocation);
}

API cudaError_t cudaFreeHost(void *p) { return release(p); }

API cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) {
    if (!is_lockable(n)) return last_error = cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    insert((Region){p, n, PAGE_LOCKED, 0, 0, current_device});
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *p) { return release(p); }

API cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
    *left = device_bytes - taken;
    *all = device_bytes;
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *p) {
    pthread_mutex_lock(&lock);
    Region *region = region_of(p);
    *found = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .hostPointer = (void *)p};
    if (region) {
        int is_device = region->kind == ON_DEVICE;
        found->type = is_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        found->device = region->device;
        found->devicePointer = (void *)p;
        found->hostPointer = is_device ? NULL : (void *)p;
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

// --- streams and events ----------------------------------------------------------------------------------------------

// Work has numbers.  A wait counts where the last work of what is waited for has a higher number than the last wait.
typedef struct { atomic_long last, waited; } Stream;
typedef struct { Stream *stream; long last; double ms; long record; } Event;

static atomic_long last_work, all_waited;
static Stream default_stream;

static Stream *stream_of(void *s) {
    int is_default = !s || s == (void *)cudaStreamLegacy || s == (void *)cudaStreamPerThread;
    return is_default ? &default_stream : s;
}

// What is recorded while a file is open: a line for each piece of work and each event, in the order in which the host gave
// them.  Kind, stream, and the bytes of a copy or message, or the number of an event's record.
static FILE *recording;
static atomic_long records;

API int standin_record(const char *file) {
    if (recording) fclose(recording);
    recording = file ? fopen(file, "w") : NULL;
    return file && !recording;
}

static void note(char kind, const Stream *stream, long number) {
    if (recording) fprintf(recording, "%c %p %ld\n", kind, (const void *)stream, number);
}

void give_work(char kind, void *s, size_t bytes) {
    stream_of(s)->last = ++last_work;
    note(kind, stream_of(s), bytes);
}

static cudaError_t wait_for(Stream *stream, long work) {
    if (work > stream->waited && work > all_waited) counts.waits++;
    if (work > stream->waited) stream->waited = work;
    return cudaSuccess;
}

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

API cudaError_t cudaDeviceSynchronize(void) {
    if (last_work > all_waited) {
        counts.waits++;
        all_waited = last_work;
    }
    return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    *s = calloc(1, sizeof(Stream));  // kept: an event may still name it
    return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) { return wait_for(stream_of(s), stream_of(s)->last); }

API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t event, unsigned flags) {
    Event *waited = (Event *)event;
    if (!waited->stream) return cudaSuccess;
    note(WAIT, stream_of(s), waited->record);
    if (waited->last > waited->stream->waited) stream_of(s)->last = ++last_work;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

// By a name of its own: the header has other arguments for it than the library that torch was built with.
API cudaError_t capture_info(cudaStream_t s, enum cudaStreamCaptureStatus *status) __asm__("cudaStreamGetCaptureInfo");
API cudaError_t capture_info(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    return cudaStreamIsCapturing(s, status);
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void *argument) {
    function(argument);
    return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof(Event));
    return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) {
    Stream *stream = stream_of(s);
    *(Event *)event = (Event){stream, stream->last, now_ms(), ++records};
    note(RECORD, stream, records);
    return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned f) {
    return cudaEventRecord(event, s);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    Event *waited = (Event *)event;
    return waited->stream ? wait_for(waited->stream, waited->last) : cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    double passed = ((Event *)to)->ms - ((Event *)from)->ms;
    *ms = passed > 1e-3 ? passed : 1e-3;
    return cudaSuccess;
}

// --- copies ----------------------------------------------------------------------------------------------------------

static enum kind kind_of(const void *address, size_t bytes, const char *what) {
    pthread_mutex_lock(&lock);
    Region *found = region_of(address);
    enum kind kind = found ? found->kind : PAGEABLE;
    if (found && (char *)address + bytes > found->start + found->bytes)
        fprintf(stderr, "stand-in: %s of %zu bytes leaves its allocation\n", what, bytes);
    pthread_mutex_unlock(&lock);
    return kind;
}

// Whether the host waits for it: into pageable memory always, out of it where it is not small.
static int copy(void *to, const void *from, size_t bytes, enum work *work) {
    enum kind target = kind_of(to, bytes, "a copy into"), source = kind_of(from, bytes, "a copy from");
    *work = target != ON_DEVICE ? TO_HOST : source != ON_DEVICE ? TO_DEVICE : KERNEL;
    int is_out = target == PAGEABLE && source == ON_DEVICE, is_in = target == ON_DEVICE && source == PAGEABLE;
    if (bytes <= TOUCHED) memmove(to, from, bytes);
    else if (is_out) memset(to, 0, bytes);  // as if it had been made
    return is_out || (is_in && bytes > STAGED);
}

void copy_bytes(void *to, const void *from, size_t bytes) { copy(to, from, bytes, &(enum work){0}); }

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s) {
    enum work work;
    int host_waits = copy(to, from, n, &work);
    give_work(work, s, n);
    return host_waits ? cudaStreamSynchronize(s) : cudaSuccess;
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
    cudaMemcpyAsync(to, from, n, kind, NULL);
    return cudaStreamSynchronize(NULL);
}

API cudaError_t cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t s
) {
    for (size_t row = 0; row < height; row++)
        cudaMemcpyAsync((char *)to + row * to_pitch, (char *)from + row * from_pitch, width, kind, s);
    return cudaSuccess;
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t s) {
    return cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, s);
}

API cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) {
    kind_of(p, n, "a memset");
    give_work(KERNEL, s, 0);
    if (n <= TOUCHED) memset(p, value, n);
    return cudaSuccess;
}

API cudaError_t cudaMemset(void *p, int value, size_t n) { return cudaMemsetAsync(p, value, n, NULL); }

// --- devices: H100s --------------------------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int *n) {
    const char *told = getenv("STANDIN_DEVICES");
    *n = told ? atoi(told) : 1;
    return cudaSuccess;
}

API cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
    current_device = device;
    return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }

API cudaError_t cudaDeviceGetPCIBusId(char *text, int n, int device) {
    snprintf(text, n, "0000:%02d:00.0", device);
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) {
    *can = 0;
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    *found = (struct cudaDeviceProp){
        .name = "stand-in for an H100",
        .totalGlobalMem = device_bytes,
        .major = 9,
        .multiProcessorCount = 132,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .sharedMemPerBlock = 49152,
        .sharedMemPerBlockOptin = 232448,
        .sharedMemPerMultiprocessor = 233472,
        .reservedSharedMemPerBlock = 1024,
        .totalConstMem = 65536,
        .l2CacheSize = 52428800,
        .memoryBusWidth = 5120,
        .memPitch = 2147483647,
        .textureAlignment = 512,
        .asyncEngineCount = 3,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .cooperativeLaunch = 1,
        .managedMemory = 1,
        .unifiedAddressing = 1,
    };
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    static const int values[cudaDevAttrMax] = {
        [cudaDevAttrComputeCapabilityMajor] = 9,
        [cudaDevAttrMultiProcessorCount] = 132,
        [cudaDevAttrWarpSize] = 32,
        [cudaDevAttrMaxThreadsPerBlock] = 1024,
        [cudaDevAttrMaxThreadsPerMultiProcessor] = 2048,
        [cudaDevAttrMaxBlocksPerMultiprocessor] = 32,
        [cudaDevAttrMaxBlockDimX] = 1024,
        [cudaDevAttrMaxBlockDimY] = 1024,
        [cudaDevAttrMaxBlockDimZ] = 64,
        [cudaDevAttrMaxGridDimX] = 2147483647,
        [cudaDevAttrMaxGridDimY] = 65535,
        [cudaDevAttrMaxGridDimZ] = 65535,
        [cudaDevAttrMaxRegistersPerBlock] = 65536,
        [cudaDevAttrMaxSharedMemoryPerBlock] = 49152,
        [cudaDevAttrMaxSharedMemoryPerBlockOptin] = 232448,
        [cudaDevAttrMaxSharedMemoryPerMultiprocessor] = 233472,
        [cudaDevAttrReservedSharedMemoryPerBlock] = 1024,
        [cudaDevAttrL2CacheSize] = 52428800,
        [cudaDevAttrCooperativeLaunch] = 1,
        [cudaDevAttrUnifiedAddressing] = 1,
        [cudaDevAttrHostRegisterSupported] = 1,
    };
    *value = attribute > 0 && attribute < cudaDevAttrMax ? values[attribute] : 0;
    return cudaSuccess;
}

API cudaError_t cudaGetLastError(void) {
    cudaError_t found = last_error;
    last_error = cudaSuccess;
    return found;
}

API cudaError_t cudaPeekAtLastError(void) { return last_error; }

API const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the stand-in";
}

API const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// --- kernels, which do nothing ---------------------------------------------------------------------------------------

static __thread struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configuration;

void count_kernel(void *stream) {
    counts.kernels++;
    give_work(KERNEL, stream, 0);
}

static cudaError_t launch(dim3 grid, dim3 block, cudaStream_t stream) {
    unsigned threads = block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || !threads || threads > 1024) {
        fprintf(stderr, "stand-in: no grid of %u %u %u, blocks of %u threads\n", grid.x, grid.y, grid.z, threads);
        return last_error = cudaErrorInvalidConfiguration;
    }
    if (grid.z > 1) counts.deep_blocks += (long)grid.x * grid.y * grid.z;
    count_kernel(stream);
    return cudaSuccess;
}

API void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[8];
    return handle;
}

API char __cudaInitModule(void **handle) { return 1; }

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **a, size_t shared, cudaStream_t s) {
    return launch(grid, block, s);
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void **a, size_t shared, cudaStream_t s) {
    return launch(grid, block, s);
}

API cudaError_t cudaLaunchCooperativeKernel(
    const void *f, dim3 grid, dim3 block, void **a, size_t shared, cudaStream_t s
) {
    return launch(grid, block, s);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *f, void **a) {
    return launch(how->gridDim, how->blockDim, how->stream);
}

API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) {
    *kernel = (cudaKernel_t)f;
    return cudaSuccess;
}

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *f) {
    *found = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 32,
        .ptxVersion = 90,
        .binaryVersion = 90,
        .maxDynamicSharedSizeBytes = 232448,
    };
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *n, const void *f, int threads, size_t shared, unsigned flags
) {
    *n = 2;
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, threads, shared, 0);
}

// --- the way to driver.c ---------------------------------------------------------------------------------------------

API cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **found, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result
) {
    *found = dlsym(RTLD_DEFAULT, name);
    if (result) *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
