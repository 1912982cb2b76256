#include <algorithm>
#include <cstring>
#include <omp.h>

// c[index[i], :] += rows[i, :], c zero at first; indices outside of c are left out.
extern "C" void purestep_rows_added(const float* rows, const int64_t* index, float* c, const int64_t* plan) {
  const int64_t count = plan[0], width = plan[1], stride = plan[2], apart = plan[3], step = plan[4], height = plan[5];
  const int64_t threads = count * width > (1 << 14) ? omp_get_max_threads() : 1;
  const int64_t part = ((width + threads - 1) / threads + 15) / 16 * 16;
  const auto one = [&](int64_t first) {
    const int64_t columns = std::min(part, width - first);
    for (int64_t i = 0; i < height; i++) std::memset(c + i * width + first, 0, sizeof(float) * columns);
    for (int64_t i = 0; i < count; i++) {
      const int64_t to = index[i * step];
      if (to < 0 || to >= height) continue;
      const float* __restrict from = rows + i * stride + first * apart;
      float* __restrict sum = c + to * width + first;
      if (apart == 1)
        for (int64_t j = 0; j < columns; j++) sum[j] += from[j];
      else
        for (int64_t j = 0; j < columns; j++) sum[j] += from[j * apart];
    }
  };
  if (threads == 1) return one(0);  // a parallel region of one thread takes a lock
#pragma omp parallel for
  for (int64_t first = 0; first < width; first += part) one(first);
}
