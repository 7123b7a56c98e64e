// Attention of rows over the slots of a cache, each row's keys in order of position.
#pragma once

#include <vector>

#include "pool.hpp"
#include "vectors.hpp"

namespace ft {

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

struct Scratch {
  std::vector<float> scores, query, sum;
  std::vector<int64_t> at;

  void fit(int64_t keys, int64_t queries, int64_t dim) {
    if (int64_t(scores.size()) < keys * queries) scores.resize(keys * queries + 4096);
    if (int64_t(query.size()) < dim * queries) { query.resize(dim * queries); sum.resize(dim * queries); }
    if (int64_t(at.size()) < keys) at.resize(keys + 1024);
  }
};

// The key of a head at a slot begins at k + head * per_head + slot * dim; so does the value.
template <class T> struct Cached { const T *k, *v; int64_t per_head; };

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

// Keys are taken for H queries at once: heads that share a head of keys, of one row or of two rows of one request. Each
// query meets its keys one after the other, whoever is beside it, so its numbers are its own.

// scores[h][t] = query[h] . key[t] for t in [first, last); writes up to seven scores more, which are of no use.
template <int H, class T>
void score(const Attention &a, const T *keys, const int64_t *at, int64_t first, int64_t last, const float *query,
           float *scores, int64_t ld) {
  const int64_t dim = a.dim, pairs = dim / 16;
  for (int64_t t = first; t < last; t += 8) {
    F8 partial[H][8];
    for (int64_t i = 0; i < 8; i += 2) { // past the end the last key again
      const T *k0 = keys + at[t + i < last ? t + i : last - 1], *k1 = keys + at[t + i + 1 < last ? t + i + 1 : last - 1];
      F8 one[H] = {}, two[H] = {};
      for (int64_t j = 0; j < pairs; ++j) {
        F8 x, y, z, w;
        load_pair<F8, I8>(k0 + j * 16, x, y);
        load_pair<F8, I8>(k1 + j * 16, z, w);
#pragma GCC unroll 6
        for (int h = 0; h < H; ++h) {
          const F8 *q = (const F8 *)(query + h * dim + j * 16);
          one[h] = fma8(y, q[1], fma8(x, q[0], one[h]));
          two[h] = fma8(w, q[1], fma8(z, q[0], two[h]));
        }
      }
#pragma GCC unroll 6
      for (int h = 0; h < H; ++h) { partial[h][i] = one[h]; partial[h][i + 1] = two[h]; }
    }
#pragma GCC unroll 6
    for (int h = 0; h < H; ++h) *(F8 *)(scores + h * ld + t) = sums8(partial[h]);
  }
}

// sum[h] += p[h][t] * value[t] for t in [first, last), in order; sum: [H, dim], lanes as load_pair has them.
template <int H, class T>
void mix(const Attention &a, const T *values, const int64_t *at, int64_t first, int64_t last, const float *p,
         int64_t ld, float *sum) {
  for (int64_t j = 0; j < a.dim; j += 16) {
    F8 even[H], odd[H];
#pragma GCC unroll 6
    for (int h = 0; h < H; ++h) {
      even[h] = *(const F8 *)(sum + h * a.dim + j);
      odd[h] = *(const F8 *)(sum + h * a.dim + j + 8);
    }
    for (int64_t t = first; t < last; ++t) {
      F8 x, y;
      load_pair<F8, I8>(values + at[t] + j, x, y);
#pragma GCC unroll 6
      for (int h = 0; h < H; ++h) {
        F8 share = splat8(p[h * ld + t]);
        even[h] = fma8(share, x, even[h]);
        odd[h] = fma8(share, y, odd[h]);
      }
    }
#pragma GCC unroll 6
    for (int h = 0; h < H; ++h) {
      *(F8 *)(sum + h * a.dim + j) = even[h];
      *(F8 *)(sum + h * a.dim + j + 8) = odd[h];
    }
  }
}

// exp(s - max) in place over n scores, padded with zeros to a whole number of eights; returns 1 / their sum.
inline float soften(float *scores, int64_t n) {
  for (int64_t t = n; t % 8; ++t) scores[t] = -INFINITY;
  F8 best = splat8(-INFINITY);
  for (int64_t t = 0; t < n; t += 8) { F8 s = *(const F8 *)(scores + t); best = s > best ? s : best; }
  float top = best[0];
  for (int i = 1; i < 8; ++i) top = best[i] > top ? best[i] : top;
  F8 sum = {};
  for (int64_t t = 0; t < n; t += 8) {
    F8 *s = (F8 *)(scores + t);
    *s = exp8(*s - top);
    sum += *s;
  }
  return 1.0f / sum8(sum);
}

// Rows [row, row + R) of one request, and H of the query heads that share a head of keys. Two rows see the same context,
// all of it; a lone row may have a window.
template <int R, int H, class T>
void attend_group(const Attention &a, const Cached<T> &cache, int64_t row, int64_t kv, int64_t h0, Scratch &scratch) {
  constexpr bool paired = sizeof(T) == 2; // even and odd lanes apart, as load_pair has them
  constexpr int64_t FAR = 256;            // keys that are fetched ahead
  const int64_t dim = a.dim, group = a.heads / a.kv_heads;
  const int32_t b = a.owner[row];
  const int32_t *table = a.tables + int64_t(a.lines[b]) * a.table_width;
  const int64_t context = a.context[b];
  int64_t most = 0;
  for (int r = 0; r < R; ++r) {
    const int64_t path = a.path_start[row + r + 1] - a.path_start[row + r];
    most = path > most ? path : most;
  }
  const int64_t ld = (context + most + 7) / 8 * 8 + 8;
  scratch.fit(ld, R * H, dim);
  int64_t *at = scratch.at.data(); // where each key lies, of this head
  float *scores = scratch.scores.data(), *query = scratch.query.data(), *sum = scratch.sum.data();
  const int64_t start = a.window && context + most > a.window ? context + most - a.window : 0;
  const T *keys = cache.k + kv * cache.per_head, *values = cache.v + kv * cache.per_head;

  for (int r = 0; r < R; ++r)
    for (int h = 0; h < H; ++h) { // the query in the lane order of load_pair, scaled
      const float *src = a.q + (row + r) * a.ldq + (kv * group + h0 + h) * dim;
      float *dst = query + (r * H + h) * dim;
      for (int64_t j = 0; j < dim; j += 16)
        for (int64_t i = 0; i < 8; ++i) {
          dst[j + i] = src[j + (paired ? 2 * i : i)] * a.scale;
          dst[j + 8 + i] = src[j + (paired ? 2 * i + 1 : 8 + i)] * a.scale;
        }
    }
  memset(sum, 0, size_t(R * H * dim) * sizeof(float));
  for (int64_t t = start; t < context; ++t) at[t] = int64_t(table[t]) * dim;
  // the cache of one layer was last touched a whole pass ago: ask for it before it is needed
  auto fetch = [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      for (int64_t i = 0; i < dim * int64_t(sizeof(T)); i += 64) {
        __builtin_prefetch((const char *)(keys + at[t]) + i, 0, 2);
        __builtin_prefetch((const char *)(values + at[t]) + i, 0, 2);
      }
  };
  const int64_t near = start + FAR < context ? start + FAR : context;
  fetch(start, near);
  for (int64_t t = start; t < context; t += FAR) {
    const int64_t end = t + FAR < context ? t + FAR : context, beyond = end + FAR < context ? end + FAR : context;
    fetch(end, beyond);
    score<R * H>(a, keys, at, t, end, query, scores, ld);
  }
  float inverse[R * H];
  for (int r = 0; r < R; ++r) {
    const int64_t path = a.path_start[row + r + 1] - a.path_start[row + r], total = context + path;
    const int32_t *slots = a.path + a.path_start[row + r] - context;
    const int64_t first = start > context ? start : context;
    for (int64_t t = first; t < total; ++t) at[t] = int64_t(slots[t]) * dim;
    score<H>(a, keys, at, first, total, query + r * H * dim, scores + r * H * ld, ld);
    for (int h = r * H; h < (r + 1) * H; ++h) inverse[h] = soften(scores + h * ld + start, total - start);
  }
  mix<R * H>(a, values, at, start, context, scores, ld, sum);
  for (int r = 0; r < R; ++r) {
    const int64_t total = context + a.path_start[row + r + 1] - a.path_start[row + r];
    const int32_t *slots = a.path + a.path_start[row + r] - context;
    const int64_t first = start > context ? start : context;
    for (int64_t t = first; R > 1 && t < total; ++t) at[t] = int64_t(slots[t]) * dim;
    mix<H>(a, values, at, first, total, scores + r * H * ld, ld, sum + r * H * dim);
    for (int h = 0; h < H; ++h) {
      const float *src = sum + (r * H + h) * dim;
      float *dst = a.out + (row + r) * a.ldo + (kv * group + h0 + h) * dim;
      for (int64_t j = 0; j < dim; j += 16)
        for (int64_t i = 0; i < 8; ++i) {
          dst[j + (paired ? 2 * i : i)] = src[j + i] * inverse[r * H + h];
          dst[j + (paired ? 2 * i + 1 : 8 + i)] = src[j + 8 + i] * inverse[r * H + h];
        }
    }
  }
}

template <int R, class T>
void attend_rows(const Attention &a, const Cached<T> &cache, int64_t row, int64_t kv, Scratch &scratch) {
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t h = 0; h < group; h += 3) switch (group - h) {
      case 1: attend_group<R, 1>(a, cache, row, kv, h, scratch); break;
      case 2: attend_group<R, 2>(a, cache, row, kv, h, scratch); break;
      default: attend_group<R, 3>(a, cache, row, kv, h, scratch);
    }
}

template <class T> void attend(Pool &pool, const Attention &a, int64_t rows, const Cached<T> &cache) {
  // rows two by two, as far as they are of one request
  static thread_local std::vector<int32_t> firsts;
  firsts.clear();
  for (int64_t r = 0; r < rows;) {
    const bool two = !a.window && r + 1 < rows && a.owner[r + 1] == a.owner[r];
    firsts.push_back(int32_t(r));
    r += two ? 2 : 1;
  }
  firsts.push_back(int32_t(rows));
  const int32_t *first = firsts.data();
  pool.run((int64_t(firsts.size()) - 1) * a.kv_heads, 1, [&, first](int64_t from, int64_t to) {
    static thread_local Scratch scratch;
    for (int64_t i = from; i < to; ++i) {
      const int64_t unit = i / a.kv_heads, kv = i % a.kv_heads, row = first[unit];
      if (first[unit + 1] - row == 2) attend_rows<2>(a, cache, row, kv, scratch);
      else attend_rows<1>(a, cache, row, kv, scratch);
    }
  });
}

} // namespace ft
