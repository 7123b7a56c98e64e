// The operations of a decoder layer for CPUs, in float32 arithmetic over bfloat16 or float32 weights and cache.
//
// The promise that the whole engine stands on: every output row is a function of its own input row alone, bit for bit,
// whatever rows are computed with it, however many, in whatever order and on however many threads. So
//   - a product sums over k in one order, one fused multiply-add a step, for every tile shape;
//   - attention walks a row's keys in order of position (committed slots first, then the row's own path), so a node of
//     a tree, a row of a chunk and a lone decoded token meet the same numbers in the same order.
// Plain C interface, no allocation per call except thread-local scratch that only grows.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// ---------------------------------------------------------------- vectors

template <int W> struct Vec;
template <> struct Vec<8> {
  typedef float F __attribute__((vector_size(32), aligned(4), may_alias));
  typedef int32_t I __attribute__((vector_size(32), aligned(4), may_alias));
};
template <> struct Vec<16> {
  typedef float F __attribute__((vector_size(64), aligned(4), may_alias));
  typedef int32_t I __attribute__((vector_size(64), aligned(4), may_alias));
};
typedef Vec<8>::F F8;
typedef Vec<8>::I I8;

#if defined(__AVX512F__)
constexpr int W = 16;        // lanes of a product
constexpr int MAX_TILE = 12; // rows of a product's tile: 24 accumulators of 32 registers
#else
constexpr int W = 8;
constexpr int MAX_TILE = 6;  // 12 accumulators of 16 registers
#endif
constexpr int BLOCK = 2 * W; // columns of a packed block
typedef Vec<W>::F FW;
typedef Vec<W>::I IW;

inline F8 fma8(F8 a, F8 b, F8 c) {
#if defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
inline FW splatw(float v) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(v);
#elif defined(__AVX__)
  return _mm256_set1_ps(v);
#else
  return FW{v, v, v, v, v, v, v, v};
#endif
}
inline FW fmaw(FW a, FW b, FW c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#else
  return fma8(a, b, c);
#endif
}

struct bf16 { uint16_t bits; };

inline float widen(bf16 v) { uint32_t u = uint32_t(v.bits) << 16; float f; memcpy(&f, &u, 4); return f; }
inline float widen(float v) { return v; }
inline void narrow(float f, bf16 &out) { // round to nearest even; NaN stays NaN
  uint32_t u; memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) { out.bits = uint16_t(u >> 16) | 0x40; return; }
  out.bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline void narrow(float f, float &out) { out = f; }

// Two vectors of a pair of 2N values: even/odd lanes for bfloat16 (one shift, one mask), halves for float32.
template <class F, class I> inline void load_pair(const bf16 *p, F &a, F &b) {
  I raw = *(const I *)p;
  I lo = raw << 16, hi = raw & int32_t(0xffff0000);
  a = (F)lo; b = (F)hi;
}
template <class F, class I> inline void load_pair(const float *p, F &a, F &b) {
  a = *(const F *)p; b = *(const F *)(p + sizeof(F) / 4);
}

inline F8 splat8(float v) { return F8{v, v, v, v, v, v, v, v}; }
inline float sum8(F8 v) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }

