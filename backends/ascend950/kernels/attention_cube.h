// The cube core's side of sparse attention: scores of the next group beside sums of values of this one.
#pragma once

#include "attention.h"
#include "cores.h"

constexpr auto kOften = asc_load_l2_cache_mode::NORMAL_FIRST_VICTIM;
constexpr int32_t kStages = 4;       // of L0A and L0B
constexpr int kScoreFlag = 4;        // and 5: two tiles of scores in L0C; flags 0 to 3 are chunks of sums

__aicore__ inline __ca__ bfloat16_t* left_at(int32_t stage) { return l0a_at<bfloat16_t>(stage * kOperandBytes); }
__aicore__ inline __cb__ bfloat16_t* right_at(int32_t stage) { return l0b_at<bfloat16_t>(stage * kOperandBytes); }

// A step of L0: waits for the stage, and hands it to the Cube after the loads.
struct Steps {
  uint32_t count = 0;
};
__aicore__ inline int32_t take_stage(Steps& steps) {
  const int32_t stage = (int32_t)(steps.count++ % kStages);
  asc_sync_wait(PIPE_M, PIPE_MTE1, stage);
  return stage;
}
__aicore__ inline void loaded(int32_t stage) {
  asc_sync_notify(PIPE_MTE1, PIPE_M, stage);
  asc_sync_wait(PIPE_MTE1, PIPE_M, stage);
}

__aicore__ inline void load_queries(const Attention& a, const Unit& unit) {
  asc_sync_wait(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);
  asc_set_gm2l1_nz_para(1, 1, kTile, 0);
  __gm__ bfloat16_t* q = (__gm__ bfloat16_t*)a.q + unit.row * a.q_row + unit.head * a.q_head;
  asc_copy_gm2l1_nd2nz(l1_at<bfloat16_t>(kQueryL1), q, a.q_head * 2, kOften, unit.heads, a.dim, 0, false);
  asc_sync_notify(PIPE_MTE2, PIPE_MTE1, EVENT_ID0);
  asc_sync_wait(PIPE_MTE2, PIPE_MTE1, EVENT_ID0);
}

// Keys times queries: a row of scores per key, so that the vector cores find a key's heads side by side.
__aicore__ inline void multiply_keys(const Attention& a, const Group& group, int32_t tile, Steps& steps) {
  const uint32_t turn = turn_of(group, tile), place = turn % kRing;
  const int32_t set = (int32_t)(turn % 2);
  const uint32_t keys = kKeyL1 + place * kKeyBytes, sums = kScoreL0C + set * kScoreSums;
  if (group.opens && tile == 0) load_queries(a, unit_at(a, group.unit));
  wait_both(PIPE_MTE1, kKeysReady);
  asc_sync_wait(PIPE_FIX, PIPE_M, kScoreFlag + set);
  for (int32_t at = 0; at < a.dim; at += kChunk) {
    const int32_t depth = least(kChunk, a.dim - at), stage = take_stage(steps);
    asc_copy_l12l0a(left_at(stage), l1_at<bfloat16_t>(keys), 0, at / 16, 4, depth / 16, 4, 4);
    asc_copy_l12l0b(right_at(stage), l1_at<bfloat16_t>(kQueryL1), 0, at / 16, 4, depth / 16, 4, 4);
    loaded(stage);
    asc_mmad(l0c_at(sums), left_at(stage), right_at(stage), kTile, depth, kTile, asc_unit_flag_mode::DISABLE, true,
             false, at == 0);
    asc_sync_notify(PIPE_M, PIPE_MTE1, stage);
  }
  if (group.closes && tile + 1 == group.tiles) asc_sync_notify(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);
  asc_sync_notify(PIPE_M, PIPE_FIX, kScoreFlag + set);
  asc_sync_wait(PIPE_M, PIPE_FIX, kScoreFlag + set);
  asc_copy_l0c2ub(ub_at<float>(kScores + place * kScoreBytes), l0c_at(sums), kTile, kTile, kTile * 16, kTile, 0,
                  asc_dual_dst_mode::DUAL_DST_SPLIT_N, asc_unit_flag_mode::DISABLE, asc_quant_mode::NoQuant,
                  asc_relu_pre_mode::NONE, false, false, false, false);
  asc_sync_notify(PIPE_FIX, PIPE_M, kScoreFlag + set);
  tell_both(PIPE_FIX, kScoresReady);
}

