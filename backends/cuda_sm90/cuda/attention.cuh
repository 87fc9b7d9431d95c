// What all forms of sparse attention share, so that a row has the same bits in each: how records become bfloat16 keys, what
// a tile of 64 keys does to a row's softmax, and how results are written. 64 heads of 512 channels; key equals value.
//
// The reference of a softmax moves only when a maximum grew by 2^8: probabilities stay below 2^8, and most tiles rescale
// nothing. Probabilities are summed apart for the lower and the upper 32 keys of tiles, added in the end. Decoded keys carry
// 2^-9, so that no factor leaves bfloat16's range; the scale of the scores and the last division take it back. Slots of -1
// and columns behind a list become keys of zeros whose scores are masked: page 0, which holes point to, is not read.
//
// Macros: WINDOW_RECORDS, KV_RECORDS records per page; KV_FP4 1 for 288-byte records, 0 for 528-byte ones.

#define FULL_WARP 0xFFFFFFFFu
constexpr int kHeads = 64, kChannels = 512, kKeys = 64;
constexpr u32 kPart = 8192;  // bytes of 64 rows of 64 channels: what one swizzle covers
constexpr u32 kTileBytes = 8 * kPart, kQueryBytes = 8 * kPart;
constexpr float kCarried = 512.f, kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kNothing = -1e30f, kMasked = -1e38f;  // a reference no score falls below, and a score far below it
constexpr bool kKvFp4 = KV_FP4 != 0;
constexpr u32 kFp8Record = 528, kFp4Record = 288;

struct Params {
  const u8* window;
  const u8* kv;
  const int* window_slots;
  const int* kv_slots;
  const float* sink;
  u16* out;
  float* lse;
  // Records decoded beforehand (`gather_records.cu`): a bit per slot, places of the slots of a word, how many there are.
  const u32* gathered_bits;
  const u32* gathered_places;
  const u32* num_gathered;  // null where nothing was gathered
  const u16* gathered;
  u64 window_page_bytes, kv_page_bytes;
  u64 window_pitch, kv_pitch;
  int rows, window_columns, kv_columns;
  u32 window_words;  // words of bits before those of `kv`
  u32 capacity;      // records that `gathered` holds; if there are more, none is there
  float scale;       // softmax_scale * log2(e) * 2^9
};

// --- records -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ const u8* window_record(const Params& p, u32 slot) {
  return p.window + slot / WINDOW_RECORDS * p.window_page_bytes + slot % WINDOW_RECORDS * kFp8Record;
}
__device__ __forceinline__ const u8* kv_record(const Params& p, u32 slot) {
  return p.kv + slot / KV_RECORDS * p.kv_page_bytes + slot % KV_RECORDS * (kKvFp4 ? kFp4Record : kFp8Record);
}

// Two bfloat16 = 2^-120 times two e4m3 values given in the upper halves of 16 bits.
__device__ __forceinline__ u32 e4m3_pair(u32 x) { return (x & 0x80008000u) | ((x >> 4) & 0x07F007F0u); }

// Keys of four e4m3 codes a word under one ue8m0 scale; zeros where the record is not there.
template <int Words>
__device__ __forceinline__ void decode_e4m3(u32 (&pairs)[2 * Words], const u32 (&words)[Words], u32 scale, bool there) {
  const u32 exponent = min(scale + 111u, 254u);  // 2^-127 * 2^120 * 2^-9, and the bias
  const u32 factor = !there ? 0u : scale == 255u ? 0x7FC07FC0u : exponent * 0x00800080u;
#pragma unroll
  for (int i = 0; i < Words; i++) {
    pairs[2 * i] = multiply_pair(e4m3_pair(__byte_perm(words[i], 0, 0x1404)), factor);
    pairs[2 * i + 1] = multiply_pair(e4m3_pair(__byte_perm(words[i], 0, 0x3424)), factor);
  }
  if (there && scale > 143u && scale < 255u) {  // what one factor cannot hold
    const u32 rest = (scale + 111u - 254u + 127u) * 0x00800080u;
#pragma unroll
    for (int i = 0; i < 2 * Words; i++) pairs[i] = multiply_pair(pairs[i], rest);
  }
}

