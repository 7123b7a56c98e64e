// The operations of a decoder layer for CPUs, in float32 arithmetic over bfloat16, float32 or int8 weights and a bfloat16
// or float32 cache.
//
// The promise that the whole engine stands on: every output row is a function of its own input row alone, bit for bit,
// whatever rows are computed with it, however many, in whatever order and on however many threads. So
//   - a product sums over k in one order for every tile shape (product.hpp);
//   - attention walks a row's keys in order of position (committed slots first, then the row's own path), so a node of
//     a tree, a row of a chunk and a lone decoded token meet the same numbers in the same order (attention.hpp).
// Plain C interface, no allocation per call except thread-local scratch that only grows.
//
// dtype: 0 bfloat16, 1 float32, 2 int8 (weights only).

#include "attention.hpp"
#include "elementwise.hpp"
#include "pool.hpp"
#include "product.hpp"
#include "tiles.hpp"

using namespace ft;

namespace {

// The structures that Python fills in; `foretell/models/native.py` has the same fields in the same order.
struct Weight {
  const void *data; const float *scales, *bias;
  int64_t dtype, n, k;
};
struct Layer {
  Weight qkv, o, gate_up, down;
  const float *input_norm, *post_norm, *q_norm, *k_norm, *cos, *sin;
  int64_t number, heads, kv_heads, dim, window;
  double eps, scale;
};
// What all layers of one forward share. The buffers have room for all rows.
struct Step {
  const int64_t *positions, *slots;
  const int32_t *owner, *tables, *lines, *context;
  const int64_t *path_start;
  const int32_t *path;
  char *k, *v; // of all layers
  float *normed, *qkv, *attended, *gate_up, *gated;
  int64_t rows, hidden, inner, table_width, layer_bytes, per_head, cache_dtype;
};

// Whether a product with weights of this dtype goes through tiles.
bool by_tiles([[maybe_unused]] int dtype) {
#if defined(FT_TILES)
  return dtype != 1 && tiles();
#else
  return false;
#endif
}

// How a weight is packed: [blocks of columns, steps of k, columns, depth] with zeros up to a multiple of `whole` in k.
// halves: a block's two halves interleave, so that one vector holds a pair of them.
struct Layout { int64_t block, depth, whole, halves; };

Layout layout_of(int dtype) {
#if defined(FT_TILES)
  if (by_tiles(dtype)) return dtype == 2 ? Layout{SIDE, 4, LINE, 0} : Layout{SIDE, 2, LINE / 2, 0};
#endif
  return dtype == 2 ? Layout{BLOCK, 2, 2, 0} : Layout{BLOCK, 1, 1, dtype == 0};
}

void linear(Pool &pool, const Product &p, const void *w, int dtype, const float *scales) {
#if defined(FT_TILES)
  if (by_tiles(dtype)) return tile_linear(pool, p, w, dtype, scales);
#endif
  vector_linear(pool, p, w, dtype, scales);
}

void linear(Pool &pool, const Weight &w, const float *x, int64_t rows, const float *residual, float *out) {
  Product p{x, w.k, rows, w.n, w.k, w.bias, residual, out, w.n};
  linear(pool, p, w.data, int(w.dtype), w.scales);
}

// picked: which rows of x, null for all
void norm(Pool &pool, const float *x, const int64_t *picked, int64_t rows, int64_t n, const float *weight, float eps,
          float *out) {
  pool.run(rows, 16, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; ++r) norm_row(x + (picked ? picked[r] : r) * n, n, weight, eps, out + r * n);
  });
}

void swiglu(Pool &pool, const float *x, int64_t rows, int64_t n, float *out) {
  pool.run(rows, 2, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; ++r) swiglu_row(x + r * 2 * n, n, out + r * n);
  });
}

// Keys and values of one layer.
struct Caches { void *k, *v; int64_t per_head; int dtype; };

void rope_write(Pool &pool, const Rope &r, int64_t rows, const Caches &c) {
  pool.run(rows, 4, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; ++i) {
      if (c.dtype == 0) rope_write_row(r, i, static_cast<bf16 *>(c.k), static_cast<bf16 *>(c.v), c.per_head);
      else rope_write_row(r, i, static_cast<float *>(c.k), static_cast<float *>(c.v), c.per_head);
    }
  });
}

void attend(Pool &pool, const Attention &a, int64_t rows, const Caches &c) {
  if (c.dtype == 0)
    attend(pool, a, rows, Cached<bf16>{static_cast<bf16 *>(c.k), static_cast<bf16 *>(c.v), c.per_head});
  else attend(pool, a, rows, Cached<float>{static_cast<float *>(c.k), static_cast<float *>(c.v), c.per_head});
}

