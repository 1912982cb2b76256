// Memory, streams, captures and the record of calls.
#include "device.h"

#include <cxxabi.h>
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

namespace standin {

std::recursive_mutex mutex;
bool late = false;
bool replays_copy = true;
thread_local int capture_mode = cudaStreamCaptureModeGlobal;

namespace {

using Blocks = std::map<char*, size_t>;
Blocks device_memory, pinned_memory;
size_t used = 0;
std::vector<std::string> calls;
std::set<Capture*> capturing;
std::vector<Stream*> all_streams;
Stream default_stream;
unsigned long long next_capture = 1;
thread_local cudaError_t last = cudaSuccess;

bool within(const Blocks& blocks, const void* pointer) {
  auto found = blocks.upper_bound((char*)pointer);
  if (found == blocks.begin()) return false;
  --found;
  return (char*)pointer < found->first + found->second;
}

std::string demangled(const std::string& line) {
  size_t at = line.find("_Z");
  if (at == std::string::npos) return line;
  int status = 0;
  char* name = abi::__cxa_demangle(line.c_str() + at, nullptr, nullptr, &status);
  if (!name) return line;
  std::string whole = line.substr(0, at) + name;
  free(name);
  return whole;
}

}  // namespace

// --- memory ----------------------------------------------------------------------------------------------------------

size_t memory_used() { return used; }

void* allocate(size_t bytes, bool on_device) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | (on_device ? MAP_NORESERVE : 0);
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (made == MAP_FAILED) return nullptr;
  (on_device ? device_memory : pinned_memory)[(char*)made] = bytes;
  if (on_device) used += bytes;
  return made;
}

bool release(void* pointer, bool on_device) {
  Blocks& blocks = on_device ? device_memory : pinned_memory;
  auto found = blocks.find((char*)pointer);
  if (found == blocks.end()) return false;
  munmap(pointer, found->second);
  if (on_device) used -= found->second;
  blocks.erase(found);
  return true;
}

void pin(void* pointer, size_t bytes) { pinned_memory[(char*)pointer] = bytes; }
void unpin(void* pointer) { pinned_memory.erase((char*)pointer); }
bool is_device(const void* pointer) { return within(device_memory, pointer); }
bool is_pinned(const void* pointer) { return within(pinned_memory, pointer); }
const char* place(const void* pointer) {
  return is_device(pointer) ? "D" : is_pinned(pointer) ? "Hpinned" : "Hpageable";
}

// --- the record of calls ---------------------------------------------------------------------------------------------

void record(const char* format, ...) {
  char line[2048];
  va_list rest;
  va_start(rest, format);
  vsnprintf(line, sizeof line, format, rest);
  va_end(rest);
  calls.push_back(line);
}

int unknown(const char* name) {
  LOCKED;
  record("UNKNOWN %s", name);
  return cudaErrorNotSupported;
}

cudaError_t failed(cudaError_t error) {
  if (error) last = error;
  return error;
}

cudaError_t last_error(bool clear) {
  cudaError_t found = last;
  if (clear) last = cudaSuccess;
  return found;
}

// --- streams ---------------------------------------------------------------------------------------------------------

Stream* stream(void* handle) {
  bool is_default = handle == nullptr || handle == (void*)1 || handle == (void*)2;
  return is_default ? &default_stream : (Stream*)handle;
}

Stream* new_stream() {
  auto* made = new Stream;
  made->id = (int)all_streams.size() + 1;
  all_streams.push_back(made);
  return made;
}

const std::vector<Stream*>& streams() { return all_streams; }

void perform(const Work& work) {
  if (work.kind == Kind::copy) memcpy(work.to, work.from, work.bytes);
  if (work.kind == Kind::fill) memset(work.to, work.value, work.bytes);
}

void settle(Stream* one) {
  for (auto& work : one->waiting) perform(work);
  one->waiting.clear();
}

void settle_all() {
  settle(&default_stream);
  for (auto* one : all_streams) settle(one);
}

