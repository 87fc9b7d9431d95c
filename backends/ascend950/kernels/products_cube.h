// The cube core's side of a product: x and, where it needs no change, w from global memory; sums; results.
//
// K is walked in stages of L1 and in steps of L0, whose lengths depend on the type and on N alone, so the sums of a row
// never depend on what else is in the batch.
#pragma once

#include "products.h"

constexpr uint32_t kSums = kTileRows * 256 * 4;  // bytes of one of two sets of sums

template <class T>
constexpr bool kScaled = std::is_same_v<T, fp8_e4m3fn_t>;

// Where the two copies of each memory are, by turns; turns go on from tile to tile.
struct Turns {
  int64_t stage = 0, step = 0, sums = 0;
};

// Rows of an operand to a stage of L1; with scales K grows to whole pairs of 32, of which the last may be all zeros.
template <class T>
__aicore__ inline void load_rows(uint32_t l1, __gm__ uint8_t* source, int64_t stride, int64_t rows, int64_t depth,
                                 asc_load_l2_cache_mode mode) {
  const int64_t padded = round_up(rows, 16);
  asc_set_gm2l1_nz_para(1, 1, padded, 0);
  asc_copy_gm2l1_nd2nz((__cbuf__ T*)(uint64_t)l1, (__gm__ T*)source, stride, mode, rows, depth, 0, false);
}

template <class T>
__aicore__ inline void zero_tail(uint32_t l1, int64_t rows, int64_t depth) {
  const int64_t blocks = (depth + kBlock - 1) / kBlock, padded = round_up(rows, 16);
  if (!kScaled<T> || blocks % 2 == 0) return;
  asc_fill_value_config whole;
  whole.repeat = 1;
  whole.blk_num = padded;
  whole.dst_gap = 0;
  asc_fill_l1((__cbuf__ uint16_t*)(uint64_t)(l1 + blocks * padded * kBlock), (uint32_t)0, whole);
}

// Scales as the Cube wants them: 16 rows of a pair each are a fractal. A pair is one 16-bit element for the copy.
__aicore__ inline void load_scales(uint32_t l1, __gm__ uint8_t* source, int64_t stride, int64_t rows, int64_t pairs) {
  asc_set_gm2l1_nz_para(1, 1, pairs, 0);
  asc_copy_gm2l1_dn2nz((__cbuf__ half*)(uint64_t)l1, (__gm__ half*)source, stride, kOften, pairs, rows, 0, false);
}

template <class T>
__aicore__ inline void load_stage(const Product& p, const Tiles& at, int64_t from, int64_t depth, int64_t stage,
                                  bool expanded) {
  constexpr int size = sizeof(T);
  const uint32_t x_l1 = stage * kStageSize, w_l1 = x_l1 + kTileRows * kStageBytes;
  const uint32_t xs_l1 = kScaleBase + stage * kScaleSize, ws_l1 = xs_l1 + kTileRows * kStageBytes / 32;
  __gm__ uint8_t* x = p.x + at.row * p.x_row + at.group * p.x_group;
  load_rows<T>(x_l1, x + from * size, p.x_row, at.num_rows, depth, kOften);
  zero_tail<T>(x_l1, at.num_rows, depth);
  zero_tail<T>(w_l1, at.num_columns, depth);
  const int64_t pairs = (depth + 63) / 64;
  if constexpr (kScaled<T>) load_scales(xs_l1, p.xs + at.row * p.xs_row + from / 32, p.xs_row, at.num_rows, pairs);
  if (expanded) return;
  __gm__ uint8_t* w = p.w + at.group * p.w_group + at.column * p.w_row;
  load_rows<T>(w_l1, w + from * size, p.w_row, at.num_columns, depth, weight_mode(at));
  if constexpr (kScaled<T>) {
    __gm__ uint8_t* ws = p.ws + at.group * p.ws_group + at.column * p.ws_row;
    load_scales(ws_l1, ws + from / 32, p.ws_row, at.num_columns, pairs);
  }
}

// One step: fractals of both operands to L0, then their product onto the sums.
template <class T>
__aicore__ inline void multiply_step(const Tiles& at, int64_t stage, int64_t pairs, int64_t from, int64_t depth,
                                     int64_t step, uint32_t sums, bool first) {
  constexpr int per_block = kBlock / sizeof(T);
  const uint32_t x_l1 = stage * kStageSize, w_l1 = x_l1 + kTileRows * kStageBytes;
  const int64_t m = round_up(at.num_rows, 16) / 16, n = round_up(at.num_columns, 16) / 16;
  const int64_t blocks = (depth + per_block - 1) / per_block, block = from / per_block;
  __ca__ T* a = (__ca__ T*)(uint64_t)(step * kOperandBytes);
  __cb__ T* b = (__cb__ T*)(uint64_t)(step * kOperandBytes);
  asc_sync_wait(PIPE_M, PIPE_MTE1, step);
  asc_copy_l12l0a(a, (__cbuf__ T*)(uint64_t)x_l1, 0, block, m, blocks, m, m);
  asc_copy_l12l0b(b, (__cbuf__ T*)(uint64_t)w_l1, 0, block, n, blocks, n, n);
  if constexpr (kScaled<T>) {
    const uint32_t xs_l1 = kScaleBase + stage * kScaleSize, ws_l1 = xs_l1 + kTileRows * kStageBytes / 32;
    const int64_t count = depth / 64;
    const uint64_t place = step * kOperandBytes / 16;
    asc_copy_l12l0a_mx(place, (__cbuf__ fp8_e8m0_t*)(uint64_t)xs_l1, 0, from / 64, m, count, pairs, count);
    asc_copy_l12l0b_mx(place, (__cbuf__ fp8_e8m0_t*)(uint64_t)ws_l1, 0, from / 64, n, count, pairs, count);
  }
  asc_sync_notify(PIPE_MTE1, PIPE_M, step);
  asc_sync_wait(PIPE_MTE1, PIPE_M, step);
  __cc__ float* c = (__cc__ float*)(uint64_t)sums;
  if constexpr (kScaled<T>) {
    asc_mmad_mx(c, a, b, at.num_rows, depth, at.num_columns, asc_unit_flag_mode::DISABLE, true, false, first);
  } else {
    asc_mmad(c, a, b, at.num_rows, depth, at.num_columns, asc_unit_flag_mode::DISABLE, true, false, first);
  }
  // a small product would not be done before the next one reads its sums
  if ((at.num_rows / 16) * (at.num_columns / 16) < 10) asc_sync_pipe(PIPE_M);
  asc_sync_notify(PIPE_M, PIPE_MTE1, step);
}

