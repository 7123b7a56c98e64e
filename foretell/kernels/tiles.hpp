// out = x w^T over packed weights by the tiles of Intel's AMX: bfloat16 and int8, up to 16 rows at the price of one.
//
// A tile of weights is 16 columns by 64 bytes of inputs, 1 KB that lies together; a tile of inputs is up to 16 rows by as
// many. Rows of a tile product are independent of each other, and every output is one sum over the tiles of k in
// ascending order, so it does not matter which rows lie in a tile.
//
// Tiles multiply 16-bit or 8-bit numbers alone, so an input goes in parts whose sum it is, exactly: a float32 as three
// bfloat16, a 16-bit integer (`Fixed`) as its two bytes. int8 products are the same integers as in product.hpp.
#pragma once

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define FT_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "pool.hpp"
#include "product.hpp"

// A process asks Linux once for the right to use tiles; one that has it keeps it.
#if !defined(FT_TILES_ALLOWED)
#define FT_TILES_ALLOWED() (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0)
#endif

namespace ft {

constexpr int64_t SIDE = 16;               // columns of a tile of weights, rows of a tile of inputs
constexpr int64_t LINE = 64;               // bytes of a row of a tile
constexpr int64_t TILE = SIDE * LINE;      // bytes of a tile of weights

// Tile registers: sums of the first part 0, 1 and of the others 2, 3, for two blocks of columns; inputs 4, 5; weights
// 6, 7. GCC's intrinsics do not tell the compiler that they read memory.
inline void reads_memory() { asm volatile("" ::: "memory"); }

inline void configure(int64_t height) {
  struct alignas(64) { uint8_t palette, start, zero[14]; uint16_t width[16]; uint8_t rows[16]; } config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) { config.width[i] = uint16_t(LINE); config.rows[i] = uint8_t(i < 6 ? height : SIDE); }
  reads_memory();
  _tile_loadconfig(&config);
}

inline void fetch_tile(const char *at) {
  for (int64_t i = 0; i < TILE; i += LINE) __builtin_prefetch(at + i, 0, 2);
}

inline void zero_sums() { _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); }

// What a tile of rows meets: its inputs [steps, parts, height, LINE bytes], and N blocks of weights [steps, TILE bytes].
struct Meeting {
  const char *x; int64_t height, steps;
  const char *w[2];
};
typedef float Sums[2][SIDE][SIDE]; // block, row, column

// The weights of step s, while those further on are fetched.
template <int N> void load_weights(const Meeting &t, int64_t s) {
  for (int n = 0; n < N; ++n) fetch_tile(t.w[n] + s * TILE + AHEAD);
  _tile_loadd(6, t.w[0] + s * TILE, LINE);
  if constexpr (N == 2) _tile_loadd(7, t.w[1] + s * TILE, LINE);
}

// The sums of the first part and of the others, as [block, row, column].
template <int N, class S> void store_sums(S *first, S *rest) {
  _tile_stored(0, first[0], LINE);
  _tile_stored(2, rest[0], LINE);
  if constexpr (N == 2) { _tile_stored(1, first[1], LINE); _tile_stored(3, rest[1], LINE); }
}

template <class T> struct Tiles;

template <> struct Tiles<bf16> {
  static constexpr int64_t INPUTS = LINE / 2, PARTS = 3; // inputs of a tile; parts of an input

  const float *scale(int64_t) const { return nullptr; }

  // Three parts without a rest: each takes the eight bits that the one before left over. What is not finite has the first
  // alone.
  static void split(const float *x, int64_t part, bf16 *out) {
    typedef int16_t S8 __attribute__((vector_size(16), aligned(2), may_alias));
    for (int64_t i = 0; i < INPUTS; i += 8) {
      F8 rest = *(const F8 *)(x + i);
      for (int64_t p = 0; p < PARTS; ++p) {
        const I8 bits = (I8)rest, size = bits & 0x7fffffff, finite = size < 0x7f800000;
        const I8 top = bits >> 16 | ((size > 0x7f800000) & 0x40); // a NaN stays one
        *(S8 *)(out + p * part + i) = __builtin_convertvector(top, S8);
        rest = (F8)((I8)(rest - (F8)(bits & int32_t(0xffff0000))) & finite);
      }
    }
  }

  template <int N> void run(const Meeting &t, int64_t, int64_t, Sums out) const {
    zero_sums();
    const int64_t part = t.height * LINE;
    for (int64_t s = 0; s < t.steps; ++s) {
      const char *x = t.x + s * PARTS * part;
      load_weights<N>(t, s);
      _tile_loadd(4, x, LINE);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (N == 2) _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, x + part, LINE);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
      _tile_loadd(4, x + 2 * part, LINE);
      _tile_dpbf16ps(2, 4, 6);
      if constexpr (N == 2) _tile_dpbf16ps(3, 4, 7);
    }
    Sums rest;
    store_sums<N>(out, rest);
    for (int n = 0; n < N; ++n)
      for (int64_t r = 0; r < t.height; ++r)
        for (int64_t c = 0; c < SIDE; ++c) out[n][r][c] += rest[n][r][c];
  }
};

