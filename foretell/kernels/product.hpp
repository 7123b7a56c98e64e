// out = x w^T (+ bias) (+ residual) over packed weights: bfloat16, float32 or int8.
//
// Every output is one sum over k in ascending order, whatever the tile: for floats one fused multiply-add a step. int8
// weights meet inputs rounded to 16-bit fixed point with a scale for every GROUP of them: sums within a group are exact
// integers, and the groups are added in ascending order, so nothing depends on the tile or the instructions either.
#pragma once

#include <cfloat>
#include <vector>

#include "pool.hpp"
#include "vectors.hpp"

namespace ft {

constexpr int64_t AHEAD = 4096; // bytes a lone tile reads ahead of itself
constexpr int64_t STRIP = 4;    // blocks that all tiles of rows go through while they lie in the cache
constexpr int64_t GROUP = 256;  // inputs that share a scale; 512 products of 127 and 32767 fit an int32

struct Product {
  const float *x; int64_t ldx; int64_t rows;
  int64_t n, k;
  const float *bias, *residual;
  float *out; int64_t ldo;
};

// A kind of weight has: bytes of a packed block, how many blocks a tile of M rows goes through at once, and the tile
// itself, rows [row, row + M) times N blocks. ahead: what to fetch meanwhile, in bytes from there; memory is the bound,
// so it must never idle while the arithmetic runs.

template <class T> struct Floats {
  const T *w;
  const float *x; int64_t ldx;
  int64_t k;

  int64_t block_bytes() const { return k * BLOCK * int64_t(sizeof(T)); }
  const float *scale(int64_t) const { return nullptr; }
  // enough accumulators in flight to hide the latency of the adds, and no more than there are registers
  static constexpr int blocks(int m) { return m == 1 ? 4 : m == 2 || (m == 3 && W == 16) ? 2 : 1; }

  template <int M, int N> void tile(int64_t row, int64_t block, int64_t ahead, FW *acc) const {
    FW sum[N][M][2] = {};
    const int64_t stride = k * BLOCK;
    const T *from = w + block * stride;
    const float *rows = x + row * ldx;
    for (int64_t i = 0; i < k; ++i) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        __builtin_prefetch((const char *)(from + n * stride + i * BLOCK) + ahead, 0, 2);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        FW a, b;
        load_pair<FW, IW>(from + n * stride + i * BLOCK, a, b);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          FW v = splatw(rows[m * ldx + i]);
          sum[n][m][0] = fmaw(v, a, sum[n][m][0]);
          sum[n][m][1] = fmaw(v, b, sum[n][m][1]);
        }
      }
    }
    memcpy(acc, sum, sizeof sum);
  }
};

struct Int8 {
  const int8_t *w;
  const float *scales;      // [n], of the columns
  const int16_t *x;         // [rows, 2 * pairs]
  const float *x_scales;    // [rows, groups]
  int64_t pairs, groups;

  int64_t block_bytes() const { return pairs * 2 * BLOCK; }
  const float *scale(int64_t column) const { return scales + column; }
  static constexpr int blocks(int m) { return m == 1 ? 4 : 1; }

  template <int M, int N> void tile(int64_t row, int64_t block, int64_t ahead, FW *acc) const {
    FW total[N][M][2] = {};
    const int64_t stride = block_bytes(), ldx = 2 * pairs;
    const int8_t *from = w + block * stride;
    const int16_t *rows = x + row * ldx;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t last = (g + 1) * (GROUP / 2) < pairs ? (g + 1) * (GROUP / 2) : pairs;
      IW sum[N][M][2] = {};
      for (int64_t i = g * (GROUP / 2); i < last; ++i) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) __builtin_prefetch(from + n * stride + i * 2 * BLOCK + ahead, 0, 2);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          const int8_t *at = from + n * stride + i * 2 * BLOCK;
          const Pairs a = widen_pairs(at), b = widen_pairs(at + 2 * W);
#pragma GCC unroll 12
          for (int m = 0; m < M; ++m) {
            const Pairs v = splat_pair(rows + m * ldx + 2 * i);
            sum[n][m][0] = add_dot(sum[n][m][0], a, v);
            sum[n][m][1] = add_dot(sum[n][m][1], b, v);
          }
        }
      }
      for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) {
          FW s = splatw(x_scales[(row + m) * groups + g]);
          for (int h = 0; h < 2; ++h) total[n][m][h] = fmaw(to_float(sum[n][m][h]), s, total[n][m][h]);
        }
    }
    memcpy(acc, total, sizeof total);
  }
};

