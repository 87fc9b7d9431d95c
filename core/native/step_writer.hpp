// Step metadata: what the kernels of one step need to know about its rows, written into buffers the caller owns.
//
// Row r of sequence s stands at position starts[s] + r; starts is num_computed unless steps are in flight, whose tokens
// are not known yet: an unknown token is written as 0, in history as -1, and the device fills it in. Every pointer is to
// int32, C-contiguous. What a step does not use is padding: zeros, -1 in slots and history, the total in cu_seqlens_q.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pool.hpp"

namespace deepinfer {

struct Vector {
  const char* name;
  int32_t* data;
  int64_t size;
};

struct Table {
  const char* name;
  int32_t* data;
  int64_t rows;
  int64_t cols;
  int32_t* row(int64_t i) const { return data + i * cols; }
};

// A table of ids, and how many leading entries of each of its rows are in use. Entries past them are 0 between steps,
// so a step clears what the last one left and no more: a row of a million tokens has thousands of entries.
struct IdTable {
  Table ids;
  Vector lens;
};

// Slots of the compressed entries of one ratio: position t closes entry t / ratio when ratio divides t + 1.
struct SlotMap {
  int64_t ratio;
  Vector slots;
};

struct StepArrays {
  // One entry per row.
  Vector input_ids;
  Vector positions;
  Vector row_to_seq;
  Vector window_slots;
  std::vector<SlotMap> slots;
  // One entry per sequence.
  Vector cu_seqlens_q;
  Vector seq_lens;
  Vector query_lens;
  Vector state_slots;
  Vector window_first_page;
  Table history;
  IdTable block_tables;
  IdTable window_tables;
};

// Writes one step and returns its number of rows. Empty starts means num_computed of each. Row arrays are padded up to max(rows, pad_rows), sequence arrays up
// to max(sequences, pad_seqs); -1 pads each array to its end. Throws before the first write.
int64_t write_step(const KVPool& pool, std::span<const int32_t> seqs, std::span<const int32_t> query_lens,
                   std::span<const int32_t> starts, const StepArrays& out, int64_t pad_rows, int64_t pad_seqs);

}  // namespace deepinfer
