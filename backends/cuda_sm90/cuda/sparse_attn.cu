// Sparse attention for 64 heads of 512 channels over paged records; key equals value.
//
// One persistent block a multiprocessor, one row at a time, tiles of 64 keys in two buffers. Eight producer warps read
// records and decode them to bfloat16, exactly; two consumer warpgroups multiply. Warpgroup w computes the scores of 32
// of the 64 keys and the outputs of 256 of the 512 channels; both see all probabilities through shared memory. A tile is
// stored once and read twice, as keys (rows along K) and as values (columns along K).
//
// A row is worked on by one block, its keys in column order, whatever the number of rows: equal bits in any batch.
// Decoded keys carry 2^-9, so that no factor leaves bfloat16's range; the scale of the scores and the last division
// take it back. Slots of -1 and columns behind a list become keys of zeros whose scores are masked: page 0, which holes
// point to, is not read.
//
// Macros: WINDOW_RECORDS, KV_RECORDS records per page; KV_FP4 1 for 288-byte records, 0 for 528-byte ones.

#define FULL_WARP 0xFFFFFFFFu
constexpr int kHeads = 64, kKeys = 64, kProducerWarps = 8;
constexpr u32 kQueryBytes = 65536, kTileBytes = 65536, kProbabilityBytes = 8192;
constexpr float kCarried = 512.f, kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kNothing = -1e30f, kMasked = -1e38f;  // a reference no score falls below, and a score far below it

struct Params {
  const u8* window;
  const u8* kv;
  const int* window_slots;
  const int* kv_slots;
  const float* sink;
  u16* out;
  float* lse;
  u64 window_page_bytes, kv_page_bytes;
  u64 window_pitch, kv_pitch;
  int rows, window_columns, kv_columns;
  float scale;  // softmax_scale * log2(e) * 2^9
};

// Four 16-byte pieces of a record as they were read, with the scales of each.
struct Batch {
  uint4 codes[4];
  u32 scales[4];
  bool there;
};

// Place of a batch in the walk over rows: an e4m3 tile is two batches (halves of the channels), an e2m1 tile is one.
struct Place {
  int row, batch;
};

constexpr bool kKvFp4 = KV_FP4 != 0;
// What is known of a batch when its code is compiled: its records, and which half of an e4m3 tile it is.
template <bool Fp4, int Half>
struct Kind {
  static constexpr bool fp4 = Fp4;
  static constexpr int half = Half;
};

// Two bfloat16 = 2^-120 times two e4m3 values given in the upper halves of 16 bits.
__device__ __forceinline__ u32 e4m3_pair(u32 x) { return (x & 0x80008000u) | ((x >> 4) & 0x07F007F0u); }

__device__ __forceinline__ void store_e4m3(u32 tile, int key8, int piece, const uint4& codes, u32 scale, bool there) {
  const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
  const u32 exponent = min(scale + 111u, 254u);  // 2^-127 * 2^120 * 2^-9, and the bias
  const u32 factor = !there ? 0u : scale == 255u ? 0x7FC07FC0u : exponent * 0x00800080u;
  u32 pairs[8];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    pairs[2 * i] = multiply_pair(e4m3_pair(__byte_perm(words[i], 0, 0x1404)), factor);
    pairs[2 * i + 1] = multiply_pair(e4m3_pair(__byte_perm(words[i], 0, 0x3424)), factor);
  }
  if (there && scale > 143u && scale < 255u) {  // what one factor cannot hold
    const u32 rest = (scale + 111u - 254u + 127u) * 0x00800080u;
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = multiply_pair(pairs[i], rest);
  }
  const int at = 2 * piece;
  const u32 to = tile + (at >> 3) * 8192;
  store_16(to + (((at & 7) ^ key8) << 4), pairs[0], pairs[1], pairs[2], pairs[3]);
  store_16(to + ((((at & 7) + 1) ^ key8) << 4), pairs[4], pairs[5], pairs[6], pairs[7]);
}