// One row of `width` sums, or as many of them as there are columns, into the result.
inline void write_line(const Product &p, int64_t row, int64_t column, int64_t width, const float *sums,
                       const float *scale) {
  if (p.n - column < width) width = p.n - column;
  float *out = p.out + row * p.ldo + column;
  const float *residual = p.residual ? p.residual + row * p.ldo + column : nullptr;
  for (int64_t i = 0; i < width; ++i) {
    float v = sums[i];
    if (scale) v *= scale[i];
    if (p.bias) v += p.bias[column + i];
    if (residual) v += residual[i];
    out[i] = v;
  }
}

template <int M, int N, class K> void product_tile(const Product &p, const K &kind, int64_t row, int64_t block,
                                                   int64_t ahead) {
  FW acc[M * N * 2];
  kind.template tile<M, N>(row, block, ahead, acc);
  for (int n = 0; n < N; ++n) {
    const int64_t column = (block + n) * BLOCK;
    const float *scale = kind.scale(column);
    for (int m = 0; m < M; ++m) {
      float line[BLOCK];
      memcpy(line, &acc[(n * M + m) * 2], sizeof line);
      write_line(p, row + m, column, BLOCK, line, scale);
    }
  }
}

// What a tile of rows fetches while it goes through a strip: of several tiles each takes its share of the next strip.
struct Fetch {
  int64_t tile, tiles, strip; // blocks of a strip
  int64_t bytes(int64_t block, int64_t block_bytes) const { // ahead of a block, counted from the strip's first
    if (tiles == 1) return AHEAD;
    return block * tiles / strip == tile ? strip * block_bytes : 0;
  }
};

template <int M, class K>
void row_tiles(const Product &p, const K &kind, int64_t row, int64_t first, int64_t last, const Fetch &fetch) {
  constexpr int N = K::blocks(M);
  const int64_t size = kind.block_bytes();
  int64_t b = first;
  for (; b + N <= last; b += N) product_tile<M, N>(p, kind, row, b, fetch.bytes(b - first, size));
  for (; b < last; ++b) product_tile<M, 1>(p, kind, row, b, fetch.bytes(b - first, size));
}

template <class K> void product_range(const Product &p, const K &kind, int64_t first, int64_t last) {
  const int64_t tiles = (p.rows + MAX_TILE - 1) / MAX_TILE;
  // a tile of rows after the other through all blocks would stream the weights again for each: so in strips
  const int64_t strip = tiles == 1 ? last - first : STRIP;
  for (int64_t s = first; s < last; s += strip) {
    const int64_t e = s + strip < last ? s + strip : last;
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t m = (p.rows - row + (tiles - t) - 1) / (tiles - t);
      const Fetch fetch{t, tiles, strip};
      switch (m) {
        case 1: row_tiles<1>(p, kind, row, s, e, fetch); break;
        case 2: row_tiles<2>(p, kind, row, s, e, fetch); break;
        case 3: row_tiles<3>(p, kind, row, s, e, fetch); break;
        case 4: row_tiles<4>(p, kind, row, s, e, fetch); break;
        case 5: row_tiles<5>(p, kind, row, s, e, fetch); break;
        case 6: row_tiles<6>(p, kind, row, s, e, fetch); break;
#if defined(__AVX512F__)
        case 7: row_tiles<7>(p, kind, row, s, e, fetch); break;
        case 8: row_tiles<8>(p, kind, row, s, e, fetch); break;
        case 9: row_tiles<9>(p, kind, row, s, e, fetch); break;
        case 10: row_tiles<10>(p, kind, row, s, e, fetch); break;
        case 11: row_tiles<11>(p, kind, row, s, e, fetch); break;
        case 12: row_tiles<12>(p, kind, row, s, e, fetch); break;
#endif
      }
      row += m;
    }
  }
}

