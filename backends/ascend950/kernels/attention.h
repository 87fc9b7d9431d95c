// What sparse attention on the Cube is told, where its buffers are, and in which order its tiles come.
//
// A unit of work is a row and up to 64 of its heads. Its slots, window list first, are walked in tiles of 64 keys and
// tiles in groups of at most five. Per tile the vector cores bring the keys as bfloat16 (each core 32 of them) and the
// Cube multiplies them with the queries; softmax waits for a whole group, so that its maximum is known before the first
// probability is rounded and the Cube can add the values of the group without rescaling; then the sum of the group
// leaves L0C and each vector core adds it to the sum of its 32 heads, while keys of the next group are on their way.
// Which group a tile is in follows from its column alone, so a row's bits do not depend on other rows.
#pragma once

#include "records.h"

constexpr int32_t kTile = 64;         // keys of a tile, and heads of a unit
constexpr int32_t kHalf = 32;         // of both, per vector core
constexpr int32_t kPiece = 16;        // keys that a vector core expands at a time: rows of a fractal
constexpr int32_t kGroup = 5;         // most tiles between two sums of values
constexpr int32_t kRing = kGroup + 1; // tiles under way
constexpr uint32_t kBlockBytes = 32;
constexpr uint32_t kMaxDim = 512;

// L1: queries, keys, probabilities.
constexpr uint32_t kKeyBytes = kTile * kMaxDim * 2;
constexpr uint32_t kWeightBytes = kTile * kTile * 2;
constexpr uint32_t kQueryL1 = 0;
constexpr uint32_t kKeyL1 = kQueryL1 + kKeyBytes;
constexpr uint32_t kWeightL1 = kKeyL1 + kRing * kKeyBytes;
static_assert(kWeightL1 + kRing * kWeightBytes <= 512 * 1024);

// L0C: sums of values by chunks of columns, then two tiles of scores.
constexpr int32_t kChunk = 128;
constexpr uint32_t kChunkSums = kTile * kChunk * 4;
constexpr uint32_t kScoreSums = kTile * kTile * 4;
constexpr uint32_t kScoreL0C = kMaxDim / kChunk * kChunkSums;
static_assert(kScoreL0C + 2 * kScoreSums <= 256 * 1024);
constexpr uint32_t kOperandBytes = kTile * kChunk * 2;  // of one of four stages of L0A, and of L0B

// UB. Records keep their alignment: codes start at multiples of 32 bytes. A load of codes may read past the last one.
constexpr uint32_t kSumBytes = kHalf * kMaxDim * 4;
constexpr uint32_t kScoreBytes = kTile * kHalf * 4;
constexpr uint32_t kRecordPitch = 544;
constexpr uint32_t kRawBytes = kPiece * kRecordPitch + kRegister;
constexpr int32_t kPieceRows = kPiece + 1;  // the odd distance keeps neighbouring blocks of a key in different banks
constexpr uint32_t kPieceBytes = kMaxDim / 16 * kPieceRows * kBlockBytes;
constexpr uint32_t kFactorBytes = kPiece * kMaxDim / 16 * 2;
constexpr uint32_t kHoleBytes = 2 * kTile * 4;
constexpr uint32_t kSums = 0;                                        // two
constexpr uint32_t kScores = kSums + 2 * kSumBytes;                  // a ring
constexpr uint32_t kRaw = kScores + kRing * kScoreBytes;             // two
constexpr uint32_t kPieces = kRaw + 2 * kRawBytes;                   // two
constexpr uint32_t kFactors = kPieces + 2 * kPieceBytes;
constexpr uint32_t kWeights = kFactors + kFactorBytes;               // two
constexpr uint32_t kHoles = kWeights + kWeightBytes;                 // a ring
constexpr uint32_t kSlots = kHoles + kRing * kHoleBytes;             // two
// Of 32 heads, as two registers of 16 heads by four keys apart; and per head.
constexpr uint32_t kTop = kSlots + 2 * kRegister;    // largest score of the group so far
constexpr uint32_t kBest = kTop + 2 * kRegister;     // of the unit
constexpr uint32_t kShift = kBest + 2 * kRegister;   // what is subtracted from scores
constexpr uint32_t kShrink = kShift + 2 * kRegister; // what earlier sums are multiplied by
constexpr uint32_t kTotal = kShrink + 2 * kRegister; // sums of probabilities
constexpr uint32_t kAny = kTotal + 2 * kRegister;    // whether a key was there, of two units
constexpr uint32_t kSink = kAny + 2 * kRegister;
constexpr uint32_t kHeadShrink = kSink + 2 * kRegister;  // per head, of two groups
constexpr uint32_t kInverse = kHeadShrink + 2 * kRegister;
constexpr uint32_t kKeep = kInverse + kRegister;
constexpr uint32_t kLse = kKeep + kRegister;
constexpr uint32_t kScratch = kLse + kRegister;      // two registers
constexpr uint32_t kPlaces = kScratch + 2 * kRegister;   // of scales in records, of both kinds
constexpr uint32_t kUsed = kPlaces + 2 * kRegister;
static_assert(kUsed <= 248 * 1024);

