#include "pool.hpp"

#include <algorithm>
#include <limits>

#include "text.hpp"

namespace deepinfer {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

const PoolConfig& validated(const PoolConfig& config) {
  const std::pair<const char*, int64_t> sizes[] = {
      {"num_blocks", config.num_blocks},
      {"block_size", config.block_size},
      {"num_window_pages", config.num_window_pages},
      {"window_page", config.window_page},
      {"window", config.window},
      {"num_slots", config.num_slots},
  };
  for (const auto& [name, value] : sizes) {
    // Ids run to count inclusive and tables hold count + 1 entries, hence one less than the largest int32.
    if (value < 1 || value >= kInt32Max) {
      throw std::invalid_argument(text(name, " is ", value, "; it must be in 1..", kInt32Max - 1));
    }
  }
  if (config.block_size % config.window_page != 0) {
    throw std::invalid_argument(
        text("window_page ", config.window_page, " does not divide block_size ", config.block_size));
  }
  if ((config.num_window_pages + 1) * config.window_page - 1 > kInt32Max) {
    throw std::overflow_error(text(config.num_window_pages, " window pages of ", config.window_page,
                                   " tokens have slots beyond int32"));
  }
  return config;
}

void require_same_size(const char* first, size_t first_size, const char* second, size_t second_size) {
  if (first_size != second_size) {
    throw std::invalid_argument(text(first, " has ", first_size, " entries, ", second, " has ", second_size));
  }
}

void require_settled(const Sequence& sequence, int64_t seq, const char* what) {
  if (sequence.num_replayed > 0) {
    throw std::invalid_argument(text("sequence ", seq, ": cannot be ", what, " before it has run ",
                                     sequence.num_replayed, " adopted tokens again and committed"));
  }
}

void require_position(const char* name, int64_t value) {
  if (value < 0 || value > kInt32Max) {
    throw std::invalid_argument(text(name, " is ", value, "; it must be in 0..", kInt32Max));
  }
}

}  // namespace

KVPool::KVPool(const PoolConfig& config)
    : config_(validated(config)),
      blocks_(static_cast<int32_t>(config.num_blocks)),
      pages_(static_cast<int32_t>(config.num_window_pages)),
      sequences_(static_cast<int32_t>(config.num_slots)) {}

int32_t KVPool::open(std::span<const int32_t> tokens, uint64_t salt, bool use_prefix, PrefixUse use) {
  require_position("number of tokens", static_cast<int64_t>(tokens.size()));
  if (sequences_.num_free() == 0) throw PoolExhausted("need 1 sequence slot, 0 free");
  Sequence sequence;
  sequence.tokens.assign(tokens.begin(), tokens.end());
  sequence.prefix.enabled = use_prefix && index_.has_value();
  sequence.prefix.salt = salt;
  sequence.prefix.num_opened = static_cast<int32_t>(tokens.size());
  adopt(sequence, use);
  return sequences_.open(std::move(sequence));
}

void KVPool::close(int64_t seq) {
  free_memory(sequences_.at(seq));
  sequences_.close(static_cast<int32_t>(seq));
}

void KVPool::append(std::span<const int32_t> seqs, std::span<const int32_t> counts, std::span<const int32_t> tokens) {
  require_same_size("seqs", seqs.size(), "counts", counts.size());
  sequences_.require_distinct(seqs);
  int64_t total = 0;
  for (size_t i = 0; i < seqs.size(); ++i) {
    require_position("count", counts[i]);
    require_position("number of tokens", sequences_[seqs[i]].num_tokens() + counts[i]);
    total += counts[i];
  }
  if (total != static_cast<int64_t>(tokens.size())) {
    throw std::invalid_argument(text("counts add up to ", total, ", tokens has ", tokens.size(), " entries"));
  }
  auto next = tokens.begin();
  for (size_t i = 0; i < seqs.size(); ++i) {
    std::vector<int32_t>& known = sequences_[seqs[i]].tokens;
    known.insert(known.end(), next, next + counts[i]);
    next += counts[i];
  }
}

int64_t KVPool::blocks_needed(int64_t seq, int64_t end) const {
  require_position("end", end);
  return missing_blocks(sequences_.at(seq), end);
}

int64_t KVPool::pages_needed(int64_t seq, int64_t end) const {
  require_position("end", end);
  return missing_pages(sequences_.at(seq), end);
}

bool KVPool::reserve(int64_t seq, int64_t end) {
  require_position("end", end);
  return try_reserve(sequences_.at(seq), end);
}

int64_t KVPool::reserve_many(std::span<const int32_t> seqs, std::span<const int32_t> ends) {
  require_same_size("seqs", seqs.size(), "ends", ends.size());
  for (size_t i = 0; i < seqs.size(); ++i) {
    sequences_.at(seqs[i]);
    require_position("end", ends[i]);
  }
  for (size_t i = 0; i < seqs.size(); ++i) {
    if (!try_reserve(sequences_[seqs[i]], ends[i])) return static_cast<int64_t>(i);
  }
  return static_cast<int64_t>(seqs.size());
}

