// How sequences enter the prefix index and start from it.
//
// Window pages are much larger than blocks per token, so only some outlast the window: those of prompt ends, of every
// page_interval tokens, of boundaries where sequences part or meet again, and of the newest boundary of each sequence.
// All others stay as long as nobody needs their memory.
#include <algorithm>
#include <stdexcept>

#include "pool.hpp"
#include "text.hpp"

namespace deepinfer {

void KVPool::enable_prefix(int64_t page_interval) {
  if (index_) throw std::invalid_argument("the prefix index is enabled already");
  if (page_interval < 1) throw std::invalid_argument(text("page_interval is ", page_interval, "; it must be at least 1"));
  index_.emplace(config_.block_size, config_.window_page, blocks_, pages_);
  page_interval_ = page_interval;
}

PrefixMatch KVPool::match(std::span<const int32_t> tokens, uint64_t salt, PrefixUse use) const {
  if (!index_ || tokens.empty()) return {};
  const auto [chain, count, replayed] = find_adoption(tokens, salt, use);
  const auto is_idle = [this](int32_t block) { return blocks_.is_idle(block); };
  return {count * config_.block_size, std::count_if(chain.begin(), chain.begin() + count, is_idle), replayed};
}

void KVPool::quarantine(int64_t seq) {
  Sequence& sequence = sequences_.at(seq);
  if (!sequence.prefix.enabled) return;
  sequence.prefix.enabled = false;
  // All that this sequence entered, or gave to entries of equal tokens, hangs under the entry of its first block.
  if (sequence.num_tokens() < config_.block_size) return;
  const uint64_t key = index_->child_key(index_->root_key(sequence.prefix.salt), sequence.tokens.data());
  const int32_t first = index_->find(0, sequence.prefix.salt, key, sequence.tokens.data());
  if (first != 0) index_->forget(first);
}

void KVPool::reset_prefix() {
  if (index_) index_->clear();
}

void KVPool::make_room(int64_t blocks, int64_t pages) {
  while (blocks_.num_unused() < blocks) index_->evict_block();
  while (pages_.num_unused() < pages) index_->evict_page();
}

int64_t KVPool::num_window_pages_at(int64_t boundary) const {
  return boundary / config_.window_page - first_page(boundary);
}

// Whether window pages that end here shall outlast those of other boundaries.
bool KVPool::is_worth_pages(const Sequence& sequence, int64_t boundary) const {
  const PrefixState& prefix = sequence.prefix;
  const auto last_before = [this](int64_t length) { return length / config_.block_size * config_.block_size; };
  // Equal tokens can be continued up to the boundary before the last of them, longer ones up to the last.
  return boundary % page_interval_ == 0 || boundary == last_before(prefix.num_opened) ||
         boundary == last_before(prefix.most_adopted) || boundary == prefix.num_matched * config_.block_size;
}

// Blocks of a chain that a sequence can start from: up to the last boundary whose window pages are all held.
int64_t KVPool::adoptable(std::span<const int32_t> chain) const {
  auto count = static_cast<int64_t>(chain.size());
  while (count > 0 && !index_->holds_last_pages(chain[static_cast<size_t>(count - 1)],
                                                num_window_pages_at(count * config_.block_size))) {
    --count;
  }
  return count;
}

// What to start from. A prefix without window pages must save more rows than have to run again.
KVPool::Adoption KVPool::find_adoption(std::span<const int32_t> tokens, uint64_t salt, PrefixUse use) const {
  // The last token must run, to give logits.
  const int64_t most = std::max<int64_t>(0, static_cast<int64_t>(tokens.size()) - 1) / config_.block_size;
  std::vector<int32_t> chain = index_->walk(tokens, salt, most);
  const auto stored = static_cast<int64_t>(chain.size());
  const int64_t limit = std::clamp<int64_t>(use.max_tokens / config_.block_size, 0, stored);
  const int64_t count = adoptable(std::span(chain).first(static_cast<size_t>(limit)));
  if (use.replay > 0) {
    const int64_t boundary = stored * config_.block_size;
    const int64_t start = std::max<int64_t>(0, boundary - use.replay) / config_.window_page * config_.window_page;
    if (boundary - count * config_.block_size > boundary - start) return {std::move(chain), stored, boundary - start};
  }
  return {std::move(chain), count, 0};
}

void KVPool::adopt(Sequence& sequence, PrefixUse use) {
  PrefixState& prefix = sequence.prefix;
  if (!prefix.enabled) {
    ++prefix_stats_.disabled;
    return;
  }
  const int64_t longest = std::min(use.max_tokens, std::max<int64_t>(0, sequence.num_tokens() - 1));
  prefix.most_adopted = static_cast<int32_t>(longest);
  const auto [chain, count, replayed] = find_adoption(sequence.tokens, prefix.salt, use);
  const int64_t boundary = count * config_.block_size;
  const auto matched = static_cast<int64_t>(chain.size());
  ++prefix_stats_.queries;
  prefix_stats_.query_tokens += sequence.num_tokens();
  prefix_stats_.hit_tokens += boundary - replayed;
  prefix_stats_.pageless_tokens += matched * config_.block_size - boundary;
  ++(count > 0     ? prefix_stats_.hits
     : longest < config_.block_size ? prefix_stats_.missed_too_short
     : matched > 0 ? prefix_stats_.missed_no_pages
                   : prefix_stats_.missed_no_block);
  prefix.num_matched = static_cast<int32_t>(matched);
  if (count == 0) return;

  const int32_t tip = chain[static_cast<size_t>(count - 1)];
  sequence.blocks.assign(chain.begin(), chain.begin() + count);
  for (const int32_t block : sequence.blocks) blocks_.add_ref(block);
  sequence.num_computed = static_cast<int32_t>(boundary);
  prefix.num_registered = static_cast<int32_t>(count);
  prefix.tip = index_->tip(tip);
  if (replayed > 0) {
    prefix.stores = false;
    sequence.num_replayed = static_cast<int32_t>(replayed);
    sequence.first_page = static_cast<int32_t>((boundary - replayed) / config_.window_page);
    return;
  }
  sequence.pages = index_->last_pages(tip, num_window_pages_at(boundary));
  std::reverse(sequence.pages.begin(), sequence.pages.end());
  for (const int32_t page : sequence.pages) pages_.add_ref(page);
  rank_pages(tip, boundary, Rank::kKept);  // where one prompt parted, others will
  sequence.first_page = static_cast<int32_t>(first_page(boundary));
}

void KVPool::register_blocks(Sequence& sequence) {
  PrefixState& prefix = sequence.prefix;
  const int64_t full = sequence.num_computed / config_.block_size;
  if (!prefix.enabled || !prefix.stores || full <= prefix.num_registered) return;
  if (!index_->is_live(prefix.tip)) {  // an entry of another sequence was part of the chain, and is gone
    prefix.num_registered = 0;
    prefix.tip = {};
  }
  const int32_t old_tip = prefix.tip.block;
  const int64_t old_boundary = prefix.num_registered * config_.block_size;
  int32_t tip = old_tip;
  while (prefix.num_registered < full) {
    const int32_t next = register_next_block(sequence, tip);
    if (next == 0) break;
    tip = next;
    const int64_t boundary = ++prefix.num_registered * config_.block_size;
    if (is_worth_pages(sequence, boundary)) rank_pages(tip, boundary, Rank::kKept);
  }
  if (tip == old_tip) return;
  prefix.tip = index_->tip(tip);
  if (old_tip != 0) rank_pages(old_tip, old_boundary, Rank::kSpare);
  rank_pages(tip, prefix.num_registered * config_.block_size, Rank::kTip);
}

// The entry of the sequence's next block behind `parent`, a new one or one of equal tokens; 0 if it cannot have one.
int32_t KVPool::register_next_block(Sequence& sequence, int32_t parent) {
  const PrefixState& prefix = sequence.prefix;
  const int64_t place = prefix.num_registered;
  const int32_t* tokens = sequence.tokens.data() + place * config_.block_size;
  const uint64_t parent_key = parent == 0 ? index_->root_key(prefix.salt) : index_->key(parent);
  const uint64_t key = index_->child_key(parent_key, tokens);
  int32_t block = index_->find(parent, prefix.salt, key, tokens);
  if (block == 0) {
    block = index_->insert(parent, prefix.salt, key, tokens, sequence.blocks[static_cast<size_t>(place)]);
  }
  if (block == 0) return 0;
  const int64_t pages_per_block = config_.block_size / config_.window_page;
  for (int64_t slot = 0; slot < pages_per_block; ++slot) {
    const int64_t held = place * pages_per_block + slot - sequence.first_page;
    if (held >= 0) index_->add_page(block, slot, sequence.pages[static_cast<size_t>(held)]);
  }
  return block;
}

// Ranks the pages of the window that ends with entry `tip`. Spare takes back a tip's rank alone, others only raise.
void KVPool::rank_pages(int32_t tip, int64_t boundary, Rank rank) {
  for (const int32_t page : index_->last_pages(tip, num_window_pages_at(boundary))) {
    if (page == 0) continue;
    const Rank old = pages_.rank(page);
    if (rank == Rank::kSpare ? old == Rank::kTip : old < rank) pages_.set_rank(page, rank);
  }
}

}  // namespace deepinfer
