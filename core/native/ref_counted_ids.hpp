// Reference counted ids 1..count: the one allocator behind blocks, window pages and sequence slots.
//
// Id 0 is the hole that padding points to. It is never handed out and not counted. The free list is a stack, so the
// ids that a run of calls gets are always the same, and what was freed last (and is warm) is used first.
//
// The prefix index may mark an id as cached: what it holds is worth keeping. A cached id that nobody references is
// idle: it still counts as free, but waits in a queue, least recently used first, until it is referenced again or the
// index gives it up. References count sequences alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace deepinfer {

// How much the prefix index wants an id. Idle spare ids are given up before all others.
enum class Rank : uint8_t { kNone, kSpare, kTip, kKept };

class RefCountedIds {
 public:
  explicit RefCountedIds(int32_t count)
      : refs_(static_cast<size_t>(count) + 1, 0), ranks_(refs_.size(), Rank::kNone), links_(refs_.size() + 2) {
    free_.reserve(static_cast<size_t>(count));
    for (int32_t id = count; id >= 1; --id) free_.push_back(id);
    for (const size_t queue : {refs_.size(), refs_.size() + 1}) {
      links_[queue] = {static_cast<int32_t>(queue), static_cast<int32_t>(queue)};
    }
  }

  int32_t count() const { return static_cast<int32_t>(refs_.size()) - 1; }
  int64_t num_free() const { return num_unused() + num_idle_; }
  int64_t num_unused() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_idle() const { return num_idle_; }
  int64_t num_cached() const { return num_cached_; }
  int32_t refs(int32_t id) const { return refs_[at(id)]; }
  bool is_cached(int32_t id) const { return ranks_[at(id)] != Rank::kNone; }
  bool is_idle(int32_t id) const { return is_cached(id) && refs(id) == 0; }
  Rank rank(int32_t id) const { return ranks_[at(id)]; }
  std::span<const int32_t> free_ids() const { return free_; }

  // A free id that holds nothing, now referenced once. The caller has checked num_unused().
  int32_t take() {
    const int32_t id = free_.back();
    free_.pop_back();
    refs_[at(id)] = 1;
    return id;
  }

  void add_ref(int32_t id) {
    if (is_idle(id)) unlink(id);
    ++refs_[at(id)];
  }

  void drop(int32_t id) {
    if (--refs_[at(id)] > 0) return;
    is_cached(id) ? link(id) : free_.push_back(id);
  }

  // Shortens `ids` to its first `keep` entries, last entry first: the stack then hands them out again in table order,
  // and of cached ones the last, which is of use to nobody without the others, is given up first.
  void drop_tail(std::vector<int32_t>& ids, size_t keep) {
    while (ids.size() > keep) {
      drop(ids.back());
      ids.pop_back();
    }
  }

  // Marks a referenced id that is not cached yet.
  void cache(int32_t id, Rank rank) {
    ranks_[at(id)] = rank;
    ++num_cached_;
  }

  void uncache(int32_t id) {
    const bool idle = is_idle(id);
    if (idle) unlink(id);
    ranks_[at(id)] = Rank::kNone;
    --num_cached_;
    if (idle) free_.push_back(id);
  }

  void set_rank(int32_t id, Rank rank) {
    const bool idle = is_idle(id);
    if (idle) unlink(id);
    ranks_[at(id)] = rank;
    if (idle) link(id);
  }

  // Makes an idle id the most recently used.
  void touch(int32_t id) {
    if (!is_idle(id)) return;
    unlink(id);
    link(id);
  }

  // The idle id to give up next; there must be one.
  int32_t oldest_idle() const {
    const int32_t spare = links_[queue_of(Rank::kSpare)].next;
    return spare <= count() ? spare : links_[queue_of(Rank::kKept)].next;
  }

  // Idle ids, the next to go first.
  std::vector<int32_t> idle_ids() const {
    std::vector<int32_t> ids;
    for (const Rank rank : {Rank::kSpare, Rank::kKept}) {
      for (int32_t id = links_[queue_of(rank)].next; id <= count(); id = links_[at(id)].next) ids.push_back(id);
    }
    return ids;
  }

 private:
  struct Link {
    int32_t prev = 0;
    int32_t next = 0;
  };

  static size_t at(int32_t id) { return static_cast<size_t>(id); }
  // The queues are rings through an entry of their own, behind those of the ids.
  size_t queue_of(Rank rank) const { return refs_.size() + (rank == Rank::kSpare ? 0 : 1); }

  void link(int32_t id) {
    const size_t queue = queue_of(rank(id));
    const int32_t last = links_[queue].prev;
    links_[at(id)] = {last, static_cast<int32_t>(queue)};
    links_[at(last)].next = id;
    links_[queue].prev = id;
    ++num_idle_;
  }

  void unlink(int32_t id) {
    const Link link = links_[at(id)];
    links_[at(link.prev)].next = link.next;
    links_[at(link.next)].prev = link.prev;
    --num_idle_;
  }

  std::vector<int32_t> refs_;
  std::vector<Rank> ranks_;
  std::vector<Link> links_;
  std::vector<int32_t> free_;
  int64_t num_idle_ = 0;
  int64_t num_cached_ = 0;
};

}  // namespace deepinfer
