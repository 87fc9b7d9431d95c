// One sequence, and the table that maps handles to sequences.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ref_counted_ids.hpp"
#include "text.hpp"

namespace deepinfer {

// An entry of the prefix index as it was: the block may have another entry by now, with another serial.
struct ChainTip {
  int32_t block = 0;  // 0 is the empty prefix
  uint64_t serial = 0;
};

// What ties a sequence to the prefix index.
struct PrefixState {
  bool enabled = false;
  uint64_t salt = 0;
  int32_t num_opened = 0;     // tokens at open(): the prompt, with the outputs of a sequence that is resumed
  int32_t most_adopted = 0;   // longest prefix it could start from with its window pages
  bool stores = true;         // enters what it computes
  int32_t num_matched = 0;    // blocks whose tokens the index knew at open(), adopted or not
  int32_t num_registered = 0; // leading blocks that have an entry, of this sequence or of one with equal tokens
  ChainTip tip;               // the entry of the last of them
};

struct Sequence {
  std::vector<int32_t> tokens;  // prompt, then outputs
  std::vector<int32_t> blocks;  // blocks[i] holds positions [i * block_size, (i + 1) * block_size)
  std::vector<int32_t> pages;   // pages[i] holds page index first_page + i
  int32_t first_page = 0;       // lowest page index still held; those before it left the window
  int32_t num_computed = 0;     // records of positions [0, num_computed) are stored
  int32_t num_replayed = 0;     // but window records of the last so many are not: their rows run again, for these alone
  PrefixState prefix;

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  int64_t page_end() const { return first_page + static_cast<int64_t>(pages.size()); }
};

// Handles are 1..num_slots; a handle is also the sequence's compressor state slot, and 0 is that of padding.
class SequenceTable {
 public:
  explicit SequenceTable(int32_t num_slots) : slots_(num_slots), sequences_(static_cast<size_t>(num_slots) + 1) {}

  int64_t num_free() const { return slots_.num_free(); }
  int32_t num_slots() const { return slots_.count(); }
  bool is_open(int64_t seq) const {
    return seq >= 1 && seq <= slots_.count() && slots_.refs(static_cast<int32_t>(seq)) > 0;
  }
  const RefCountedIds& slots() const { return slots_; }

  const Sequence& at(int64_t seq) const {
    if (!is_open(seq)) {
      throw std::invalid_argument(text("sequence ", seq, " is not open; handles are 1..", slots_.count()));
    }
    return sequences_[static_cast<size_t>(seq)];
  }
  Sequence& at(int64_t seq) { return const_cast<Sequence&>(std::as_const(*this).at(seq)); }

  // At a handle that at() has already accepted.
  const Sequence& operator[](int32_t seq) const { return sequences_[static_cast<size_t>(seq)]; }
  Sequence& operator[](int32_t seq) { return sequences_[static_cast<size_t>(seq)]; }

  int32_t open(Sequence sequence) {
    const int32_t seq = slots_.take();
    sequences_[static_cast<size_t>(seq)] = std::move(sequence);
    return seq;
  }

  void close(int32_t seq) {
    sequences_[static_cast<size_t>(seq)] = Sequence{};
    slots_.drop(seq);
  }

  // Refuses handles that are not open and handles that are named twice.
  void require_distinct(std::span<const int32_t> seqs) const {
    std::vector<uint8_t> seen(sequences_.size(), 0);
    for (const int32_t seq : seqs) {
      at(seq);
      if (seen[static_cast<size_t>(seq)]++) throw std::invalid_argument(text("sequence ", seq, " is named twice"));
    }
  }

 private:
  RefCountedIds slots_;
  std::vector<Sequence> sequences_;
};

}  // namespace deepinfer
