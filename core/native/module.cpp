// deepinfer.core._native: the Python face of the pool and the step writer. Documented in core/_native.pyi.
//
// Bulk calls release the GIL after their arrays are checked. A pool is not thread safe all the same: one thread at a
// time may be inside it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "draft_lengths.hpp"
#include "pool.hpp"
#include "step_writer.hpp"

namespace py = pybind11;

namespace deepinfer {
namespace {

// The output arrays of a step, checked once; holding them keeps their memory in place.
struct BoundStepArrays {
  StepArrays arrays;
  std::vector<py::array> owners;
};

BoundStepArrays bind_step_arrays(py::array input_ids, py::array positions, py::array row_to_seq,
                                 py::array window_slots, const std::vector<std::pair<int64_t, py::array>>& slots,
                                 py::array cu_seqlens_q, py::array seq_lens, py::array query_lens,
                                 py::array state_slots, py::array window_first_page, py::array history,
                                 py::array block_tables, py::array block_table_lens, py::array window_tables,
                                 py::array window_table_lens) {
  BoundStepArrays bound{
      .arrays = {.input_ids = output_vector("input_ids", input_ids),
                 .positions = output_vector("positions", positions),
                 .row_to_seq = output_vector("row_to_seq", row_to_seq),
                 .window_slots = output_vector("window_slots", window_slots),
                 .slots = {},
                 .cu_seqlens_q = output_vector("cu_seqlens_q", cu_seqlens_q),
                 .seq_lens = output_vector("seq_lens", seq_lens),
                 .query_lens = output_vector("query_lens", query_lens),
                 .state_slots = output_vector("state_slots", state_slots),
                 .window_first_page = output_vector("window_first_page", window_first_page),
                 .history = output_table("history", history),
                 .block_tables = {output_table("block_tables", block_tables),
                                  output_vector("block_table_lens", block_table_lens)},
                 .window_tables = {output_table("window_tables", window_tables),
                                   output_vector("window_table_lens", window_table_lens)}},
      .owners = {input_ids, positions, row_to_seq, window_slots, cu_seqlens_q, seq_lens, query_lens, state_slots,
                 window_first_page, history, block_tables, block_table_lens, window_tables, window_table_lens}};
  for (const auto& [ratio, array] : slots) {
    if (ratio < 1) throw std::invalid_argument(text("slots: ratio is ", ratio, "; it must be at least 1"));
    bound.arrays.slots.push_back({ratio, output_vector("slots", array)});
    bound.owners.push_back(array);
  }
  return bound;
}

std::vector<std::tuple<const char*, int32_t, int32_t>> as_tuples(const std::vector<Copy>& copies) {
  std::vector<std::tuple<const char*, int32_t, int32_t>> tuples;
  for (const Copy& copy : copies) tuples.emplace_back(copy.kind, copy.src, copy.dst);
  return tuples;
}

py::dict as_dict(const KVPool& pool) {
  const PrefixStats& stats = pool.prefix_stats();
  py::dict counts;
  counts["queries"] = stats.queries;
  counts["hits"] = stats.hits;
  counts["query_tokens"] = stats.query_tokens;
  counts["hit_tokens"] = stats.hit_tokens;
  counts["pageless_tokens"] = stats.pageless_tokens;
  counts["missed_no_block"] = stats.missed_no_block;
  counts["missed_no_pages"] = stats.missed_no_pages;
  counts["missed_too_short"] = stats.missed_too_short;
  counts["disabled"] = stats.disabled;
  counts["evicted_blocks"] = pool.prefix_index() ? pool.prefix_index()->num_evicted_blocks() : 0;
  counts["evicted_pages"] = pool.prefix_index() ? pool.prefix_index()->num_evicted_pages() : 0;
  counts["held_blocks"] = pool.num_cached_blocks();
  counts["held_pages"] = pool.num_cached_pages();
  return counts;
}

// A read-only property of the pool's configuration.
template <int64_t PoolConfig::*field>
int64_t config_of(const KVPool& pool) {
  return pool.config().*field;
}

void bind_pool(py::module_& m) {
  py::class_<KVPool> cls(m, "KVPool");
  cls.def(py::init([](int64_t num_blocks, int64_t block_size, int64_t num_window_pages, int64_t window_page,
                      int64_t window, int64_t num_slots) {
            return std::make_unique<KVPool>(
                PoolConfig{num_blocks, block_size, num_window_pages, window_page, window, num_slots});
          }),
          py::arg("num_blocks"), py::arg("block_size"), py::arg("num_window_pages"), py::arg("window_page"),
          py::arg("window"), py::arg("num_slots"));
  cls.def_property_readonly("num_blocks", config_of<&PoolConfig::num_blocks>)
      .def_property_readonly("block_size", config_of<&PoolConfig::block_size>)
      .def_property_readonly("num_window_pages", config_of<&PoolConfig::num_window_pages>)
      .def_property_readonly("window_page", config_of<&PoolConfig::window_page>)
      .def_property_readonly("window", config_of<&PoolConfig::window>)
      .def_property_readonly("num_slots", config_of<&PoolConfig::num_slots>)
      .def_property_readonly("num_free_blocks", &KVPool::num_free_blocks)
      .def_property_readonly("num_free_pages", &KVPool::num_free_pages)
      .def_property_readonly("num_free_slots", &KVPool::num_free_slots);

  cls.def("is_open", [](const KVPool& pool, int64_t seq) { return pool.sequences().is_open(seq); }, py::arg("seq"));
  const auto getter = [&cls](const char* name, auto get) {
    cls.def(name, [get](const KVPool& pool, int64_t seq) { return get(pool.sequences().at(seq)); }, py::arg("seq"));
  };
  getter("num_tokens", [](const Sequence& sequence) { return sequence.num_tokens(); });
  getter("num_computed", [](const Sequence& sequence) { return sequence.num_computed; });
  getter("num_replayed", [](const Sequence& sequence) { return sequence.num_replayed; });
  getter("first_page", [](const Sequence& sequence) { return sequence.first_page; });
  cls.def("tokens",
          [](const KVPool& pool, int64_t seq, int64_t start) {
            const std::span<const int32_t> tokens = pool.sequences().at(seq).tokens;
            const auto size = static_cast<int64_t>(tokens.size());
            if (start < 0) throw std::invalid_argument(text("start is ", start, "; it must be at least 0"));
            return copy_out(tokens.subspan(static_cast<size_t>(std::min(start, size))));
          },
          py::arg("seq"), py::arg("start") = 0);
  getter("blocks", [](const Sequence& sequence) { return copy_out(sequence.blocks); });
  getter("pages", [](const Sequence& sequence) { return copy_out(sequence.pages); });

  cls.def("open",
          [](KVPool& p, const py::array& tokens, uint64_t salt, bool use_prefix, int64_t max_stored, int64_t replay) {
            const auto t = input_vector("token_ids", tokens);
            py::gil_scoped_release released;
            return p.open(t, salt, use_prefix, {max_stored, replay});
          },
          py::arg("token_ids"), py::arg("salt") = 0, py::arg("use_prefix") = false,
          py::arg("max_stored") = PrefixUse{}.max_tokens, py::arg("replay") = 0)
      .def("close", &KVPool::close, py::arg("seq"))
      .def("blocks_needed", &KVPool::blocks_needed, py::arg("seq"), py::arg("end"))
      .def("pages_needed", &KVPool::pages_needed, py::arg("seq"), py::arg("end"))
      .def("reserve", &KVPool::reserve, py::arg("seq"), py::arg("end"))
      .def("fork",
           [](KVPool& p, int64_t seq) {
             const auto [child, copies] = p.fork(seq);
             return std::pair(child, as_tuples(copies));
           },
           py::arg("seq"))
      .def("check", &KVPool::check, py::call_guard<py::gil_scoped_release>());

  cls.def("enable_prefix", &KVPool::enable_prefix, py::arg("page_interval") = 4096)
      .def("match",
           [](const KVPool& p, const py::array& tokens, uint64_t salt, int64_t max_stored, int64_t replay) {
             const auto t = input_vector("token_ids", tokens);
             py::gil_scoped_release released;
             const PrefixMatch found = p.match(t, salt, {max_stored, replay});
             return std::pair(found.num_tokens, found.num_idle_blocks);
           },
           py::arg("token_ids"), py::arg("salt") = 0, py::arg("max_stored") = PrefixUse{}.max_tokens,
           py::arg("replay") = 0)
      .def("quarantine", &KVPool::quarantine, py::arg("seq"))
      .def("reset_prefix", &KVPool::reset_prefix)
      .def("stored_prefix",
           [](const KVPool& p, const py::array& tokens, uint64_t salt) {
             const StoredPrefix stored = p.stored_prefix(input_vector("token_ids", tokens), salt);
             return std::pair(copy_out(stored.blocks), copy_out(stored.pages));
           },
           py::arg("token_ids"), py::arg("salt") = 0)
      .def("prefix_keys",
           [](const KVPool& p, const py::array& tokens, uint64_t salt) {
             const std::vector<uint64_t> keys = p.prefix_keys(input_vector("token_ids", tokens), salt);
             return py::array_t<uint64_t>(static_cast<py::ssize_t>(keys.size()), keys.data());
           },
           py::arg("token_ids"), py::arg("salt") = 0)
      .def("import_prefix",
           [](KVPool& p, const py::array& tokens, uint64_t salt, const py::array& has_page) {
             const auto t = input_vector("token_ids", tokens), h = input_vector("has_page", has_page);
             const StoredPrefix added = p.import_prefix(t, salt, h);
             return std::pair(copy_out(added.blocks), copy_out(added.pages));
           },
           py::arg("token_ids"), py::arg("salt"), py::arg("has_page"))
      .def("forget_prefix",
           [](KVPool& p, const py::array& tokens, uint64_t salt, int64_t first_block) {
             p.forget_prefix(input_vector("token_ids", tokens), salt, first_block);
           },
           py::arg("token_ids"), py::arg("salt"), py::arg("first_block"))
      .def("prefix_stats", &as_dict);

  cls.def("append",
          [](KVPool& pool, const py::array& seqs, const py::array& counts, const py::array& tokens) {
            const auto s = input_vector("seqs", seqs), c = input_vector("counts", counts);
            const auto t = input_vector("tokens", tokens);
            py::gil_scoped_release released;
            pool.append(s, c, t);
          },
          py::arg("seqs"), py::arg("counts"), py::arg("tokens"))
      .def("reserve_many",
           [](KVPool& pool, const py::array& seqs, const py::array& ends) {
             const auto s = input_vector("seqs", seqs), e = input_vector("ends", ends);
             py::gil_scoped_release released;
             return pool.reserve_many(s, e);
           },
           py::arg("seqs"), py::arg("ends"))
      .def("commit",
           [](KVPool& pool, const py::array& seqs, const py::array& new_computed) {
             const auto s = input_vector("seqs", seqs), n = input_vector("new_computed", new_computed);
             py::gil_scoped_release released;
             pool.commit(s, n);
           },
           py::arg("seqs"), py::arg("new_computed"))
      .def("write_step",
           [](const KVPool& pool, const py::array& seqs, const py::array& query_lens, const BoundStepArrays& out,
              int64_t pad_rows, int64_t pad_seqs, const std::optional<py::array>& starts) {
             const auto s = input_vector("seqs", seqs), q = input_vector("query_lens", query_lens);
             const auto b = starts ? input_vector("starts", *starts) : std::span<const int32_t>{};
             py::gil_scoped_release released;
             return write_step(pool, s, q, b, out.arrays, pad_rows, pad_seqs);
           },
           py::arg("seqs"), py::arg("query_lens"), py::arg("out"), py::arg("pad_rows") = -1, py::arg("pad_seqs") = -1,
           py::arg("starts") = py::none());
}

}  // namespace
}  // namespace deepinfer

PYBIND11_MODULE(_native, m) {
  m.doc() = "Host hot paths of the engine: block and page pools, step metadata, draft lengths.";
  py::register_exception<deepinfer::PoolExhausted>(m, "PoolExhaustedError", PyExc_RuntimeError);
  py::class_<deepinfer::BoundStepArrays>(m, "StepArrays")
      .def(py::init(&deepinfer::bind_step_arrays), py::kw_only(), py::arg("input_ids"), py::arg("positions"),
           py::arg("row_to_seq"), py::arg("window_slots"), py::arg("slots"), py::arg("cu_seqlens_q"),
           py::arg("seq_lens"), py::arg("query_lens"), py::arg("state_slots"), py::arg("window_first_page"),
           py::arg("history"), py::arg("block_tables"), py::arg("block_table_lens"), py::arg("window_tables"),
           py::arg("window_table_lens"));
  deepinfer::bind_pool(m);
  deepinfer::bind_draft_lengths(m);
}
