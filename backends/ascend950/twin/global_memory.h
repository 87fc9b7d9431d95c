// Global memory as a launch sees it: the regions of its arguments, and who wrote which byte of them.
//
// Blocks of one launch are not ordered, though this machine runs them one after another: what one block wrote, another
// may neither read nor write, unless a barrier of all blocks lies between (`phase`). The opposite order, a write after
// another block's read, shows as this one when the blocks run backwards (`Request::backwards`).
#pragma once

#include <cstdio>
#include <memory>
#include <unordered_map>

#include "clocks.h"

namespace twin {

struct Region {  // read by twin_call.py: keep in step with its Structure
  uint64_t base;
  uint64_t bytes;
  const char* name;
  int32_t writable;
};

class GlobalMemory {
 public:
  TWIN_UNWATCHED void begin(const Region* regions, int count) {
    regions_ = regions;
    count_ = count;
    last_ = 0;
    ++launch_;
    if (pages_.size() > kKeptPages) pages_.clear();
  }

  // Copies to global memory add instead of replacing: several blocks may then do so.
  bool atomic = false;

  // The kind of fault of an access, with words about it; null where it is right.
  TWIN_UNWATCHED const char* check(const void* pointer, size_t bytes, bool write, char* words, size_t room) {
    const Region* region = find(reinterpret_cast<uintptr_t>(pointer), bytes);
    if (!region) {
      explain(reinterpret_cast<uintptr_t>(pointer), bytes, words, room);
      return "bounds";
    }
    if (write && !region->writable) {
      std::snprintf(words, room, "writes '%s', which is an input", region->name);
      return "read-only";
    }
    return nullptr;
  }

  TWIN_UNWATCHED bool contains(const void* pointer, size_t bytes) {
    return find(reinterpret_cast<uintptr_t>(pointer), bytes) != nullptr;
  }

  // As `check`, for the order of accesses; the access is remembered. phase: barriers of all blocks passed so far.
  TWIN_UNWATCHED const char* order(const void* pointer, size_t bytes, bool write, int block, int thread,
                                   const Clock& now, uint32_t phase, char* words, size_t room) {
    uintptr_t at = reinterpret_cast<uintptr_t>(pointer);
    const uintptr_t end = at + bytes;
    Page* page = nullptr;
    while (at < end) {
      const uintptr_t stop = std::min(end, (at / kGrain + 1) * kGrain);
      if (!page || at % kPage == 0) page = find_page(at / kPage, write);
      if (!page) {  // nothing of this page was written, so reads of it are free
        at = std::min(end, (at / kPage + 1) * kPage);
        continue;
      }
      const uint32_t ones = stop - at == kGrain ? ~0u : ((1u << (stop - at)) - 1) << (at % kGrain);
      Writer* writers = page->writers[at % kPage / kGrain];
      for (int i = 0; i < 2; ++i) {
        Writer& other = writers[i];
        if (!(other.bytes & ones)) continue;
        if (other.block != block) {
          if (other.phase < phase || (write && atomic && other.atomic)) continue;
          std::snprintf(words, room, write ? "overwrites bytes of '%s' that block %d wrote in this launch"
                                           : "reads bytes of '%s' that block %d wrote in this launch",
                        name_of(at), other.block);
          return "blocks";
        }
        if (other.thread != thread && other.clock > now.at[other.thread]) {
          std::snprintf(words, room, "%s '%s' before the write of pipe %s is known to be complete",
                        write ? "overwrites" : "reads", name_of(at), pipe_name(other.thread % 8));
          return "race";
        }
      }
      if (write) remember(writers, ones, block, thread, now, phase);
      at = stop;
    }
    return nullptr;
  }

 private:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kGrain = 32;
  static constexpr size_t kKeptPages = 8192;

  struct Writer {
    uint32_t bytes = 0;  // of the grain, one bit each
    uint32_t clock = 0;
    uint32_t phase = 0;
    uint16_t block = 0;
    uint8_t thread = 0;
    bool atomic = false;
  };
  struct Page {
    uint32_t launch = 0;
    Writer writers[kPage / kGrain][2];
  };

  TWIN_UNWATCHED void remember(Writer* writers, uint32_t ones, int block, int thread, const Clock& now,
                               uint32_t phase) {
    Writer* mine = nullptr;
    for (int i = 0; i < 2; ++i) {
      writers[i].bytes &= ~ones;
      const bool same = writers[i].bytes && writers[i].block == block && writers[i].thread == thread;
      if (same || (!mine && !writers[i].bytes)) mine = &writers[i];
    }
    if (!mine) mine = &writers[1];  // a third writer of these 32 bytes: the second is forgotten
    if (!(mine->block == block && mine->thread == thread)) mine->bytes = 0;
    *mine = Writer{mine->bytes | ones, now.at[thread], phase, static_cast<uint16_t>(block),
                   static_cast<uint8_t>(thread), atomic};
  }

  TWIN_UNWATCHED Page* find_page(uintptr_t number, bool make) {
    auto found = pages_.find(number);
    if (found == pages_.end()) {
      if (!make) return nullptr;
      found = pages_.emplace(number, std::make_unique<Page>()).first;
    }
    Page& page = *found->second;
    if (page.launch != launch_) {
      if (!make) return nullptr;
      page = Page{};
      page.launch = launch_;
    }
    return &page;
  }

  TWIN_UNWATCHED const Region* find(uintptr_t at, size_t bytes) {
    for (int i = 0; i < count_; ++i) {
      const int candidate = (last_ + i) % count_;
      const Region& region = regions_[candidate];
      if (at >= region.base && at + bytes <= region.base + region.bytes) {
        last_ = candidate;
        return &region;
      }
    }
    return nullptr;
  }

  TWIN_UNWATCHED const char* name_of(uintptr_t at) {
    const Region* region = find(at, 1);
    return region ? region->name : "?";
  }

  TWIN_UNWATCHED void explain(uintptr_t at, size_t bytes, char* words, size_t room) const {
    for (int i = 0; i < count_; ++i) {
      const Region& region = regions_[i];
      if (at >= region.base && at < region.base + region.bytes) {
        std::snprintf(words, room, "%zu bytes from '%s'+%zu end past its %zu bytes", bytes, region.name,
                      static_cast<size_t>(at - region.base), static_cast<size_t>(region.bytes));
        return;
      }
    }
    const Region* nearest = nullptr;
    uint64_t distance = ~uint64_t{0};
    for (int i = 0; i < count_; ++i) {
      const Region& region = regions_[i];
      const uint64_t gap = at < region.base ? region.base - at : at - (region.base + region.bytes);
      if (gap < distance) {
        distance = gap;
        nearest = &region;
      }
    }
    if (nearest && distance < (1 << 20)) {
      std::snprintf(words, room, "%zu bytes at an address %zu bytes %s '%s' (%zu bytes)", bytes,
                    static_cast<size_t>(distance), at < nearest->base ? "before" : "past the end of", nearest->name,
                    static_cast<size_t>(nearest->bytes));
    } else {
      std::snprintf(words, room, "%zu bytes at %p, which is in no argument of this launch", bytes,
                    reinterpret_cast<void*>(at));
    }
  }

  const Region* regions_ = nullptr;
  int count_ = 0;
  int last_ = 0;
  uint32_t launch_ = 0;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
};

}  // namespace twin
