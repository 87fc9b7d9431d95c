// What index scores are told, which part of them a block computes next, and where keys lie in memory.
//
// Keys are dense rows (ragged), every stored key of a sequence (paged), or those of candidate blocks. Only where a key
// is found differs: the same instructions on the same values follow, so equal keys get equal bits.
#pragma once

#include "rows.h"

constexpr int64_t kTileQueries = 128;  // rows of the left operand: heads of some rows
constexpr int64_t kHalfKeys = 128;     // keys of a tile that one vector core looks after, at most
constexpr int64_t kBlockBytes = 32;
constexpr auto kStays = asc_load_l2_cache_mode::NORMAL_FIRST_VICTIM;

struct Scores {
  __gm__ uint8_t* q;
  __gm__ uint8_t* q_scale;
  __gm__ uint8_t* keys;        // dense rows, or pages
  __gm__ uint8_t* key_scale;   // of dense rows
  __gm__ uint8_t* weights;
  __gm__ int32_t* origin;      // per row: its first key (ragged), or its sequence
  __gm__ int32_t* limit;       // per row: one past its last key (ragged), or how many it sees
  __gm__ int32_t* blocks;      // candidate blocks of each row; null: all keys
  __gm__ int32_t* table;       // pages of each sequence; null: ragged
  __gm__ float* out;
  int64_t rows, heads, row_bytes, scale_bytes;   // bytes of one query or key, without and of its scales
  int64_t columns, tile, group;                  // columns of the result and of a tile, rows taken together
  int64_t records, page_bytes, table_columns, table_pitch, num_blocks, candidate;
};

#define SCORES_PARAMETERS                                                                                           \
  __gm__ uint8_t *q, __gm__ uint8_t *q_scale, __gm__ uint8_t *keys, __gm__ uint8_t *key_scale,                      \
      __gm__ uint8_t *weights, __gm__ int32_t *origin, __gm__ int32_t *limit, __gm__ int32_t *blocks,               \
      __gm__ int32_t *table, __gm__ float *out, int64_t rows, int64_t heads, int64_t row_bytes,                     \
      int64_t scale_bytes, int64_t columns, int64_t tile, int64_t group, int64_t records, int64_t page_bytes,       \
      int64_t table_columns, int64_t table_pitch, int64_t num_blocks, int64_t candidate
#define SCORES                                                                                                      \
  Scores {                                                                                                          \
    q, q_scale, keys, key_scale, weights, origin, limit, blocks, table, out, rows, heads, row_bytes, scale_bytes,   \
        columns, tile, group, records, page_bytes, table_columns, table_pitch, num_blocks, candidate                \
  }

__aicore__ inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// How many columns of a row, or with candidate blocks positions of its sequence, hold a key.
__aicore__ inline int64_t visible_of(const Scores& p, int64_t row) {
  return p.table == nullptr ? p.limit[row] - p.origin[row] : p.limit[row];
}

// Neighbouring rows that see the same keys, and a tile of columns.
struct Job {
  int64_t row, rows;
  int64_t column, width;
  int64_t keys;    // columns that some row may see: none of them needs no products
  int64_t padded;  // of keys, for two vector cores
  int64_t middle;  // columns from here on are the second vector core's
};

// Tasks in order, row groups one after another, tiles of one group side by side; a block takes every
// asc_get_block_num()-th, and its cores all walk the same way. Within a task a job ends where the keys change.
struct Walk {
  int64_t task, row;
};

__aicore__ inline Walk begin_walk(const Scores& p) { return {asc_get_block_idx(), 0}; }

__aicore__ inline bool next_job(Job& job, Walk& at, const Scores& p) {
  const int64_t tiles = (p.columns + p.tile - 1) / p.tile, groups = (p.rows + p.group - 1) / p.group;
  if (at.task >= groups * tiles) return false;
  const int64_t first = at.task / tiles * p.group, end = min(first + p.group, p.rows);
  job.row = first + at.row;
  job.column = at.task % tiles * p.tile;
  job.width = min(p.tile, p.columns - job.column);
  int64_t visible = visible_of(p, job.row);
  for (job.rows = 1; job.row + job.rows < end; ++job.rows) {
    if (p.origin[job.row + job.rows] != p.origin[job.row]) break;
    visible = max(visible, visible_of(p, job.row + job.rows));
  }
  if (p.blocks != nullptr && visible > 0) visible = p.columns;  // a candidate block may stand in any column
  job.keys = max((int64_t)0, min(visible - job.column, job.width));
  job.padded = round_up(job.keys, kBlockBytes);
  job.middle = (job.keys ? job.padded : round_up(job.width, kBlockBytes)) / 2;
  at.row += job.rows;
  if (first + at.row >= end) at = {at.task + asc_get_block_num(), 0};
  return true;
}

// Keys that follow one another in memory.
struct Run {
  __gm__ uint8_t* codes;
  __gm__ uint8_t* scales;
  int64_t count;
};

// The keys of columns from `column` on, at most up to `end`. What a column without a key would name is not used: any
// key may stand there.
__aicore__ inline Run run_at(const Scores& p, const Job& job, int64_t column, int64_t end) {
  int64_t position = column, count = end - column;
  if (p.table == nullptr) {
    const int64_t key = p.origin[job.row] + column;
    return {p.keys + key * p.row_bytes, p.key_scale + key * p.scale_bytes, count};
  }
  if (p.blocks != nullptr) {
    const int64_t number = p.blocks[job.row * p.num_blocks + column / p.candidate], inside = column % p.candidate;
    position = max(number, (int64_t)0) * p.candidate + inside;
    count = min(count, p.candidate - inside);
  }
  const int64_t place = min(position / p.records, p.table_columns - 1), offset = position % p.records;
  const int64_t number = p.table[p.origin[job.row] * p.table_pitch + place];
  __gm__ uint8_t* page = p.keys + number * p.page_bytes;
  return {page + offset * p.row_bytes, page + p.records * p.row_bytes + offset * p.scale_bytes,
          min(count, p.records - offset)};
}
