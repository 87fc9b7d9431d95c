#include "draft_lengths.hpp"

#include <algorithm>
#include <array>
#include <vector>

namespace deepinfer {
namespace {

constexpr double kLeastPrice = 1e-12;

// Calls visit(place, signal) for each of the row's places.
template <typename Visit>
void for_each_signal(const Confidences& confidences, int64_t row, Visit visit) {
  const int64_t first = row * confidences.own.columns;
  double before = 1.0;
  for (int64_t place = 0; place < confidences.own.columns; ++place) {
    const double own = std::clamp(static_cast<double>(confidences.own.data[first + place]), 0.0, 1.0);
    const double used = confidences.stand_in ? std::clamp<double>(confidences.stand_in[first + place], 0.0, 1.0) : own;
    visit(place, before * used);
    before *= own;
  }
}

}  // namespace

double CostCurve::at(double rows, double row_context) const {
  const auto above = std::upper_bound(knots.begin() + 1, knots.end() - 1, rows) - knots.begin();
  const double low = knots[above - 1], high = knots[above];
  const double share = std::clamp((rows - low) / (high - low), 0.0, 1.0);
  const double step = seconds[above - 1] + (seconds[above] - seconds[above - 1]) * share;
  const double device = step + context_price * row_context + draft_seconds;
  return overlaps ? std::max(device, host_seconds) : device + host_seconds;
}

void forecast_drafts(const Confidences& confidences, std::span<const int32_t> seqs, const Coefficients& coefficients,
                     Matrix<float> out) {
  for (size_t i = 0; i < seqs.size(); ++i) {
    double least = 1.0;
    for_each_signal(confidences, seqs[i], [&](int64_t place, double signal) {
      const auto at = static_cast<size_t>(place);
      least = std::clamp(coefficients.constant[at] + coefficients.slope[at] * signal, 0.0, least);
      out.at(static_cast<int64_t>(i), place) = static_cast<float>(least);
    });
  }
}

void add_verified(const Confidences& confidences, std::span<const int32_t> seqs, std::span<const int32_t> verified,
                  std::span<const int32_t> accepted, Matrix<double> sums) {
  for (size_t i = 0; i < seqs.size(); ++i) {
    for_each_signal(confidences, seqs[i], [&](int64_t place, double signal) {
      if (place >= verified[i]) return;
      const double missed = (place < accepted[i] ? 1.0 : 0.0) - signal;
      sums.at(0, place) += 1;
      sums.at(1, place) += signal;
      sums.at(2, place) += signal * signal;
      sums.at(3, place) += missed;
      sums.at(4, place) += missed * signal;
    });
  }
}

void enter_block(const Book& book, std::span<const int32_t> seqs, Matrix<const float> confidences, float habit_weight,
                 float usual_weight) {
  if (seqs.empty()) return;
  std::vector<double> sums(book.usual.size());
  for (size_t i = 0; i < seqs.size(); ++i) {
    for (int64_t place = 0; place < book.newest.columns; ++place) {
      const float given = confidences.at(static_cast<int64_t>(i), place);
      const float found = given > 0.0F ? std::min(given, 1.0F) : 0.0F;  // NaN is not above 0
      book.older.at(seqs[i], place) = book.recent.at(seqs[i], place);
      book.newest.at(seqs[i], place) = book.recent.at(seqs[i], place) = found;
      float& habit = book.habit.at(seqs[i], place);
      habit += habit_weight * (found - habit);
      sums[static_cast<size_t>(place)] += found;
    }
  }
  for (size_t place = 0; place < sums.size(); ++place) {
    const auto mean = static_cast<float>(sums[place] / static_cast<double>(seqs.size()));
    book.usual[place] += usual_weight * (mean - book.usual[place]);
  }
}

void add_reliability(Matrix<const float> confidences, std::span<const int32_t> verified,
                     std::span<const int32_t> accepted, Matrix<double> sums) {
  for (int64_t row = 0; row < confidences.rows; ++row) {
    const auto at = static_cast<size_t>(row);
    const int64_t tried = std::min<int64_t>({verified[at], int64_t{accepted[at]} + 1, confidences.columns});
    for (int64_t place = 0; place < tried; ++place) {
      const double value = confidences.at(row, place);
      const double scaled = value * static_cast<double>(sums.columns);  // compared before it becomes an integer
      const int64_t bin = scaled > 0 ? static_cast<int64_t>(std::min<double>(scaled, sums.columns - 1)) : 0;
      sums.at(0, bin) += 1;
      sums.at(1, bin) += place < accepted[at] ? 1.0 : 0.0;
      sums.at(2, bin) += value;
    }
  }
}

void rank_drafts(Matrix<const float> gains, std::span<const int32_t> contexts, double row_price, double context_price,
                 std::span<int32_t> order) {
  const auto size = order.size();
  std::vector<double> worth(size);
  double best = 0.0;
  for (int64_t row = 0; row < gains.rows; ++row) {
    const double price = std::max(row_price + context_price * contexts[static_cast<size_t>(row)], kLeastPrice);
    for (int64_t place = 0; place < gains.columns; ++place) {
      const double gain = gains.at(row, place);
      const double value = gain > 0 ? gain / price : 0.0;  // what is not a number brings nothing
      worth[static_cast<size_t>(row * gains.columns + place)] = value;
      best = std::max(best, value);
    }
  }
  // 16 bits are plenty to tell drafts apart, and integers that short are sorted in linear time: two stable passes.
  const double scale = best > 0 ? 65535.0 / best : 0.0;
  std::vector<uint16_t> key(size);
  std::array<std::array<size_t, 257>, 2> starts{};
  for (size_t i = 0; i < size; ++i) {
    key[i] = static_cast<uint16_t>(65535.0 - worth[i] * scale);
    ++starts[0][(key[i] & 255) + 1];
    ++starts[1][(key[i] >> 8) + 1];
  }
  for (auto& pass : starts) {
    for (size_t digit = 1; digit < pass.size(); ++digit) pass[digit] += pass[digit - 1];
  }
  std::vector<int32_t> half(size);
  for (size_t i = 0; i < size; ++i) half[starts[0][key[i] & 255]++] = static_cast<int32_t>(i);
  for (const int32_t i : half) order[starts[1][key[static_cast<size_t>(i)] >> 8]++] = i;
}

std::pair<int64_t, double> best_count(Matrix<const float> gains, std::span<const int32_t> contexts,
                                      std::span<const int32_t> order, int64_t most, int64_t other_rows,
                                      const CostCurve& cost) {
  double tokens = static_cast<double>(gains.rows), row_context = 0.0;
  for (const int32_t context : contexts) row_context += context;
  double rows = tokens + static_cast<double>(other_rows);
  int64_t best = 0;
  double best_rate = tokens / std::max(cost.at(rows, row_context), kLeastPrice);
  for (int64_t count = 1; count <= most; ++count) {
    const int32_t draft = order[static_cast<size_t>(count - 1)];
    tokens += gains.data[draft];
    row_context += contexts[static_cast<size_t>(draft / gains.columns)];
    rows += 1;
    const double rate = tokens / std::max(cost.at(rows, row_context), kLeastPrice);
    if (rate > best_rate) {
      best = count;
      best_rate = rate;
    }
  }
  return {best, best_rate};
}

}  // namespace deepinfer
