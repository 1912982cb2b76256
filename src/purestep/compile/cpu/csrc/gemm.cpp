#include <ATen/cpu/vec/vec.h>
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>
#include <omp.h>

namespace {

using Vector = at::vec::Vectorized<float>;
constexpr int64_t WIDE = Vector::size();
constexpr int64_t PANEL = 2 * WIDE;  // columns
constexpr int64_t ROWS = WIDE == 16 ? 12 : WIDE == 8 ? 6 : 8;  // as many sums as there are registers
constexpr int64_t DEEP = 256;  // of k at once: a panel of b stays in the first cache
constexpr int64_t ROOM = 1 << 16;  // numbers of a at once: they stay in the second
constexpr int64_t SHORT = 64;  // of k: reading c and writing it is most of the work

struct Plan { int64_t heads, m, n, k, ah, am, ak, bh, bk, bn, ch, cm; };
struct Strides { int64_t am, ak, b, c, add; };

// c[R, cols] = a[R, k] b[k, cols] + add[R, cols], which may be c; without `add` where it is null.
template <int64_t R, int64_t VECTORS>
inline __attribute__((always_inline)) void block(
    const float* __restrict a, const float* __restrict b, float* c, const Strides& s,
    int64_t k, int64_t cols, const float* add) {
  Vector sum[R][VECTORS];
#pragma GCC unroll 16
  for (int64_t r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int64_t v = 0; v < VECTORS; v++) sum[r][v] = Vector(0.f);
  const int64_t am = s.am, ak = s.ak, bk = s.b;
  for (int64_t i = 0; i < k; i++) {
    Vector row[VECTORS];
#pragma GCC unroll 2
    for (int64_t v = 0; v < VECTORS; v++) row[v] = Vector::loadu(b + i * bk + v * WIDE);
#pragma GCC unroll 16
    for (int64_t r = 0; r < R; r++) {
      const Vector one(a[r * am + i * ak]);
#pragma GCC unroll 2
      for (int64_t v = 0; v < VECTORS; v++) sum[r][v] = at::vec::fmadd(one, row[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int64_t r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int64_t v = 0; v < VECTORS; v++) {
      float* to = c + r * s.c + v * WIDE;
      const int64_t left = std::min(cols - v * WIDE, WIDE);
      if (left <= 0) continue;
      if (left == WIDE) {
        if (add) sum[r][v] = sum[r][v] + Vector::loadu(add + r * s.add + v * WIDE);
        sum[r][v].store(to);
      } else {
        if (add) sum[r][v] = sum[r][v] + Vector::loadu(add + r * s.add + v * WIDE, left);
        sum[r][v].store(to, left);
      }
    }
}

template <int64_t VECTORS>
__attribute__((noinline)) void blocks(
    const float* a, const float* b, float* c, const Strides& s, int64_t m, int64_t k, int64_t cols,
    const float* add) {
  for (; m >= ROWS; m -= ROWS, a += ROWS * s.am, c += ROWS * s.c, add += ROWS * s.add)
    block<ROWS, VECTORS>(a, b, c, s, k, cols, add);
  for (; m >= 4; m -= 4, a += 4 * s.am, c += 4 * s.c, add += 4 * s.add)
    block<4, VECTORS>(a, b, c, s, k, cols, add);
  for (; m >= 1; m -= 1, a += s.am, c += s.c, add += s.add) block<1, VECTORS>(a, b, c, s, k, cols, add);
}

// b[k, cols] side by side, with zeros up to `width`.
inline void pack(const float* b, float* to, int64_t width, int64_t k, int64_t cols, int64_t bk, int64_t bn) {
  if (cols < width) std::memset(to, 0, sizeof(float) * k * width);
  if (bn == 1) {
    for (int64_t i = 0; i < k; i++)
      if (cols == PANEL) std::memcpy(to + i * PANEL, b + i * bk, sizeof(float) * PANEL);  // without a call
      else std::memcpy(to + i * width, b + i * bk, sizeof(float) * cols);
  } else if (bk == 1) {
    for (int64_t i = 0; i < k; i += WIDE)
      for (int64_t j = 0; j < cols; j += WIDE) {
        const int64_t high = std::min(k - i, WIDE), wide = std::min(cols - j, WIDE);
        if (high == WIDE && wide == WIDE)
          at::vec::transpose_mxn<float, WIDE, WIDE>(b + j * bn + i, bn, to + i * width + j, width);
        else
          for (int64_t x = 0; x < high; x++)
            for (int64_t y = 0; y < wide; y++) to[(i + x) * width + j + y] = b[(j + y) * bn + i + x];
      }
  } else {
    for (int64_t i = 0; i < k; i++)
      for (int64_t j = 0; j < cols; j++) to[i * width + j] = b[i * bk + j * bn];
  }
}

// Rows of a that lie as columns, as blocks of `ROWS` of them: far apart, they would drive each other out of the cache.
inline const float* pack_rows(const float* a, int64_t m, int64_t k, int64_t ak) {
  static thread_local std::vector<float> store(ROOM + ROWS * DEEP);
  float* to = store.data();
  for (int64_t i = 0; i < m; i += ROWS) {
    const int64_t high = std::min(m - i, ROWS);
    for (int64_t j = 0; j < k; j++, to += high)
      if (high == ROWS) std::memcpy(to, a + i + j * ak, sizeof(float) * ROWS);
      else std::memcpy(to, a + i + j * ak, sizeof(float) * high);
  }
  return store.data();
}

// At most one panel of columns, and `DEEP` of k; a in the blocks of `pack_rows`, or with its own strides.
inline void panel(
    const float* a, const float* b, float* c, int64_t m, int64_t cols, int64_t k, const Strides& s, int64_t bn,
    bool in_blocks, const float* add) {
  alignas(64) float packed[DEEP * PANEL];
  const int64_t width = cols > WIDE ? PANEL : WIDE;
  const bool in_place = bn == 1 && cols == width && (m <= 2 * ROWS || k <= SHORT);
  if (!in_place) pack(b, packed, width, k, cols, s.b, bn);
  const float* from = in_place ? b : packed;
  const int64_t bk = in_place ? s.b : width;
  for (int64_t i = 0, step = in_blocks ? ROWS : m; i < m; i += step, a += ROWS * k) {
    const int64_t high = std::min(m - i, step);
    const Strides of{in_blocks ? 1 : s.am, in_blocks ? high : s.ak, bk, s.c, s.add};
    const float* more = add ? add + i * s.add : nullptr;
    if (cols > WIDE) blocks<2>(a, from, c + i * s.c, of, high, k, cols, more);
    else blocks<1>(a, from, c + i * s.c, of, high, k, cols, more);
  }
}

// As many rows as `ROOM` holds of `DEEP` of k, or of all.
inline void part(
    const float* a, const float* b, float* c, const float* bias, int64_t m, int64_t n, int64_t k,
    Strides s, int64_t bn) {
  const bool in_blocks = s.am == 1 && s.ak >= 256 && m >= 2 * ROWS && n > PANEL;  // nearer ones stay without
  if (k == 0)
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) c[i * s.c + j] = bias ? bias[j] : 0;
  for (int64_t at = 0; at < k; at += DEEP) {
    const int64_t deep = std::min(k - at, DEEP);
    const float* add = at ? c : bias;
    s.add = at ? s.c : 0;
    const float* left = in_blocks ? pack_rows(a + at * s.ak, m, deep, s.ak) : a + at * s.ak;
    for (int64_t p = 0; p < n; p += PANEL)
      panel(left, b + at * s.b + p * bn, c + p, m, std::min(n - p, PANEL), deep, s, bn, in_blocks,
            add ? add + p : nullptr);
  }
}

// The size of each of so many parts, in whole units.
inline int64_t share(int64_t size, int64_t parts, int64_t unit) {
  return ((size + parts - 1) / parts + unit - 1) / unit * unit;
}

}  // namespace

// c[h, m, n] = a[h, m, k] b[h, k, n] + bias[n], of any strides but that of n in c, which is 1. The bias may be
// null.
extern "C" void purestep_product(
    const float* a, const float* b, float* c, const float* bias, const int64_t* plan) {
  const auto [heads, m, n, k, ah, am, ak, bh, bk, bn, ch, cm] = *(const Plan*)plan;
  if (heads * m * n == 0) return;
  const int threads = heads * m * n * k > (1 << 18) ? omp_get_max_threads() : 1;
  // Where matrices do not go round evenly, panels are shared, or rows: what is packed twice then counts.
  const int64_t panels = (n + PANEL - 1) / PANEL;
  const int64_t each = heads < 8 * threads ? threads / std::gcd<int64_t>(heads, threads) : 1;
  const bool by_rows = (panels % each && panels < 8 * each) || (am == 1 && m > n);
  const int64_t tall = by_rows ? share(m, each, ROWS) : m, wide = by_rows ? n : share(n, each, PANEL);
  // Where k is short, rows of c are written from one end to the other, a few at once, as long as b stays near.
  const bool is_short = bn == 1 && k <= SHORT && k * n <= 4 * ROOM;
  const int64_t fits = is_short ? 2 * ROWS : ROOM / std::clamp<int64_t>(k, 1, DEEP);
  const int64_t high = share(tall, (tall + fits - 1) / fits, ROWS);
  const auto at = [&](int64_t h, int64_t i, int64_t p) {
    part(a + h * ah + i * am, b + h * bh + p * bn, c + h * ch + i * cm + p,
         bias ? bias + p : nullptr, std::min(high, m - i), std::min(wide, n - p), k, {am, ak, bk, cm, 0}, bn);
  };
  if (threads == 1) {  // a parallel region of one thread takes a lock
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = 0; i < m; i += high) at(h, i, 0);
    return;
  }
#pragma omp parallel for collapse(3)
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = 0; i < m; i += high)
      for (int64_t p = 0; p < n; p += wide) at(h, i, p);
}
