#include <cstring>
#include <type_traits>
#include <vector>

// The model class of the generated code, whose name is the macro MODEL, and the functions of C by which torch's runner
// calls it: in place of AOTInductor's base class and container, which take g++ longer than the code of a small step.
// The graph holds no constants.

namespace torch::aot_inductor {

struct ModelBase {
  struct Named { const char* name; };
  std::vector<Named> inputs_info_, outputs_info_;
  std::string in_spec_, out_spec_;
  std::shared_ptr<std::vector<ConstantHandle>> constants_;
  std::unique_ptr<AOTInductorModelKernelsBase> kernels_;
  int32_t device_idx_ = -1;  // of the CPU
  ModelBase(size_t inputs, size_t outputs, size_t, const std::string&, std::optional<std::string>, bool)
      : inputs_info_(inputs), outputs_info_(outputs) {}
  void update_constants_map(std::shared_ptr<ConstantMap>) {}
  void update_constants_array(std::shared_ptr<std::vector<ConstantHandle>>) {}
};

struct MODEL : ModelBase {
  MODEL(std::shared_ptr<ConstantMap>, std::shared_ptr<std::vector<ConstantHandle>>, const std::string&,
        std::optional<std::string>);
  std::unordered_map<std::string, AtenTensorHandle> const_run_impl(DeviceStreamType, AOTIProxyExecutorHandle, bool);
  void _const_run_impl(std::vector<AtenTensorHandle>&, DeviceStreamType, AOTIProxyExecutorHandle);
  void run_impl(AtenTensorHandle*, AtenTensorHandle*, DeviceStreamType, AOTIProxyExecutorHandle);
};

static thread_local std::string last_error;

template <class Function> AOTIRuntimeError without_autograd(Function function) {
  const bool before = aoti_torch_grad_mode_is_enabled();
  aoti_torch_grad_mode_set_enabled(false);
  AOTIRuntimeError code = AOTI_RUNTIME_SUCCESS;
  try { function(); }
  catch (const std::exception& error) { last_error = error.what(), code = AOTI_RUNTIME_FAILURE; }
  catch (...) { last_error = "unknown exception", code = AOTI_RUNTIME_FAILURE; }
  aoti_torch_grad_mode_set_enabled(before);
  return code;
}

}  // namespace torch::aot_inductor

extern "C" {

AOTIRuntimeError AOTInductorModelContainerCreateWithDevice(
    AOTInductorModelContainerHandle* made, size_t, const char* device, const char*) {
  using namespace torch::aot_inductor;
  return without_autograd([&] { *made = (AOTInductorModelContainerHandle) new MODEL({}, {}, device, {}); });
}
AOTIRuntimeError AOTInductorModelContainerDelete(AOTInductorModelContainerHandle model) {
  delete (torch::aot_inductor::MODEL*)model;
  return AOTI_RUNTIME_SUCCESS;
}
AOTIRuntimeError AOTInductorModelContainerRun(
    AOTInductorModelContainerHandle model, AtenTensorHandle* inputs, size_t, AtenTensorHandle* outputs, size_t,
    AOTInductorStreamHandle, AOTIProxyExecutorHandle executor) {
  using namespace torch::aot_inductor;
  return without_autograd([&] { ((MODEL*)model)->run_impl(inputs, outputs, nullptr, executor); });
}
AOTIRuntimeError AOTInductorModelContainerGetNumOutputs(AOTInductorModelContainerHandle model, size_t* count) {
  *count = ((torch::aot_inductor::MODEL*)model)->outputs_info_.size();
  return AOTI_RUNTIME_SUCCESS;
}
AOTIRuntimeError AOTInductorGetLastError(const char** error) {
  *error = torch::aot_inductor::last_error.c_str();
  return AOTI_RUNTIME_SUCCESS;
}

// The runner looks for these when it loads the library; purestep calls none of them.
AOTIRuntimeError purestep_missing() { return AOTI_RUNTIME_FAILURE; }
#define MISSING(name) decltype(name) name __attribute__((alias("purestep_missing")));
MISSING(AOTInductorModelContainerExtractConstantsMap)
MISSING(AOTInductorModelContainerFreeInactiveConstantBuffer)
MISSING(AOTInductorModelContainerGetCallSpec)
MISSING(AOTInductorModelContainerGetConstantDtype)
MISSING(AOTInductorModelContainerGetConstantName)
MISSING(AOTInductorModelContainerGetConstantOriginalFQN)
MISSING(AOTInductorModelContainerGetConstantsBlobSize)
MISSING(AOTInductorModelContainerGetNumConstants)
MISSING(AOTInductorModelContainerRunConstantFolding)
MISSING(AOTInductorModelContainerSwapConstantBuffer)
MISSING(AOTInductorModelContainerUpdateConstantBuffer)
MISSING(AOTInductorModelContainerUpdateConstantBufferFromCpu)
MISSING(AOTInductorModelContainerUpdateInactiveConstantBuffer)
MISSING(AOTInductorModelContainerUpdateUserManagedConstantBuffer)
MISSING(AOTInductorModelUpdateConstantsFromBlob)

}  // extern "C"

#define AOTInductorModelBase ModelBase
