// Which prefixes of token ids are stored, and in which blocks and window pages.
//
// A tree of entries, one per full block that a sequence has computed: an entry is known by the id of its block, its
// parent holds the tokens before it. Entries are found by a 64-bit hash chain, and token ids, parent and salt are
// compared on a hit: a collision is a miss, never a wrong hit.
//
// An entry may also hold the window pages of its block. They come and go one by one; a prefix can be continued where
// all pages of its last window are there. What is cached but referenced by no sequence is idle (see ref_counted_ids):
// it counts as free and is given up, least recently used first, when ids run out.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "ref_counted_ids.hpp"
#include "sequence.hpp"

namespace deepinfer {

class PrefixIndex {
 public:
  // `blocks` and `pages` outlive the index.
  PrefixIndex(int64_t block_size, int64_t window_page, RefCountedIds& blocks, RefCountedIds& pages);

  uint64_t root_key(uint64_t salt) const;
  uint64_t key(int32_t block) const { return entry(block).key; }
  // The key of the block of `tokens` that follows the prefix of `parent_key`.
  uint64_t child_key(uint64_t parent_key, const int32_t* tokens) const;

  // The entry of these tokens behind `parent` (0 is the empty prefix of `salt`), or 0.
  int32_t find(int32_t parent, uint64_t salt, uint64_t key, const int32_t* tokens) const;
  // The entries of the leading full blocks of `tokens`, at most `max_blocks`.
  std::vector<int32_t> walk(std::span<const int32_t> tokens, uint64_t salt, int64_t max_blocks) const;
  // Adds an entry for a referenced block; 0 where another prefix has taken its key or the block is an entry already.
  int32_t insert(int32_t parent, uint64_t salt, uint64_t key, const int32_t* tokens, int32_t block);
  // Removes an entry and all that continue it. Blocks and pages stay with the sequences that hold them.
  void forget(int32_t block);

  int32_t parent(int32_t block) const { return entry(block).parent; }
  ChainTip tip(int32_t block) const { return {block, block == 0 ? 0 : entry(block).serial}; }
  bool is_live(const ChainTip& tip) const { return tip.block == 0 || entry(tip.block).serial == tip.serial; }
  // Makes the prefix of an entry the most recently used, its end before its beginning.
  void touch_chain(int32_t block);

  // The pages of the `count` window pages that end with an entry's block, last first; 0 for one that is not held.
  std::vector<int32_t> last_pages(int32_t block, int64_t count) const;
  bool holds_last_pages(int32_t block, int64_t count) const;
  // Gives the entry a page of its block, unless it has that one or the page belongs to another.
  void add_page(int32_t block, int64_t slot, int32_t page);
  void forget_page(int32_t page);

  // Give up the idle block or page that was used least recently; there must be one.
  void evict_block();
  void evict_page();
  int64_t num_evicted_blocks() const { return num_evicted_blocks_; }
  int64_t num_evicted_pages() const { return num_evicted_pages_; }

  void clear();
  void check() const;

 private:
  struct Entry {
    uint64_t key = 0;
    uint64_t salt = 0;
    uint64_t serial = 0;  // never used twice; 0 is no entry
    int32_t parent = 0;
    int32_t first_child = 0;
    int32_t next_sibling = 0;
    int32_t prev_sibling = 0;
    std::unique_ptr<int32_t[]> tokens;  // kept for the block's next entry
  };

  const Entry& entry(int32_t block) const { return entries_[static_cast<size_t>(block)]; }
  Entry& entry(int32_t block) { return entries_[static_cast<size_t>(block)]; }
  int32_t* page_slots(int32_t block) { return page_slots_.data() + block * pages_per_block_; }
  const int32_t* page_slots(int32_t block) const { return page_slots_.data() + block * pages_per_block_; }
  void remove(int32_t block);

  int64_t block_size_;
  int64_t pages_per_block_;
  RefCountedIds& blocks_;
  RefCountedIds& pages_;
  std::vector<Entry> entries_;        // by block id; entry 0 is the parent of all first blocks
  std::vector<int32_t> page_slots_;   // [block, page within block], 0 where the page is not held
  std::vector<int32_t> page_owners_;  // by page id, the block it belongs to
  std::unordered_map<uint64_t, int32_t> table_;
  uint64_t next_serial_ = 1;
  int64_t num_evicted_blocks_ = 0;
  int64_t num_evicted_pages_ = 0;
};

}  // namespace deepinfer
