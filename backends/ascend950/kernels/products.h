// What a product of matrices is told, and which tile of it a core computes next.
//
// y[g][r][n] = sum over k of x[g][r][k] * w[g][n][k] for every group g. A dense product has one group; the groups of
// a product by experts have rows of x of their own, which end where `psum` says; those of the output projection have all
// rows, each its own columns of x and y.
#pragma once

#include "c_api/asc_simd.h"

constexpr int kTileRows = 128;      // of x; a tile has at most 256 rows of w (n_tile)
constexpr int kStageBytes = 512;    // of a row, along K, that one stage of L1 holds
constexpr int kOperandBytes = 32 * 1024;  // of one of two stages of L0A, and of L0B
constexpr int kBlock = 32;          // bytes: what fractals and copies are made of

constexpr auto kOnce = asc_load_l2_cache_mode::NOTALLOC_KEEP;
constexpr auto kOften = asc_load_l2_cache_mode::NORMAL_FIRST_VICTIM;

// Signals between the cores of a block. A vector core numbers them from 0; the cube core adds 16 for the second one.
constexpr int kStageReady = 0;      // and 1: this vector core's half of w is in L1
constexpr int kStageFree = 2;       // and 3: the cube core has read the stage

// L1: two stages of x and w, then their scales.
constexpr uint32_t kStageSize = (kTileRows + 256) * kStageBytes;
constexpr uint32_t kScaleBase = 2 * kStageSize;
constexpr uint32_t kScaleSize = (kTileRows + 256) * kStageBytes / 32;

struct Product {
  __gm__ uint8_t* x;
  __gm__ uint8_t* xs;
  __gm__ uint8_t* w;
  __gm__ uint8_t* ws;
  __gm__ uint8_t* y;
  __gm__ int32_t* psum;  // null: every group has all rows
  int64_t rows, n, k, groups;
  int64_t x_row, x_group, xs_row;                // bytes
  int64_t w_row, w_group, ws_row, ws_group;      // bytes
  int64_t y_row, y_group;                        // elements
  int64_t n_tile;
  int64_t wide;                                  // 1: y is float32, 0: bfloat16
};

#define PRODUCT_PARAMETERS                                                                                          \
  __gm__ uint8_t *x, __gm__ uint8_t *xs, __gm__ uint8_t *w, __gm__ uint8_t *ws, __gm__ uint8_t *y,                  \
      __gm__ int32_t *psum, int64_t rows, int64_t n, int64_t k, int64_t groups, int64_t x_row, int64_t x_group,     \
      int64_t xs_row, int64_t w_row, int64_t w_group, int64_t ws_row, int64_t ws_group, int64_t y_row,              \
      int64_t y_group, int64_t n_tile, int64_t wide
#define PRODUCT                                                                                                     \
  Product {                                                                                                         \
    x, xs, w, ws, y, psum, rows, n, k, groups, x_row, x_group, xs_row, w_row, w_group, ws_row, ws_group, y_row,     \
        y_group, n_tile, wide                                                                                       \
  }

__aicore__ inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
__aicore__ inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Tiles in order: group by group, inside a group rows of tiles, the columns of w fastest. A core takes every
// asc_get_block_num()-th; all cores of a block walk the same way.
struct Tiles {
  int64_t group = 0;
  int64_t begin = 0, end = 0;       // rows of x of the group
  int64_t before = 0, count = 0;    // tiles of earlier groups, tiles of this one
  int64_t row = 0, num_rows = 0;    // of the tile found
  int64_t column = 0, num_columns = 0;
};

__aicore__ inline void enter_group(Tiles& at, const Product& p) {
  at.begin = p.psum == nullptr || at.group == 0 ? 0 : at.end;
  at.end = p.psum == nullptr ? p.rows : p.psum[at.group];
  at.count = (at.end - at.begin + kTileRows - 1) / kTileRows * ((p.n + p.n_tile - 1) / p.n_tile);
}

__aicore__ inline bool find_tile(Tiles& at, const Product& p, int64_t tile) {
  if (at.group == 0 && at.before == 0) enter_group(at, p);
  while (tile >= at.before + at.count) {
    at.before += at.count;
    if (++at.group >= p.groups) return false;
    enter_group(at, p);
  }
  const int64_t across = (p.n + p.n_tile - 1) / p.n_tile, inside = tile - at.before;
  at.row = at.begin + inside / across * kTileRows;
  at.num_rows = least(kTileRows, at.end - at.row);
  at.column = inside % across * p.n_tile;
  at.num_columns = least(p.n_tile, p.n - at.column);
  return true;
}

// A weight stays in L2 only where another row of tiles will read it.
__aicore__ inline asc_load_l2_cache_mode weight_mode(const Tiles& at) {
  return at.end - at.begin > kTileRows ? kOften : kOnce;
}
