// Reference counted ids 1..count: the one allocator behind blocks, window pages and sequence slots.
//
// Id 0 is the hole that padding points to. It is never handed out and not counted. The free list is a stack, so the
// ids that a run of calls gets are always the same, and what was freed last (and is warm) is used first.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace deepinfer {

class RefCountedIds {
 public:
  explicit RefCountedIds(int32_t count) : refs_(static_cast<size_t>(count) + 1, 0) {
    free_.reserve(static_cast<size_t>(count));
    for (int32_t id = count; id >= 1; --id) free_.push_back(id);
  }

  int32_t count() const { return static_cast<int32_t>(refs_.size()) - 1; }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int32_t refs(int32_t id) const { return refs_[static_cast<size_t>(id)]; }
  bool is_shared(int32_t id) const { return refs(id) > 1; }
  std::span<const int32_t> free_ids() const { return free_; }

  // A free id, now referenced once. The caller has checked num_free().
  int32_t take() {
    const int32_t id = free_.back();
    free_.pop_back();
    refs_[static_cast<size_t>(id)] = 1;
    return id;
  }

  void add_ref(int32_t id) { ++refs_[static_cast<size_t>(id)]; }

  void drop(int32_t id) {
    if (--refs_[static_cast<size_t>(id)] == 0) free_.push_back(id);
  }

  // Shortens `ids` to its first `keep` entries, last entry first: the stack then hands them out again in table order.
  void drop_tail(std::vector<int32_t>& ids, size_t keep) {
    while (ids.size() > keep) {
      drop(ids.back());
      ids.pop_back();
    }
  }

 private:
  std::vector<int32_t> refs_;
  std::vector<int32_t> free_;
};

}  // namespace deepinfer
