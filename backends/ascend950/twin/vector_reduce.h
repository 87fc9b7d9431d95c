// Reductions over a register, over blocks of 32 bytes, and over pairs.
//
// Sums are trees of neighbours, each step rounded in the type of the result; lanes outside the mask count as zero, or as
// the value that never wins. What is not a result is zero. Indices of a maximum are stored as integers as wide as a lane.
//
// Follows: asc-devkit docs/zh/api/SIMD-API/C-API/reg/reduce_compute, a document per intrinsic and named like it.
#pragma once

#include "vector_lanes.h"

namespace twin {

template <class Element>
TWIN_LANE Element add_lanes(Element a, Element b) {
  return lower<Element>(op::Add::of(lift(a), lift(b)));
}

/// Sum of `count` lanes (a power of two) as a tree of neighbours.
template <class Sum>
TWIN_LANE Sum tree_sum(Sum* values, int count) {
  for (; count > 1; count /= 2) {
    for (int i = 0; i < count / 2; ++i) values[i] = add_lanes(values[2 * i], values[2 * i + 1]);
  }
  return values[0];
}

/// Groups of `group` source lanes, each summed into one lane of `dst` from the lowest on.
template <class Sum, class Element>
TWIN_OP void reduce_sum(Register<Sum>& dst, const Register<Element>& src, const Predicate& mask, int group, const char* what) {
  require_written(src, what);
  require_written(mask, what);
  count_instruction();
  constexpr int lanes = Register<Element>::lanes;
  Sum values[lanes];
  for (int i = 0; i < lanes; ++i) values[i] = mask.at<Element>(i) ? static_cast<Sum>(src.lane[i]) : Sum{0};
  Register<Sum> out;
  std::memset(out.lane, 0, sizeof out.lane);
  for (int first = 0; first < lanes; first += group) out.lane[first / group] = tree_sum(values + first, group);
  std::memcpy(dst.lane, out.lane, sizeof out.lane);
  mark_written(dst);
}

template <class Element>
TWIN_LANE Element losing_value(bool for_max) {
  if constexpr (std::is_integral_v<Element>) {
    return for_max ? std::numeric_limits<Element>::min() : std::numeric_limits<Element>::max();
  } else {
    return static_cast<Element>(for_max ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity());
  }
}

/// Whether `next` wins over `best`: +0 is above -0, equal values lose.
template <class Value>
TWIN_LANE bool wins(Value next, Value best, bool for_max) {
  if constexpr (!std::is_integral_v<Value>) {
    if (next == 0 && best == 0) return std::signbit(next) != std::signbit(best) && std::signbit(best) == for_max;
  }
  return for_max ? next > best : next < best;
}

/// The best lane of `count` from `first`, the lower one of equals, a nan before anything.
template <class Element>
TWIN_LANE int best_lane(const Element* values, int first, int count, bool for_max) {
  int best = first;
  for (int i = first; i < first + count; ++i) {
    if constexpr (!std::is_integral_v<Element>) {
      if (values[i] != values[i]) return i;
    }
    if (wins(lift(values[i]), lift(values[best]), for_max)) best = i;
  }
  return best;
}

/// One extreme a group; with its lane number behind it where there is one group.
template <class Element>
TWIN_OP void reduce_extreme(Register<Element>& dst, const Register<Element>& src, const Predicate& mask, bool for_max,
                            int group, const char* what) {
  require_written(src, what);
  require_written(mask, what);
  count_instruction();
  constexpr int lanes = Register<Element>::lanes;
  Element values[lanes];
  bool any = false;
  for (int i = 0; i < lanes; ++i) {
    const bool active = mask.at<Element>(i);
    any |= active;
    values[i] = active ? src.lane[i] : losing_value<Element>(for_max);
  }
  Register<Element> out;
  std::memset(out.lane, 0, sizeof out.lane);
  for (int first = 0; first < lanes; first += group) {
    int best = best_lane(values, first, group, for_max);
    out.lane[first / group] = values[best];
    if (group < lanes) continue;
    // A lane outside the mask that ties with the answer does not give its number.
    while (any && best < lanes - 1 && !mask.at<Element>(best)) ++best;
    const bits_t<Element> index = static_cast<bits_t<Element>>(any ? best : 0);
    std::memcpy(&out.lane[1], &index, sizeof index);
  }
  std::memcpy(dst.lane, out.lane, sizeof out.lane);
  mark_written(dst);
}

}  // namespace twin

// asc_reduce_sum.md, asc_reduce_sum_datablock.md: 16-bit integers are summed in 32 bits
#define TWIN_REDUCE_SUM(Sum, Element)                                                                                   \
  TWIN_OP void asc_reduce_sum(vector_##Sum& dst, const vector_##Element& src, const vector_bool& mask) {                \
    twin::reduce_sum(dst, src, mask, vector_##Element::lanes, "asc_reduce_sum");                                        \
  }                                                                                                                     \
  TWIN_OP void asc_reduce_sum_datablock(vector_##Sum& dst, const vector_##Element& src, const vector_bool& mask) {      \
    twin::reduce_sum(dst, src, mask, vector_##Element::lanes / 8, "asc_reduce_sum_datablock");                          \
  }
TWIN_REDUCE_SUM(s32, s16)
TWIN_REDUCE_SUM(u32, u16)
TWIN_REDUCE_SUM(s32, s32)
TWIN_REDUCE_SUM(u32, u32)
TWIN_REDUCE_SUM(f16, f16)
TWIN_REDUCE_SUM(f32, f32)
#undef TWIN_REDUCE_SUM

// asc_pair_reduce_sum.md: sums of neighbours in the lower half
template <class Element>
  requires twin::one_of<Element, half, float>
TWIN_OP void asc_pair_reduce_sum(twin::Register<Element>& dst, const twin::Register<Element>& src, const vector_bool& mask) {
  twin::reduce_sum(dst, src, mask, 2, "asc_pair_reduce_sum");
}

// asc_reduce_max.md, asc_reduce_min.md, asc_reduce_max_datablock.md, asc_reduce_min_datablock.md
#define TWIN_REDUCE_EXTREME(Name, ForMax)                                                                                 \
  template <class Element>                                                                                                \
    requires twin::one_of<Element, int16_t, uint16_t, int32_t, uint32_t, half, float>                                     \
  TWIN_OP void Name(twin::Register<Element>& dst, const twin::Register<Element>& src, const vector_bool& mask) {          \
    twin::reduce_extreme(dst, src, mask, ForMax, src.lanes, #Name);                                         \
  }                                                                                                                       \
  template <class Element>                                                                                                \
    requires twin::one_of<Element, int16_t, uint16_t, int32_t, uint32_t, half, float>                                     \
  TWIN_OP void Name##_datablock(twin::Register<Element>& dst, const twin::Register<Element>& src, const vector_bool& mask) { \
    twin::reduce_extreme(dst, src, mask, ForMax, src.lanes / 8, #Name "_datablock");                        \
  }
TWIN_REDUCE_EXTREME(asc_reduce_max, true)
TWIN_REDUCE_EXTREME(asc_reduce_min, false)
#undef TWIN_REDUCE_EXTREME
