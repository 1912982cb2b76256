extern "C" {
void purestep_product(const float* a, const float* b, float* c, const float* bias, const int64_t* plan);
void* purestep_take(int64_t size, const void* graph);
void purestep_give(void* at);
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
int PyGILState_Check();
}

namespace torch::aot_inductor {

static const char purestep_graph = 0;  // its address is this graph's name; `inline` would share it with other libraries

// What a tensor and its views share: a block of the thread's memory, or a tensor of torch.
struct Owner { int64_t count; AtenTensorHandle real; };

// A tensor in the thread's memory, which is a tensor of torch only once an operator of torch needs its handle.
class Kept {
 public:
  Kept() {}
  Kept(AtenTensorHandle given) {  // takes it over
    if ((int64_t)given & 1) { *this = std::move(*(Kept*)((int64_t)given - 1)); return; }  // of `kept_empty`
    owner_ = new Owner{1, given};
    is_real_ = true;  // perhaps without memory yet, as the result of an operator
  }
  Kept(Kept&& other) noexcept { *this = std::move(other); }
  Kept& operator=(Kept&& other) noexcept {
    if (this != &other) {
      reset();
      std::memcpy((void*)this, (void*)&other, sizeof(Kept));
      other.owner_ = nullptr;
      other.handle_ = nullptr;
    }
    return *this;
  }
  ~Kept() { reset(); }

  void reset() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
    handle_ = nullptr;
    if (owner_ && --owner_->count == 0) {
      if (owner_->real) { aoti_torch_delete_tensor_object(owner_->real); delete owner_; }
      else purestep_give(owner_);
    }
    owner_ = nullptr;
  }
  static Kept made(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
    Kept found;
    found.lie(dims, sizes, strides, dtype);
    found.owner_ = (Owner*)purestep_take(HEAD + found.bytes(), &purestep_graph);
    *found.owner_ = {1, nullptr};
    found.at_ = (char*)found.owner_ + HEAD;
    return found;
  }
  Kept viewed(int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset) const {
    Kept found;
    found.lie(dims, sizes, strides, dtype());
    found.at_ = (char*)data_ptr() + offset * (int64_t)aoti_torch_dtype_element_size(dtype());
    found.owner_ = owner_;
    owner_->count++;
    return found;
  }
  void* data_ptr() const {
    if (is_real_ && !at_) {
      void* at;
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(owner_->real, &at));
      at_ = (char*)at;
      int64_t count = 1;
      if (!at) AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(owner_->real, &count));
      if (!at && count) throw std::runtime_error("a tensor without memory: clone a lazy zero tensor, resize_ no storage");
    }
    return at_;
  }
  AtenTensorHandle get() const {
    if (is_real_) return owner_->real;
    if (!handle_)
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
          at_, dims_, sizes_, strides_, 0, dtype_, aoti_torch_device_type_cpu(), 0, &handle_));
    return handle_;
  }
  operator AtenTensorHandle() const { return get(); }
  AtenTensorHandle release() {  // of a result: the tensor of torch, a view of it, or memory of its own
    AtenTensorHandle found;
    if (is_real_) {
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(owner_->real, &found));
    } else if (owner_->real) {
      int64_t offset;
      void* start;
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(owner_->real, &offset));
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(owner_->real, &start));
      offset += (at_ - (char*)start) / (int64_t)aoti_torch_dtype_element_size(dtype_);
      AOTI_TORCH_ERROR_CODE_CHECK(
          aoti_torch__reinterpret_tensor(owner_->real, dims_, sizes_, strides_, offset, &found));
    } else {
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
          dims_, sizes_, strides_, dtype_, aoti_torch_device_type_cpu(), 0, &found));
      void* to;
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(found, &to));
      if (to) std::memcpy(to, at_, bytes());
    }
    reset();
    return found;
  }
  const int64_t* sizes() const {
    if (!is_real_) return sizes_;
    int64_t* found;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(owner_->real, &found));
    return found;
  }
  const int64_t* strides() const {
    if (!is_real_) return strides_;
    int64_t* found;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(owner_->real, &found));
    return found;
  }
  int32_t dtype() const {
    if (is_real_) AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(owner_->real, &dtype_));
    return dtype_;
  }
  int64_t dims() const {
    if (is_real_) AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(owner_->real, &dims_));
    return dims_;
  }

 private:
  static constexpr int64_t HEAD = 64;  // bytes before the memory
  void lie(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
    dims_ = dims, sizes_ = sizes, strides_ = strides, dtype_ = dtype;
  }
  int64_t bytes() const {
    int64_t length = 1;
    for (int64_t i = 0; i < dims_; i++) {
      if (!sizes_[i]) return 0;
      length += (sizes_[i] - 1) * strides_[i];
    }
    return length * (int64_t)aoti_torch_dtype_element_size(dtype_);
  }
  Owner* owner_ = nullptr;
  mutable char* at_ = nullptr;
  mutable int64_t dims_ = 0;
  const int64_t *sizes_ = nullptr, *strides_ = nullptr;
  mutable int32_t dtype_ = 0;
  bool is_real_ = false;
  mutable AtenTensorHandle handle_ = nullptr;
};