template <> struct Tiles<int8_t> {
  static constexpr int64_t INPUTS = LINE, PARTS = 2;

  const float *scales;   // [n], of the columns
  const float *x_scales; // [rows, groups]
  int64_t groups;

  const float *scale(int64_t column) const { return scales + column; }

  static void split(const int16_t *x, int64_t part, int8_t *out) { // x = 256 * first + second
    for (int64_t i = 0; i < INPUTS; ++i) {
      out[i] = int8_t(x[i] >> 8);
      out[part + i] = int8_t(x[i] & 255); // unsigned
    }
  }

  template <int N> void run(const Meeting &t, int64_t row, int64_t rows, Sums out) const {
    int32_t high[N][SIDE][SIDE], low[N][SIDE][SIDE];
    const int64_t part = t.height * LINE, of_group = GROUP / INPUTS;
    memset(out, 0, sizeof(Sums));
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t last = (g + 1) * of_group < t.steps ? (g + 1) * of_group : t.steps;
      zero_sums();
      for (int64_t s = g * of_group; s < last; ++s) {
        const char *x = t.x + s * PARTS * part;
        load_weights<N>(t, s);
        _tile_loadd(4, x, LINE);
        _tile_dpbssd(0, 4, 6);
        if constexpr (N == 2) _tile_dpbssd(1, 4, 7);
        _tile_loadd(5, x + part, LINE);
        _tile_dpbusd(2, 5, 6);
        if constexpr (N == 2) _tile_dpbusd(3, 5, 7);
      }
      store_sums<N>(high, low);
      for (int n = 0; n < N; ++n)
        for (int64_t r = 0; r < rows; ++r) {
          const FW scale = splatw(x_scales[(row + r) * groups + g]);
          for (int64_t c = 0; c < SIDE; c += W) {
            IW sum = *(const IW *)&high[n][r][c] * 256 + *(const IW *)&low[n][r][c];
            FW *total = (FW *)&out[n][r][c];
            *total = fmaw(to_float(sum), scale, *total);
          }
        }
    }
  }
};

// The inputs of a product in tiles: [tiles of rows, steps, parts, height, LINE bytes]. As many tiles of rows as must be,
// of one height, which the last may not fill.
template <class T, class X> struct Tiled {
  std::vector<char> bytes;
  int64_t height = 0, steps = 0;

  void take(Pool &pool, const X *x, int64_t ldx, int64_t rows, int64_t k) {
    typedef Tiles<T> K;
    const int64_t tiles = (rows + SIDE - 1) / SIDE;
    height = (rows + tiles - 1) / tiles;
    steps = (k + K::INPUTS - 1) / K::INPUTS;
    const int64_t part = height * LINE, whole = tiles * steps * K::PARTS * part;
    if (int64_t(bytes.size()) < whole) bytes.resize(whole);
    pool.run(tiles * height, 4, [&](int64_t a, int64_t b) {
      for (int64_t r = a; r < b; ++r)
        for (int64_t s = 0; s < steps; ++s) {
          char *at = bytes.data() + ((r / height * steps + s) * K::PARTS * height + r % height) * LINE;
          const int64_t first = s * K::INPUTS, left = r < rows ? k - first : 0;
          const X *from = x + r * ldx + first;
          X line[K::INPUTS] = {};
          if (left < K::INPUTS) {
            if (left) memcpy(line, from, size_t(left) * sizeof(X));
            from = line;
          }
          K::split(from, part / int64_t(sizeof(T)), (T *)at);
        }
    });
  }
};