// Probabilities times values, added over the tiles of a group; the last one hands each chunk of columns on.
__aicore__ inline void multiply_values(const Attention& a, const Group& group, int32_t tile, Steps& steps) {
  const uint32_t place = turn_of(group, tile) % kRing;
  const bool first = tile == 0, last = tile + 1 == group.tiles;
  wait_both(PIPE_MTE1, kWeightsReady);
  if (last && group.number > 0) wait_both(PIPE_FIX, kSumsTaken);
  for (int32_t at = 0; at < a.dim; at += kChunk) {
    const int32_t columns = least(kChunk, a.dim - at), chunk = at / kChunk, stage = take_stage(steps);
    asc_copy_l12l0a_transpose(left_at(stage), l1_at<bfloat16_t>(kWeightL1 + place * kWeightBytes), 0, 0, 4, 4, 4, 4);
    asc_copy_l12l0b_transpose(right_at(stage), l1_at<bfloat16_t>(kKeyL1 + place * kKeyBytes), 0, at / 16, 4,
                              columns / 16, 4, columns / 16);
    loaded(stage);
    if (first) asc_sync_wait(PIPE_FIX, PIPE_M, chunk);
    asc_mmad(l0c_at(chunk * kChunkSums), left_at(stage), right_at(stage), kTile, kTile, columns,
             asc_unit_flag_mode::DISABLE, true, false, first);
    asc_sync_notify(PIPE_M, PIPE_MTE1, stage);
    if (!last) continue;
    asc_sync_notify(PIPE_M, PIPE_FIX, chunk);
    asc_sync_wait(PIPE_M, PIPE_FIX, chunk);
    __ubuf__ float* landing = ub_at<float>(kSums + landing_of(group) * kSumBytes);
    asc_copy_l0c2ub(landing + at, l0c_at(chunk * kChunkSums), columns, kTile, a.dim, kTile, 0,
                    asc_dual_dst_mode::DUAL_DST_SPLIT_M, asc_unit_flag_mode::DISABLE, asc_quant_mode::NoQuant,
                    asc_relu_pre_mode::NONE, false, true, false, false);
    asc_sync_notify(PIPE_FIX, PIPE_M, chunk);
  }
  tell_both(PIPE_MTE1, kTileFree);
  if (last) tell_both(PIPE_FIX, kSumsReady);
}

__aicore__ inline void cube_side(const Attention& a) {
  // NaN and infinities of a query or a record are results; the register outlives the kernel
  const bool saturates = asc_get_saturation_flag(asc_saturation_mode::FLOAT);
  asc_set_saturation_flag(asc_saturation_mode::FLOAT, false);
  asc_set_l0c_copy_nz_para(1, 0, 0);
  if (a.heads % kTile) {  // heads that are not there, as zeros
    asc_fill_value_config all;
    all.repeat = 1;
    all.blk_num = kTile * a.dim * 2 / kBlockBytes;
    all.dst_gap = 0;
    asc_fill_l1(l1_at<uint16_t>(kQueryL1), (uint32_t)0, all);
    asc_sync_pipe(PIPE_MTE2);
  }
  asc_sync_notify(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);
  for (int32_t stage = 0; stage < kStages; ++stage) {
    asc_sync_notify(PIPE_M, PIPE_MTE1, stage);
    asc_sync_notify(PIPE_FIX, PIPE_M, stage);
  }
  for (int set = 0; set < 2; ++set) asc_sync_notify(PIPE_FIX, PIPE_M, kScoreFlag + set);
  Steps steps;
  Group now, next = first_group(a);
  while (next.tiles || now.tiles) {
    for (int32_t tile = 0; tile < kGroup; ++tile) {
      if (tile < next.tiles) multiply_keys(a, next, tile, steps);
      if (tile < now.tiles) multiply_values(a, now, tile, steps);
    }
    now = next;
    if (next.tiles) next = group_after(a, next);
  }
  wait_both(PIPE_FIX, kSumsTaken);
  asc_sync_wait(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);
  for (int32_t stage = 0; stage < kStages; ++stage) {
    asc_sync_wait(PIPE_M, PIPE_MTE1, stage);
    asc_sync_wait(PIPE_FIX, PIPE_M, stage);
  }
  for (int set = 0; set < 2; ++set) asc_sync_wait(PIPE_FIX, PIPE_M, kScoreFlag + set);
  asc_sync_pipe(PIPE_ALL);
  asc_set_saturation_flag(asc_saturation_mode::FLOAT, saturates);
}
