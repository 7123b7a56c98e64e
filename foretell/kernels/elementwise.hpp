// What lies between products: norms, rotary positions, gates.
#pragma once

#include "pool.hpp"
#include "vectors.hpp"

namespace ft {

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

// per_head: see Cached in attention.hpp.
template <class T> void rope_write_row(const Rope &r, int64_t row, T *k_cache, T *v_cache, int64_t per_head) {
  float *line = r.qkv + row * r.ld;
  const int64_t position = r.positions[row];
  for (int64_t h = 0; h < r.heads; ++h) rotate(line + h * r.dim, r, r.q_norm, position);
  float *k = line + r.heads * r.dim, *v = k + r.kv_heads * r.dim;
  for (int64_t h = 0; h < r.kv_heads; ++h) {
    rotate(k + h * r.dim, r, r.k_norm, position);
    const int64_t at = h * per_head + r.slots[row] * r.dim;
    for (int64_t i = 0; i < r.dim; ++i) {
      narrow(k[h * r.dim + i], k_cache[at + i]);
      narrow(v[h * r.dim + i], v_cache[at + i]);
    }
  }
}

inline void norm_row(const float *x, int64_t n, const float *weight, float eps, float *out) {
  const float scale = norm_scale(x, n, eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

// out[i] = silu(x[i]) * x[n + i]
inline void swiglu_row(const float *x, int64_t n, float *out) {
  const float *gate = x, *up = x + n;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    F8 g = *(const F8 *)(gate + i), u = *(const F8 *)(up + i);
    F8 magnitude = g < 0 ? -g : g;
    F8 e = exp8(-magnitude); // at most 1, so nothing overflows on either side
    F8 sigmoid = (g < 0 ? e : splat8(1.0f)) / (e + 1.0f);
    *(F8 *)(out + i) = g * sigmoid * u;
  }
  for (; i < n; ++i) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

} // namespace ft