void run_layer(Pool &pool, const Layer &l, const Step &s, float *x) {
  const float eps = float(l.eps);
  const int64_t width = l.heads * l.dim, line = width + 2 * l.kv_heads * l.dim;
  const int64_t at = l.number * s.layer_bytes;
  const Caches caches{s.k + at, s.v + at, s.per_head, int(s.cache_dtype)};
  norm(pool, x, nullptr, s.rows, s.hidden, l.input_norm, eps, s.normed);
  linear(pool, l.qkv, s.normed, s.rows, nullptr, s.qkv);
  const Rope rope{s.qkv, line, s.positions, s.slots, l.heads, l.kv_heads, l.dim, l.cos, l.sin, l.q_norm, l.k_norm, eps};
  rope_write(pool, rope, s.rows, caches);
  const Attention attention{s.qkv, line, s.attended, width, l.heads, l.kv_heads, l.dim, s.owner, s.tables,
                            s.table_width, s.lines, s.context, s.path_start, s.path, l.window, float(l.scale)};
  attend(pool, attention, s.rows, caches);
  linear(pool, l.o, s.attended, s.rows, x, x);
  norm(pool, x, nullptr, s.rows, s.hidden, l.post_norm, eps, s.normed);
  linear(pool, l.gate_up, s.normed, s.rows, nullptr, s.gate_up);
  swiglu(pool, s.gate_up, s.rows, s.inner, s.gated);
  linear(pool, l.down, s.gated, s.rows, x, x);
}

} // namespace

extern "C" {

// Those that products with weights of this dtype use here.
const char *ft_instructions(int dtype) {
  return by_tiles(dtype) ? "amx" : VECTORS;
}

// out: block, depth, whole, halves
void ft_layout(int dtype, int64_t *out) {
  const Layout layout = layout_of(dtype);
  memcpy(out, &layout, sizeof layout);
}

void *ft_pool_new(int threads) { return new Pool(threads); }
void ft_pool_free(void *pool) { delete static_cast<Pool *>(pool); }

// Layers in turn over x [rows, hidden], in place.
void ft_layers(void *pool, const Layer *const *layers, int64_t count, const Step *step, float *x) {
  for (int64_t i = 0; i < count; ++i) run_layer(*static_cast<Pool *>(pool), *layers[i], *step, x);
}

void ft_linear(void *pool, const float *x, int64_t ldx, int64_t rows, const void *w, int dtype, int64_t n, int64_t k,
               const float *scales, const float *bias, const float *residual, float *out) {
  linear(*static_cast<Pool *>(pool), Product{x, ldx, rows, n, k, bias, residual, out, n}, w, dtype, scales);
}

// Rows of a packed matrix, widened: the embedding of each token.
void ft_embed(const void *w, int dtype, const float *scales, const int64_t *tokens, int64_t rows, int64_t k,
              float *out) {
  const Layout layout = layout_of(dtype);
  const int64_t block = layout.block, depth = layout.depth;
  const int64_t size = (k + layout.whole - 1) / layout.whole * layout.whole * block;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = tokens[r], column = token % block, half = block / 2;
    const int64_t lane = !layout.halves ? column * depth : column < half ? 2 * column : 2 * (column - half) + 1;
    int64_t at = token / block * size + lane;
    for (int64_t i = 0; i < k; ++i, at += i % depth ? 1 : (block - 1) * depth + 1) {
      out[r * k + i] = dtype == 0   ? widen(static_cast<const bf16 *>(w)[at])
                       : dtype == 1 ? static_cast<const float *>(w)[at]
                                    : float(static_cast<const int8_t *>(w)[at]) * scales[token];
    }
  }
}

void ft_norm(void *pool, const float *x, const int64_t *picked, int64_t rows, int64_t n, const float *weight,
             float eps, float *out) {
  norm(*static_cast<Pool *>(pool), x, picked, rows, n, weight, eps, out);
}

void ft_rope_write(void *pool, float *qkv, int64_t ld, int64_t rows, const int64_t *positions, const int64_t *slots,
                   int64_t heads, int64_t kv_heads, int64_t dim, const float *cos, const float *sin,
                   const float *q_norm, const float *k_norm, float eps, void *k_cache, void *v_cache, int64_t per_head,
                   int dtype) {
  const Rope r{qkv, ld, positions, slots, heads, kv_heads, dim, cos, sin, q_norm, k_norm, eps};
  rope_write(*static_cast<Pool *>(pool), r, rows, Caches{k_cache, v_cache, per_head, dtype});
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
               int64_t window, float scale, void *k_cache, void *v_cache, int64_t per_head, int dtype) {
  const Attention a{q, ldq, out, ldo, heads, kv_heads, dim, owner, tables, table_width, lines, context, path_start,
                    path, window, scale};
  attend(*static_cast<Pool *>(pool), a, rows, Caches{k_cache, v_cache, per_head, dtype});
}

// The k largest of each row of x [rows, n], larger first and ties by lower index, and their values; NaN is never among
// them.
void ft_top(const float *x, int64_t rows, int64_t n, int64_t k, int32_t *out, float *values) {
  for (int64_t r = 0; r < rows; ++r) {
    const float *row = x + r * n;
    int32_t *ids = out + r * k;
    float *best = values + r * k;
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
  swiglu(*static_cast<Pool *>(pool), x, rows, n, out);
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
