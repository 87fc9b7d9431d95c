#include "prefix_index.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "text.hpp"

namespace deepinfer {
namespace {

__extension__ using Wide = unsigned __int128;

constexpr uint64_t kMulA = 0xa0761d6478bd642f;
constexpr uint64_t kMulB = 0xe7037ed1a0b428db;

// Both halves of a product, folded. Source: wyhash (Wang Yi), public domain.
uint64_t fold(uint64_t a, uint64_t b) {
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t load(const int32_t* tokens, size_t bytes) {
  uint64_t word = 0;
  std::memcpy(&word, tokens, bytes);
  return word;
}

}  // namespace

PrefixIndex::PrefixIndex(int64_t block_size, int64_t window_page, RefCountedIds& blocks, RefCountedIds& pages)
    : block_size_(block_size),
      pages_per_block_(block_size / window_page),
      blocks_(blocks),
      pages_(pages),
      entries_(static_cast<size_t>(blocks.count()) + 1),
      page_slots_(entries_.size() * static_cast<size_t>(pages_per_block_), 0),
      page_owners_(static_cast<size_t>(pages.count()) + 1, 0) {}

uint64_t PrefixIndex::root_key(uint64_t salt) const { return fold(salt ^ kMulA, kMulB); }

uint64_t PrefixIndex::child_key(uint64_t parent_key, const int32_t* tokens) const {
  uint64_t hash = fold(parent_key ^ kMulB, kMulA);
  int64_t i = 0;
  for (; i + 4 <= block_size_; i += 4) hash = fold(load(tokens + i, 8) ^ kMulA, load(tokens + i + 2, 8) ^ hash);
  for (; i < block_size_; ++i) hash = fold(load(tokens + i, 4) ^ kMulB, hash ^ kMulA);
  return hash;
}

int32_t PrefixIndex::find(int32_t parent, uint64_t salt, uint64_t key, const int32_t* tokens) const {
  const auto found = table_.find(key);
  if (found == table_.end()) return 0;
  const Entry& candidate = entry(found->second);
  const bool equal = candidate.parent == parent && candidate.salt == salt &&
                     std::equal(tokens, tokens + block_size_, candidate.tokens.get());
  return equal ? found->second : 0;
}

std::vector<int32_t> PrefixIndex::walk(std::span<const int32_t> tokens, uint64_t salt, int64_t max_blocks) const {
  std::vector<int32_t> chain;
  uint64_t key = root_key(salt);
  int32_t parent = 0;
  for (int64_t i = 0; i < max_blocks; ++i) {
    const int32_t* ids = tokens.data() + i * block_size_;
    key = child_key(key, ids);
    const int32_t block = find(parent, salt, key, ids);
    if (block == 0) break;
    chain.push_back(parent = block);
  }
  return chain;
}

int32_t PrefixIndex::insert(int32_t parent, uint64_t salt, uint64_t key, const int32_t* tokens, int32_t block) {
  if (blocks_.is_cached(block) || !table_.emplace(key, block).second) return 0;
  Entry& added = entry(block);
  added.key = key;
  added.salt = salt;
  added.serial = next_serial_++;
  added.parent = parent;
  added.first_child = 0;
  added.prev_sibling = 0;
  added.next_sibling = entry(parent).first_child;
  if (added.next_sibling != 0) entry(added.next_sibling).prev_sibling = block;
  entry(parent).first_child = block;
  if (!added.tokens) added.tokens = std::make_unique_for_overwrite<int32_t[]>(static_cast<size_t>(block_size_));
  std::copy_n(tokens, block_size_, added.tokens.get());
  blocks_.cache(block, Rank::kKept);
  return block;
}

void PrefixIndex::forget(int32_t block) {
  const Entry& top = entry(block);
  if (top.prev_sibling != 0) {
    entry(top.prev_sibling).next_sibling = top.next_sibling;
  } else {
    entry(top.parent).first_child = top.next_sibling;
  }
  if (top.next_sibling != 0) entry(top.next_sibling).prev_sibling = top.prev_sibling;
  std::vector<int32_t> pending{block};  // not recursion: a prompt is a branch of thousands
  while (!pending.empty()) {
    const int32_t next = pending.back();
    pending.pop_back();
    for (int32_t child = entry(next).first_child; child != 0; child = entry(child).next_sibling) {
      pending.push_back(child);
    }
    remove(next);
  }
}

void PrefixIndex::remove(int32_t block) {
  Entry& gone = entry(block);
  table_.erase(gone.key);
  gone.serial = 0;
  gone.first_child = 0;
  for (int64_t slot = 0; slot < pages_per_block_; ++slot) {
    if (const int32_t page = page_slots(block)[slot]; page != 0) forget_page(page);
  }
  blocks_.uncache(block);
}

void PrefixIndex::touch_chain(int32_t block) {
  for (; block != 0; block = parent(block)) blocks_.touch(block);
}

std::vector<int32_t> PrefixIndex::last_pages(int32_t block, int64_t count) const {
  std::vector<int32_t> found;
  for (; static_cast<int64_t>(found.size()) < count; block = parent(block)) {
    for (int64_t slot = pages_per_block_ - 1; slot >= 0 && static_cast<int64_t>(found.size()) < count; --slot) {
      found.push_back(page_slots(block)[slot]);
    }
  }
  return found;
}

bool PrefixIndex::holds_last_pages(int32_t block, int64_t count) const {
  for (; count > 0; block = parent(block), count -= pages_per_block_) {
    const int32_t* end = page_slots(block) + pages_per_block_;
    if (std::find(end - std::min(count, pages_per_block_), end, 0) != end) return false;
  }
  return true;
}

void PrefixIndex::add_page(int32_t block, int64_t slot, int32_t page) {
  if (page_slots(block)[slot] != 0 || pages_.is_cached(page)) return;
  page_slots(block)[slot] = page;
  page_owners_[static_cast<size_t>(page)] = block;
  pages_.cache(page, Rank::kSpare);
}

void PrefixIndex::forget_page(int32_t page) {
  int32_t* slots = page_slots(page_owners_[static_cast<size_t>(page)]);
  *std::find(slots, slots + pages_per_block_, page) = 0;
  page_owners_[static_cast<size_t>(page)] = 0;
  pages_.uncache(page);
}

void PrefixIndex::evict_block() {
  const int64_t before = blocks_.num_cached();
  forget(blocks_.oldest_idle());
  num_evicted_blocks_ += before - blocks_.num_cached();
}

void PrefixIndex::evict_page() {
  forget_page(pages_.oldest_idle());
  ++num_evicted_pages_;
}

void PrefixIndex::clear() {
  while (entry(0).first_child != 0) forget(entry(0).first_child);
}

void PrefixIndex::check() const {
  const auto require = [](bool holds, const char* kind, int64_t id, const char* what) {
    if (!holds) throw std::logic_error(text("prefix index, ", kind, " ", id, ": ", what));
  };
  int64_t num_entries = 0;
  int64_t num_pages = 0;
  for (int32_t block = 0; block <= blocks_.count(); ++block) {
    const Entry& one = entry(block);
    const bool is_entry = one.serial != 0;
    require(is_entry == blocks_.is_cached(block), "block", block, "is an entry or cached, not both");
    for (int32_t child = one.first_child, prev = 0; child != 0; prev = child, child = entry(child).next_sibling) {
      require(is_entry || block == 0, "block", block, "has children but is no entry");
      require(entry(child).serial != 0 && entry(child).parent == block, "block", child, "is not its parent's child");
      require(entry(child).prev_sibling == prev, "block", child, "does not know its sibling");
      ++num_entries;
    }
    for (int64_t slot = 0; slot < pages_per_block_; ++slot) {
      const int32_t page = page_slots(block)[slot];
      if (page == 0) continue;
      require(is_entry && page_owners_.at(static_cast<size_t>(page)) == block, "page", page, "has another owner");
      require(pages_.is_cached(page), "page", page, "is held but not cached");
      ++num_pages;
    }
    if (!is_entry) continue;
    const uint64_t parent_key = one.parent == 0 ? root_key(one.salt) : entry(one.parent).key;
    require(one.key == child_key(parent_key, one.tokens.get()), "block", block, "has a wrong key");
    require(one.parent == 0 || entry(one.parent).salt == one.salt, "block", block, "has another salt than its parent");
    require(find(one.parent, one.salt, one.key, one.tokens.get()) == block, "block", block, "is not found");
  }
  require(num_entries == blocks_.num_cached(), "entries", num_entries, "are reachable, another number is cached");
  require(num_entries == static_cast<int64_t>(table_.size()), "entries", num_entries, "another number has a key");
  require(num_pages == pages_.num_cached(), "pages", num_pages, "are held, another number is cached");
}

}  // namespace deepinfer