__device__ __forceinline__ void store_e2m1(u32 tile, int key8, int piece, const uint4& codes, u32 scales, bool there) {
  const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
  // two e4m3 scales: 2^-120 times them, times 2^120, times 2^117 (2^126 that the codes lack, and the carried 2^-9)
  const u32 raw = e4m3_pair(__byte_perm(scales, 0, 0x1404)) & 0x7FFF7FFFu;
  const u32 both = multiply_pair(multiply_pair(raw, 0x7B807B80u), 0x7A007A00u);
  u32 factors[2] = {__byte_perm(both, 0, 0x1010), __byte_perm(both, 0, 0x3232)};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (((scales >> (8 * i)) & 0x7Fu) == 0x7Fu) factors[i] = 0x7FC07FC0u;
    if (!there) factors[i] = 0u;
  }
  const u32 to = tile + (piece >> 1) * 8192;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 low = words[i], high = words[i] >> 4, factor = factors[i >> 1];
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      // byte j as (low nibble, high nibble); one product moves sign and magnitude to bfloat16's bits 15 and 8..6
      const u32 nibbles = __byte_perm(low, high, j | (4 + j) << 8) & 0x000F000Fu;
      pairs[j] = multiply_pair((nibbles * 4160u) & 0x81C081C0u, factor);
    }
    store_16(to + ((((piece & 1) * 4 + i) ^ key8) << 4), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

__device__ __forceinline__ void load_query(u32 to, const TensorMap* map, int row, u32 barrier) {
  barrier_expect(barrier, kQueryBytes);
  for (int i = 0; i < 8; i++) copy_box(to + i * 8192, map, i * 64, row * kHeads, barrier);
}

__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__(256 + 32 * kProducerWarps, 1)
    sparse_attn(const __grid_constant__ TensorMap query_map, const __grid_constant__ Params p) {
  extern __shared__ u8 raw[];
  const u32 query = (shared_address(raw) + 1023) & ~1023u;
  const u32 tiles = query + kQueryBytes, probabilities = tiles + 2 * kTileBytes;
  const u32 maxima = probabilities + kProbabilityBytes, sums = maxima + 1024, masks = sums + 512, barriers = masks + 512;
  const u32 full = barriers, empty = barriers + 16, query_full = barriers + 32, query_empty = barriers + 40;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int window_tiles = (p.window_columns + kKeys - 1) / kKeys;
  // batches are walked in pairs, so one-batch tiles come in an even number
  const int kv_tiles = kKvFp4 ? 2 * ((p.kv_columns + 2 * kKeys - 1) / (2 * kKeys)) : (p.kv_columns + kKeys - 1) / kKeys;
  const int num_tiles = window_tiles + kv_tiles;
  if (thread == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(full + 8 * i, 32 * kProducerWarps);
      barrier_init(empty + 8 * i, 8);
    }
    barrier_init(query_full, 1);
    barrier_init(query_empty, 8);
    barrier_init_done();
  }
  __syncthreads();

  if (warp >= 8) {  // producers
    asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
    // A lane holds key (lane & 7) of its warp's eight and every fourth piece: eight lanes write eight keys, and the
    // swizzle spreads them over all banks. Records come one batch ahead of their use, slots two, across rows.
    const int key8 = lane & 7, first_piece = lane >> 3, key = (warp - 8) * 8 + key8;
    const int window_batches = 2 * window_tiles, num_batches = window_batches + (kKvFp4 ? 1 : 2) * kv_tiles;
    u32 tile = 0, query_phase = 0;

    auto next = [&](Place& at) {
      if (++at.batch == num_batches) at = Place{at.row + static_cast<int>(gridDim.x), 0};
    };
    auto slot_of = [&](const Place& at) -> int {
      if (at.row >= p.rows) return -1;
      if (at.batch < window_batches) {
        const int column = (at.batch >> 1) * kKeys + key;
        return column < p.window_columns ? p.window_slots[at.row * p.window_pitch + column] : -1;
      }
      const int column = ((at.batch - window_batches) >> (kKvFp4 ? 0 : 1)) * kKeys + key;
      return column < p.kv_columns ? p.kv_slots[at.row * p.kv_pitch + column] : -1;
    };
    auto fetch = [&](const Place& at, int slot, Batch& batch) {
      batch.there = slot >= 0;
      if (!batch.there) return;
      const bool is_window = at.batch < window_batches;
      const u32 records = is_window ? WINDOW_RECORDS : KV_RECORDS, page = (u32)slot / records, offset = (u32)slot % records;
      const u8* base = is_window ? p.window + page * p.window_page_bytes : p.kv + page * p.kv_page_bytes;
      if (is_window || !kKvFp4) {
        const u8* record = base + offset * 528;
        const int piece = (at.batch & 1) * 16 + first_piece;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          batch.codes[i] = *reinterpret_cast<const uint4*>(record + (piece + 4 * i) * 16);
          batch.scales[i] = record[512 + ((piece + 4 * i) >> 1)];
        }
      } else {
        const u8* record = base + offset * 288;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          batch.codes[i] = *reinterpret_cast<const uint4*>(record + (first_piece + 4 * i) * 16);
          batch.scales[i] = *reinterpret_cast<const u16*>(record + 256 + 2 * (first_piece + 4 * i));
        }
      }
    };
    auto put = [&](const Place& at, const Batch& batch, auto kind) {
      if (at.batch == 0 && thread == 256 && at.row != static_cast<int>(blockIdx.x)) {
        barrier_wait(query_empty, query_phase ^ 1);
        query_phase ^= 1;
        load_query(query, &query_map, at.row, query_full);
      }
      const u32 buffer = tile & 1, to = tiles + buffer * kTileBytes + key * 128;
      constexpr bool opens = kind.fp4 || kind.half == 0, closes = kind.fp4 || kind.half == 1;
      if (opens) {
        barrier_wait(empty + 8 * buffer, ((tile >> 1) & 1) ^ 1);
        if (first_piece == 0) store_f32(masks + buffer * 256 + key * 4, batch.there ? 0.f : kMasked);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int piece = first_piece + 4 * i;
        if constexpr (kind.fp4) {
          store_e2m1(to, key8, piece, batch.codes[i], batch.scales[i], batch.there);
        } else {
          store_e4m3(to, key8, kind.half * 16 + piece, batch.codes[i], batch.scales[i], batch.there);
        }
      }
      if (closes) {
        barrier_arrive(full + 8 * buffer);
        tile++;
      }
    };

    Place now{static_cast<int>(blockIdx.x), 0}, ahead = now;
    if (thread == 256) {
      load_query(query, &query_map, now.row, query_full);
      query_phase ^= 1;
    }
    Batch even = {}, odd = {};
    fetch(now, slot_of(now), even);
    next(ahead);
    int slot = slot_of(ahead);
    auto two_batches = [&](auto first, auto second) {
      fetch(ahead, slot, odd);
      next(ahead);
      slot = slot_of(ahead);
      put(now, even, first);
      next(now);
      fetch(ahead, slot, even);
      next(ahead);
      slot = slot_of(ahead);
      put(now, odd, second);
      next(now);
    };
    while (now.row < p.rows) {
#pragma unroll 1
      for (int i = 0; i < window_batches / 2; i++) two_batches(Kind<false, 0>{}, Kind<false, 1>{});
#pragma unroll 1
      for (int i = 0; i < (num_batches - window_batches) / 2; i++) two_batches(Kind<kKvFp4, 0>{}, Kind<kKvFp4, 1>{});
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 176;");
  const int group = warp >> 2, quarter = lane & 3, head = (warp & 3) * 16 + (lane >> 2);  // and head + 8
  float o[2][64], s[16];
  const float sink0 = p.sink[head] * kLog2e, sink1 = p.sink[head + 8] * kLog2e;
  u32 tile = 0, query_phase = 0;
  const u64 query_rows = rows_along_k(query);
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x, query_phase ^= 1) {
    float top0 = kNothing, top1 = kNothing, sum0 = 0.f, sum1 = 0.f;
#pragma unroll
    for (int i = 0; i < 64; i++) o[0][i] = o[1][i] = 0.f;
    barrier_wait(query_full, query_phase);
    for (int j = 0; j < num_tiles; j++, tile++) {
      const u32 buffer = tile & 1, keys = tiles + buffer * kTileBytes;
      barrier_wait(full + 8 * buffer, (tile >> 1) & 1);
      fence_async_units();
      mma_fence();
      const u64 key_rows = rows_along_k(keys + group * 4096);
#pragma unroll
      for (int i = 0; i < 32; i++) {
        mma_scores(s, query_rows + (i >> 2) * 512 + (i & 3) * 2, key_rows + (i >> 2) * 512 + (i & 3) * 2, i != 0);
      }
      mma_commit();
      mma_wait_all();
      keep(s);
      if (j == num_tiles - 1 && lane == 0) barrier_arrive(query_empty);

      float best0 = kNothing, best1 = kNothing;
      const u32 mask = masks + buffer * 256 + (group * 32 + 2 * quarter) * 4;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int at = 4 * (i >> 1) + (i & 1);
        const float masked = load_f32(mask + (i >> 1) * 32 + (i & 1) * 4);  // keys of zeros score 0 before it is added
        s[at] += masked;
        s[at + 2] += masked;
        best0 = fmaxf(best0, s[at]);
        best1 = fmaxf(best1, s[at + 2]);
      }
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) {
        best0 = fmaxf(best0, __shfl_xor_sync(FULL_WARP, best0, step));
        best1 = fmaxf(best1, __shfl_xor_sync(FULL_WARP, best1, step));
      }
      const u32 mine = maxima + buffer * 512 + group * 256 + head * 4, theirs = maxima + buffer * 512 + (group ^ 1) * 256 + head * 4;
      if (quarter == 0) {
        store_f32(mine, best0);
        store_f32(mine + 32, best1);
      }
      consumers_meet();
      best0 = fmaxf(best0, load_f32(theirs));
      best1 = fmaxf(best1, load_f32(theirs + 32));
      // the reference moves only when a maximum grew by 2^8: probabilities stay below 2^8, and most tiles rescale nothing
      const float new0 = (best0 - top0) * p.scale > 8.f ? best0 : top0, new1 = (best1 - top1) * p.scale > 8.f ? best1 : top1;
      const float shrink0 = power_of_two((top0 - new0) * p.scale), shrink1 = power_of_two((top1 - new1) * p.scale);
      top0 = new0;
      top1 = new1;
      sum0 *= shrink0;
      sum1 *= shrink1;
      const float shift0 = new0 * p.scale, shift1 = new1 * p.scale;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float a0 = power_of_two(fmaf(s[4 * i], p.scale, -shift0)), a1 = power_of_two(fmaf(s[4 * i + 1], p.scale, -shift0));
        const float b0 = power_of_two(fmaf(s[4 * i + 2], p.scale, -shift1)), b1 = power_of_two(fmaf(s[4 * i + 3], p.scale, -shift1));
        sum0 += a0 + a1;
        sum1 += b0 + b1;
        const u32 at = (((group * 4 + i) ^ (head & 7)) << 4) + quarter * 4;
        store_u32(probabilities + head * 128 + at, round_pair(a0, a1));
        store_u32(probabilities + (head + 8) * 128 + at, round_pair(b0, b1));
      }
      if (__any_sync(FULL_WARP, shrink0 != 1.f || shrink1 != 1.f)) {
#pragma unroll
        for (int i = 0; i < 128; i += 4) {
          o[i >> 6][i & 63] *= shrink0;
          o[i >> 6][(i & 63) + 1] *= shrink0;
          o[i >> 6][(i & 63) + 2] *= shrink1;
          o[i >> 6][(i & 63) + 3] *= shrink1;
        }
      }
      fence_async_units();
      consumers_meet();
      mma_fence();
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          mma_values(o[half], rows_along_k(probabilities + 32 * i),
                     columns_along_k(keys + group * 32768 + half * 16384 + i * 2048), 1);
        }
      }
      mma_commit();
      mma_wait_all();
      keep(o[0]);
      keep(o[1]);
      if (lane == 0) barrier_arrive(empty + 8 * buffer);
    }