// Signals between the cores of a block: vector cores number them from 0, the cube core adds 16 for the second one.
constexpr int kKeysReady = 0;     // this core's half of a tile is in L1
constexpr int kWeightsReady = 1;  // its heads' probabilities too
constexpr int kSumsTaken = 2;     // there is room in UB for the next group's sums
constexpr int kTileFree = 3;      // the Cube has read a tile and its probabilities for the last time
constexpr int kScoresReady = 4;
constexpr int kSumsReady = 5;

// Records of one list: bytes of the pool, slots of every row.
struct List {
  __gm__ uint8_t* cache;
  __gm__ int32_t* slots;
  int64_t page_bytes, pitch;
  int32_t columns, records, kind;
};

struct Attention {
  __gm__ uint8_t* out;
  __gm__ float* lse;
  __gm__ uint8_t* q;
  __gm__ float* sink;
  List window, compressed;
  int64_t rows, q_row, q_head;  // q in elements
  int32_t heads, dim;
  float scale;
};

#define ATTENTION_PARAMETERS                                                                                        \
  __gm__ uint8_t *out, __gm__ float *lse, __gm__ uint8_t *q, __gm__ float *sink, __gm__ uint8_t *window,            \
      __gm__ int32_t *window_slots, __gm__ uint8_t *compressed, __gm__ int32_t *compressed_slots, int64_t rows,     \
      int64_t q_row, int64_t q_head, int64_t window_page, int64_t window_pitch, int64_t compressed_page,            \
      int64_t compressed_pitch, int32_t heads, int32_t dim, int32_t window_columns, int32_t compressed_columns,     \
      int32_t window_records, int32_t compressed_records, int32_t window_kind, int32_t compressed_kind, float scale
#define ATTENTION                                                                                                   \
  Attention {                                                                                                       \
    out, lse, q, sink, {window, window_slots, window_page, window_pitch, window_columns, window_records, window_kind}, \
        {compressed, compressed_slots, compressed_page, compressed_pitch, compressed_columns, compressed_records,   \
         compressed_kind},                                                                                          \
        rows, q_row, q_head, heads, dim, scale                                                                      \
  }

__aicore__ inline int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
__aicore__ inline int32_t tiles_of(const List& list) { return (list.columns + kTile - 1) / kTile; }

// Tiles of a unit; without any column there is one, of nothing.
__aicore__ inline int32_t tiles_of(const Attention& a) {
  const int32_t count = tiles_of(a.window) + tiles_of(a.compressed);
  return count == 0 ? 1 : count;
}

// Units, of which a block takes every asc_get_block_num()-th.
__aicore__ inline int32_t parts_of(const Attention& a) { return (a.heads + kTile - 1) / kTile; }
__aicore__ inline int64_t num_units(const Attention& a) { return a.rows * parts_of(a); }

struct Unit {
  int64_t row;
  int32_t head, heads;
};

__aicore__ inline Unit unit_at(const Attention& a, int64_t index) {
  const int32_t head = (int32_t)(index % parts_of(a)) * kTile;
  return {index / parts_of(a), head, least(kTile, a.heads - head)};
}

// One group after another, through all units of a block.
struct Group {
  int64_t unit = -1;
  int32_t first = 0, tiles = 0;  // of the unit's tiles; no tiles: there is no such group
  uint32_t ring = 0;             // number of its first tile among all of the block
  uint32_t number = 0;
  uint32_t home = 0;                   // which buffer of UB keeps the unit's sums
  bool opens = false, closes = false;  // first, last of its unit
};

__aicore__ inline Group group_at(const Attention& a, int64_t unit, int32_t first) {
  Group made;
  made.unit = unit;
  made.first = first;
  if (unit >= num_units(a)) return made;
  made.tiles = least(kGroup, tiles_of(a) - first);
  made.opens = first == 0;
  made.closes = first + made.tiles == tiles_of(a);
  return made;
}

__aicore__ inline Group first_group(const Attention& a) { return group_at(a, asc_get_block_idx(), 0); }

__aicore__ inline Group group_after(const Attention& a, const Group& group) {
  const int64_t unit = group.closes ? group.unit + asc_get_block_num() : group.unit;
  Group made = group_at(a, unit, group.closes ? 0 : group.first + group.tiles);
  made.ring = group.ring + group.tiles;
  made.number = group.number + 1;
  made.home = group.closes ? 1 - group.home : group.home;
  return made;
}

__aicore__ inline uint32_t turn_of(const Group& group, int32_t tile) { return group.ring + tile; }

// Where the sums of a group arrive: those of the first one stay there, later ones are added to them.
__aicore__ inline uint32_t landing_of(const Group& group) { return group.opens ? group.home : 1 - group.home; }