// exp for x <= 88, by 2^n * polynomial (Cephes' coefficients); about 1 ulp, 0 below -87.
inline F8 exp8(F8 x) {
  I8 tiny = x < -87.0f;
  x = (F8)(((I8)x & ~tiny) | ((I8)splat8(-87.0f) & tiny));
  F8 n = x * 1.44269504088896341f;
  F8 magic = splat8(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer
  F8 rounded = (n + magic) - magic;
  F8 r = fma8(rounded, splat8(-0.693359375f), x);
  r = fma8(rounded, splat8(2.12194440e-4f), r);
  F8 p = splat8(1.9875691500e-4f);
  p = fma8(p, r, splat8(1.3981999507e-3f));
  p = fma8(p, r, splat8(8.3334519073e-3f));
  p = fma8(p, r, splat8(4.1665795894e-2f));
  p = fma8(p, r, splat8(1.6666665459e-1f));
  p = fma8(p, r, splat8(5.0000001201e-1f));
  p = fma8(p, r * r, r) + 1.0f;
  I8 e = (__builtin_convertvector(rounded, I8) + 127) << 23;
  F8 y = p * (F8)e;
  return (F8)((I8)y & ~tiny);
}

// ---------------------------------------------------------------- threads

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Work is cut into chunks; whoever is free takes the next. Workers spin for some tens of microseconds between two runs,
// then sleep, and a run never waits for a worker that has not begun: cheap when something else needs the cores.
class Pool {
 public:
  explicit Pool(int threads) : size_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~Pool() {
    stop_ = true;
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto &w : workers_) w.join();
  }
  // Calls job(first, last) over [0, items), a chunk at a time; items / chunk must stay below 2^32.
  template <class Job> void run(int64_t items, int64_t chunk, const Job &job) {
    if (size_ == 1 || items <= chunk) { job(int64_t(0), items); return; }
    const uint64_t chunks = uint64_t((items + chunk - 1) / chunk);
    items_ = items; chunk_ = chunk; chunks_ = chunks;
    context_ = &job;
    call_ = [](const void *c, int64_t a, int64_t b) { (*static_cast<const Job *>(c))(a, b); };
    done_.store(0, std::memory_order_relaxed);
    left_.store(++runs_ << 32 | chunks); // publishes all of the above
    epoch_.fetch_add(1);
    if (sleeping_.load() > 0) epoch_.notify_all();
    while (take()) {}
    for (int spins = 0; done_.load(std::memory_order_acquire) != chunks; ++spins) {
      if (spins < 2000) pause_cpu(); else std::this_thread::yield();
    }
  }
  int size() const { return size_; }

 private:
  // Do one chunk. The number of the run and the chunks left are one word: whoever lowers it owns a chunk of the run that
  // is going on, which cannot end, nor its fields change, before that chunk is done.
  bool take() {
    uint64_t left = left_.load();
    do {
      if ((left & 0xffffffff) == 0) return false;
    } while (!left_.compare_exchange_weak(left, left - 1));
    int64_t first = int64_t(chunks_ - (left & 0xffffffff)) * chunk_;
    call_(context_, first, first + chunk_ < items_ ? first + chunk_ : items_);
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }
  void work() {
    while (!stop_) {
      uint32_t seen = epoch_.load();
      int spins = 0;
      while (!take() && ++spins < 3000) pause_cpu();
      if (spins < 3000) continue;
      sleeping_.fetch_add(1);
      epoch_.wait(seen); // returns at once if a run began since
      sleeping_.fetch_sub(1);
    }
  }
  int size_;
  std::vector<std::thread> workers_;
  std::atomic<uint64_t> left_{0}, done_{0};
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  uint64_t runs_ = 0, chunks_ = 0;
  int64_t items_ = 0, chunk_ = 1;
  const void *context_ = nullptr;
  void (*call_)(const void *, int64_t, int64_t) = nullptr;
};

// ---------------------------------------------------------------- products

constexpr int64_t AHEAD = 4096; // bytes a lone tile reads ahead of itself
constexpr int64_t STRIP = 4;    // blocks that all tiles of rows go through while they lie in the cache

// out[rows 0..M) x [blocks 0..N) of a packed weight: one accumulator an output, k ascending. ahead: what to fetch
// meanwhile, as an offset from w; memory is the bound, so it must never idle while the arithmetic runs.
template <int M, int N, class T>
void tile(const float *x, int64_t ldx, const T *w, int64_t ahead, int64_t k, FW *acc) {
  FW sum[N][M][2] = {};
  const int64_t stride = k * BLOCK;
  for (int64_t i = 0; i < k; ++i) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) __builtin_prefetch(w + ahead + n * stride + i * BLOCK, 0, 2);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      FW a, b;
      load_pair<FW, IW>(w + n * stride + i * BLOCK, a, b);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        FW v = splatw(x[m * ldx + i]);
        sum[n][m][0] = fmaw(v, a, sum[n][m][0]);
        sum[n][m][1] = fmaw(v, b, sum[n][m][1]);
      }
    }
  }
  for (int n = 0; n < N; ++n)
    for (int m = 0; m < M; ++m) { acc[(n * M + m) * 2] = sum[n][m][0]; acc[(n * M + m) * 2 + 1] = sum[n][m][1]; }
}

struct Product {
  const float *x; int64_t ldx; int64_t rows;
  int64_t n, k;
  const float *bias, *residual;
  float *out; int64_t ldo;
};