#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
      sum0 += __shfl_xor_sync(FULL_WARP, sum0, step);
      sum1 += __shfl_xor_sync(FULL_WARP, sum1, step);
    }
    if (quarter == 0) {
      store_f32(sums + group * 256 + head * 4, sum0);
      store_f32(sums + group * 256 + head * 4 + 32, sum1);
    }
    consumers_meet();
    // the lower keys first in both groups, so that both divide by the same bits
    const float low0 = load_f32(sums + head * 4), low1 = load_f32(sums + head * 4 + 32);
    sum0 = low0 + load_f32(sums + 256 + head * 4);
    sum1 = low1 + load_f32(sums + 256 + head * 4 + 32);
    const float below0 = sum0 + power_of_two(sink0 - top0 * p.scale), below1 = sum1 + power_of_two(sink1 - top1 * p.scale);
    const float factor0 = sum0 == 0.f ? 0.f : kCarried / below0, factor1 = sum1 == 0.f ? 0.f : kCarried / below1;

    // 4x4 transposes inside quads leave each lane 16 contiguous bytes
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
    u16* to = p.out + (static_cast<u64>(row) * kHeads + head) * 512 + group * 256 + 8 * quarter;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u32 a[4], b[4];
#pragma unroll
      for (int z = 0; z < 4; z++) {
        const int e = 4 * (4 * i + z);
        const float* part = o[e >> 6] + (e & 63);
        a[z] = round_pair(part[0] * factor0, part[1] * factor0);
        b[z] = round_pair(part[2] * factor1, part[3] * factor1);
      }
      transpose(a);
      transpose(b);
      *reinterpret_cast<uint4*>(to + 32 * i) = make_uint4(a[0], a[1], a[2], a[3]);
      *reinterpret_cast<uint4*>(to + 8 * 512 + 32 * i) = make_uint4(b[0], b[1], b[2], b[3]);
    }
    if (group == 0 && quarter == 0) {
      p.lse[row * kHeads + head] = (top0 * p.scale + __log2f(sum0)) * kLn2;
      p.lse[row * kHeads + head + 8] = (top1 * p.scale + __log2f(sum1)) * kLn2;
    }
    consumers_meet();  // `sums` is written again by the next row
  }
}