inline Kept reinterpret_tensor_wrapper(
    const Kept& of, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset) {
  return of.viewed(dims, sizes, strides, offset);
}
inline Kept wrap_with_raii_handle_if_needed(Kept&& of) { return std::move(of); }
inline const Kept& wrap_with_raii_handle_if_needed(const Kept& of) { return of; }

// It lives as long as the call, in which other threads of Python run.
struct Inputs : std::vector<Kept> {
  void* thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  Inputs() {}
  Inputs(Inputs&& other) : std::vector<Kept>(std::move(other)), thread(other.thread) { other.thread = nullptr; }
  ~Inputs() { if (thread) PyEval_RestoreThread(thread); }
};
inline Inputs kept_inputs(AtenTensorHandle* handles, size_t count) {
  Inputs found;
  found.reserve(count);
  for (size_t i = 0; i < count; i++) {
    found.emplace_back(handles[i]);
    handles[i] = nullptr;
  }
  return found;
}

// The generated code makes a `Kept` of the handle in the next line.
static AOTITorchError kept_empty(
    int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t, int32_t, AtenTensorHandle* made) {
  alignas(8) static thread_local Kept box;
  box = Kept::made(dims, sizes, strides, dtype);
  *made = (AtenTensorHandle)((int64_t)&box + 1);
  return AOTI_TORCH_SUCCESS;
}

template <class... Tensors>
inline constexpr bool all_kept = (std::is_same_v<std::decay_t<Tensors>, Kept> && ...);

// c = a b + bias of float32, for matrices or batches of them; false if the kernel does not take them.
inline bool product(const Kept& a, const Kept& b, Kept& c, const float* bias = nullptr) {
  const int64_t k = c.dims() - 2, *as = a.sizes(), *at = a.strides(), *bs = b.sizes(), *bt = b.strides(), *ct = c.strides();
  if (a.dtype() != aoti_torch_dtype_float32() || b.dtype() != a.dtype() || ct[k + 1] != 1) return false;
  const int64_t plan[] = {k ? as[0] : 1, as[k], bs[k + 1], as[k + 1], k ? at[0] : 0, at[k], at[k + 1],
                          k ? bt[0] : 0, bt[k], bt[k + 1], k ? ct[0] : 0, ct[k]};
  purestep_product((const float*)a.data_ptr(), (const float*)b.data_ptr(), (float*)c.data_ptr(), bias, plan);
  return true;
}
template <class C, class A, class B> inline AOTITorchError kept_mm(C&& c, const A& a, const B& b) {
  if constexpr (all_kept<C, A, B>)
    if (product(a, b, c)) return AOTI_TORCH_SUCCESS;
  return aoti_torch_cpu_mm_out(c, a, b);
}
template <class C, class A, class B> inline AOTITorchError kept_bmm(C&& c, const A& a, const B& b) {
  if constexpr (all_kept<C, A, B>)
    if (product(a, b, c)) return AOTI_TORCH_SUCCESS;
  return aoti_torch_cpu_bmm_out(c, a, b);
}
template <class C, class D, class A, class B>
inline AOTITorchError kept_addmm(C&& c, const D& bias, const A& a, const B& b, double beta, double alpha) {
  if constexpr (all_kept<C, D, A, B>)
    if (beta == 1 && alpha == 1 && bias.dims() == 1 && bias.dtype() == aoti_torch_dtype_float32() &&
        bias.strides()[0] == 1 && bias.sizes()[0] == c.sizes()[1] && product(a, b, c, (const float*)bias.data_ptr()))
      return AOTI_TORCH_SUCCESS;
  return aoti_torch_cpu_addmm_out(c, bias, a, b, beta, alpha);
}

}  // namespace torch::aot_inductor

#define RAIIAtenTensorHandle Kept
#define steal_from_raw_handles_to_raii_handles kept_inputs
#define aoti_torch_empty_strided kept_empty
#define aoti_torch_cpu_mm_out kept_mm
#define aoti_torch_cpu_bmm_out kept_bmm
#define aoti_torch_cpu_addmm_out kept_addmm
