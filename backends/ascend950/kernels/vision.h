// Attention within images: what it is told, where its buffers are, and in which order its tiles come.
//
// A unit of work is 128 patches of an image, 64 for each vector core, and one head. The image's keys come in tiles, from
// its first one on, so a patch meets them in the same order wherever its image stands. Per tile the Cube multiplies keys
// by queries, a row of scores per key: a register of a vector core then holds its 64 queries and softmax over keys is
// element by element. Probabilities go back through L1, the Cube multiplies them by the values, and the vector cores
// add that to their sums. The scores of the next tile are under way meanwhile, also across units.
#pragma once

#include "cores.h"
#include "rows.h"

constexpr int32_t kQueries = 128;
constexpr int32_t kHalf = 64;      // queries of a vector core
constexpr int32_t kMaxDim = 64;
constexpr uint32_t kBlock = 32;    // bytes

// Keys of a tile: with float32 half as many, since operands are twice as large.
template <class T>
constexpr int32_t kKeys = 256 / sizeof(T);
template <class T>
constexpr int32_t kPerBlock = kBlock / sizeof(T);

// Two of everything. Operands of the Cube take 32 KB in L0A and L0B, whichever product they are of.
constexpr uint32_t kOperandBytes = kQueries * kMaxDim * sizeof(float);
constexpr uint32_t kKeyBytes = 128 * kMaxDim * 2;  // a tile of keys or values, of either type
constexpr uint32_t kWeightBytes = kQueries * 128 * 2;
constexpr uint32_t kQueryL1 = 0;
constexpr uint32_t kKeyL1 = kQueryL1 + 2 * kOperandBytes;
constexpr uint32_t kValueL1 = kKeyL1 + 2 * kKeyBytes;
constexpr uint32_t kWeightL1 = kValueL1 + 2 * kKeyBytes;
static_assert(kWeightL1 + 2 * kWeightBytes <= 512 * 1024 && 2 * kOperandBytes <= 64 * 1024 &&
              kWeightBytes <= kOperandBytes);

constexpr uint32_t kScoreBytes = 128 * kQueries * sizeof(float);
constexpr uint32_t kProductBytes = kQueries * kMaxDim * sizeof(float);
constexpr uint32_t kScoreL0C = 0;
constexpr uint32_t kProductL0C = kScoreL0C + 2 * kScoreBytes;
static_assert(kProductL0C + 2 * kProductBytes <= 256 * 1024);

// UB. Blocks of probabilities lie an odd number of rows apart, so that neighbours are in different banks.
constexpr uint32_t kStagedBytes = 64 * 1024 / 4 + 8 * kBlock;
constexpr uint32_t kScores = 0;
constexpr uint32_t kStaged = kScores + kScoreBytes;              // a half of two tiles
constexpr uint32_t kAdded = kStaged + 2 * kStagedBytes;
constexpr uint32_t kSums = kAdded + kProductBytes;
constexpr uint32_t kResult = kSums + kProductBytes / 2;
constexpr uint32_t kTop = kResult + kProductBytes / 2;           // largest score of each query so far
constexpr uint32_t kTotal = kTop + 2 * kRegister;                // sum of its probabilities
constexpr uint32_t kShrink = kTotal + 2 * kRegister;             // what earlier sums are multiplied by
static_assert(kShrink + 2 * kRegister <= 248 * 1024 && kStagedBytes % kRegister == 0);

// Signals between the cores of a block.
constexpr int kScoresReady = 0, kScoresTaken = 1, kWeightsReady = 2, kWeightsTaken = 3, kSumsReady = 4, kSumsTaken = 5;

struct Rows3 {
  __gm__ uint8_t* data;
  int64_t row, head;  // elements from one to the next
};

struct Vision {
  __gm__ uint8_t* out;
  Rows3 q, k, v;
  __gm__ int32_t* cu_seqlens;
  int64_t rows;
  int32_t images, heads, dim;
  float scale;
};

#define VISION_PARAMETERS                                                                                      \
  __gm__ uint8_t *out, __gm__ uint8_t *q, __gm__ uint8_t *k, __gm__ uint8_t *v, __gm__ int32_t *cu_seqlens,    \
      int64_t rows, int64_t q_row, int64_t q_head, int64_t k_row, int64_t k_head, int64_t v_row,               \
      int64_t v_head, int32_t images, int32_t heads, int32_t dim, float scale
#define VISION                                                                                                 \
  Vision {                                                                                                     \
    out, {q, q_row, q_head}, {k, k_row, k_head}, {v, v_row, v_head}, cu_seqlens, rows, images, heads, dim, scale \
  }

__aicore__ inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
template <class T>
__aicore__ inline __gm__ T* at_row(const Rows3& x, int64_t row, int64_t head) {
  return (__gm__ T*)x.data + row * x.row + head * x.head;
}

// One tile of keys of one unit; steps are numbered through a block, and their parity says which buffer is theirs.
struct Step {
  int64_t image = -1, before = 0, count = 0;  // units of earlier images, units of this one
  int64_t begin = 0, end = 0;                 // patches of the image
  int64_t unit = 0, head = 0, query = 0, queries = 0;
  int64_t key = 0, keys = 0;
  uint32_t number = 0, unit_number = 0;       // among those of this block
  bool there = false, opens = false, closes = false;
};

// Moves to the unit `step.unit`; false where there is none.
__aicore__ inline bool enter_unit(Step& step, const Vision& a) {
  while (step.image < 0 || step.unit >= step.before + step.count) {
    step.before += step.count;
    if (++step.image >= a.images) return false;
    step.begin = a.cu_seqlens[step.image];
    step.end = a.cu_seqlens[step.image + 1];
    step.count = (step.end - step.begin + kQueries - 1) / kQueries * a.heads;
  }
  const int64_t inside = step.unit - step.before, tiles = step.count / a.heads;
  step.head = inside / tiles;
  step.query = step.begin + inside % tiles * kQueries;
  step.queries = least(kQueries, step.end - step.query);
  step.key = step.begin;
  return true;
}

template <class T>
__aicore__ inline void settle_step(Step& step) {
  step.keys = least(kKeys<T>, step.end - step.key);
  step.opens = step.key == step.begin;
  step.closes = step.key + step.keys == step.end;
}

template <class T>
__aicore__ inline Step first_step(const Vision& a) {
  Step step;
  step.unit = asc_get_block_idx();
  step.there = enter_unit(step, a);
  if (step.there) settle_step<T>(step);
  return step;
}

template <class T>
__aicore__ inline Step step_after(const Vision& a, Step step) {
  ++step.number;
  step.key += step.keys;
  if (step.closes) {
    step.unit += asc_get_block_num();
    ++step.unit_number;
    step.there = enter_unit(step, a);
  }
  if (step.there) settle_step<T>(step);
  return step;
}