template <int M, int N, class T>
void product_tile(const Product &p, const T *w, int64_t row, int64_t block, int64_t ahead) {
  FW acc[M * N * 2];
  tile<M, N, T>(p.x + row * p.ldx, p.ldx, w + block * p.k * BLOCK, ahead, p.k, acc);
  for (int n = 0; n < N; ++n) {
    int64_t column = (block + n) * BLOCK;
    int64_t width = p.n - column < BLOCK ? p.n - column : BLOCK;
    for (int m = 0; m < M; ++m) {
      float *out = p.out + (row + m) * p.ldo + column;
      float line[BLOCK];
      memcpy(line, &acc[(n * M + m) * 2], sizeof line);
      const float *residual = p.residual ? p.residual + (row + m) * p.ldo + column : nullptr;
      for (int64_t i = 0; i < width; ++i) {
        float v = line[i];
        if (p.bias) v += p.bias[column + i];
        if (residual) v += residual[i];
        out[i] = v;
      }
    }
  }
}

template <int M, class T>
void row_tiles(const Product &p, const T *w, int64_t row, int64_t first, int64_t last, int64_t ahead) {
  constexpr int N = M == 1 ? 4 : M <= 3 ? 2 : 1; // enough accumulators in flight to hide the latency of the adds
  int64_t b = first;
  for (; b + N <= last; b += N) product_tile<M, N, T>(p, w, row, b, ahead);
  for (; b < last; ++b) product_tile<M, 1, T>(p, w, row, b, ahead);
}

template <class T> void product_range(const Product &p, const T *w, int64_t first, int64_t last) {
  int64_t tiles = (p.rows + MAX_TILE - 1) / MAX_TILE;
  // a tile of rows after the other through all blocks would stream the weights again for each: so in strips, of which
  // the last tile fetches the next
  int64_t strip = tiles == 1 ? last - first : STRIP;
  for (int64_t s = first; s < last; s += strip) {
    int64_t e = s + strip < last ? s + strip : last;
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      int64_t m = (p.rows - row + (tiles - t) - 1) / (tiles - t);
      int64_t ahead = tiles > 1 && t == tiles - 1 ? strip * p.k * BLOCK : AHEAD / int64_t(sizeof(T));
      switch (m) {
        case 1: row_tiles<1, T>(p, w, row, s, e, ahead); break;
        case 2: row_tiles<2, T>(p, w, row, s, e, ahead); break;
        case 3: row_tiles<3, T>(p, w, row, s, e, ahead); break;
        case 4: row_tiles<4, T>(p, w, row, s, e, ahead); break;
        case 5: row_tiles<5, T>(p, w, row, s, e, ahead); break;
        case 6: row_tiles<6, T>(p, w, row, s, e, ahead); break;
#if defined(__AVX512F__)
        case 7: row_tiles<7, T>(p, w, row, s, e, ahead); break;
        case 8: row_tiles<8, T>(p, w, row, s, e, ahead); break;
        case 9: row_tiles<9, T>(p, w, row, s, e, ahead); break;
        case 10: row_tiles<10, T>(p, w, row, s, e, ahead); break;
        case 11: row_tiles<11, T>(p, w, row, s, e, ahead); break;
        case 12: row_tiles<12, T>(p, w, row, s, e, ahead); break;
#endif
      }
      row += m;
    }
  }
}

template <class T> void product(Pool &pool, const Product &p, const T *w) {
  int64_t blocks = (p.n + BLOCK - 1) / BLOCK;
  int64_t chunk = blocks / (pool.size() * 4);
  chunk = chunk < 4 ? 4 : chunk & ~int64_t(3);
  pool.run(blocks, chunk, [&](int64_t a, int64_t b) { product_range<T>(p, w, a, b); });
}

// ---------------------------------------------------------------- attention

struct Attention {
  const float *q; int64_t ldq;
  float *out; int64_t ldo;
  int64_t heads, kv_heads, dim;
  const int32_t *owner;      // [R] request of the row
  const int32_t *tables;     // slot table, one line a request
  int64_t table_width;
  const int32_t *lines;      // [B] line of the table
  const int32_t *context;    // [B]
  const int64_t *path_start; // [R + 1]
  const int32_t *path;       // slots of the rows on the path, itself last
  int64_t window;            // 0: all keys
  float scale;
};

