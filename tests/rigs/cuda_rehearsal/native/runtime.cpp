// The CUDA runtime: devices, memory, streams, events, captures, launches.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>

#include "device.h"

using namespace standin;

// --- the device ------------------------------------------------------------------------------------------------------

static const char* const kName = "stand-in for an NVIDIA H100";
enum { kVersion = 13000 };

EXPORT cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int* index) { return *index = 0, cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int index) { return index == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice); }
EXPORT cudaError_t cudaDriverGetVersion(int* version) { return *version = kVersion, cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return *version = kVersion, cudaSuccess; }

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int) {
  memset(of, 0, sizeof *of);
  strcpy(of->name, kName);
  of->major = 9;
  of->totalGlobalMem = kMemory;
  of->sharedMemPerBlock = 49152;
  of->sharedMemPerBlockOptin = 232448;
  of->sharedMemPerMultiprocessor = 233472;
  of->regsPerBlock = of->regsPerMultiprocessor = 65536;
  of->warpSize = 32;
  of->maxThreadsPerBlock = of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
  of->maxThreadsDim[2] = 64;
  of->maxGridSize[0] = 2147483647;
  of->maxGridSize[1] = of->maxGridSize[2] = 65535;
  of->maxThreadsPerMultiProcessor = 2048;
  of->maxBlocksPerMultiProcessor = 32;
  of->multiProcessorCount = 132;
  of->totalConstMem = 65536;
  of->textureAlignment = 512;
  of->memoryBusWidth = 5120;
  of->l2CacheSize = 50 << 20;
  of->asyncEngineCount = 3;
  of->canMapHostMemory = of->concurrentKernels = of->unifiedAddressing = of->streamPrioritiesSupported = 1;
  of->managedMemory = of->cooperativeLaunch = of->memoryPoolsSupported = of->clusterLaunch = 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
  static const std::map<int, int> known = {
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxRegistersPerBlock, 65536},
      {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrMemoryClockRate, 2619000},
      {cudaDevAttrGlobalMemoryBusWidth, 5120},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
      {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
      {cudaDevAttrMemoryPoolsSupported, 1},
  };
  auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  return snprintf(text, size, "0000:00:00.0"), cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }

EXPORT cudaError_t cudaGetLastError() { return last_error(true); }
EXPORT cudaError_t cudaPeekAtLastError() { return last_error(false); }
EXPORT const char* cudaGetErrorName(cudaError_t error) {
  static thread_local char text[64];
  return snprintf(text, sizeof text, "cudaError %d", error), text;
}
EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch ((int)error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    default: return cudaGetErrorName(error);
  }
}

// --- memory ----------------------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return *total = kMemory, *free = kMemory - memory_used(), cudaSuccess;
}

EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  LOCKED;
  if (auto error = refused_by_captures("cudaMalloc")) return error;
  if (memory_used() + bytes > kMemory) return failed(cudaErrorMemoryAllocation);
  *pointer = allocate(bytes, true);
  record("MALLOC %zu", bytes);
  return *pointer ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

