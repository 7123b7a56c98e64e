// Vectors of float32, the two storage types, and exp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ft {

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
#if defined(__AVX2__)
constexpr const char *VECTORS = W == 16 ? "avx512" : "avx2";
#else
constexpr const char *VECTORS = "portable"; // what the compiler makes of its own vectors
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
// memcpy, since a template argument forgets that its type may lie anywhere.
template <class F, class I> inline void load_pair(const bf16 *p, F &a, F &b) {
  I raw;
  memcpy(&raw, p, sizeof raw);
  I lo = raw << 16, hi = raw & int32_t(0xffff0000);
  memcpy(&a, &lo, sizeof a);
  memcpy(&b, &hi, sizeof b);
}
template <class F, class I> inline void load_pair(const float *p, F &a, F &b) {
  memcpy(&a, p, sizeof a);
  memcpy(&b, p + sizeof(F) / 4, sizeof b);
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

// ---------------------------------------------------------------- pairs of 16-bit integers

// w: two neighbouring int8 of each of W columns, widened; v: the same two int16 for all columns.
#if defined(__AVX512BW__)
typedef __m512i Pairs;
inline Pairs widen_pairs(const int8_t *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
inline Pairs splat_pair(const int16_t *p) { int32_t v; memcpy(&v, p, 4); return _mm512_set1_epi32(v); }
inline IW add_dot(IW sum, Pairs w, Pairs v) {
#if defined(__AVX512VNNI__)
  return (IW)_mm512_dpwssd_epi32((__m512i)sum, w, v);
#else
  return (IW)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(w, v));
#endif
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
typedef __m256i Pairs;
inline Pairs widen_pairs(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
inline Pairs splat_pair(const int16_t *p) { int32_t v; memcpy(&v, p, 4); return _mm256_set1_epi32(v); }
inline IW add_dot(IW sum, Pairs w, Pairs v) {
#if defined(__AVXVNNI__)
  return (IW)_mm256_dpwssd_avx_epi32((__m256i)sum, w, v);
#else
  return (IW)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(w, v));
#endif
}
#else
struct Pairs { IW low, high; };
inline Pairs widen_pairs(const int8_t *p) {
  Pairs pairs;
  for (int i = 0; i < W; ++i) { pairs.low[i] = p[2 * i]; pairs.high[i] = p[2 * i + 1]; }
  return pairs;
}
inline Pairs splat_pair(const int16_t *p) { return Pairs{IW{} + p[0], IW{} + p[1]}; }
inline IW add_dot(IW sum, Pairs w, Pairs v) { return sum + w.low * v.low + w.high * v.high; }
#endif
inline FW to_float(IW v) { return __builtin_convertvector(v, FW); }

} // namespace ft
