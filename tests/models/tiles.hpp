// AMX's tiles in plain C++, for machines that have none: the kernels built with this before them
// (`-include tests/models/tiles.hpp`) run the code of tiles.hpp anywhere. What the operations do is in Intel's manual
// (Software Developer's Manual, volume 2, TDPBF16PS and TDPBSSD); denormals are not flushed here.
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define FT_TILES_ALLOWED() (std::getenv("FORETELL_NO_TILES") == nullptr)

namespace emulated {

struct State {
  bool on;
  uint16_t width[8];
  uint8_t rows[8];
  alignas(64) char tile[8][16][64];
};
inline thread_local State state;

inline State &configured() {
  if (!state.on) abort(); // the processor would raise an exception
  return state;
}

inline void load_config(const void *config) {
  const char *from = static_cast<const char *>(config);
  memset(&state, 0, sizeof state);
  state.on = from[0] == 1;
  memcpy(state.width, from + 16, sizeof state.width);
  memcpy(state.rows, from + 48, sizeof state.rows);
}

inline void release() { memset(&state, 0, sizeof state); }

inline void load(int t, const void *base, long stride) {
  State &s = configured();
  memset(s.tile[t], 0, sizeof s.tile[t]);
  for (int r = 0; r < s.rows[t]; ++r) memcpy(s.tile[t][r], static_cast<const char *>(base) + r * stride, s.width[t]);
}

inline void store(int t, void *base, long stride) {
  State &s = configured();
  for (int r = 0; r < s.rows[t]; ++r) memcpy(static_cast<char *>(base) + r * stride, s.tile[t][r], s.width[t]);
}

inline float widened(uint16_t v) {
  const uint32_t bits = uint32_t(v) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline void multiply_bf16(int c, int a, int b) {
  State &s = configured();
  if (s.rows[c] != s.rows[a] || s.rows[b] != s.width[a] / 4) abort();
  for (int m = 0; m < s.rows[c]; ++m) {
    float even[16] = {}, odd[16] = {}, *out = reinterpret_cast<float *>(s.tile[c][m]);
    const uint16_t *x = reinterpret_cast<uint16_t *>(s.tile[a][m]);
    for (int k = 0; k < s.width[a] / 4; ++k) {
      const uint16_t *w = reinterpret_cast<uint16_t *>(s.tile[b][k]);
      for (int n = 0; n < s.width[c] / 4; ++n) {
        even[n] = __builtin_fmaf(widened(x[2 * k]), widened(w[2 * n]), even[n]);
        odd[n] = __builtin_fmaf(widened(x[2 * k + 1]), widened(w[2 * n + 1]), odd[n]);
      }
    }
    for (int n = 0; n < s.width[c] / 4; ++n) out[n] += even[n] + odd[n];
  }
}

template <class X> void multiply_int8(int c, int a, int b) {
  State &s = configured();
  if (s.rows[c] != s.rows[a] || s.rows[b] != s.width[a] / 4) abort();
  for (int m = 0; m < s.rows[c]; ++m) {
    int32_t *out = reinterpret_cast<int32_t *>(s.tile[c][m]);
    const X *x = reinterpret_cast<X *>(s.tile[a][m]);
    for (int k = 0; k < s.width[a] / 4; ++k) {
      const int8_t *w = reinterpret_cast<int8_t *>(s.tile[b][k]);
      for (int n = 0; n < s.width[c] / 4; ++n)
        for (int i = 0; i < 4; ++i) out[n] += int32_t(x[4 * k + i]) * int32_t(w[4 * n + i]);
    }
  }
}

} // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig(config) emulated::load_config(config)
#define _tile_release() emulated::release()
#define _tile_zero(t) memset(emulated::configured().tile[t], 0, sizeof emulated::state.tile[t])
#define _tile_loadd(t, base, stride) emulated::load(t, base, stride)
#define _tile_stored(t, base, stride) emulated::store(t, base, stride)
#define _tile_dpbf16ps(c, a, b) emulated::multiply_bf16(c, a, b)
#define _tile_dpbssd(c, a, b) emulated::multiply_int8<int8_t>(c, a, b)
#define _tile_dpbusd(c, a, b) emulated::multiply_int8<uint8_t>(c, a, b)