// Blocks that a thread takes at once.
inline int64_t chunk_of(const Pool &pool, int64_t blocks) {
  const int64_t chunk = blocks / (pool.size() * 4);
  return chunk < 4 ? 4 : chunk & ~int64_t(3);
}

template <class K> void product(Pool &pool, const Product &p, const K &kind) {
  const int64_t blocks = (p.n + BLOCK - 1) / BLOCK;
  pool.run(blocks, chunk_of(pool, blocks), [&](int64_t a, int64_t b) { product_range(p, kind, a, b); });
}

// One row of inputs as 16-bit fixed point: q = round(x * 32767 / max |x|) within each group; an input that is not finite
// makes its group's scale NaN. q has room for a whole number of eights.
inline void fix_row(const float *x, int64_t k, int16_t *q, float *scales) {
  typedef int16_t S8 __attribute__((vector_size(16), aligned(2), may_alias));
  for (int64_t first = 0; first < k; first += GROUP, ++scales) {
    const int64_t last = first + GROUP < k ? first + GROUP : k, whole = first + (last - first) / 8 * 8;
    F8 most = {};
    I8 finite = ~I8{};
    for (int64_t i = first; i < whole; i += 8) {
      F8 v = *(const F8 *)(x + i);
      v = v < 0 ? -v : v;
      most = v > most ? v : most;
      finite &= v <= FLT_MAX; // false of NaN
    }
    float top = 0;
    bool good = true;
    for (int i = 0; i < 8; ++i) { top = most[i] > top ? most[i] : top; good = good && finite[i]; }
    for (int64_t i = whole; i < last; ++i) {
      const float v = std::fabs(x[i]);
      top = v > top ? v : top;
      good = good && v <= FLT_MAX;
    }
    const bool some = good && top > 1e-30f;
    *scales = good ? (some ? top / 32767.0f : 0.0f) : NAN;
    const float inverse = some ? 32767.0f / top : 0.0f;
    const F8 magic = splat8(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer, which lies in the low bits
    for (int64_t i = first; i < whole; i += 8) {
      F8 v = some ? *(const F8 *)(x + i) * inverse + magic : magic;
      *(S8 *)(q + i) = __builtin_convertvector((I8)v - (I8)magic, S8);
    }
    for (int64_t i = whole; i < last; ++i) q[i] = some ? int16_t(std::nearbyint(x[i] * inverse)) : int16_t(0);
  }
}

// The inputs of a product in the form that int8 weights take; kept by the calling thread until its next product.
struct Fixed {
  std::vector<int16_t> q;
  std::vector<float> scales;
  int64_t pairs = 0, groups = 0;

  void take(Pool &pool, const Product &p) {
    pairs = (p.k + 1) / 2;
    groups = (p.k + GROUP - 1) / GROUP;
    if (int64_t(q.size()) < p.rows * 2 * pairs + 8) q.resize(p.rows * 2 * pairs + 8);
    if (int64_t(scales.size()) < p.rows * groups) scales.resize(p.rows * groups);
    pool.run(p.rows, 8, [&](int64_t a, int64_t b) {
      for (int64_t r = a; r < b; ++r) {
        int16_t *line = q.data() + r * 2 * pairs;
        fix_row(p.x + r * p.ldx, p.k, line, scales.data() + r * groups);
        if (p.k % 2) line[p.k] = 0;
      }
    });
  }
};

// dtype: see kernels.cpp
inline void vector_linear(Pool &pool, const Product &p, const void *w, int dtype, const float *scales) {
  static thread_local Fixed fixed;
  switch (dtype) {
    case 0: product(pool, p, Floats<bf16>{static_cast<const bf16 *>(w), p.x, p.ldx, p.k}); break;
    case 1: product(pool, p, Floats<float>{static_cast<const float *>(w), p.x, p.ldx, p.k}); break;
    case 2:
      fixed.take(pool, p);
      product(pool, p, Int8{static_cast<const int8_t *>(w), scales, fixed.q.data(), fixed.scales.data(), fixed.pairs,
                            fixed.groups});
  }
}

} // namespace ft
