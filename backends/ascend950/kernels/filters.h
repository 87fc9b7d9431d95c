// Which ids of a row a request's filters keep, found without sorting.
//
// min-p, top-k and top-p each keep a prefix of one order: score down, then id up. A prefix is a cut: a key, of which
// greater ones are kept, and the last id that is kept of those that have it. Cuts are found by a search over keys with
// integer counts and integer masses, so the sum of the softmax alone depends on an order, and that is the row's.
#pragma once

#include "passes.h"

struct Filters {
  int32_t top_k;
  float top_p, min_p;
};

struct Cut {
  uint32_t key = kOfMinusInfinity;
  int32_t limit = kNobody;
  float top = 0.0f, total = 0.0f;
  bool usable = false;
  uint32_t listed = 0;  // entries of the list, if it holds all ids that are kept
};

// Lists the kept ids whose mass, or key, is at least `from`; there must be at most `kShort`.
template <bool masses>
__aicore__ inline void list_ids(Cut& cut, const Row& row, uint32_t from) {
  uint32_t listed = 0;
  int32_t slot = 0;
  load_stretch(row, 0, slot);
  for (int64_t first = 0; first < row.ids; first += kStretch) {
    if (first + kStretch < row.ids) load_stretch(row, first + kStretch, 1 - slot);
    __ubuf__ float* x = ub_at<float>(kRow + slot * kStretchBytes);
    __ubuf__ int32_t* picks = ub_at<int32_t>(kPicks);
    asc_sync_wait(PIPE_MTE2, PIPE_V, slot);
    asc_vf_call<pick<masses>>(x, stretch_at(row, first), (int32_t)first, row.divisor, cut.key, cut.limit, cut.top,
                              cut.total, from, picks, ub_at<uint32_t>(kPicked));
    wait_for_vector();
    const uint32_t picked = found<uint32_t>(kPicked);
    asc_vf_call<list_picks<masses>>(x, (int32_t)first, row.divisor, cut.top, cut.total, picks, picked,
                                    ub_at<uint32_t>(kKeys) + listed, ub_at<uint32_t>(kWeights) + listed,
                                    ub_at<int32_t>(kIds) + listed);
    asc_sync_notify(PIPE_V, PIPE_MTE2, slot);
    listed += (picked + kLanes - 1) / kLanes * kLanes;
    slot = 1 - slot;
  }
  cut.listed = listed;
}

__aicore__ inline uint32_t order_key(float score) {
  union {
    float value;
    uint32_t bits;
  } of = {score == 0.0f ? 0.0f : score};
  return of.bits & 0x80000000u ? ~of.bits : of.bits | 0x80000000u;
}

// Weights of what is kept from each of three keys on; the scalar core may read them.
template <bool masses>
__aicore__ inline __ubuf__ uint32_t* weights_from(const Cut& cut, const Row& row, uint32_t low, uint32_t middle,
                                                  uint32_t high) {
  __ubuf__ uint32_t *weight = ub_at<uint32_t>(kWeight), *lanes = ub_at<uint32_t>(kLanesOf);
  if (cut.listed) {
    asc_vf_call<weigh_list>(ub_at<uint32_t>(kKeys), ub_at<uint32_t>(kWeights), cut.listed, low, middle, high, weight,
                            lanes);
  } else {
    over_row<weigh<masses>>(row, row.divisor, cut.key, cut.limit, cut.top, cut.total, low, middle, high, weight, lanes);
  }
  wait_for_vector();
  return weight;
}

__aicore__ inline int32_t tie_limit(const Cut& cut, const Row& row, uint32_t key, uint32_t wanted) {
  __ubuf__ int32_t* tie = ub_at<int32_t>(kTie);
  if (cut.listed) {
    asc_vf_call<last_listed_tie>(ub_at<uint32_t>(kKeys), ub_at<int32_t>(kIds), cut.listed, key, wanted, tie);
  } else {
    over_row<last_tie>(row, row.divisor, key, wanted, tie, ub_at<uint32_t>(kLanesOf));
  }
  wait_for_vector();
  return *tie;
}