__aicore__ inline void store_tile(const Product& p, const Tiles& at, uint32_t sums) {
  const int64_t first = at.row * p.y_row + at.group * p.y_group + at.column;
  const int64_t padded = round_up(at.num_rows, 16);
  __cc__ float* c = (__cc__ float*)(uint64_t)sums;
  asc_set_l0c_copy_nz_para(1, 0, 0);
  if (p.wide) {
    asc_copy_l0c2gm((__gm__ float*)p.y + first, c, at.num_columns, at.num_rows, p.y_row, padded,
                    asc_store_l2_cache_mode::NORMAL_FIRST_VICTIM, asc_unit_flag_mode::DISABLE, asc_quant_mode::NoQuant,
                    asc_relu_pre_mode::NONE, false, true, false, false);
  } else {
    asc_copy_l0c2gm((__gm__ bfloat16_t*)p.y + first, c, at.num_columns, at.num_rows, p.y_row, padded,
                    asc_store_l2_cache_mode::NORMAL_FIRST_VICTIM, asc_unit_flag_mode::DISABLE, asc_quant_mode::F322BF16,
                    asc_relu_pre_mode::NONE, false, true, false, false);
  }
}

// expanded: the vector cores bring w, since it is stored in another format.
template <class T>
__aicore__ inline void cube_side(const Product& p, bool expanded) {
  constexpr int64_t stage_depth = kStageBytes / sizeof(T);
  // the longest step, of 32-byte blocks by powers of two, whose operands fit: narrow tiles take fewer, longer ones
  const int64_t step_depth = kOperandBytes / (p.n_tile <= kTileRows ? kTileRows : 256) / sizeof(T);
  // NaN and infinities of a row are results; the register outlives the kernel
  const bool saturates = asc_get_saturation_flag(asc_saturation_mode::FLOAT);
  asc_set_saturation_flag(asc_saturation_mode::FLOAT, false);
  for (int turn = 0; turn < 2; ++turn) {
    asc_sync_notify(PIPE_MTE1, PIPE_MTE2, turn);
    asc_sync_notify(PIPE_M, PIPE_MTE1, turn);
    asc_sync_notify(PIPE_FIX, PIPE_M, turn);
  }
  Tiles at;
  Turns turns;
  for (int64_t tile = asc_get_block_idx(); find_tile(at, p, tile); tile += asc_get_block_num()) {
    const int64_t set = turns.sums++ % 2;
    asc_sync_wait(PIPE_FIX, PIPE_M, set);
    for (int64_t from = 0; from < p.k; from += stage_depth) {
      const int64_t stage = turns.stage++ % 2, depth = least(stage_depth, p.k - from);
      const int64_t whole = kScaled<T> ? round_up(depth, 64) : depth;
      asc_sync_wait(PIPE_MTE1, PIPE_MTE2, stage);
      load_stage<T>(p, at, from, depth, stage, expanded);
      asc_sync_notify(PIPE_MTE2, PIPE_MTE1, stage);
      asc_sync_wait(PIPE_MTE2, PIPE_MTE1, stage);
      if (expanded) {
        asc_sync_intra_wait(PIPE_MTE1, kStageReady + stage);
        asc_sync_intra_wait(PIPE_MTE1, 16 + kStageReady + stage);
      }
      for (int64_t inner = 0; inner < whole; inner += step_depth) {
        multiply_step<T>(at, stage, whole / 64, inner, least(step_depth, whole - inner), turns.step++ % 2, set * kSums,
                         from + inner == 0);
      }
      asc_sync_notify(PIPE_MTE1, PIPE_MTE2, stage);
      if (expanded) {
        asc_sync_intra_arrive(PIPE_MTE1, kStageFree + stage);
        asc_sync_intra_arrive(PIPE_MTE1, 16 + kStageFree + stage);
      }
    }
    asc_sync_notify(PIPE_M, PIPE_FIX, set);
    asc_sync_wait(PIPE_M, PIPE_FIX, set);
    store_tile(p, at, set * kSums);
    asc_sync_notify(PIPE_FIX, PIPE_M, set);
  }
  for (int turn = 0; turn < 2; ++turn) {
    asc_sync_wait(PIPE_MTE1, PIPE_MTE2, turn);
    asc_sync_wait(PIPE_M, PIPE_MTE1, turn);
    asc_sync_wait(PIPE_FIX, PIPE_M, turn);
  }
  asc_sync_pipe(PIPE_ALL);
  asc_set_saturation_flag(asc_saturation_mode::FLOAT, saturates);
}
