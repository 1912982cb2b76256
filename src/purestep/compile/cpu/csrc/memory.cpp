#include <cstdint>
#include <cstdlib>
#include <new>

// Memory of a thread's intermediate tensors, shared by all graphs. A freed block serves the next tensor of its size. A
// new block takes the place of free ones that other graphs have used last: those of a last batch, or of an evaluation,
// do not add up.

namespace {

struct Class;
struct Block { int64_t size; const void* graph; Block* next; Class* home; int64_t unused[4]; };
static_assert(sizeof(Block) == 64);  // it lies before the memory, which stays aligned
struct Class { int64_t size; Block* free; };

struct Store {
  static constexpr uint64_t CLASSES = 4096;
  Class classes[CLASSES] = {};
  int64_t held = 0;

  Class* of(int64_t size) {
    for (uint64_t i = 0, at = (uint64_t)size * 0x9E3779B97F4A7C15ull >> 52; i < CLASSES; i++, at = (at + 1) % CLASSES) {
      if (!classes[at].size) classes[at].size = size;
      if (classes[at].size == size) return &classes[at];
    }
    return nullptr;  // too many sizes: such blocks are not kept
  }
  void drop(Block* block) {
    held -= block->size;
    std::free(block);
  }
  void make_room(int64_t size, const void* graph) {
    for (Class& each : classes)
      for (Block** at = &each.free; *at && size > 0;) {
        Block* const block = *at;
        if (block->graph == graph) { at = &block->next; continue; }
        *at = block->next;
        size -= block->size;
        drop(block);
      }
  }
  ~Store() { make_room(INT64_MAX, this); }
};

thread_local Store store;

}  // namespace

// At least `size` > 0 bytes, for a tensor of this graph.
extern "C" void* purestep_take(int64_t size, const void* graph) {
  size = (size + 63) / 64 * 64;
  Class* const home = store.of(size);
  Block* block = home ? home->free : nullptr;
  if (block) {
    home->free = block->next;
  } else {
    store.make_room(size, graph);
    block = (Block*)std::aligned_alloc(64, sizeof(Block) + size);
    if (!block) throw std::bad_alloc();
    block->size = size;
    block->home = home;
    store.held += size;
  }
  block->graph = graph;
  return block + 1;
}

extern "C" void purestep_give(void* at) {
  Block* const block = (Block*)at - 1;
  if (!block->home) return store.drop(block);
  block->next = block->home->free;
  block->home->free = block;
}

// Bytes of all blocks of this thread.
extern "C" int64_t purestep_held() { return store.held; }
