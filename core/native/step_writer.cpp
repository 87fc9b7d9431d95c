#include "step_writer.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "text.hpp"

namespace deepinfer {
namespace {

// The largest of each dimension that a step needs.
struct Extent {
  int64_t rows = 0;
  int64_t seqs = 0;
  int64_t blocks = 0;
  int64_t pages = 0;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Position of a sequence's first row.
int64_t first_row(const Sequence& sequence, std::span<const int32_t> starts, size_t i) {
  return starts.empty() ? sequence.num_computed - sequence.num_replayed : starts[i];
}

Extent measure(const KVPool& pool, std::span<const int32_t> seqs, std::span<const int32_t> query_lens,
               std::span<const int32_t> starts) {
  if (seqs.size() != query_lens.size()) {
    throw std::invalid_argument(text("seqs has ", seqs.size(), " entries, query_lens has ", query_lens.size()));
  }
  if (!starts.empty() && starts.size() != seqs.size()) {
    throw std::invalid_argument(text("seqs has ", seqs.size(), " entries, starts has ", starts.size()));
  }
  pool.sequences().require_distinct(seqs);
  const PoolConfig& config = pool.config();
  Extent extent{.seqs = static_cast<int64_t>(seqs.size())};
  for (size_t i = 0; i < seqs.size(); ++i) {
    const Sequence& sequence = pool.sequences()[seqs[i]];
    const int64_t begin = first_row(sequence, starts, i);
    const int64_t end = begin + query_lens[i];
    const bool known = !starts.empty() || end <= sequence.num_tokens();
    if (query_lens[i] < 0 || begin < sequence.num_computed - sequence.num_replayed || !known) {
      throw std::invalid_argument(text("sequence ", seqs[i], ": ", query_lens[i], " rows from ", begin, "; it has ",
                                       sequence.num_tokens(), " tokens, ", sequence.num_computed, " computed"));
    }
    const int64_t blocks = ceil_div(end, config.block_size);
    const int64_t page_end = ceil_div(end, config.window_page);
    if (blocks > static_cast<int64_t>(sequence.blocks.size()) || page_end > sequence.page_end()) {
      throw std::invalid_argument(text("sequence ", seqs[i], ": rows up to ", end, " tokens are not reserved"));
    }
    extent.rows += query_lens[i];
    extent.blocks = std::max(extent.blocks, blocks);
    extent.pages = std::max(extent.pages, page_end - sequence.first_page);
  }
  return extent;
}

void require(const Vector& vector, int64_t size) {
  if (vector.size < size) {
    throw std::invalid_argument(
        text(vector.name, " has shape (", vector.size, ",); this step needs at least (", size, ",)"));
  }
}

void require(const Table& table, int64_t rows, int64_t cols) {
  if (table.rows < rows || table.cols < cols) {
    throw std::invalid_argument(text(table.name, " has shape (", table.rows, ", ", table.cols,
                                     "); this step needs at least (", rows, ", ", cols, ")"));
  }
}

void require(const IdTable& table, int64_t rows, int64_t cols) {
  require(table.ids, rows, cols);
  require(table.lens, table.ids.rows);
  for (int64_t i = 0; i < table.ids.rows; ++i) {
    const int64_t used = table.lens.data[i];
    if (used < 0 || used > table.ids.cols) {
      throw std::invalid_argument(text(table.lens.name, "[", i, "] is ", used, "; ", table.ids.name, " has ",
                                       table.ids.cols, " columns, and the step before left what it says"));
    }
  }
}

void require_slots_fit(const PoolConfig& config, const SlotMap& map) {
  if (config.block_size % map.ratio != 0) {
    throw std::invalid_argument(
        text("slots: ratio ", map.ratio, " does not divide block_size ", config.block_size));
  }
  const int64_t records = config.block_size / map.ratio;
  if ((config.num_blocks + 1) * records - 1 > std::numeric_limits<int32_t>::max()) {
    throw std::overflow_error(
        text("slots of ratio ", map.ratio, ": ", config.num_blocks, " blocks of ", records, " records exceed int32"));
  }
}

void require_capacity(const KVPool& pool, const StepArrays& out, const Extent& used, int64_t rows, int64_t seqs) {
  for (const Vector& vector : {out.input_ids, out.positions, out.row_to_seq, out.window_slots}) require(vector, rows);
  for (const SlotMap& map : out.slots) {
    require_slots_fit(pool.config(), map);
    require(map.slots, rows);
  }
  require(out.cu_seqlens_q, seqs + 1);
  for (const Vector& vector : {out.seq_lens, out.query_lens, out.state_slots, out.window_first_page}) {
    require(vector, seqs);
  }
  require(out.history, seqs, 0);
  require(out.block_tables, seqs, used.blocks);
  require(out.window_tables, seqs, used.pages);
}

// Fills [from, end), where end is the padded length or, when pad is -1, the array's own.
void fill_rest(const Vector& vector, int64_t from, int64_t pad, int32_t value) {
  const int64_t end = pad < 0 ? vector.size : std::max(from, pad);
  std::fill(vector.data + from, vector.data + end, value);
}

// Writes row i and clears what the step before left behind it.
void write_ids(const IdTable& table, int64_t i, const int32_t* ids, int64_t count) {
  int32_t* row = table.ids.row(i);
  std::copy_n(ids, count, row);
  const int64_t stale = table.lens.data[i];
  if (stale > count) std::fill(row + count, row + stale, 0);
  table.lens.data[i] = static_cast<int32_t>(count);
}

// The window slots of positions [begin, end): a run of consecutive slots per page.
void write_window_slots(const Sequence& sequence, int64_t page_size, int64_t begin, int64_t end, int32_t* out) {
  for (int64_t position = begin; position < end;) {
    const int64_t page = position / page_size;
    const int64_t stop = std::min(end, (page + 1) * page_size);
    const int64_t id = sequence.pages[static_cast<size_t>(page - sequence.first_page)];
    std::iota(out, out + (stop - position), static_cast<int32_t>(id * page_size + position % page_size));
    out += stop - position;
    position = stop;
  }
}

// The entry slots that positions [begin, end) close, -1 for a position that closes none. Within a block both the
// closing positions and their slots are evenly spaced.
void write_entry_slots(const Sequence& sequence, int64_t block_size, int64_t ratio, int64_t begin, int64_t end,
                       int32_t* out) {
  if (ratio > 1) std::fill(out, out + (end - begin), -1);
  for (int64_t position = (begin / ratio + 1) * ratio - 1; position < end;) {
    const int64_t block = position / block_size;
    const int64_t stop = std::min(end, (block + 1) * block_size);
    const int64_t id = sequence.blocks[static_cast<size_t>(block)];
    auto slot = static_cast<int32_t>((id * block_size + position % block_size) / ratio);
    for (; position < stop; position += ratio) out[position - begin] = slot++;
  }
}

// The token at a position, or `unknown` where there is none yet or the position is before the start.
int32_t token_at(const Sequence& sequence, int64_t position, int32_t unknown) {
  const bool known = position >= 0 && position < sequence.num_tokens();
  return known ? sequence.tokens[static_cast<size_t>(position)] : unknown;
}

void write_sequence(const PoolConfig& config, const Sequence& sequence, int64_t begin, int64_t query_len, int64_t row,
                    int64_t i, const StepArrays& out) {
  const int64_t end = begin + query_len;
  const int64_t num_known = std::clamp<int64_t>(sequence.num_tokens() - begin, 0, query_len);
  std::copy_n(sequence.tokens.begin() + std::min<int64_t>(begin, sequence.num_tokens()), num_known,
              out.input_ids.data + row);
  std::fill_n(out.input_ids.data + row + num_known, query_len - num_known, 0);
  std::iota(out.positions.data + row, out.positions.data + row + query_len, static_cast<int32_t>(begin));
  std::fill_n(out.row_to_seq.data + row, query_len, static_cast<int32_t>(i));
  write_window_slots(sequence, config.window_page, begin, end, out.window_slots.data + row);
  for (const SlotMap& map : out.slots) {
    write_entry_slots(sequence, config.block_size, map.ratio, begin, end, map.slots.data + row);
    // Replayed rows find their entries stored, perhaps by another sequence.
    const int64_t num_replayed = std::clamp<int64_t>(sequence.num_computed - begin, 0, query_len);
    std::fill_n(map.slots.data + row, num_replayed, -1);
  }
  out.seq_lens.data[i] = static_cast<int32_t>(end);
  out.query_lens.data[i] = static_cast<int32_t>(query_len);
  out.window_first_page.data[i] = sequence.first_page;
  for (int64_t k = 0; k < out.history.cols; ++k) out.history.row(i)[k] = token_at(sequence, begin - k - 1, -1);
  write_ids(out.block_tables, i, sequence.blocks.data(), ceil_div(end, config.block_size));
  const int64_t num_pages = std::max<int64_t>(0, ceil_div(end, config.window_page) - sequence.first_page);
  write_ids(out.window_tables, i, sequence.pages.data(), num_pages);
}

}  // namespace

int64_t write_step(const KVPool& pool, std::span<const int32_t> seqs, std::span<const int32_t> query_lens,
                   std::span<const int32_t> starts, const StepArrays& out, int64_t pad_rows, int64_t pad_seqs) {
  const Extent used = measure(pool, seqs, query_lens, starts);
  require_capacity(pool, out, used, std::max(used.rows, pad_rows), std::max(used.seqs, pad_seqs));

  const PoolConfig& config = pool.config();
  int64_t row = 0;
  for (int64_t i = 0; i < used.seqs; ++i) {
    const int32_t seq = seqs[static_cast<size_t>(i)];
    const int64_t query_len = query_lens[static_cast<size_t>(i)];
    out.cu_seqlens_q.data[i] = static_cast<int32_t>(row);
    out.state_slots.data[i] = seq;
    const Sequence& sequence = pool.sequences()[seq];
    write_sequence(config, sequence, first_row(sequence, starts, static_cast<size_t>(i)), query_len, row, i, out);
    row += query_len;
  }

  for (const Vector& vector : {out.input_ids, out.positions, out.row_to_seq}) fill_rest(vector, row, pad_rows, 0);
  fill_rest(out.window_slots, row, pad_rows, -1);
  for (const SlotMap& map : out.slots) fill_rest(map.slots, row, pad_rows, -1);
  fill_rest(out.cu_seqlens_q, used.seqs, pad_seqs < 0 ? pad_seqs : std::max(used.seqs, pad_seqs) + 1,
            static_cast<int32_t>(row));
  for (const Vector& vector : {out.seq_lens, out.query_lens, out.state_slots, out.window_first_page}) {
    fill_rest(vector, used.seqs, pad_seqs, 0);
  }
  const int64_t history_rows = pad_seqs < 0 ? out.history.rows : std::max(used.seqs, pad_seqs);
  std::fill(out.history.row(used.seqs), out.history.row(history_rows), -1);
  for (const IdTable& table : {out.block_tables, out.window_tables}) {
    for (int64_t i = used.seqs; i < table.ids.rows; ++i) write_ids(table, i, nullptr, 0);
  }
  return row;
}

}  // namespace deepinfer
