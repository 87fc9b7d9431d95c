// Drafts by what they bring: forecasts from confidences, order by gain for price, and the number that pays best.
//
// Plain loops over spans, no policy: which confidences, which coefficients and which prices is decided in Python
// (core/confidence.py, core/draft_lengths.py).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <utility>

namespace deepinfer {

// A row-major matrix that somebody else owns.
template <typename T>
struct Matrix {
  T* data;
  int64_t rows;
  int64_t columns;

  T& at(int64_t row, int64_t column) const { return data[row * columns + column]; }
};

// What a calibration says of each place: kept = constant + slope * signal.
struct Coefficients {
  std::span<const double> constant;
  std::span<const double> slope;
};

// Confidences by handle. The signal of a place is the product of the row's confidences up to it; with stand-ins its own
// confidence is left out, and that of the other matrix stands in for it.
struct Confidences {
  Matrix<const float> own;
  const float* stand_in = nullptr;  // null, or as large as `own`
};

// Seconds of a step: straight between knots, a price per token of context, and what comes on top.
struct CostCurve {
  std::span<const double> knots;  // ascending, at least two
  std::span<const double> seconds;
  double context_price;
  double draft_seconds;
  double host_seconds;
  bool overlaps;

  double at(double rows, double row_context) const;
};

void forecast_drafts(const Confidences& confidences, std::span<const int32_t> seqs, const Coefficients& coefficients,
                     Matrix<float> out);

// Adds verified drafts to `sums` [5, D]: count, signal, its square, kept - signal, and that times the signal.
void add_verified(const Confidences& confidences, std::span<const int32_t> seqs, std::span<const int32_t> verified,
                  std::span<const int32_t> accepted, Matrix<double> sums);

// What is remembered of drafts' confidences, by handle and place, and what they are usually like, by place.
struct Book {
  Matrix<float> newest, recent, older, habit;
  std::span<float> usual;
};

// Enters one block of confidences for each handle, distinct ones; what is not a number counts as 0.
void enter_block(const Book& book, std::span<const int32_t> seqs, Matrix<const float> confidences, float habit_weight,
                 float usual_weight);

// Adds drafts whose predecessors were all kept to `sums` [3, B], by bins of their confidence: drafts, those that were
// kept, and the confidence.
void add_reliability(Matrix<const float> confidences, std::span<const int32_t> verified,
                     std::span<const int32_t> accepted, Matrix<double> sums);

// Writes flat indices of `gains` by gain / (row_price + context_price * context), highest first, stable.
void rank_drafts(Matrix<const float> gains, std::span<const int32_t> contexts, double row_price, double context_price,
                 std::span<int32_t> order);

// The number of drafts, taken in `order`, that gives most tokens per second, the fewest of equals; and that rate.
std::pair<int64_t, double> best_count(Matrix<const float> gains, std::span<const int32_t> contexts,
                                      std::span<const int32_t> order, int64_t most, int64_t other_rows,
                                      const CostCurve& cost);

void bind_draft_lengths(pybind11::module_& m);

}  // namespace deepinfer
