// A vector core's side of sparse attention: keys of the next group, probabilities of this one, results of the last.
#pragma once

#include "attention_records.h"
#include "attention_softmax.h"

constexpr int kResults = 4;  // flag of what a unit ends with

__aicore__ inline void read_scores(const Attention& a, const Group& group, int32_t tile) {
  const uint32_t place = turn_of(group, tile) % kRing;
  asc_sync_intra_wait(PIPE_V, kScoresReady);
  asc_vf_call<scale_scores>(ub_at<float>(kScores + place * kScoreBytes), ub_at<float>(kHoles + place * kHoleBytes),
                            ub_at<float>(kTop), a.scale, (int32_t)(tile == 0));
}

// The group's maximum is known; the sinks of a new unit come while its probabilities are made.
__aicore__ inline void renew(const Attention& a, const Group& group) {
  asc_vf_call<renew_maximum>(ub_at<float>(kTop), ub_at<float>(kBest), ub_at<float>(kShift), ub_at<float>(kShrink),
                             ub_at<float>(kHeadShrink + group.number % 2 * kRegister), ub_at<float>(kScratch),
                             (int32_t)group.opens);
  if (!group.opens) return;
  const Unit unit = unit_at(a, group.unit);
  const int32_t first = (int32_t)asc_get_sub_block_id() * kHalf, count = least(kHalf, unit.heads - first);
  asc_sync_wait(PIPE_V, PIPE_MTE2, kResults);
  if (count > 0) load_row(ub_at<float>(kSink), a.sink + unit.head + first, count);
  asc_sync_notify(PIPE_MTE2, PIPE_V, kResults);
}

__aicore__ inline void give_weights(const Group& group, int32_t tile) {
  const uint32_t turn = turn_of(group, tile), place = turn % kRing, stage = turn % 2;
  const uint32_t bytes = kWeightBytes / 2;
  const Start start = tile > 0 ? kGoesOn : (group.opens ? kFromZero : kShrunk);
  __ubuf__ bfloat16_t* weights = ub_at<bfloat16_t>(kWeights + stage * bytes);
  asc_sync_wait(PIPE_MTE3, PIPE_V, 2 + stage);
  asc_vf_call<weigh_scores>(weights, ub_at<float>(kScores + place * kScoreBytes), ub_at<float>(kShift),
                            ub_at<float>(kShrink), ub_at<float>(kTotal), (int32_t)start);
  asc_sync_notify(PIPE_V, PIPE_MTE3, 2 + stage);
  asc_sync_wait(PIPE_V, PIPE_MTE3, 2 + stage);
  const uint32_t l1 = kWeightL1 + place * kWeightBytes + (uint32_t)asc_get_sub_block_id() * bytes;
  asc_copy_ub2l1((__cbuf__ void*)(uint64_t)l1, weights, bytes);
  asc_sync_notify(PIPE_MTE3, PIPE_V, 2 + stage);
  asc_sync_intra_arrive(PIPE_MTE3, kWeightsReady);
}

__aicore__ inline void settle(const Group& group) {
  asc_sync_wait(PIPE_MTE2, PIPE_V, kResults);
  asc_sync_wait(PIPE_MTE3, PIPE_V, kResults);
  asc_vf_call<settle_heads>(ub_at<float>(kTotal), ub_at<float>(kShift), ub_at<float>(kSink),
                            ub_at<float>(kAny + group.home * kRegister), ub_at<float>(kInverse), ub_at<float>(kKeep),
                            ub_at<float>(kLse), ub_at<float>(kScratch));
  asc_sync_notify(PIPE_V, PIPE_MTE2, kResults);
}

__aicore__ inline void store_unit(const Attention& a, const Group& group) {
  const Unit unit = unit_at(a, group.unit);
  const int32_t first = (int32_t)asc_get_sub_block_id() * kHalf, count = least(kHalf, unit.heads - first);
  if (count <= 0) return;
  const int64_t head = unit.row * a.heads + unit.head + first;
  store_row((__gm__ bfloat16_t*)a.out + head * a.dim, ub_at<bfloat16_t>(kSums + group.home * kSumBytes), count * a.dim);
  store_row(a.lse + head, ub_at<float>(kLse), count);
}

// Sums of a group are here.
__aicore__ inline void take_sums(const Attention& a, const Group& group) {
  __ubuf__ float* sums = ub_at<float>(kSums + group.home * kSumBytes);
  __ubuf__ float* added = ub_at<float>(kSums + landing_of(group) * kSumBytes);
  __ubuf__ float* shrink = ub_at<float>(kHeadShrink + group.number % 2 * kRegister);
  __ubuf__ float *inverse = ub_at<float>(kInverse), *keep = ub_at<float>(kKeep);
  asc_sync_intra_wait(PIPE_V, kSumsReady);
  if (group.closes && group.opens) {
    asc_vf_call<divide_sums<false>>((__ubuf__ bfloat16_t*)sums, sums, added, shrink, inverse, keep, a.dim);
  } else if (group.closes) {
    asc_vf_call<divide_sums<true>>((__ubuf__ bfloat16_t*)sums, sums, added, shrink, inverse, keep, a.dim);
  } else if (!group.opens) {
    asc_vf_call<add_sums>(sums, added, shrink, a.dim);
  }
  asc_sync_notify(PIPE_V, PIPE_MTE3, kResults);
  asc_sync_wait(PIPE_V, PIPE_MTE3, kResults);
  if (group.closes) {
    store_unit(a, group);
    asc_sync_notify(PIPE_MTE3, PIPE_V, kResults);
  }
  asc_sync_intra_arrive(PIPE_MTE3, kSumsTaken);
}

// The next tile's slots, wherever it is.
__aicore__ inline void fetch_slots_after(const Attention& a, const Group& group, int32_t tile) {
  if (tile + 1 < group.tiles) {
    fetch_slots(a, group, tile + 1);
    return;
  }
  const Group next = group_after(a, group);
  if (next.tiles) fetch_slots(a, next, 0);
}

__aicore__ inline void vector_side(const Attention& a) {
  for (int flag = 0; flag < 5; ++flag) {
    asc_sync_notify(PIPE_V, PIPE_MTE2, flag);
    asc_sync_notify(PIPE_MTE3, PIPE_V, flag);
  }
  asc_vf_call<make_places>(ub_at<uint16_t>(kPlaces), a.dim, factor_shift(a.dim));
  Group past, now, next = first_group(a);
  if (next.tiles) fetch_slots(a, next, 0);
  while (next.tiles || now.tiles || past.tiles) {
    for (int32_t tile = 0; tile <= kGroup; ++tile) {
      if (tile < next.tiles) {
        fetch_slots_after(a, next, tile);
        bring_keys(a, next, tile);
      }
      if (tile > 0 && tile <= next.tiles) read_scores(a, next, tile - 1);
      if (tile < now.tiles) give_weights(now, tile);
      if (tile == 0 && past.tiles) take_sums(a, past);
    }
    if (now.closes) settle(now);
    if (next.tiles) renew(a, next);
    past = now;
    now = next;
    if (next.tiles) next = group_after(a, next);
  }
  for (uint32_t tile = 0; tile < kRing && tile < next.ring; ++tile) asc_sync_intra_wait(PIPE_MTE3, kTileFree);
  for (int flag = 0; flag < 5; ++flag) {
    asc_sync_wait(PIPE_V, PIPE_MTE2, flag);
    asc_sync_wait(PIPE_MTE3, PIPE_V, flag);
  }
  asc_sync_pipe(PIPE_ALL);
}