EXPORT cudaError_t cudaFree(void* pointer) {
  LOCKED;
  if (!pointer) return cudaSuccess;
  if (auto error = refused_by_captures("cudaFree")) return error;
  settle_all();
  record("FREE");
  return release(pointer, true) ? cudaSuccess : failed(cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  LOCKED;
  if (auto error = refused_by_captures("cudaHostAlloc")) return error;
  *pointer = allocate(bytes, false);
  record("HOSTALLOC %zu", bytes);
  return *pointer ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

EXPORT cudaError_t cudaFreeHost(void* pointer) {
  LOCKED;
  if (auto error = refused_by_captures("cudaFreeHost")) return error;
  settle_all();
  release(pointer, false);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  LOCKED;
  return pin(pointer, bytes), cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  LOCKED;
  settle_all();
  return unpin(pointer), cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of, const void* pointer) {
  LOCKED;
  memset(of, 0, sizeof *of);
  bool on_device = is_device(pointer), pinned = is_pinned(pointer);
  of->type = on_device ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  of->device = on_device || pinned ? 0 : -2;
  of->devicePointer = on_device || pinned ? (void*)pointer : nullptr;
  of->hostPointer = on_device ? nullptr : (void*)pointer;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void* handle) {
  LOCKED;
  char name[200];
  snprintf(name, sizeof name, "MEMCPY %s->%s %zu", place(from), place(to), bytes);
  return enqueue(handle, Work{Kind::copy, to, from, bytes, 0, name});
}

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  LOCKED;
  if (auto error = refused_by_captures("cudaMemcpy")) return error;
  settle_all();
  record("MEMCPY %s->%s %zu", place(from), place(to), bytes);
  record("SYNC cudaMemcpy");
  memcpy(to, from, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, void* handle) {
  LOCKED;
  return enqueue(handle, Work{Kind::fill, to, nullptr, bytes, value, "MEMSET " + std::to_string(bytes)});
}

EXPORT cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  LOCKED;
  if (auto error = refused_by_captures("cudaMemset")) return error;
  record("MEMSET %zu", bytes);
  memset(to, value, bytes);
  return cudaSuccess;
}

// --- streams and events ----------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaStreamCreate(void** handle) {
  LOCKED;
  return *handle = new_stream(), cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(void** handle, unsigned) { return cudaStreamCreate(handle); }
EXPORT cudaError_t cudaStreamCreateWithPriority(void** handle, unsigned, int) { return cudaStreamCreate(handle); }
EXPORT cudaError_t cudaStreamDestroy(void*) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(void*, int* priority) { return *priority = 0, cudaSuccess; }

static cudaError_t refused(Stream* one, const char* what) {
  if (one->capture)
    return refused_by(one->capture, cudaErrorStreamCaptureUnsupported,
                      (std::string(what) + " of a stream that is captured").c_str());
  return refused_by_captures(what);
}

EXPORT cudaError_t cudaStreamQuery(void* handle) {
  LOCKED;
  if (auto error = refused(stream(handle), "cudaStreamQuery")) return error;
  settle(stream(handle));
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(void* handle) {
  LOCKED;
  if (auto error = refused(stream(handle), "cudaStreamSynchronize")) return error;
  settle(stream(handle));
  record("SYNC stream %d", stream(handle)->id);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  LOCKED;
  cudaError_t error;
  if (any_capture(&error, "cudaDeviceSynchronize during a capture")) return error;
  settle_all();
  record("SYNC device");
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(void** handle, unsigned) { return *handle = new Event, cudaSuccess; }
EXPORT cudaError_t cudaEventCreate(void** handle) { return *handle = new Event, cudaSuccess; }
EXPORT cudaError_t cudaEventDestroy(void*) { return cudaSuccess; }

EXPORT cudaError_t cudaEventRecord(void* handle, void* on) {
  LOCKED;
  auto* event = (Event*)handle;
  event->stream = stream(on);
  event->capture = event->stream->capture;
  event->capture_id = event->capture ? event->capture->id : 0;
  event->recorded = true;
  event->asked = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(void* handle, void* on, unsigned) { return cudaEventRecord(handle, on); }

static cudaError_t refused(const Event* event, const char* what) {
  if (is_captured(event))
    return refused_by(event->capture, cudaErrorCapturedEvent, (std::string(what) + " of a captured event").c_str());
  return refused_by_captures(what);
}

EXPORT cudaError_t cudaEventQuery(void* handle) {
  LOCKED;
  auto* event = (Event*)handle;
  if (auto error = refused(event, "cudaEventQuery")) return error;
  if (!event->recorded) return cudaSuccess;
  if (late && event->asked++ < 2) return failed(cudaErrorNotReady);
  settle(event->stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(void* handle) {
  LOCKED;
  auto* event = (Event*)handle;
  if (auto error = refused(event, "cudaEventSynchronize")) return error;
  if (event->stream) settle(event->stream);
  record("SYNC event");
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 1, cudaSuccess; }

EXPORT cudaError_t cudaStreamWaitEvent(void* handle, void* on, unsigned) {
  LOCKED;
  Stream* one = stream(handle);
  auto* event = (Event*)on;
  if (is_captured(event)) {
    if (one->capture && one->capture != event->capture)
      return refused_by(one->capture, cudaErrorStreamCaptureMerge, "merge of two captures");
    if (!one->capture) record("CAPTURE joined by stream %d", one->id);
    one->capture = event->capture;
    return cudaSuccess;
  }
  if (one->capture && event->recorded)
    return refused_by(one->capture, cudaErrorStreamCaptureIsolation, "wait of a captured stream for outside work");
  if (event->stream && event->stream != one) settle(event->stream);
  record("WAIT stream %d for stream %d", one->id, event->stream ? event->stream->id : -1);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
  LOCKED;
  record("HOSTFUNC");
  if (!stream(handle)->capture) function(data);
  return cudaSuccess;
}

// --- captures and graphs ---------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaStreamBeginCapture(void* handle, int mode) {
  LOCKED;
  return begin_capture(handle, mode, new Graph);
}
EXPORT cudaError_t cudaStreamBeginCaptureToGraph(void* handle, void* graph, void*, void*, size_t, int mode) {
  LOCKED;
  return begin_capture(handle, mode, (Graph*)graph);
}
EXPORT cudaError_t cudaStreamEndCapture(void* handle, void** graph) {
  LOCKED;
  return end_capture(handle, (Graph**)graph);
}
EXPORT cudaError_t cudaStreamIsCapturing(void* handle, int* status) {
  LOCKED;
  Capture* capture = stream(handle)->capture;
  return *status = capture ? capture->status : cudaStreamCaptureStatusNone, cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(void* handle, int* status, unsigned long long* id, void** graph,
                                            const void*** dependencies, const void** edges, size_t* count) {
  LOCKED;
  Capture* capture = stream(handle)->capture;
  *status = capture ? capture->status : cudaStreamCaptureStatusNone;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? capture->graph : nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(int* mode) {
  int before = capture_mode;
  return capture_mode = *mode, *mode = before, cudaSuccess;
}
EXPORT cudaError_t cudaGraphCreate(void** graph, unsigned) { return *graph = new Graph, cudaSuccess; }
EXPORT cudaError_t cudaGraphGetNodes(void* graph, void**, size_t* count) {
  return *count = ((Graph*)graph)->works.size(), cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(void** made, void* graph, unsigned long long) {
  return *made = new Graph(*(Graph*)graph), cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(void** made, void* graph, unsigned long long flags) {
  return cudaGraphInstantiate(made, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(void* made, void* handle) {
  LOCKED;
  auto* graph = (Graph*)made;
  settle(stream(handle));
  if (replays_copy)
    for (auto& work : graph->works) perform(work);
  record("REPLAY of %zu nodes", graph->works.size());
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(void*) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(void*) { return cudaSuccess; }

// --- launches --------------------------------------------------------------------------------------------------------

struct Size {
  unsigned x, y, z;
};

static std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> found;  // made by the first library that registers one
  return found;
}

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                   int*) {
  kernels()[host] = name;
}

static thread_local struct {
  Size grid, block;
  size_t shared;
  void* stream;
} configuration;

EXPORT unsigned __cudaPushCallConfiguration(Size grid, Size block, size_t shared, void* handle) {
  configuration = {grid, block, shared, handle};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(Size* grid, Size* block, size_t* shared, void* handle) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void**)handle = configuration.stream;
  return cudaSuccess;
}

static cudaError_t launch(const void* function, void* handle) {
  LOCKED;
  auto found = kernels().find(function);
  std::string name = found == kernels().end() ? "of no name" : found->second;
  return enqueue(handle, Work{Kind::kernel, nullptr, nullptr, 0, 0, "KERNEL " + name});
}

EXPORT cudaError_t cudaLaunchKernel(const void* function, Size, Size, void**, size_t, void* handle) {
  return launch(function, handle);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, Size, Size, void**, size_t, void* handle) {
  return launch(function, handle);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function, void**) {
  return launch(function, (void*)how->stream);
}
EXPORT cudaError_t __cudaGetKernel(const void** kernel, const void* function) {
  return *kernel = function, cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(const void* kernel, Size, Size, void**, size_t, void* handle) {
  return launch(kernel, handle);
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
  memset(of, 0, sizeof *of);
  of->maxThreadsPerBlock = 1024;
  of->numRegs = 32;
  of->binaryVersion = of->ptxVersion = 90;
  of->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 2, cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                          unsigned) {
  return *blocks = 2, cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char symbol[1 << 16];
  return *pointer = symbol, cudaSuccess;
}

// --- the driver's functions, by name ---------------------------------------------------------------------------------

static int nameless() { return unknown("a driver function that was asked for by its name"); }

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** pointer, unsigned, unsigned long long,
                                                    int* found) {
  void* own = dlsym(RTLD_DEFAULT, name);
  *pointer = own ? own : (void*)nameless;
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char* name, void** pointer, unsigned long long flags, int* found) {
  return cudaGetDriverEntryPointByVersion(name, pointer, 0, flags, found);
}