struct Scratch { std::vector<float> scores, query; };

template <class T> struct Cached { const T *k, *v; };

// The sums of eight vectors, each as sum8 has it.
inline F8 sums8(const F8 *v) {
#if defined(__AVX__)
  __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#else
  return F8{sum8(v[0]), sum8(v[1]), sum8(v[2]), sum8(v[3]), sum8(v[4]), sum8(v[5]), sum8(v[6]), sum8(v[7])};
#endif
}

// One row's attention for H of the query heads that share a head of keys.
template <int H, class T>
void attend_group(const Attention &a, const Cached<T> &cache, int64_t row, int64_t kv, int64_t h0, Scratch &scratch) {
  constexpr bool paired = sizeof(T) == 2; // even and odd lanes apart, as load_pair has them
  const int64_t dim = a.dim, pairs = dim / 16, stride = a.kv_heads * dim, group = a.heads / a.kv_heads;
  const int32_t b = a.owner[row];
  const int32_t *table = a.tables + int64_t(a.lines[b]) * a.table_width;
  const int64_t context = a.context[b], total = context + a.path_start[row + 1] - a.path_start[row];
  const int32_t *path = a.path + a.path_start[row] - context;
  const int64_t start = a.window && total > a.window ? total - a.window : 0;
  const int64_t padded = (total - start + 7) / 8 * 8;
  if (int64_t(scratch.scores.size()) < padded * H) scratch.scores.resize(padded * H + 4096);
  if (int64_t(scratch.query.size()) < dim * H) scratch.query.resize(dim * H);
  float *scores = scratch.scores.data(), *query = scratch.query.data();
  auto slot = [&](int64_t t) { return int64_t(t < context ? table[t] : path[t]); };

  for (int h = 0; h < H; ++h) { // the query in the lane order of load_pair, scaled
    const float *src = a.q + row * a.ldq + (kv * group + h0 + h) * dim;
    for (int64_t j = 0; j < dim; j += 16)
      for (int64_t i = 0; i < 8; ++i) {
        query[h * dim + j + i] = src[j + (paired ? 2 * i : i)] * a.scale;
        query[h * dim + j + 8 + i] = src[j + (paired ? 2 * i + 1 : 8 + i)] * a.scale;
      }
  }
  F8 best[H];
  for (int h = 0; h < H; ++h) best[h] = splat8(-INFINITY);
  for (int64_t t = start; t < total; t += 8) {
    F8 partial[H][8];
    const T *k[8]; // past the end the last key again: its scores are masked below
    for (int64_t i = 0; i < 8; ++i) k[i] = cache.k + slot(t + i < total ? t + i : total - 1) * stride + kv * dim;
    for (int i = 0; i < 8; i += 2) {
      F8 one[H] = {}, two[H] = {};
      for (int64_t j = 0; j < pairs; ++j) {
        F8 x, y, z, w;
        load_pair<F8, I8>(k[i] + j * 16, x, y);
        load_pair<F8, I8>(k[i + 1] + j * 16, z, w);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
          const F8 *q = (const F8 *)(query + h * dim + j * 16);
          one[h] = fma8(y, q[1], fma8(x, q[0], one[h]));
          two[h] = fma8(w, q[1], fma8(z, q[0], two[h]));
        }
      }
      for (int h = 0; h < H; ++h) { partial[h][i] = one[h]; partial[h][i + 1] = two[h]; }
    }
    for (int h = 0; h < H; ++h) {
      F8 block = sums8(partial[h]);
      for (int64_t i = total - t; i < 8; ++i) block[i] = -INFINITY;
      *(F8 *)(scores + h * padded + t - start) = block;
      best[h] = block > best[h] ? block : best[h];
    }
  }
  float inverse[H];
  for (int h = 0; h < H; ++h) {
    float top = best[h][0];
    for (int i = 1; i < 8; ++i) top = best[h][i] > top ? best[h][i] : top;
    F8 sum = {};
    for (int64_t t = 0; t < padded; t += 8) {
      F8 *s = (F8 *)(scores + h * padded + t);
      *s = exp8(*s - top);
      sum += *s;
    }
    inverse[h] = 1.0f / sum8(sum);
  }
  for (int64_t j = 0; j < pairs; ++j) {
    F8 even[H] = {}, odd[H] = {};
    const T *v = cache.v + kv * dim + j * 16;
    for (int64_t t = start; t < total; ++t) {
      F8 x, y;
      load_pair<F8, I8>(v + slot(t) * stride, x, y);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        F8 p = splat8(scores[h * padded + t - start]);
        even[h] = fma8(p, x, even[h]);
        odd[h] = fma8(p, y, odd[h]);
      }
    }
    for (int h = 0; h < H; ++h) {
      float *dst = a.out + row * a.ldo + (kv * group + h0 + h) * dim + j * 16;
      for (int64_t i = 0; i < 8; ++i) {
        dst[paired ? 2 * i : i] = even[h][i] * inverse[h];
        dst[paired ? 2 * i + 1 : 8 + i] = odd[h][i] * inverse[h];
      }
    }
  }
}