cudaError_t enqueue(void* handle, const Work& work) {
  Stream* one = stream(handle);
  if (one->capture) {
    if (one->capture->status != cudaStreamCaptureStatusActive) return failed(cudaErrorStreamCaptureInvalidated);
    one->capture->graph->works.push_back(work);
    record("CAPTURED %s", work.name.c_str());
    return cudaSuccess;
  }
  record("%s", work.name.c_str());
  for (Capture* capture : capturing)  // the thread that captures does something that its graph will not do
    if (capture->status == cudaStreamCaptureStatusActive && pthread_equal(capture->owner, pthread_self()))
      record("ESCAPED from a capture, on stream %d: %s", one->id, work.name.c_str());
  bool touches_host = work.kind == Kind::copy && (is_pinned(work.from) || is_pinned(work.to));
  if (late && touches_host) {
    one->waiting.push_back(work);
  } else {
    if (late) settle(one);
    perform(work);
  }
  return cudaSuccess;
}

// --- captures --------------------------------------------------------------------------------------------------------

cudaError_t refused_by(Capture* capture, cudaError_t error, const char* what) {
  capture->status = cudaStreamCaptureStatusInvalidated;
  record("ILLEGAL %s", what);
  return failed(error);
}

cudaError_t refused_by_captures(const char* what) {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (Capture* capture : capturing) {
    if (capture->status != cudaStreamCaptureStatusActive || capture->mode == cudaStreamCaptureModeRelaxed) continue;
    bool is_mine = pthread_equal(capture->owner, pthread_self());
    bool only_mine = capture->mode == cudaStreamCaptureModeThreadLocal || capture_mode == cudaStreamCaptureModeThreadLocal;
    if (only_mine && !is_mine) continue;
    return refused_by(capture, cudaErrorStreamCaptureUnsupported, (std::string(what) + " during a capture").c_str());
  }
  return cudaSuccess;
}

bool any_capture(cudaError_t* error, const char* what) {
  for (Capture* capture : capturing)
    if (capture->status == cudaStreamCaptureStatusActive) {
      *error = refused_by(capture, cudaErrorStreamCaptureUnsupported, what);
      return true;
    }
  return false;
}

bool is_captured(const Event* event) {
  Capture* capture = event->capture;
  return capture && capturing.count(capture) && capture->id == event->capture_id;
}

cudaError_t begin_capture(void* handle, int mode, Graph* graph) {
  Stream* one = stream(handle);
  if (one == &default_stream) return failed(cudaErrorStreamCaptureUnsupported);
  if (one->capture) return failed(cudaErrorIllegalState);
  one->capture = new Capture{mode, cudaStreamCaptureStatusActive, next_capture++, graph, pthread_self(), one};
  capturing.insert(one->capture);
  record("CAPTURE begins on stream %d, mode %d", one->id, mode);
  return cudaSuccess;
}

cudaError_t end_capture(void* handle, Graph** graph) {
  Stream* one = stream(handle);
  Capture* capture = one->capture;
  *graph = nullptr;
  if (!capture) return failed(cudaErrorIllegalState);
  if (capture->origin != one) return failed(cudaErrorStreamCaptureUnmatched);
  bool is_broken = capture->status != cudaStreamCaptureStatusActive;
  capturing.erase(capture);
  for (auto* other : all_streams)
    if (other->capture == capture) other->capture = nullptr;
  record("CAPTURE ends %s, %zu nodes", is_broken ? "broken" : "whole", capture->graph->works.size());
  if (is_broken) return failed(cudaErrorStreamCaptureInvalidated);
  *graph = capture->graph;
  return cudaSuccess;
}

}  // namespace standin

// --- what the tests ask ----------------------------------------------------------------------------------------------

EXPORT void standin_reset() {
  LOCKED;
  standin::calls.clear();
}

EXPORT const char* standin_calls() {
  LOCKED;
  static std::string text;
  text.clear();
  for (auto& line : standin::calls) text += standin::demangled(line) + "\n";
  return text.c_str();
}

EXPORT void standin_set_late(int on) {
  LOCKED;
  if (!on) standin::settle_all();
  standin::late = on;
}

EXPORT void standin_set_replays_copy(int on) { standin::replays_copy = on; }
