// A stand-in for one CUDA device: its memory is the host's, its kernels do nothing, and every call is written down.
// Streams, events and captures follow CUDA's rules; what these forbid is refused as CUDA refuses it.
#pragma once
#include <driver_types.h>
#include <pthread.h>

#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define LOCKED std::lock_guard<std::recursive_mutex> locked(standin::mutex)

namespace standin {

enum class Kind { kernel, copy, fill };

struct Work {  // what a stream or a graph is given to do
  Kind kind;
  void* to;
  const void* from;
  size_t bytes;
  int value;
  std::string name;
};

struct Graph {
  std::vector<Work> works;
};

struct Stream;

struct Capture {
  int mode;    // cudaStreamCaptureMode
  int status;  // cudaStreamCaptureStatus
  unsigned long long id;
  Graph* graph;
  pthread_t owner;
  Stream* origin;
};

struct Stream {
  int id = 0;
  Capture* capture = nullptr;
  std::vector<Work> waiting;  // copies that CUDA need not have made yet, see `set_late`
};

struct Event {
  Capture* capture = nullptr;
  unsigned long long capture_id = 0;
  Stream* stream = nullptr;
  bool recorded = false;
  int asked = 0;
};

extern std::recursive_mutex mutex;
extern bool late;            // whether copies that touch host memory are made as late as CUDA may
extern bool replays_copy;    // whether a replayed graph makes its copies
extern thread_local int capture_mode;  // of this thread, as cudaThreadExchangeStreamCaptureMode sets it

constexpr size_t kMemory = 80ull << 30;
size_t memory_used();
void* allocate(size_t bytes, bool on_device);
bool release(void* pointer, bool on_device);
void pin(void* pointer, size_t bytes);
void unpin(void* pointer);
bool is_device(const void* pointer);
bool is_pinned(const void* pointer);
const char* place(const void* pointer);  // D, Hpinned, Hpageable

void record(const char* format, ...) __attribute__((format(printf, 1, 2)));
int unknown(const char* name);  // a call that the stand-in does not have: written down, and an error for the caller

cudaError_t failed(cudaError_t error);
cudaError_t last_error(bool clear);

Stream* stream(void* handle);
Stream* new_stream();
const std::vector<Stream*>& streams();
cudaError_t enqueue(void* handle, const Work& work);  // captured where the stream is capturing
void perform(const Work& work);
void settle(Stream* one);  // makes its late copies
void settle_all();

// What a capture forbids everywhere, not only on its own stream. cudaSuccess where nobody is capturing.
cudaError_t refused_by_captures(const char* what);
cudaError_t refused_by(Capture* capture, cudaError_t error, const char* what);
bool is_captured(const Event* event);
cudaError_t begin_capture(void* handle, int mode, Graph* graph);
cudaError_t end_capture(void* handle, Graph** graph);
bool any_capture(cudaError_t* error, const char* what);

}  // namespace standin
