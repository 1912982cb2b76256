// cuBLAS and cuBLASLt: products are launches that do nothing.
#include <cstdlib>
#include <cstring>

#include "device.h"

using namespace standin;

struct Handle {
  void* stream = nullptr;
  int mode = 0;
};

EXPORT int cublasCreate_v2(void** handle) {
  LOCKED;
  if (refused_by_captures("cublasCreate")) return 1;
  return *handle = new Handle, 0;
}
EXPORT int cublasDestroy_v2(void*) { return 0; }
EXPORT int cublasSetStream_v2(void* handle, void* on) { return ((Handle*)handle)->stream = on, 0; }
EXPORT int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
EXPORT int cublasGetMathMode(void* handle, int* mode) { return *mode = ((Handle*)handle)->mode, 0; }
EXPORT int cublasSetMathMode(void* handle, int mode) { return ((Handle*)handle)->mode = mode, 0; }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
EXPORT int cublasSetPointerMode_v2(void*, int) { return 0; }

static int product(void* on, const char* name) {
  LOCKED;
  return enqueue(on, Work{Kind::kernel, nullptr, nullptr, 0, 0, std::string("BLAS ") + name});
}

// What the generated entry points of the same shape call: cublasSgemm_v2, cublasGemmEx, ...
namespace standin {
int blas(void* handle, const char* name) { return product(((Handle*)handle)->stream, name); }
}  // namespace standin

static int described(void** made) { return *made = calloc(1, 512), 0; }

EXPORT size_t cublasLtGetVersion() { return 130101; }
EXPORT int cublasLtCreate(void** handle) { return *handle = new Handle, 0; }
EXPORT int cublasLtMatmulDescCreate(void** made, int, int) { return described(made); }
EXPORT int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
EXPORT int cublasLtMatmulDescDestroy(void* made) { return free(made), 0; }
EXPORT int cublasLtMatmulPreferenceCreate(void** made) { return described(made); }
EXPORT int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
EXPORT int cublasLtMatmulPreferenceDestroy(void* made) { return free(made), 0; }
EXPORT int cublasLtMatrixLayoutCreate(void** made, int, unsigned long long, unsigned long long, long long) {
  return described(made);
}
EXPORT int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, size_t) { return 0; }
EXPORT int cublasLtMatrixLayoutDestroy(void* made) { return free(made), 0; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, char* result,
                                          int* found) {
  memset(result, 0, 96);  // cublasLtMatmulHeuristicResult_t
  return *found = 1, 0;
}
EXPORT int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                          void*, size_t, void* on) {
  return product(on, "cublasLtMatmul");
}
