// A local memory: its bytes, which of them were ever written, and who touched each 32-byte cell last.
#pragma once

#include <cstring>
#include <vector>

#include "clocks.h"

namespace twin {

enum class Space : uint8_t { UB, L1, L0A, L0B, L0C, BIAS, FIXPIPE, L0A_MX, L0B_MX };
enum class Access : uint8_t { read, write };

TWIN_UNWATCHED constexpr const char* space_name(Space space) {
  constexpr const char* names[] = {"UB", "L1", "L0A", "L0B", "L0C", "BT", "FB", "L0A_MX", "L0B_MX"};
  return names[static_cast<int>(space)];
}

// asc-devkit, docs: NPU architecture 3510, table of storage units. Of 256 KB of UB, 8 KB belong to the system.
TWIN_UNWATCHED constexpr size_t space_bytes(Space space) {
  constexpr size_t sizes[] = {248 << 10, 512 << 10, 64 << 10, 64 << 10, 256 << 10, 4 << 10, 4 << 10, 4 << 10, 4 << 10};
  return sizes[static_cast<int>(space)];
}

inline constexpr size_t kCell = 32;       // grain of the race check, and the alignment of every local copy
inline constexpr uint8_t kPoison = 0xFF;  // NaN in every float format, -1 in every integer
inline constexpr uint8_t kNobody = 255;

struct Cell {
  uint32_t epoch = 0;
  uint32_t write_clock = 0;
  uint32_t instruction = 0;
  uint8_t writer = kNobody;
  uint8_t reader[kPipes] = {};
  uint32_t read_clock[kPipes] = {};
};

class Memory {
 public:
  explicit Memory(Space space) : space(space), bytes(space_bytes(space)), data_(bytes + kGuard, kPoison) {
#if TWIN_CHECKED
    cells_.resize(bytes / kCell);
    defined_.resize(bytes / 64);
#endif
  }

  // Bytes at an offset; the guard behind the end is never read in `checked` mode.
  TWIN_UNWATCHED uint8_t* at(size_t offset) { return data_.data() + align_ + offset; }

  // Offset of a pointer: an address in this memory, or an offset already. A wild pointer gives one past the end.
  TWIN_UNWATCHED size_t offset_of(const void* pointer) {
    const auto value = reinterpret_cast<uintptr_t>(pointer);
    const auto base = reinterpret_cast<uintptr_t>(at(0));
    if (value >= base && value <= base + bytes) return value - base;
    return value < (size_t{1} << 20) ? value : SIZE_MAX / 2;
  }

  // A new block starts: nothing is defined, nobody has touched anything.
  TWIN_UNWATCHED void reset() {
    ++epoch_;
    if (dirty_end_ > dirty_begin_) {
      std::memset(at(dirty_begin_), kPoison, dirty_end_ - dirty_begin_);
#if TWIN_CHECKED
      std::memset(defined_.data() + dirty_begin_ / 64, 0, (dirty_end_ + 63) / 64 * 8 - dirty_begin_ / 64 * 8);
#endif
    }
    dirty_begin_ = bytes;
    dirty_end_ = 0;
  }

  TWIN_UNWATCHED void touch(size_t offset, size_t count) {
    dirty_begin_ = std::min(dirty_begin_, offset);
    dirty_end_ = std::max(dirty_end_, offset + count);
    highest = std::max(highest, offset + count);
  }

  TWIN_UNWATCHED void define(size_t offset, size_t count) {
    touch(offset, count);
#if TWIN_CHECKED
    size_t bit = offset;
    const size_t end = offset + count;
    while (bit < end) {
      const size_t next = std::min(end, (bit / 64 + 1) * 64);
      const uint64_t ones = next - bit == 64 ? ~uint64_t{0} : ((uint64_t{1} << (next - bit)) - 1) << (bit % 64);
      defined_[bit / 64] |= ones;
      bit = next;
    }
#endif
  }

  // Which of the 32 bytes from a multiple of 32 were ever written, a bit each; and saying so, for copies of what was not.
  TWIN_UNWATCHED uint32_t defined_block(size_t offset) const {
#if TWIN_CHECKED
    return static_cast<uint32_t>(defined_[offset / 64] >> (offset % 64));
#else
    (void)offset;
    return ~uint32_t{0};
#endif
  }
  TWIN_UNWATCHED void set_defined_block(size_t offset, uint32_t bits) {
#if TWIN_CHECKED
    uint64_t& word = defined_[offset / 64];
    word = (word & ~(uint64_t{0xffffffff} << (offset % 64))) | uint64_t{bits} << (offset % 64);
#else
    (void)offset, (void)bits;
#endif
  }

  // The first byte of a range that nothing wrote, or the end of the range.
  TWIN_UNWATCHED size_t first_undefined(size_t offset, size_t count) const {
    const size_t end = offset + count;
#if TWIN_CHECKED
    for (size_t bit = offset; bit < end; ++bit) {
      if (bit % 64 == 0 && bit + 64 <= end && defined_[bit / 64] == ~uint64_t{0}) {
        bit += 63;
      } else if (!(defined_[bit / 64] >> (bit % 64) & 1)) {
        return bit;
      }
    }
#endif
    return end;
  }

  TWIN_UNWATCHED Cell& cell(size_t index) {
    Cell& found = cells_[index];
    if (found.epoch != epoch_) {
      found = Cell{};
      found.epoch = epoch_;
    }
    return found;
  }

  const Space space;
  const size_t bytes;
  size_t highest = 0;  // one past the highest byte touched in this launch

 private:
  static constexpr size_t kGuard = 4096;  // `fast` mode does not check: a load past the end reads here

  std::vector<uint8_t> data_;
  size_t align_ = (512 - reinterpret_cast<uintptr_t>(data_.data()) % 512) % 512;
  std::vector<Cell> cells_;
  std::vector<uint64_t> defined_;
  uint32_t epoch_ = 1;
  size_t dirty_begin_ = 0;
  size_t dirty_end_ = bytes;
};

}  // namespace twin
