// Who holds which block and window page, for every open sequence.
//
// A sequence of n computed positions holds blocks for [0, n) and the window pages that the next query, at position n, can
// see: positions > n - window. It never goes back: steps in flight may be planned beyond what turns out to be accepted,
// but only what is known to be is committed. The first page kept is therefore
//
//     first_page(n) = max(0, n - window + 1) / window_page          (page p is freed once p < first_page(n)).
//
// Positions >= num_computed will be written, so every block and page at or after the one that holds num_computed is
// held by this sequence alone, and not in the prefix index. fork() keeps that true by giving out copies to make.
//
// With enable_prefix(), commit() enters full blocks and their window pages into the prefix index, and open() adopts them:
// a sequence then starts at a block boundary, and so at a page boundary, and what it adopted is never written again.
// A sequence that adopts blocks without their window pages (PrefixUse::replay) has num_replayed > 0 until its first
// commit: rows from num_computed - num_replayed on run once more, into pages of its own, and pages are held from there.
//
// What only the index wants counts as free and is given up when ids run out. pool_prefix.cpp holds this part.
//
// Not thread safe: one engine thread owns a pool. Calls are all or nothing: one that throws has changed nothing.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "prefix_index.hpp"
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
  int64_t num_slots;
};

// Device memory to copy before the next step: a block, a window page, or a compressor state slot.
struct Copy {
  const char* kind;
  int32_t src;
  int32_t dst;
};

// What open() found so far. A query is an open() that may use the index; tokens are counted by query.
struct PrefixStats {
  int64_t queries = 0;
  int64_t hits = 0;
  int64_t query_tokens = 0;
  int64_t hit_tokens = 0;
  int64_t pageless_tokens = 0;  // known and lost, because the window pages that would continue them are not held
  int64_t missed_no_block = 0;
  int64_t missed_no_pages = 0;
  int64_t missed_too_short = 0;
  int64_t disabled = 0;
};

// Which stored prefixes a sequence may start from.
struct PrefixUse {
  int64_t max_tokens = std::numeric_limits<int32_t>::max();  // longest one, with its window pages
  // Where this is not 0, a longer one is adopted without its window pages, and so many tokens at its end run again to
  // make them, or a few more up to a page boundary. What is computed behind that is not entered into the index.
  int64_t replay = 0;
};

// The prefix that open() would adopt.
struct PrefixMatch {
  int64_t num_tokens = 0;
  int64_t num_idle_blocks = 0;  // of its blocks, those that no sequence holds: adopting them leaves as many fewer free
  int64_t num_replayed = 0;     // of its tokens, those at its end that are to run again
};

// A prefix block by block: block ids, and the window pages of each block by slot, 0 for one that is not there.
struct StoredPrefix {
  std::vector<int32_t> blocks;
  std::vector<int32_t> pages;
};

class KVPool {
 public:
  explicit KVPool(const PoolConfig& config);
  KVPool(const KVPool&) = delete;  // the index refers to the groups of its pool

  const PoolConfig& config() const { return config_; }
  const SequenceTable& sequences() const { return sequences_; }
  int64_t num_free_blocks() const { return blocks_.num_free(); }
  int64_t num_free_pages() const { return pages_.num_free(); }
  int64_t num_free_slots() const { return sequences_.num_free(); }

  int32_t open(std::span<const int32_t> tokens, uint64_t salt = 0, bool use_prefix = false, PrefixUse use = {});
  void close(int64_t seq);
  // The next counts[i] of the packed `tokens` go to sequence seqs[i].
  void append(std::span<const int32_t> seqs, std::span<const int32_t> counts, std::span<const int32_t> tokens);

  int64_t blocks_needed(int64_t seq, int64_t end) const;
  int64_t pages_needed(int64_t seq, int64_t end) const;
  bool reserve(int64_t seq, int64_t end);
  int64_t reserve_many(std::span<const int32_t> seqs, std::span<const int32_t> ends);

  void commit(std::span<const int32_t> seqs, std::span<const int32_t> new_computed);
  std::pair<int32_t, std::vector<Copy>> fork(int64_t seq);

  // Window pages behind every multiple of `page_interval` tokens outlast those of other boundaries.
  void enable_prefix(int64_t page_interval);
  PrefixMatch match(std::span<const int32_t> tokens, uint64_t salt, PrefixUse use = {}) const;
  // The sequence's prefix leaves the index with all that continues it, and the sequence enters nothing more.
  void quarantine(int64_t seq);
  void reset_prefix();

  // The longest stored prefix that a sequence can continue exactly, with its last window pages and others worth keeping.
  StoredPrefix stored_prefix(std::span<const int32_t> tokens, uint64_t salt) const;
  // The hash chain of the full blocks of `tokens`.
  std::vector<uint64_t> prefix_keys(std::span<const int32_t> tokens, uint64_t salt) const;
  // Enters a prefix that another pool computed, with those pages for which has_page is not 0. Gives the blocks and pages
  // whose records are to be written now, 0 where they are stored already; fewer blocks where a hash key is taken.
  StoredPrefix import_prefix(std::span<const int32_t> tokens, uint64_t salt, std::span<const int32_t> has_page);
  // Takes a prefix from its block `first_block` on out of the index, and all that continues it.
  void forget_prefix(std::span<const int32_t> tokens, uint64_t salt, int64_t first_block);
  const PrefixStats& prefix_stats() const { return prefix_stats_; }
  const std::optional<PrefixIndex>& prefix_index() const { return index_; }
  int64_t num_cached_blocks() const { return blocks_.num_cached(); }
  int64_t num_cached_pages() const { return pages_.num_cached(); }

  void check() const;

 private:
  void check_group(const char* kind, const RefCountedIds& ids, const std::vector<int32_t>& held) const;
  void check_sequence(int32_t seq) const;
  int64_t missing_blocks(const Sequence& sequence, int64_t end) const;
  int64_t missing_pages(const Sequence& sequence, int64_t end) const;
  bool try_reserve(Sequence& sequence, int64_t end);
  void free_memory(Sequence& sequence);
  int64_t first_page(int64_t num_computed) const;

  // Gives up what is idle until this many ids hold nothing. The caller has checked num_free().
  void make_room(int64_t blocks, int64_t pages);
  int64_t num_window_pages_at(int64_t boundary) const;
  bool is_worth_pages(const Sequence& sequence, int64_t boundary) const;
  int64_t adoptable(std::span<const int32_t> chain) const;
  struct Adoption {
    std::vector<int32_t> chain;  // entries of all leading blocks that are stored
    int64_t num_blocks;          // of these, those to adopt
    int64_t num_replayed;
  };
  Adoption find_adoption(std::span<const int32_t> tokens, uint64_t salt, PrefixUse use) const;
  void adopt(Sequence& sequence, PrefixUse use);
  void register_blocks(Sequence& sequence);
  int32_t register_next_block(Sequence& sequence, int32_t parent);
  void rank_pages(int32_t tip, int64_t boundary, Rank rank);

  PoolConfig config_;
  RefCountedIds blocks_;
  RefCountedIds pages_;
  SequenceTable sequences_;
  std::optional<PrefixIndex> index_;
  int64_t page_interval_ = 0;
  PrefixStats prefix_stats_;
};

}  // namespace deepinfer