template <class T, class X>
void tile_product(Pool &pool, const Product &p, const Tiles<T> &kind, const Tiled<T, X> &x, const char *w) {
  const int64_t blocks = (p.n + SIDE - 1) / SIDE, size = x.steps * TILE, of_rows = x.steps * kind.PARTS * x.height * LINE;
  pool.run(blocks, chunk_of(pool, blocks), [&](int64_t first, int64_t last) {
    configure(x.height);
    for (int64_t b = first; b < last; b += 2)
      for (int64_t row = 0; row < p.rows; row += x.height) {
        const int64_t rows = p.rows - row < x.height ? p.rows - row : x.height;
        const Meeting meeting{x.bytes.data() + row / x.height * of_rows, x.height, x.steps,
                              {w + b * size, w + (b + 1) * size}};
        Sums sums;
        const int count = b + 1 < last ? 2 : 1;
        if (count == 2) kind.template run<2>(meeting, row, rows, sums);
        else kind.template run<1>(meeting, row, rows, sums);
        for (int n = 0; n < count; ++n)
          for (int64_t r = 0; r < rows; ++r)
            write_line(p, row + r, (b + n) * SIDE, SIDE, sums[n][r], kind.scale((b + n) * SIDE));
      }
    _tile_release();
  });
}

inline void tile_linear(Pool &pool, const Product &p, const void *w, int dtype, const float *scales) {
  const char *data = static_cast<const char *>(w);
  if (dtype == 0) {
    static thread_local Tiled<bf16, float> tiled;
    tiled.take(pool, p.x, p.ldx, p.rows, p.k);
    tile_product(pool, p, Tiles<bf16>{}, tiled, data);
  } else {
    static thread_local Fixed fixed;
    static thread_local Tiled<int8_t, int16_t> tiled;
    fixed.take(pool, p);
    tiled.take(pool, fixed.q.data(), 2 * fixed.pairs, p.rows, p.k);
    tile_product(pool, p, Tiles<int8_t>{scales, fixed.scales.data(), fixed.groups}, tiled, data);
  }
}

// Whether this machine's tiles multiply as they should: whole numbers small enough that any order has the same sums.
template <class T> bool tiles_multiply(int dtype) {
  constexpr int64_t ROWS = 19, N = 40, K = 300, DEPTH = 4 / sizeof(T);
  constexpr int64_t blocks = (N + SIDE - 1) / SIDE, steps = (K + Tiles<T>::INPUTS - 1) / Tiles<T>::INPUTS;
  std::vector<float> x(ROWS * K), out(ROWS * N), scales(blocks * SIDE, 1.0f);
  std::vector<T> w(blocks * steps * TILE / sizeof(T));
  auto value = [](int64_t n, int64_t k) { return int((n * 31 + k * 17) % 13) - 6; };
  for (int64_t n = 0; n < N; ++n)
    for (int64_t k = 0; k < K; ++k) {
      T *at = &w[n / SIDE * steps * TILE / sizeof(T) + k / DEPTH * SIDE * DEPTH + n % SIDE * DEPTH + k % DEPTH];
      if constexpr (sizeof(T) == 2) narrow(float(value(n, k)), *at);
      else *at = T(value(n, k));
    }
  for (int64_t r = 0; r < ROWS; ++r) // 16-bit numbers; the largest of each group gives it the scale 1
    for (int64_t k = 0; k < K; ++k) x[r * K + k] = k % GROUP ? float((r * 977 + k * 131) % 9001 - 4500) : 32767.0f;
  Pool pool(1);
  tile_linear(pool, Product{x.data(), K, ROWS, N, K, nullptr, nullptr, out.data(), N}, w.data(), dtype, scales.data());
  for (int64_t r = 0; r < ROWS; ++r)
    for (int64_t n = 0; n < N; ++n) {
      int64_t sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += int64_t(x[r * K + k]) * value(n, k);
      if (out[r * N + n] != float(sum)) return false;
    }
  return true;
}

// Whether products of bfloat16 and int8 weights go through tiles in this process, and so how both are packed.
inline bool tiles() {
  static const bool use = FT_TILES_ALLOWED() && tiles_multiply<bf16>(0) && tiles_multiply<int8_t>(2);
  return use;
}

} // namespace ft
#endif