// Narrows a cut to the shortest prefix with `target` ids, or with that mass; one that never gets there stays. Each pass
// tells four parts of what keys are left apart. As soon as few ids are left they are listed, and passes are short.
template <bool masses>
__aicore__ inline void narrow(Cut& cut, const Row& row, uint32_t target) {
  const bool listable = row.ids <= kListedIds;
  uint32_t low = cut.key - 1, high = order_key(cut.top);  // `low` counts as reached until a key is
  uint32_t reached = 0, above = 0;                        // weights from `low` on, and behind `high`
  bool ever = false;
  cut.listed = 0;
  if (masses && listable) {
    list_ids<true>(cut, row, kLeastMass);
    if (cut.listed && weights_from<true>(cut, row, 1, 1, 1)[0] < target) cut.listed = 0;
  }
  while (low < high) {
    const uint32_t width = high - low, step = (width + 3) / 4;
    uint32_t from[3];
    for (uint32_t i = 0; i < 3; ++i) from[i] = width > (i + 1) * step ? low + (i + 1) * step : high;
    __ubuf__ uint32_t* weight = weights_from<masses>(cut, row, from[0], from[1], from[2]);
    for (int32_t i = 2; i >= 0; --i) {
      const uint32_t there = weight[i * kLanes];
      if (there >= target) {
        low = from[i];
        reached = there;
        ever = true;
        break;
      }
      high = from[i] - 1;
      above = there;
    }
    if (!masses && listable && ever && !cut.listed && reached <= kShort) list_ids<false>(cut, row, low);
  }
  if (!ever) return;
  uint32_t each = 1;
  if (masses) {
    asc_vf_call<weigh_key>(low, cut.top, cut.total, ub_at<uint32_t>(kEach));
    wait_for_vector();
    each = found<uint32_t>(kEach);
  }
  const uint32_t ties = (reached - above) / each;
  const uint32_t wanted = max((target - above + each - 1) / each, 1u);  // the best id always
  if (wanted < ties) {
    cut.limit = tie_limit(cut, row, low, wanted);
  } else if (low != cut.key) {
    cut.limit = kNobody;
  }
  cut.key = low;
}

__aicore__ inline void add_up(Cut& cut, const Row& row) {
  over_row<sum_exp>(row, row.divisor, cut.key, cut.limit, cut.top, ub_at<float>(kTotal), ub_at<float>(kLogTotal),
                    ub_at<float>(kLanesOf));
  wait_for_vector();
  cut.total = found<float>(kTotal);
}

// Best score and usability of a row; nothing is cut.
__aicore__ inline Cut look_at(const Row& row) {
  Cut cut;
  over_row<survey>(row, row.divisor, ub_at<float>(kTop), ub_at<int32_t>(kBroken), ub_at<float>(kLanesOf));
  wait_for_vector();
  cut.top = found<float>(kTop);
  cut.usable = found<int32_t>(kBroken) == 0 && cut.top >= -kLargest;
  return cut;
}

// min-p, top-k, top-p. With `want_total` the sum over what is kept is known in the end, whatever the filters.
__aicore__ inline Cut find_cut(const Row& row, const Filters& filters, bool want_total) {
  Cut cut = look_at(row);
  if (!cut.usable) return cut;
  if (filters.min_p > 0.0f) {
    over_row<lowest_shared>(row, row.divisor, cut.top, filters.min_p, ub_at<uint32_t>(kLowest),
                            ub_at<uint32_t>(kLanesOf));
    wait_for_vector();
    cut.key = found<uint32_t>(kLowest);
  }
  if (filters.top_k > 0 && filters.top_k < row.ids) narrow<false>(cut, row, filters.top_k);
  const bool nucleus = filters.top_p < 1.0f;
  if (nucleus || want_total) add_up(cut, row);
  if (nucleus) {
    narrow<true>(cut, row, filters.top_p > 0.0f ? (uint32_t)(filters.top_p * kMassOne) : 0u);
    if (want_total) add_up(cut, row);
  }
  return cut;
}
