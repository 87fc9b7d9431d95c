// The Python face of draft_lengths.hpp. Documented in core/_native.pyi.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>

#include "arrays.hpp"
#include "draft_lengths.hpp"

namespace deepinfer {
namespace {

template <typename T>
const T* checked(const char* name, const py::array& array, std::initializer_list<py::ssize_t> shape) {
  const bool fits = array.ndim() == static_cast<py::ssize_t>(shape.size()) &&
                    std::equal(shape.begin(), shape.end(), array.shape(),
                               [](py::ssize_t want, py::ssize_t have) { return want < 0 || want == have; });
  if (!fits || !py::array_t<T, py::array::c_style>::check_(array)) {
    std::string wanted;
    for (const auto size : shape) wanted += (wanted.empty() ? "" : ", ") + (size < 0 ? "any" : std::to_string(size));
    throw std::invalid_argument(text(name, " has shape ", shape_of(array), " and dtype ",
                                     py::str(array.dtype()).cast<std::string>(), "; need a C-contiguous ",
                                     py::str(py::dtype::of<T>()).cast<std::string>(), " array of [", wanted, "]"));
  }
  return static_cast<const T*>(array.data());
}

template <typename T>
Matrix<const T> matrix(const char* name, const py::array& array, py::ssize_t rows = -1, py::ssize_t columns = -1) {
  const T* data = checked<T>(name, array, {rows, columns});
  return {data, array.shape(0), array.shape(1)};
}

template <typename T>
Matrix<T> writable_matrix(const char* name, const py::array& array, py::ssize_t rows, py::ssize_t columns) {
  T* data = const_cast<T*>(checked<T>(name, array, {rows, columns}));
  if (!array.writeable()) throw std::invalid_argument(text(name, " is read-only"));
  return {data, rows, columns};
}

template <typename T>
std::span<const T> vector(const char* name, const py::array& array, py::ssize_t size = -1) {
  const T* data = checked<T>(name, array, {size});
  return {data, static_cast<size_t>(array.size())};
}

Confidences confidences_of(const py::array& own, const std::optional<py::array>& stand_in) {
  const auto book = matrix<float>("confidences", own);
  return {book, stand_in ? matrix<float>("stand_in", *stand_in, book.rows, book.columns).data : nullptr};
}

std::span<const int32_t> handles(const py::array& seqs, int64_t num_rows) {
  const auto found = vector<int32_t>("seqs", seqs);
  for (const int32_t seq : found) {
    if (seq < 0 || seq >= num_rows) {
      throw std::invalid_argument(text("seqs names row ", seq, " of confidences, which has ", num_rows));
    }
  }
  return found;
}

std::span<const int32_t> ranking(const py::array& order, int64_t num_drafts) {
  const auto found = vector<int32_t>("order", order, num_drafts);
  for (const int32_t draft : found) {
    if (draft < 0 || draft >= num_drafts) {
      throw std::invalid_argument(text("order names draft ", draft, " of ", num_drafts));
    }
  }
  return found;
}

}  // namespace

void bind_draft_lengths(py::module_& m) {
  m.def(
      "forecast_drafts",
      [](const py::array& confidences, const py::array& seqs, const py::array& coefficients,
         const std::optional<py::array>& stand_in) {
        const auto book = confidences_of(confidences, stand_in);
        const auto rows = handles(seqs, book.own.rows);
        const auto all = matrix<double>("coefficients", coefficients, 2, book.own.columns);
        const auto places = static_cast<size_t>(book.own.columns);
        py::array_t<float> out({static_cast<py::ssize_t>(rows.size()), static_cast<py::ssize_t>(book.own.columns)});
        forecast_drafts(book, rows, {{all.data, places}, {all.data + places, places}},
                        {out.mutable_data(), out.shape(0), out.shape(1)});
        return out;
      },
      py::arg("confidences"), py::arg("seqs"), py::arg("coefficients"), py::arg("stand_in") = py::none());
  m.def(
      "add_verified",
      [](const py::array& confidences, const py::array& seqs, const py::array& verified, const py::array& accepted,
         const py::array& sums, const std::optional<py::array>& stand_in) {
        const auto book = confidences_of(confidences, stand_in);
        const auto rows = handles(seqs, book.own.rows);
        const auto count = static_cast<py::ssize_t>(rows.size());
        add_verified(book, rows, vector<int32_t>("verified", verified, count),
                     vector<int32_t>("accepted", accepted, count),
                     writable_matrix<double>("sums", sums, 5, book.own.columns));
      },
      py::arg("confidences"), py::arg("seqs"), py::arg("verified"), py::arg("accepted"), py::arg("sums"),
      py::arg("stand_in") = py::none());
  m.def(
      "enter_block",
      [](const py::array& newest, const py::array& recent, const py::array& older, const py::array& habit,
         const py::array& usual, const py::array& seqs, const py::array& confidences, float habit_weight,
         float usual_weight) {
        const auto shape = matrix<float>("newest", newest);
        const auto rows = handles(seqs, shape.rows);
        const auto given = matrix<float>("confidences", confidences, static_cast<py::ssize_t>(rows.size()));
        if (given.columns < shape.columns) {
          throw std::invalid_argument(text("confidences has ", given.columns, " columns; need ", shape.columns));
        }
        const auto writable = [&](const char* name, const py::array& array) {
          return writable_matrix<float>(name, array, shape.rows, shape.columns);
        };
        const Book book{writable("newest", newest), writable("recent", recent), writable("older", older),
                        writable("habit", habit), {}};
        vector<float>("usual", usual, shape.columns);
        if (!usual.writeable()) throw std::invalid_argument("usual is read-only");
        enter_block({book.newest, book.recent, book.older, book.habit,
                     {static_cast<float*>(const_cast<void*>(usual.data())), static_cast<size_t>(shape.columns)}},
                    rows, given, habit_weight, usual_weight);
      },
      py::arg("newest"), py::arg("recent"), py::arg("older"), py::arg("habit"), py::arg("usual"), py::arg("seqs"),
      py::arg("confidences"), py::arg("habit_weight"), py::arg("usual_weight"));
  m.def(
      "add_reliability",
      [](const py::array& confidences, const py::array& verified, const py::array& accepted, const py::array& sums) {
        const auto given = matrix<float>("confidences", confidences);
        if (sums.ndim() != 2 || sums.shape(1) < 1) throw std::invalid_argument("sums needs the shape [3, 1 or more]");
        add_reliability(given, vector<int32_t>("verified", verified, given.rows),
                        vector<int32_t>("accepted", accepted, given.rows),
                        writable_matrix<double>("sums", sums, 3, sums.shape(1)));
      },
      py::arg("confidences"), py::arg("verified"), py::arg("accepted"), py::arg("sums"));
  m.def(
      "rank_drafts",
      [](const py::array& gains, const py::array& contexts, double row_price, double context_price) {
        const auto table = matrix<float>("gains", gains);
        py::array_t<int32_t> order(table.rows * table.columns);
        rank_drafts(table, vector<int32_t>("contexts", contexts, table.rows), row_price, context_price,
                    {order.mutable_data(), static_cast<size_t>(order.size())});
        return order;
      },
      py::arg("gains"), py::arg("contexts"), py::arg("row_price"), py::arg("context_price"));
  m.def(
      "best_count",
      [](const py::array& gains, const py::array& contexts, const py::array& order, int64_t most, int64_t other_rows,
         const py::array& knots, const py::array& seconds, double context_price, double draft_seconds,
         double host_seconds, bool overlaps) {
        const auto table = matrix<float>("gains", gains);
        const auto curve = vector<double>("knots", knots);
        if (curve.size() < 2) throw std::invalid_argument(text("knots has ", curve.size(), " entries; need 2 or more"));
        if (most < 0 || most > table.rows * table.columns) {
          throw std::invalid_argument(text("most is ", most, " of ", table.rows * table.columns, " drafts"));
        }
        return best_count(table, vector<int32_t>("contexts", contexts, table.rows),
                          ranking(order, table.rows * table.columns), most, other_rows,
                          {curve, vector<double>("seconds", seconds, static_cast<py::ssize_t>(curve.size())),
                           context_price, draft_seconds, host_seconds, overlaps});
      },
      py::arg("gains"), py::arg("contexts"), py::arg("order"), py::arg("most"), py::arg("other_rows"), py::kw_only(),
      py::arg("knots"), py::arg("seconds"), py::arg("context_price"), py::arg("draft_seconds"),
      py::arg("host_seconds"), py::arg("overlaps"));
}

}  // namespace deepinfer
