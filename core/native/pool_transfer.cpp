// Prefixes that leave a pool, and that come into one from another.
//
// A prefix travels as its blocks, and as those window pages that a sequence can continue from. It comes in as if a
// sequence of this pool had computed it: entries that nobody references, to be adopted, or given up when memory is
// short. What is here already stays; who imports fills the rest before anything else is asked of the pool.
#include <algorithm>

#include "pool.hpp"
#include "text.hpp"

namespace deepinfer {

StoredPrefix KVPool::stored_prefix(std::span<const int32_t> tokens, uint64_t salt) const {
  StoredPrefix stored;
  if (!index_) return stored;
  const auto most = static_cast<int64_t>(tokens.size()) / config_.block_size;
  stored.blocks = index_->walk(tokens, salt, most);
  const int64_t count = adoptable(stored.blocks);
  stored.blocks.resize(static_cast<size_t>(count));
  if (count == 0) return stored;
  const int64_t pages_per_block = config_.block_size / config_.window_page;
  stored.pages = index_->last_pages(stored.blocks.back(), count * pages_per_block);
  std::reverse(stored.pages.begin(), stored.pages.end());
  const int64_t needed = num_window_pages_at(count * config_.block_size);
  for (int64_t i = 0; i + needed < count * pages_per_block; ++i) {
    int32_t& page = stored.pages[static_cast<size_t>(i)];
    if (page != 0 && pages_.rank(page) == Rank::kSpare) page = 0;  // it would not outlast the next shortage here either
  }
  return stored;
}

std::vector<uint64_t> KVPool::prefix_keys(std::span<const int32_t> tokens, uint64_t salt) const {
  std::vector<uint64_t> keys;
  if (!index_) return keys;
  uint64_t key = index_->root_key(salt);
  for (size_t i = 0; i + static_cast<size_t>(config_.block_size) <= tokens.size(); i += config_.block_size) {
    keys.push_back(key = index_->child_key(key, tokens.data() + i));
  }
  return keys;
}

StoredPrefix KVPool::import_prefix(std::span<const int32_t> tokens, uint64_t salt, std::span<const int32_t> has_page) {
  if (!index_) throw std::invalid_argument("the prefix index is not enabled");
  const int64_t pages_per_block = config_.block_size / config_.window_page;
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  if (num_tokens % config_.block_size != 0) {
    throw std::invalid_argument(text(num_tokens, " tokens are not whole blocks of ", config_.block_size));
  }
  const int64_t count = num_tokens / config_.block_size;
  if (static_cast<int64_t>(has_page.size()) != count * pages_per_block) {
    throw std::invalid_argument(
        text("has_page has ", has_page.size(), " entries; ", count, " blocks have ", count * pages_per_block, " pages"));
  }
  std::vector<int32_t> chain = index_->walk(tokens, salt, count);
  const auto num_known = static_cast<int64_t>(chain.size());
  std::vector<int32_t> pages;  // those of the known blocks, 0 where none is held
  if (num_known > 0) pages = index_->last_pages(chain.back(), num_known * pages_per_block);
  std::reverse(pages.begin(), pages.end());
  pages.resize(has_page.size(), 0);
  int64_t num_new_pages = 0;
  for (size_t i = 0; i < pages.size(); ++i) num_new_pages += has_page[i] != 0 && pages[i] == 0;

  // Held while others are given up for what is new.
  for (const int32_t block : chain) blocks_.add_ref(block);
  for (const int32_t page : pages) {
    if (page != 0) pages_.add_ref(page);
  }
  const auto let_go = [&] {
    blocks_.drop_tail(chain, 0);
    std::erase(pages, 0);
    pages_.drop_tail(pages, 0);
  };
  if (count - num_known > blocks_.num_free() || num_new_pages > pages_.num_free()) {
    const int64_t blocks = blocks_.num_free(), free_pages = pages_.num_free();
    let_go();
    throw PoolExhausted(text("need ", count - num_known, " blocks and ", num_new_pages, " window pages, ", blocks,
                             " and ", free_pages, " free"));
  }
  make_room(count - num_known, num_new_pages);

  StoredPrefix added;
  added.blocks.assign(static_cast<size_t>(num_known), 0);
  uint64_t key = num_known > 0 ? index_->key(chain.back()) : index_->root_key(salt);
  for (int64_t place = num_known; place < count; ++place) {
    const int32_t* ids = tokens.data() + place * config_.block_size;
    key = index_->child_key(key, ids);
    const int32_t block = blocks_.take();
    if (index_->insert(chain.empty() ? 0 : chain.back(), salt, key, ids, block) == 0) {  // another prefix has its key
      blocks_.drop(block);
      break;
    }
    chain.push_back(block);
    added.blocks.push_back(block);
  }
  added.pages.assign(chain.size() * static_cast<size_t>(pages_per_block), 0);
  for (size_t i = 0; i < added.pages.size(); ++i) {
    if (has_page[i] == 0 || pages[i] != 0) continue;
    const int32_t page = pages_.take();
    const auto slot = static_cast<int64_t>(i);
    index_->add_page(chain[static_cast<size_t>(slot / pages_per_block)], slot % pages_per_block, page);
    pages_.set_rank(page, Rank::kKept);
    pages[i] = added.pages[i] = page;
  }
  let_go();
  return added;
}

void KVPool::forget_prefix(std::span<const int32_t> tokens, uint64_t salt, int64_t first_block) {
  if (!index_) return;
  const std::vector<int32_t> chain = index_->walk(tokens, salt, first_block + 1);
  if (static_cast<int64_t>(chain.size()) > first_block) index_->forget(chain.back());
}

}  // namespace deepinfer