// Factors of two groups of e2m1 codes from their e4m3 scales.
__device__ __forceinline__ void e2m1_factors(u32 (&factors)[2], u32 scales, bool there) {
  // 2^-120 times the scales, times 2^120, times 2^117 (2^126 that the codes lack, and the carried 2^-9)
  const u32 raw = e4m3_pair(__byte_perm(scales, 0, 0x1404)) & 0x7FFF7FFFu;
  const u32 both = multiply_pair(multiply_pair(raw, 0x7B807B80u), 0x7A007A00u);
  factors[0] = __byte_perm(both, 0, 0x1010);
  factors[1] = __byte_perm(both, 0, 0x3232);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (((scales >> (8 * i)) & 0x7Fu) == 0x7Fu) factors[i] = 0x7FC07FC0u;
    if (!there) factors[i] = 0u;
  }
}

// Keys of the eight e2m1 codes of a word.
__device__ __forceinline__ void decode_e2m1(u32 (&pairs)[4], u32 low, u32 factor) {
  const u32 high = low >> 4;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    // byte j as (low nibble, high nibble); one product moves sign and magnitude to bfloat16's bits 15 and 8..6
    const u32 nibbles = __byte_perm(low, high, j | (4 + j) << 8) & 0x000F000Fu;
    pairs[j] = multiply_pair((nibbles * 4160u) & 0x81C081C0u, factor);
  }
}

// Sixteen bytes of a record's codes, with the scales of them.
struct Piece {
  uint4 codes;
  u32 scales;
};

__device__ __forceinline__ Piece load_e4m3(const u8* record, int piece) {
  return Piece{*reinterpret_cast<const uint4*>(record + piece * 16), record[kChannels + (piece >> 1)]};
}
__device__ __forceinline__ Piece load_e2m1(const u8* record, int piece) {
  return Piece{*reinterpret_cast<const uint4*>(record + piece * 16),
               *reinterpret_cast<const u16*>(record + kChannels / 2 + 2 * piece)};
}

// Decoded pieces go to their key's row of a tile, whose address is `row` for the first 64 channels; `key8` is the key mod 8.
__device__ __forceinline__ void store_e4m3(u32 row, int key8, int piece, const Piece& from, bool there) {
  const u32 words[4] = {from.codes.x, from.codes.y, from.codes.z, from.codes.w};
  u32 pairs[8];
  decode_e4m3(pairs, words, from.scales, there);
  const int at = 2 * piece;
  const u32 to = row + (at >> 3) * kPart;
  store_16(to + (((at & 7) ^ key8) << 4), pairs[0], pairs[1], pairs[2], pairs[3]);
  store_16(to + ((((at & 7) + 1) ^ key8) << 4), pairs[4], pairs[5], pairs[6], pairs[7]);
}
__device__ __forceinline__ void store_e2m1(u32 row, int key8, int piece, const Piece& from, bool there) {
  const u32 words[4] = {from.codes.x, from.codes.y, from.codes.z, from.codes.w};
  u32 factors[2];
  e2m1_factors(factors, from.scales, there);
  const u32 to = row + (piece >> 1) * kPart;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 pairs[4];
    decode_e2m1(pairs, words[i], factors[i >> 1]);
    store_16(to + ((((piece & 1) * 4 + i) ^ key8) << 4), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

__device__ __forceinline__ void load_query(u32 to, const TensorMap* map, int row, u32 barrier) {
  barrier_expect(barrier, kQueryBytes);
  for (int i = 0; i < 8; i++) copy_box(to + i * kPart, map, i * 64, row * kHeads, barrier);
}

// Before a block writes to others they have begun.
__device__ __forceinline__ void block_is_there() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
__device__ __forceinline__ void wait_for_blocks() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// As `blocks_meet`, for blocks whose shared memory others may have read until then; nothing written is seen for it.
__device__ __forceinline__ void blocks_leave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Tiles of the two lists. The loop of producers takes tiles of e2m1 records in pairs, so their number is even everywhere.
__device__ __forceinline__ int tiles_of_window(const Params& p) { return (p.window_columns + kKeys - 1) / kKeys; }
__device__ __forceinline__ int tiles_of_kv(const Params& p) {
  return kKvFp4 ? 2 * ((p.kv_columns + 2 * kKeys - 1) / (2 * kKeys)) : (p.kv_columns + kKeys - 1) / kKeys;
}

// --- softmax: a thread has the scores of heads h and h + 8 with keys 8 i + 2 q and 8 i + 2 q + 1, q its place in a quad --------

// Maxima of the two heads over all keys of a warpgroup after masking; `masks` is where the thread's first key's mask is.
template <int N>
__device__ __forceinline__ void mask_and_find_maxima(float (&s)[N], u32 masks, float& best0, float& best1) {
  best0 = best1 = kNothing;
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    u32 bits[2];
    load_8(bits, masks + i * 32);
    const float even = __uint_as_float(bits[0]), odd = __uint_as_float(bits[1]);  // keys of zeros score 0 before it is added
    s[4 * i] += even;
    s[4 * i + 1] += odd;
    s[4 * i + 2] += even;
    s[4 * i + 3] += odd;
    best0 = fmaxf(best0, fmaxf(s[4 * i], s[4 * i + 1]));
    best1 = fmaxf(best1, fmaxf(s[4 * i + 2], s[4 * i + 3]));
  }
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    best0 = fmaxf(best0, __shfl_xor_sync(FULL_WARP, best0, step));
    best1 = fmaxf(best1, __shfl_xor_sync(FULL_WARP, best1, step));
  }
}

