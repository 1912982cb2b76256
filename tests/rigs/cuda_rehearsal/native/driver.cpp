// The CUDA driver, as far as torch, inductor and Triton's launcher call it.
#include <cstdio>

#include "device.h"

using namespace standin;

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int index);

static void* const kContext = (void*)0x1234;
enum { kPrimaryContext = 1, kDevicePointer = 3, kDeviceIndex = 9 };  // CUpointer_attribute

struct Function {
  std::string name;
};

EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
EXPORT int cuGetErrorString(int, const char** text) { return *text = "refused by the stand-in", 0; }
EXPORT int cuDeviceGetCount(int* count) { return *count = 1, 0; }
EXPORT int cuDeviceGet(int* device, int) { return *device = 0, 0; }
EXPORT int cuDeviceGetName(char* text, int size, int) { return snprintf(text, size, "stand-in for an NVIDIA H100"), 0; }
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int index) {
  return cudaDeviceGetAttribute(value, attribute, index);  // numbered alike
}
EXPORT int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { return *flags = 0, *active = 1, 0; }
EXPORT int cuDevicePrimaryCtxRetain(void** context, int) { return *context = kContext, 0; }
EXPORT int cuCtxGetCurrent(void** context) { return *context = kContext, 0; }
EXPORT int cuCtxSetCurrent(void*) { return 0; }
EXPORT int cuCtxGetDevice(int* device) { return *device = 0, 0; }
EXPORT int cuCtxGetLimit(size_t* value, int) { return *value = 8 << 20, 0; }
EXPORT int cuCtxSetLimit(int, size_t) { return 0; }

EXPORT int cuPointerGetAttribute(void* value, int attribute, unsigned long long pointer) {
  LOCKED;
  if (attribute == kDevicePointer)
    *(unsigned long long*)value = pointer;
  else if (attribute == kPrimaryContext)
    *(void**)value = kContext;
  else
    *(int*)value = 0;
  return is_device((void*)pointer) || is_pinned((void*)pointer) ? 0 : cudaErrorInvalidValue;
}

EXPORT int cuModuleLoadData(void** module, const void*) { return *module = (void*)1, 0; }
EXPORT int cuModuleLoadDataEx(void** module, const void*, unsigned, void*, void*) { return *module = (void*)1, 0; }
EXPORT int cuModuleLoad(void** module, const char*) { return *module = (void*)1, 0; }
EXPORT int cuModuleUnload(void*) { return 0; }
EXPORT int cuModuleGetFunction(void** function, void*, const char* name) {
  return *function = new Function{name}, 0;
}
EXPORT int cuFuncGetAttribute(int* value, int attribute, void*) {
  enum { kMaxThreads = 0, kRegisters = 4 };
  return *value = attribute == kMaxThreads ? 1024 : attribute == kRegisters ? 32 : 0, 0;
}
EXPORT int cuFuncSetAttribute(void*, int, int) { return 0; }
EXPORT int cuFuncSetCacheConfig(void*, int) { return 0; }
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) { return *blocks = 2, 0; }
EXPORT int cuOccupancyMaxActiveClusters(int* clusters, void*, void*) { return *clusters = 1, 0; }

static int launch(void* function, void* handle) {
  LOCKED;
  return enqueue(handle, Work{Kind::kernel, nullptr, nullptr, 0, 0, "TRITON " + ((Function*)function)->name});
}

EXPORT int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          void* handle, void**, void**) {
  return launch(function, handle);
}
EXPORT int cuLaunchCooperativeKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                     unsigned, void* handle, void**) {
  return launch(function, handle);
}

struct Configuration {  // the beginning of CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
};
EXPORT int cuLaunchKernelEx(const Configuration* how, void* function, void**, void**) {
  return launch(function, how->stream);
}