template <class T> void attend(Pool &pool, const Attention &a, int64_t rows, const Cached<T> &cache) {
  const int64_t group = a.heads / a.kv_heads;
  pool.run(rows * a.kv_heads, 1, [&](int64_t first, int64_t last) {
    static thread_local Scratch scratch;
    for (int64_t i = first; i < last; ++i)
      for (int64_t h = 0; h < group; h += 4) {
        const int64_t row = i / a.kv_heads, kv = i % a.kv_heads;
        switch (group - h) {
          case 1: attend_group<1, T>(a, cache, row, kv, h, scratch); break;
          case 2: attend_group<2, T>(a, cache, row, kv, h, scratch); break;
          case 3: attend_group<3, T>(a, cache, row, kv, h, scratch); break;
          default: attend_group<4, T>(a, cache, row, kv, h, scratch);
        }
      }
  });
}

inline float norm_scale(const float *x, int64_t n, float eps) {
  F8 sum = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) { F8 v = *(const F8 *)(x + i); sum = fma8(v, v, sum); }
  float s = sum8(sum);
  for (; i < n; ++i) s = std::fma(x[i], x[i], s);
  return 1.0f / std::sqrt(s / float(n) + eps);
}

struct Rope {
  float *qkv; int64_t ld;
  const int64_t *positions, *slots;
  int64_t heads, kv_heads, dim;
  const float *cos, *sin; // [max_positions, dim / 2]
  const float *q_norm, *k_norm;
  float eps;
};

inline void rotate(float *x, const Rope &r, const float *norm, int64_t position) {
  const int64_t half = r.dim / 2;
  const float *c = r.cos + position * half, *s = r.sin + position * half;
  if (norm) {
    float scale = norm_scale(x, r.dim, r.eps);
    for (int64_t i = 0; i < r.dim; ++i) x[i] = x[i] * scale * norm[i];
  }
  for (int64_t i = 0; i < half; ++i) {
    float u = x[i], v = x[i + half];
    x[i] = u * c[i] - v * s[i];
    x[i + half] = v * c[i] + u * s[i];
  }
}

template <class T> void rope_write(const Rope &r, int64_t row, T *k_cache, T *v_cache) {
  float *line = r.qkv + row * r.ld;
  const int64_t position = r.positions[row], width = r.kv_heads * r.dim;
  for (int64_t h = 0; h < r.heads; ++h) rotate(line + h * r.dim, r, r.q_norm, position);
  float *k = line + r.heads * r.dim, *v = k + width;
  T *kc = k_cache + r.slots[row] * width, *vc = v_cache + r.slots[row] * width;
  for (int64_t h = 0; h < r.kv_heads; ++h) rotate(k + h * r.dim, r, r.k_norm, position);
  for (int64_t i = 0; i < width; ++i) { narrow(k[i], kc[i]); narrow(v[i], vc[i]); }
}

} // namespace

// ---------------------------------------------------------------- C interface (dtype: 0 bfloat16, 1 float32)

