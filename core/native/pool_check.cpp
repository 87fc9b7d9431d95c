// The audit that tests run after every operation: slow, and independent of how the pool keeps its books.
#include <stdexcept>

#include "pool.hpp"
#include "text.hpp"

namespace deepinfer {

void KVPool::check() const {
  std::vector<int32_t> block_refs(static_cast<size_t>(blocks_.count()) + 1, 0);
  std::vector<int32_t> page_refs(static_cast<size_t>(pages_.count()) + 1, 0);
  std::vector<int32_t> open(static_cast<size_t>(sequences_.num_slots()) + 1, 0);
  for (int32_t seq = 1; seq <= sequences_.num_slots(); ++seq) {
    if (!sequences_.is_open(seq)) continue;
    check_sequence(seq);
    open[static_cast<size_t>(seq)] = 1;
    for (const int32_t id : sequences_[seq].blocks) ++block_refs.at(static_cast<size_t>(id));
    for (const int32_t id : sequences_[seq].pages) ++page_refs.at(static_cast<size_t>(id));
  }
  check_group("block", blocks_, block_refs);
  check_group("page", pages_, page_refs);
  check_group("slot", sequences_.slots(), open);
  if (index_) index_->check();
}

// Every id but the hole is in the free list once, or idle once, or referenced as often as it is held.
void KVPool::check_group(const char* kind, const RefCountedIds& ids, const std::vector<int32_t>& held) const {
  std::vector<int32_t> times_free(held.size(), 0);
  std::vector<int32_t> times_idle(held.size(), 0);
  for (const int32_t id : ids.free_ids()) ++times_free.at(static_cast<size_t>(id));
  for (const int32_t id : ids.idle_ids()) ++times_idle.at(static_cast<size_t>(id));
  for (size_t id = 0; id < held.size(); ++id) {
    const int32_t refs = ids.refs(static_cast<int32_t>(id));
    const bool cached = ids.is_cached(static_cast<int32_t>(id));
    const int32_t expect_free = id != 0 && held[id] == 0 && !cached ? 1 : 0;
    const int32_t expect_idle = held[id] == 0 && cached ? 1 : 0;
    if (refs != held[id] || times_free[id] != expect_free || times_idle[id] != expect_idle ||
        (id == 0 && (held[id] != 0 || cached))) {
      throw std::logic_error(text(kind, " ", id, ": ", refs, " references, held ", held[id], " times, ", times_free[id],
                                  " times in the free list, ", times_idle[id], " times idle, cached: ", cached));
    }
  }
}

void KVPool::check_sequence(int32_t seq) const {
  const Sequence& sequence = sequences_[seq];
  const int64_t computed = sequence.num_computed;
  const auto require = [seq](bool holds, const char* what) {
    if (!holds) throw std::logic_error(text("sequence ", seq, ": ", what));
  };
  require(computed >= 0 && computed <= sequence.num_tokens(), "num_computed is outside its tokens");
  require(missing_blocks(sequence, computed) == 0, "computed positions lack blocks");
  if (sequence.num_replayed == 0) {
    require(missing_pages(sequence, computed) == 0, "computed positions lack window pages");
    require(sequence.first_page <= first_page(computed), "the next query's window is freed");
    require(sequence.first_page >= first_page(computed), "pages behind the window are held");
  } else {
    require(sequence.first_page * config_.window_page == computed - sequence.num_replayed,
            "pages are not held from the first replayed position on");
  }
  const auto writable = [](const RefCountedIds& ids, const std::vector<int32_t>& held, int64_t from) {
    for (size_t i = static_cast<size_t>(from); i < held.size(); ++i) {
      if (ids.refs(held[i]) != 1 || ids.is_cached(held[i])) return false;
    }
    return true;
  };
  require(writable(blocks_, sequence.blocks, computed / config_.block_size), "a block to be written is shared");
  require(writable(pages_, sequence.pages, computed / config_.window_page - sequence.first_page),
          "a window page to be written is shared");
  const PrefixState& prefix = sequence.prefix;
  require(prefix.num_registered <= computed / config_.block_size, "blocks that are not full are registered");
  require((prefix.num_registered == 0) == (prefix.tip.block == 0), "its chain has no tip");
}

}  // namespace deepinfer