void KVPool::commit(std::span<const int32_t> seqs, std::span<const int32_t> new_computed) {
  require_same_size("seqs", seqs.size(), "new_computed", new_computed.size());
  sequences_.require_distinct(seqs);
  for (size_t i = 0; i < seqs.size(); ++i) {
    const Sequence& sequence = sequences_[seqs[i]];
    const int64_t computed = new_computed[i];
    if (computed < sequence.num_computed || computed > sequence.num_tokens()) {
      throw std::invalid_argument(text("sequence ", seqs[i], ": cannot commit ", computed, " tokens; it has ",
                                       sequence.num_computed, " computed of ", sequence.num_tokens()));
    }
    if (missing_blocks(sequence, computed) > 0 || missing_pages(sequence, computed) > 0) {
      throw std::invalid_argument(
          text("sequence ", seqs[i], ": cannot commit ", computed, " tokens; reserve them first"));
    }
  }
  for (size_t i = 0; i < seqs.size(); ++i) {
    Sequence& sequence = sequences_[seqs[i]];
    sequence.num_computed = new_computed[i];
    sequence.num_replayed = 0;
    register_blocks(sequence);  // before its pages go
    const int64_t behind = first_page(sequence.num_computed) - sequence.first_page;
    if (behind <= 0) continue;
    const auto kept = sequence.pages.begin() + behind;
    std::for_each(sequence.pages.begin(), kept, [this](int32_t page) { pages_.drop(page); });
    sequence.pages.erase(sequence.pages.begin(), kept);
    sequence.first_page += static_cast<int32_t>(behind);
  }
}

std::pair<int32_t, std::vector<Copy>> KVPool::fork(int64_t seq) {
  const Sequence& parent = sequences_.at(seq);
  require_settled(parent, seq, "forked");
  const int64_t full_blocks = parent.num_computed / config_.block_size;
  const int64_t full_pages = parent.num_computed / config_.window_page - parent.first_page;
  const bool copy_block = parent.num_computed % config_.block_size != 0;
  const bool copy_page = parent.num_computed % config_.window_page != 0;
  if (sequences_.num_free() == 0) throw PoolExhausted("need 1 sequence slot, 0 free");
  if (copy_block && blocks_.num_free() == 0) throw PoolExhausted("need 1 block for the fork's tail, 0 free");
  if (copy_page && pages_.num_free() == 0) throw PoolExhausted("need 1 window page for the fork's tail, 0 free");
  make_room(copy_block, copy_page);

  Sequence child;
  child.tokens = parent.tokens;
  child.num_computed = parent.num_computed;
  child.first_page = parent.first_page;
  child.prefix = parent.prefix;
  std::vector<Copy> copies;
  const auto share = [&](const char* kind, RefCountedIds& ids, const std::vector<int32_t>& from,
                         std::vector<int32_t>& to, int64_t full, bool copy) {
    to.assign(from.begin(), from.begin() + full);
    for (const int32_t id : to) ids.add_ref(id);
    if (!copy) return;
    to.push_back(ids.take());
    copies.push_back({kind, from[static_cast<size_t>(full)], to.back()});
  };
  share("block", blocks_, parent.blocks, child.blocks, full_blocks, copy_block);
  share("page", pages_, parent.pages, child.pages, full_pages, copy_page);
  const bool has_state = child.num_computed > 0;
  const int32_t child_seq = sequences_.open(std::move(child));
  if (has_state) copies.push_back({"state", static_cast<int32_t>(seq), child_seq});
  return {child_seq, std::move(copies)};
}

int64_t KVPool::missing_blocks(const Sequence& sequence, int64_t end) const {
  return std::max<int64_t>(0, ceil_div(end, config_.block_size) - static_cast<int64_t>(sequence.blocks.size()));
}

int64_t KVPool::missing_pages(const Sequence& sequence, int64_t end) const {
  return std::max<int64_t>(0, ceil_div(end, config_.window_page) - sequence.page_end());
}

bool KVPool::try_reserve(Sequence& sequence, int64_t end) {
  int64_t blocks = missing_blocks(sequence, end);
  int64_t pages = missing_pages(sequence, end);
  if (blocks > blocks_.num_free() || pages > pages_.num_free()) return false;
  make_room(blocks, pages);
  while (blocks-- > 0) sequence.blocks.push_back(blocks_.take());
  while (pages-- > 0) sequence.pages.push_back(pages_.take());
  return true;
}

void KVPool::free_memory(Sequence& sequence) {
  blocks_.drop_tail(sequence.blocks, 0);
  pages_.drop_tail(sequence.pages, 0);
  // Entries of other sequences may be part of the chain; the whole of it is now as recently used, its end first to go.
  if (index_ && index_->is_live(sequence.prefix.tip)) index_->touch_chain(sequence.prefix.tip.block);
  sequence.prefix.num_registered = 0;
  sequence.prefix.tip = {};
  sequence.first_page = 0;
  sequence.num_computed = 0;
  sequence.num_replayed = 0;
}

int64_t KVPool::first_page(int64_t num_computed) const {
  return std::max<int64_t>(0, num_computed - config_.window + 1) / config_.window_page;
}

}  // namespace deepinfer