extern "C" {

int ft_block() { return BLOCK; }
int ft_lanes() { return W; }

void *ft_pool_new(int threads) { return new Pool(threads); }
void ft_pool_free(void *pool) { delete static_cast<Pool *>(pool); }

void ft_linear(void *pool, const float *x, int64_t ldx, int64_t rows, const void *w, int dtype, int64_t n, int64_t k,
               const float *bias, const float *residual, float *out, int64_t ldo) {
  Product p{x, ldx, rows, n, k, bias, residual, out, ldo};
  if (dtype == 0) product(*static_cast<Pool *>(pool), p, static_cast<const bf16 *>(w));
  else product(*static_cast<Pool *>(pool), p, static_cast<const float *>(w));
}

// Rows of a packed matrix, widened: the embedding of each token.
void ft_embed(const void *w, int dtype, const int64_t *tokens, int64_t rows, int64_t k, float *out) {
  for (int64_t r = 0; r < rows; ++r) {
    int64_t block = tokens[r] / BLOCK, column = tokens[r] % BLOCK;
    // pack puts column c < W at lane 2c and column W + c at 2c + 1 for bfloat16, in order for float32
    int64_t lane = dtype == 0 ? (column < W ? 2 * column : 2 * (column - W) + 1) : column;
    int64_t at = block * k * BLOCK + lane;
    for (int64_t i = 0; i < k; ++i)
      out[r * k + i] = dtype == 0 ? widen(static_cast<const bf16 *>(w)[at + i * BLOCK])
                                  : static_cast<const float *>(w)[at + i * BLOCK];
  }
}

void ft_norm(void *pool, const float *x, int64_t rows, int64_t n, const float *weight, float eps, float *out) {
  static_cast<Pool *>(pool)->run(rows, 16, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; ++r) {
      const float *in = x + r * n;
      float scale = norm_scale(in, n, eps);
      for (int64_t i = 0; i < n; ++i) out[r * n + i] = in[i] * scale * weight[i];
    }
  });
}

void ft_rope_write(void *pool, float *qkv, int64_t ld, int64_t rows, const int64_t *positions, const int64_t *slots,
                   int64_t heads, int64_t kv_heads, int64_t dim, const float *cos, const float *sin,
                   const float *q_norm, const float *k_norm, float eps, void *k_cache, void *v_cache, int dtype) {
  Rope r{qkv, ld, positions, slots, heads, kv_heads, dim, cos, sin, q_norm, k_norm, eps};
  static_cast<Pool *>(pool)->run(rows, 8, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; ++i) {
      if (dtype == 0) rope_write(r, i, static_cast<bf16 *>(k_cache), static_cast<bf16 *>(v_cache));
      else rope_write(r, i, static_cast<float *>(k_cache), static_cast<float *>(v_cache));
    }
  });
}

// Slots of each row's own path (trail or ancestors, then itself) and the request it belongs to; returns the number of
// entries. parents: row within the request, -1 for none. path may be null to count only. trail may be null.
int64_t ft_paths(const int32_t *indptr, int64_t requests, const int32_t *parents, const int64_t *slots,
                 const int64_t *trail_start, const int32_t *trail, int32_t *owner, int64_t *path_start,
                 int32_t *path) {
  path_start[0] = 0;
  for (int64_t b = 0; b < requests; ++b)
    for (int32_t r = indptr[b]; r < indptr[b + 1]; ++r) {
      owner[r] = int32_t(b);
      int64_t parent = parents[r] < 0 ? -1 : indptr[b] + parents[r];
      int64_t before = parent >= 0 ? path_start[parent + 1] - path_start[parent]
                       : trail     ? trail_start[r + 1] - trail_start[r]
                                   : 0;
      path_start[r + 1] = path_start[r] + before + 1;
      if (!path) continue;
      const int32_t *from = parent >= 0 ? path + path_start[parent] : trail ? trail + trail_start[r] : nullptr;
      if (before) memcpy(path + path_start[r], from, size_t(before) * 4);
      path[path_start[r] + before] = int32_t(slots[r]);
    }
  return path_start[indptr[requests]];
}

void ft_attend(void *pool, const float *q, int64_t ldq, float *out, int64_t ldo, int64_t rows, int64_t heads,
               int64_t kv_heads, int64_t dim, const int32_t *owner, const int32_t *tables, int64_t table_width,
               const int32_t *lines, const int32_t *context, const int64_t *path_start, const int32_t *path,
               int64_t window, float scale, const void *k_cache, const void *v_cache, int dtype) {
  Attention a{q, ldq, out, ldo, heads, kv_heads, dim, owner, tables, table_width, lines, context, path_start, path,
              window, scale};
  if (dtype == 0)
    attend(*static_cast<Pool *>(pool), a, rows,
           Cached<bf16>{static_cast<const bf16 *>(k_cache), static_cast<const bf16 *>(v_cache)});
  else
    attend(*static_cast<Pool *>(pool), a, rows,
           Cached<float>{static_cast<const float *>(k_cache), static_cast<const float *>(v_cache)});
}