// Moves a head's reference for a tile's maximum; returns the factor of what was summed before.
__device__ __forceinline__ float move_reference(float& top, float best, float scale) {
  const float moved = (best - top) * scale > 8.f ? best : top;
  const float shrink = power_of_two((top - moved) * scale);
  top = moved;
  return shrink;
}

// Probabilities of 32 keys as pairs of neighbours, of head h and h + 8 in turn, and the thread's share of their sums.
__device__ __forceinline__ void find_probabilities(u32 (&p)[8], float& sum0, float& sum1, const float* s, float scale, float top0,
                                                   float top1) {
  const float shift0 = top0 * scale, shift1 = top1 * scale;
  sum0 = sum1 = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float a0 = power_of_two(fmaf(s[4 * i], scale, -shift0)), a1 = power_of_two(fmaf(s[4 * i + 1], scale, -shift0));
    const float b0 = power_of_two(fmaf(s[4 * i + 2], scale, -shift1)), b1 = power_of_two(fmaf(s[4 * i + 3], scale, -shift1));
    sum0 += a0 + a1;
    sum1 += b0 + b1;
    p[2 * i] = round_pair(a0, a1);
    p[2 * i + 1] = round_pair(b0, b1);
  }
}

__device__ __forceinline__ float sum_of_quad(float x) {
  x += __shfl_xor_sync(FULL_WARP, x, 1);
  return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// What a head's sums are multiplied with in the end; 0 for a row without keys.
__device__ __forceinline__ float last_factor(float sum, float top, float sink, float scale) {
  const float below = sum + power_of_two(fmaf(-top, scale, sink * kLog2e));
  return sum == 0.f ? 0.f : kCarried / below;
}
__device__ __forceinline__ float lse_of(float sum, float top, float scale) { return fmaf(top, scale, __log2f(sum)) * kLn2; }

// Sums of 32 channels of both heads to 16 bytes a lane: 4x4 transposes inside quads. `to` is the place of head h and the
// thread's eight channels.
__device__ __forceinline__ void store_results(u16* to, const float* sums, float factor0, float factor1, int quarter) {
  auto transpose = [&](u32(&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const u32 other = __shfl_xor_sync(FULL_WARP, quarter & 1 ? a[i] : a[i + 1], 1);
      if (quarter & 1) a[i] = other;
      else a[i + 1] = other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 other = __shfl_xor_sync(FULL_WARP, quarter & 2 ? a[i] : a[i + 2], 2);
      if (quarter & 2) a[i] = other;
      else a[i + 2] = other;
    }
  };
  u32 a[4], b[4];
#pragma unroll
  for (int z = 0; z < 4; z++) {
    a[z] = round_pair(sums[4 * z] * factor0, sums[4 * z + 1] * factor0);
    b[z] = round_pair(sums[4 * z + 2] * factor1, sums[4 * z + 3] * factor1);
  }
  transpose(a);
  transpose(b);
  *reinterpret_cast<uint4*>(to) = make_uint4(a[0], a[1], a[2], a[3]);
  *reinterpret_cast<uint4*>(to + 8 * kChannels) = make_uint4(b[0], b[1], b[2], b[3]);
}

// Sums of sixteen heads of a warp times their factors, in the layout of a tile from its first channel's part on. `round` makes 16
// bits each of two neighbours.
template <int N, typename Round>
__device__ __forceinline__ void store_tile(u32 to, const float (&sums)[N], float factor0, float factor1, Round round) {
  const int lane = threadIdx.x & 31, head = ((threadIdx.x >> 5) & 3) * 16 + (lane & 15);
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    const float* of = sums + i * 8;
    const u32 at = to + (i >> 2) * kPart + head * 128 + (((2 * (i & 3) + (lane >> 4)) ^ (lane & 7)) << 4);
    store_matrices(at, round(of[0] * factor0, of[1] * factor0), round(of[2] * factor1, of[3] * factor1),
                   round(of[4] * factor0, of[5] * factor0), round(of[6] * factor1, of[7] * factor1));
  }
}
