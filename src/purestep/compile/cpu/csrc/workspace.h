#include <cstdlib>
#include <new>

extern "C" const int64_t purestep_bytes;

// The thread's memory, larger if it has to be; memory of its own for a graph that an operator of another one calls.
// `header` is the address of the thread's memory, its size, and whether a graph is at work there.
class Workspace {
 public:
  explicit Workspace(int64_t* header) : header_(header), own_(header[2]) {
    if (own_) {
      at_ = made(rounded());
    } else {
      if (header[1] < purestep_bytes) {
        std::free((void*)header[0]);
        header[0] = header[1] = 0;
        header[0] = (int64_t)made(rounded());
        header[1] = rounded();
      }
      header[2] = 1;
      at_ = (char*)header[0];
    }
  }
  ~Workspace() {
    if (own_) std::free(at_);
    else header_[2] = 0;
  }
  Workspace(const Workspace&) = delete;
  char* at() const { return at_; }

 private:
  static constexpr int64_t PAGE = 1 << 21;
  static int64_t rounded() { return (purestep_bytes + PAGE - 1) / PAGE * PAGE; }
  static char* made(int64_t size) {
    char* const found = (char*)std::aligned_alloc(PAGE, size);
    if (!found && size) throw std::bad_alloc();
    return found;
  }
  int64_t* header_;
  bool own_;
  char* at_;
};

// A tensor in that memory, which costs nothing until an operator of torch asks for a handle.
class Kept {
 public:
  Kept(void* at, int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype, int64_t width)
      : at_(at), dims_(dims), sizes_(sizes), strides_(strides), dtype_(dtype), width_(width) {}
  void* data_ptr() const { return at_; }
  void reset() {}
  AtenTensorHandle get() const {
    if (!handle_.get()) {
      AtenTensorHandle made;
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
          at_, dims_, sizes_, strides_, 0, dtype_, aoti_torch_device_type_cpu(), 0, &made));
      handle_ = RAIIAtenTensorHandle(made);
    }
    return handle_.get();
  }
  operator AtenTensorHandle() const { return get(); }
  AtenTensorHandle release() const {  // to an operator that takes ownership of the handle
    get();
    return handle_.release();
  }
  Kept viewed(int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset) const {
    return Kept((char*)at_ + offset * width_, dims, sizes, strides, dtype_, width_);
  }

 private:
  void* at_;
  int64_t dims_;
  const int64_t *sizes_, *strides_;
  int32_t dtype_;
  int64_t width_;
  mutable RAIIAtenTensorHandle handle_;
};

static inline Kept reinterpret_tensor_wrapper(
    const Kept& of, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset) {
  return of.viewed(dims, sizes, strides, offset);
}
static inline Kept wrap_with_raii_handle_if_needed(Kept&& of) { return std::move(of); }
