// Who holds which block and window page, for every open sequence.
//
// A sequence of n computed positions holds blocks for [0, n) and the window pages that a query can still see. Let the
// next query stand at position n: it sees positions > n - window. A rollback takes back at most lookback - window
// computed positions, to some m >= n - (lookback - window), and the query at m sees positions > m - window, so
// everything from n - lookback + 1 on must stay. The first page kept is therefore
//
//     first_page(n) = max(0, n - lookback + 1) / window_page          (page p is freed once p < first_page(n)).
//
// Positions >= num_computed will be written, so every block and page at or after the one that holds num_computed is
// held by this sequence alone. fork() and truncate() keep that true by giving out copies to make.
//
// Not thread safe: one engine thread owns a pool. Calls are all or nothing: one that throws has changed nothing.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ref_counted_ids.hpp"
#include "sequence.hpp"

namespace deepinfer {

// A call that must give a block, a page or a slot found none free.
class PoolExhausted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct PoolConfig {
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_window_pages;
  int64_t window_page;
  int64_t window;
  int64_t lookback;
  int64_t num_slots;
};

// Device memory to copy before the next step: a block, a window page, or a compressor state slot.
struct Copy {
  const char* kind;
  int32_t src;
  int32_t dst;
};

class KVPool {
 public:
  explicit KVPool(const PoolConfig& config);

  const PoolConfig& config() const { return config_; }
  const SequenceTable& sequences() const { return sequences_; }
  int64_t num_free_blocks() const { return blocks_.num_free(); }
  int64_t num_free_pages() const { return pages_.num_free(); }
  int64_t num_free_slots() const { return sequences_.num_free(); }

  int32_t open(std::span<const int32_t> tokens);
  void close(int64_t seq);
  void append(std::span<const int32_t> seqs, std::span<const int32_t> tokens);
  void append_many(int64_t seq, std::span<const int32_t> tokens);

  int64_t blocks_needed(int64_t seq, int64_t end) const;
  int64_t pages_needed(int64_t seq, int64_t end) const;
  bool reserve(int64_t seq, int64_t end);
  int64_t reserve_many(std::span<const int32_t> seqs, std::span<const int32_t> ends);

  void commit(std::span<const int32_t> seqs, std::span<const int32_t> new_computed);
  std::vector<Copy> truncate(int64_t seq, int64_t num_tokens);
  void release_memory(int64_t seq);
  std::pair<int32_t, std::vector<Copy>> fork(int64_t seq);

  void check() const;

 private:
  void check_group(const char* kind, const RefCountedIds& ids, const std::vector<int32_t>& held) const;
  void check_sequence(int32_t seq) const;
  int64_t missing_blocks(const Sequence& sequence, int64_t end) const;
  int64_t missing_pages(const Sequence& sequence, int64_t end) const;
  bool try_reserve(Sequence& sequence, int64_t end);
  void free_memory(Sequence& sequence);
  int64_t first_page(int64_t num_computed, int64_t reach) const;

  PoolConfig config_;
  RefCountedIds blocks_;
  RefCountedIds pages_;
  SequenceTable sequences_;
};

}  // namespace deepinfer