// The k largest of each row of x [rows, n], larger first and ties by lower index; NaN is never among them.
void ft_top(const float *x, int64_t rows, int64_t n, int64_t k, int32_t *out) {
  std::vector<float> best(k);
  for (int64_t r = 0; r < rows; ++r) {
    const float *row = x + r * n;
    int32_t *ids = out + r * k;
    for (int64_t j = 0; j < k; ++j) { best[j] = -INFINITY; ids[j] = -1; }
    auto offer = [&](int64_t i) {
      if (!(row[i] > best[k - 1])) return;
      int64_t j = k - 1;
      for (; j > 0 && row[i] > best[j - 1]; --j) { best[j] = best[j - 1]; ids[j] = ids[j - 1]; }
      best[j] = row[i]; ids[j] = int32_t(i);
    };
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) { // most groups hold nothing: one comparison tells
      const F8 *v = (const F8 *)(row + i);
      I8 above = (v[0] > best[k - 1]) | (v[1] > best[k - 1]) | (v[2] > best[k - 1]) | (v[3] > best[k - 1]);
      int32_t any = 0;
      for (int j = 0; j < 8; ++j) any |= above[j];
      if (any)
        for (int64_t j = i; j < i + 32; ++j) offer(j);
    }
    for (; i < n; ++i) offer(i);
  }
}

// out[r, i] = silu(x[r, i]) * x[r, n + i]
void ft_swiglu(void *pool, const float *x, int64_t rows, int64_t n, float *out) {
  static_cast<Pool *>(pool)->run(rows, 8, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; ++r) {
      const float *gate = x + r * 2 * n, *up = gate + n;
      float *dst = out + r * n;
      int64_t i = 0;
      for (; i + 8 <= n; i += 8) {
        F8 g = *(const F8 *)(gate + i), u = *(const F8 *)(up + i);
        F8 magnitude = g < 0 ? -g : g;
        F8 e = exp8(-magnitude); // at most 1, so nothing overflows on either side
        F8 sigmoid = (g < 0 ? e : splat8(1.0f)) / (e + 1.0f);
        *(F8 *)(dst + i) = g * sigmoid * u;
      }
      for (; i < n; ++i) dst[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    }
  });
}

// Reads `count` buffers once, on all threads, and adds up their words: what a forward's weights cost if nothing is done
// with them. The sum is returned so that no compiler leaves the reading out.
int64_t ft_stream(void *pool, const void *const *data, const int64_t *bytes, int64_t count) {
  typedef uint32_t U8 __attribute__((vector_size(32), aligned(4), may_alias)); // unsigned: it may overflow
  struct Piece { const char *at; int64_t bytes; };
  constexpr int64_t PIECE = 1 << 17;
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t at = 0; at < bytes[i]; at += PIECE)
      pieces.push_back({static_cast<const char *>(data[i]) + at, bytes[i] - at < PIECE ? bytes[i] - at : PIECE});
  std::atomic<int64_t> total{0};
  static_cast<Pool *>(pool)->run(int64_t(pieces.size()), 1, [&](int64_t a, int64_t b) {
    int64_t sum = 0;
    for (int64_t p = a; p < b; ++p) {
      U8 sums[4] = {};
      int64_t i = 0;
      for (; i + 128 <= pieces[p].bytes; i += 128) {
        const U8 *v = (const U8 *)(pieces[p].at + i);
        __builtin_prefetch(pieces[p].at + i + 2048);
        __builtin_prefetch(pieces[p].at + i + 2048 + 64);
        for (int j = 0; j < 4; ++j) sums[j] += v[j];
      }
      for (; i < pieces[p].bytes; ++i) sum += pieces[p].at[i];
      U8 all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      for (int j = 0; j < 8; ++j) sum += all[j];
    }
    total += sum;
  });
  return total;
}

} // extern "C"
