// Products of tokens with quantised weights, for one matrix, for groups of columns, and for experts over their own rows.
//
// The weight is the first operand: 64 or 128 of its rows by TOKENS tokens are a tile, K is walked in blocks of 128 with
// one accumulator, always from the first to the last: a token's bits depend on nothing but its own values, whatever the
// tile. Weights come packed in the order of the MMA's registers (`packing.py`); a consumer reads codes with two or four
// 16-byte loads, decodes them to bfloat16 exactly, and multiplies from registers. Tokens are bfloat16 and come through a
// tensor map with swizzle. One warp feeds a ring of stages across tiles, one or two warpgroups multiply.
//
// A persistent block walks tiles; which expert a tile belongs to is found from `row_ends` in shared memory, so the host
// reads nothing. Tiles of an expert are equally long. A tile loads TOKENS rows wherever it ends, multiplies as many
// columns as the narrowest compiled product that holds its own rows, and stores those alone.
//
// A matrix of few rows with few tokens leaves most of the device idle. Where equal bits in any batch are not asked for, a
// cluster of blocks may sum a part of K each; the first of them adds up and stores.
//
// Few tokens of e4m3 codes may instead be multiplied as they are, with weights decoded to e4m3, which costs less: a product of
// 32 deep for each group of scales, added in float32 under both its factors. That form has bits of its own.
//
// Macros: BITS 4 (e2m1) or 8 (e4m3); TOKENS a multiple of 8; STAGES; GROUPS warpgroups that multiply; RESIDENT blocks of a
// multiprocessor; SHORTER narrower products, 8 columns apart; AHEAD 1 to read scales and codes a block ahead; WIDE 1 for
// float32 results, 0 for bfloat16; NARROW 1 for e2m1 weights in the order of e4m3 products (`packing_narrow.py`); EIGHT 1
// for e4m3 products, which need that order; SPLIT parts of K, whose blocks have one tile each.

constexpr u32 kDepth = 128, kConsumers = 128 * GROUPS;
constexpr u32 kCodeBytes = GROUPS * 64 * kDepth * BITS / 8, kScaleBytes = GROUPS * 256;
constexpr u32 kTokenBytes = TOKENS * kDepth * (EIGHT ? 1 : 2), kTokenScaleBytes = EIGHT ? TOKENS * 16 : 0;
constexpr u32 kBlockCodes = 128 * kDepth * BITS / 8, kBlockScales = 512;  // of the 128 rows that are packed together
constexpr int kQuads = BITS / 4;                                          // 16-byte loads a thread for 64 of the depth

struct Params {
  const u8* codes;
  const u8* scales;
  const int* row_ends;  // running ends of the experts' rows; null for one matrix
  void* out;
  const void* acc;            // added before the rounding; null for none
  const float* token_scales;  // of e4m3 products: [depth_blocks, token_scale_rows, 4] powers of two
  u64 token_scale_rows;
  u64 out_pitch, acc_pitch, acc_step;  // of acc also from column to column
  int experts, rows, row_tiles, out_tiles, depth_blocks;
  int sweep;        // output tiles between which row tiles change, a divisor of out_tiles
  int group_tiles;  // output tiles that share columns of the tokens; the next ones use the next columns
  int acc_halves;   // whether acc is bfloat16 instead of float32
};

struct Tile {
  int expert, out_tile, row, end;  // first row, and the end of its rows or, of one matrix, of all rows
};

// The first lane's value, which the compiler then keeps once for the warp; all lanes come here.
__device__ __forceinline__ int of_warp(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

// Calls a function with the narrowest of the compiled widths, N downwards, that so many tokens fit.
template <int N, class Function>
__device__ __forceinline__ void for_width(int used, Function function) {
  if constexpr (N > TOKENS - 8 * SHORTER) {
    if (used <= N - 8) return for_width<N - 8>(used, function);
  }
  function(Width<N>());
}

// A byte as the exponents of two equal bfloat16.
template <u32 Selector>
__device__ __forceinline__ u32 power_pair(u32 bytes) {
  return __byte_perm(bytes, 0, Selector) >> 1;
}

// The first operand of four MMAs: 64 of the depth, rows r and r + 8 of a thread, with their scales.
__device__ __forceinline__ void decode(u32 (&a)[16], const u32 (&words)[4 * kQuads], u32 scales) {
  const u32 low[2] = {power_pair<0x0404>(scales), power_pair<0x2424>(scales)};
  const u32 high[2] = {power_pair<0x1414>(scales), power_pair<0x3434>(scales)};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 s = low[i >> 1], t = high[i >> 1];
#if NARROW
    // A nibble's sign goes to bit 15 and its magnitude to bits 8..6, both by one product: 2^-126 times the code.
    const u32 v = words[i], upper = v >> 8;
    a[4 * i + 0] = multiply_pair(((v & 0x000F000Fu) * 4160u) & 0x81C081C0u, s);
    a[4 * i + 1] = multiply_pair(((v & 0x00F000F0u) * 260u) & 0x81C081C0u, t);
    a[4 * i + 2] = multiply_pair(((upper & 0x000F000Fu) * 4160u) & 0x81C081C0u, s);
    a[4 * i + 3] = multiply_pair(((upper & 0x00F000F0u) * 260u) & 0x81C081C0u, t);
#elif BITS == 4
    // Signs go to bit 15 and magnitudes to bits 8..6: 2^-126 times the code. Three codes only need a shift, as a product,
    // which another unit does than the masks; one product of three terms brings the bits of the fourth to their places.
    const u32 v = words[i], last = (__byte_perm(v, 0, 0x2301) & 0x006C006Cu) * (2u + 64u + 4096u);
    a[4 * i + 0] = multiply_pair(v & 0x81C081C0u, s);
    a[4 * i + 1] = multiply_pair((v * 8u) & 0x81C081C0u, t);
    a[4 * i + 2] = multiply_pair((v * 64u) & 0x81C081C0u, s);
    a[4 * i + 3] = multiply_pair(last & 0x81C081C0u, t);
#else
#pragma unroll
    for (int j = 0; j < 2; j++) {  // signs to bit 15, the rest to bits 10..4: 2^-120 times the code
      const u32 v = words[2 * i + j], second = ((v * 16u) & 0x80F080F0u) | ((v >> 4) & 0x07000700u);
      a[4 * i + 2 * j] = multiply_pair(v & 0x87F087F0u, s);
      a[4 * i + 2 * j + 1] = multiply_pair(second, t);
    }
#endif
  }
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(kConsumers + 32, RESIDENT)
    products(const __grid_constant__ TensorMap token_map, const __grid_constant__ Params p) {
  extern __shared__ u8 raw[];
  const u32 tokens = (shared_address(raw) + 1023) & ~1023u, codes = tokens + STAGES * kTokenBytes;
  const u32 scales = codes + STAGES * kCodeBytes, token_scales = scales + STAGES * kScaleBytes;
  const u32 full = token_scales + STAGES * kTokenScaleBytes, empty = full + 8 * STAGES;
  int* const tile_ends = reinterpret_cast<int*>(raw + (empty + 8 * STAGES - shared_address(raw)));
  int* const row_ends = tile_ends + p.experts;
  // Known to be one number for a warp, so that what follows from it is computed once a warp instead of once a thread.
  const int thread = threadIdx.x, warp = of_warp(thread >> 5), lane = thread & 31;
  if (thread == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * GROUPS);
    }
    barrier_init_done();
  }
  if (p.row_ends != nullptr && warp == 0) {  // running sums of the experts' row tiles
    int before = 0;
    for (int first = 0; first < p.experts; first += 32) {
      const int e = first + lane;
      const bool there = e < p.experts;
      const int end = there ? p.row_ends[e] : 0, start = there && e > 0 ? p.row_ends[e - 1] : 0;
      int sum = there ? (end - start + TOKENS - 1) / TOKENS : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane >= step) sum += other;
      }
      sum += before;
      before = __shfl_sync(0xFFFFFFFFu, sum, 31);
      if (there) {
        tile_ends[e] = sum;
        row_ends[e] = end;
      }
    }
  }
  __syncthreads();
  const int row_tiles = of_warp(p.row_ends != nullptr ? tile_ends[p.experts - 1] : p.row_tiles);
  const int num_tiles = row_tiles * p.out_tiles;
  const int part = blockIdx.x % SPLIT, first_number = blockIdx.x / SPLIT, numbers = gridDim.x / SPLIT;
  auto tile_at = [&](int number) -> Tile {
    const int span = max(p.sweep * row_tiles, 1), sweep = number / span, within = number - sweep * span;
    const int row_tile = within / p.sweep, out_tile = sweep * p.sweep + within - row_tile * p.sweep;
    if (p.row_ends == nullptr) return Tile{0, out_tile, row_tile * TOKENS, p.rows};
    int low = 0, high = p.experts - 1;  // the first expert whose tiles end behind this one
    while (low < high) {
      const int middle = (low + high) >> 1;
      if (tile_ends[middle] > row_tile) high = middle;
      else low = middle + 1;
    }
    const int first_tile = low > 0 ? tile_ends[low - 1] : 0, first_row = low > 0 ? row_ends[low - 1] : 0;
    const int end = row_ends[low], tiles = max(tile_ends[low] - first_tile, 1), each = (end - first_row + tiles - 1) / tiles;
    const int row = first_row + (row_tile - first_tile) * each;
    return Tile{low, out_tile, row, min(row + each, end)};
  };

  const int first_block = part * p.depth_blocks / SPLIT, end_block = (part + 1) * p.depth_blocks / SPLIT;
  u32 stage = 0, phase = 0;
  auto advance = [&] {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  };

  if (warp == 4 * GROUPS) {  // the producer
    if (lane != 0) return;
    for (int number = first_number; number < num_tiles; number += numbers) {
      const Tile tile = tile_at(number);
      const int half = GROUPS == 1 ? tile.out_tile & 1 : 0, packed_row = GROUPS == 1 ? tile.out_tile >> 1 : tile.out_tile;
      const u64 block = (static_cast<u64>(tile.expert) * (p.out_tiles * GROUPS / 2) + packed_row) * p.depth_blocks + first_block;
      const u8* from = p.codes + block * kBlockCodes + half * kCodeBytes;
      const u8* from_scales = p.scales + block * kBlockScales + half * kScaleBytes;
      int column = (tile.out_tile / p.group_tiles * p.depth_blocks + first_block) * static_cast<int>(kDepth);  // of 16 bits
      for (int k = first_block; k < end_block; k++, column += EIGHT ? kDepth / 2 : kDepth) {
        const u32 barrier = full + 8 * stage, to = tokens + stage * kTokenBytes;
        barrier_wait(empty + 8 * stage, phase ^ 1);
        barrier_expect(barrier, kCodeBytes + kScaleBytes + kTokenBytes + kTokenScaleBytes);
        copy_bytes(codes + stage * kCodeBytes, from, kCodeBytes, barrier);
        copy_bytes(scales + stage * kScaleBytes, from_scales, kScaleBytes, barrier);
        copy_box(to, &token_map, column, tile.row, barrier);
#if EIGHT
        const float* of_tokens = p.token_scales + (k * p.token_scale_rows + tile.row) * 4;
        copy_bytes(token_scales + stage * kTokenScaleBytes, of_tokens, kTokenScaleBytes, barrier);
#else
        copy_box(to + kTokenBytes / 2, &token_map, column + 64, tile.row, barrier);
#endif
        from += kBlockCodes;
        from_scales += kBlockScales;
        advance();
      }
    }
    return;
  }

  const int group = warp >> 2, quarter = lane & 3;
  const u32 my_codes = codes + group * (kBlockCodes / 2) + (thread & 127) * 16;
  const u32 my_scales = scales + group * 256 + (warp & 3) * 64 + (lane >> 2) * 8;
  const u64 token_rows = rows_along_k(tokens);
  float d[TOKENS / 2];
#if EIGHT
  float groups[4][TOKENS / 2];  // products of one group of scales each
  u32 a[16];
#else
  u32 a[2][16];  // while one is multiplied, the other is decoded
#endif
  Tile tile = tile_at(first_number), next;
  for (int number = first_number; number < num_tiles; number += numbers, tile = next) {
#if EIGHT
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) d[i] = groups[0][i] = groups[1][i] = groups[2][i] = groups[3][i] = 0.f;
    for (int k = 0; k < p.depth_blocks; k++) {
      barrier_wait(full + 8 * stage, phase);
      // Scales are read before the codes, whose use below shows that every read of the stage has landed before its release.
      u32 bytes[2], words[2][4], of_tokens[TOKENS / 4][4];
      load_8(bytes, my_scales + stage * kScaleBytes);
#pragma unroll
      for (int j = 0; j < TOKENS / 4; j++) {
        load_16(of_tokens[j], token_scales + stage * kTokenScaleBytes + ((j >> 1) * 8 + 2 * quarter + (j & 1)) * 16);
      }
      load_16(words[0], my_codes + stage * kCodeBytes);
      load_16(words[1], my_codes + stage * kCodeBytes + 2048);
#pragma unroll
      for (int i = 0; i < 8; i++) {  // a nibble to bits 7 and 4..2 of a byte: 2^-6 times the code
        const u32 v = words[i >> 2][i & 3];
        a[2 * i] = ((v << 4) & 0x80808080u) | ((v << 2) & 0x1C1C1C1Cu);
        a[2 * i + 1] = (v & 0x80808080u) | ((v >> 2) & 0x1C1C1C1Cu);
      }
      mma_fence();
#pragma unroll
      for (int g = 0; g < 4; g++) {
        multiply(Width<TOKENS>(), groups[g], a + 4 * g, token_rows + stage * (kTokenBytes / 16) + 2 * g, 0);
      }
      mma_commit();
      mma_wait_all();
#pragma unroll
      for (int g = 0; g < 4; g++) keep(groups[g]);
      if (lane == 0) barrier_arrive(empty + 8 * stage);
      advance();
#pragma unroll
      for (int g = 0; g < 4; g++) {
        // packed scales are 126 above the exponent; 6 of it stay, since codes are 2^-6 times theirs
        const u32 v = bytes[g >> 1] - 0x78787878u;
        const float low = __uint_as_float((g & 1 ? v << 7 : v << 23) & 0x7F800000u);
        const float high = __uint_as_float((g & 1 ? v >> 1 : v << 15) & 0x7F800000u);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
          const float even = __uint_as_float(of_tokens[2 * j][g]), odd = __uint_as_float(of_tokens[2 * j + 1][g]);
          d[4 * j] = fmaf(groups[g][4 * j], low * even, d[4 * j]);
          d[4 * j + 1] = fmaf(groups[g][4 * j + 1], low * odd, d[4 * j + 1]);
          d[4 * j + 2] = fmaf(groups[g][4 * j + 2], high * even, d[4 * j + 2]);
          d[4 * j + 3] = fmaf(groups[g][4 * j + 3], high * odd, d[4 * j + 3]);
        }
      }
    }
    next = tile_at(number + numbers);
#else
    const int used = of_warp(tile.end - tile.row);
    u32 before = 0;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) d[i] = 0.f;
    u32 bytes[2], words[2][4 * kQuads];
    auto load_words = [&](int c) {
#pragma unroll
      for (int i = 0; i < kQuads; i++) {
        load_16(*reinterpret_cast<u32(*)[4]>(words[c] + 4 * i), my_codes + stage * kCodeBytes + (c * kQuads + i) * 2048);
      }
    };
    auto multiply_half = [&](int c, u32 of) {
      const u64 rows = token_rows + of * (kTokenBytes / 16) + c * (kTokenBytes / 32);
      decode(a[c], words[c], bytes[c]);
      mma_fence();
      for_width<TOKENS>(used, [&](auto width) {
#pragma unroll
        for (int i = 0; i < 4; i++) multiply(width, d, a[c] + 4 * i, rows + 2 * i, 1);
        mma_commit();  // here, since behind the branches it would be a group of its own
      });
    };
    // What is read of a stage is used before its release, scales being read first: a read still in flight at the release
    // would race with the next copy.
#if AHEAD
    // Scales and codes are read while those before are multiplied. The loop goes from the second half of a block to the
    // first of the next, for the wait to stand where no product is started: the compiler would finish each one otherwise.
    barrier_wait(full + 8 * stage, phase);
    load_8(bytes, my_scales + stage * kScaleBytes);
    load_words(0);
    load_words(1);
    multiply_half(0, stage);
    for (int k = first_block + 1; k < end_block; k++) {
      const u32 last = stage;
      u32 later[2];
      advance();
      barrier_wait(full + 8 * stage, phase);
      load_8(later, my_scales + stage * kScaleBytes);
      load_words(0);
      mma_wait_all_but_newest();  // a[1] is free, and so is the stage before the last
      if (k > first_block + 1 && lane == 0) barrier_arrive(empty + 8 * before);
      multiply_half(1, last);
      load_words(1);
      bytes[0] = later[0];
      bytes[1] = later[1];
      mma_wait_all_but_newest();
      multiply_half(0, stage);
      before = last;
    }
    mma_wait_all_but_newest();
    if (end_block > first_block + 1 && lane == 0) barrier_arrive(empty + 8 * before);
    multiply_half(1, stage);
    before = stage;
    advance();
#else
    for (int k = first_block; k < end_block; k++) {
      barrier_wait(full + 8 * stage, phase);
      load_8(bytes, my_scales + stage * kScaleBytes);
      if (BITS == 4) {
        load_words(0);
        load_words(1);
      }
#pragma unroll
      for (int c = 0; c < 2; c++) {
        if (BITS == 8) load_words(c);  // as late as that, since they take twice the registers
        mma_wait_all_but_newest();     // a[c] is free; at c = 1 so is the stage before
        if (c == 1 && k > first_block && lane == 0) barrier_arrive(empty + 8 * before);
        multiply_half(c, stage);
      }
      before = stage;
      advance();
    }
#endif
    next = tile_at(number + numbers);  // while the last products are under way
    mma_wait_all();
    keep(d);
    if (lane == 0) barrier_arrive(empty + 8 * before);
#if SPLIT > 1
    // Sums wait where tokens were, of which no copy is under way any more, as this was the only tile, and which no warp's
    // products read any more.
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
    const u32 exchange = tokens + thread * 16;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++) store_floats(exchange + i * 2048, d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
    blocks_meet();
#pragma unroll 1
    for (int other = 1; part == 0 && other < SPLIT; other++) {
      const u32 theirs = address_in_block(exchange, other);
#pragma unroll
      for (int i = 0; i < TOKENS / 8; i++) {
        u32 sums[4];
        load_far_16(sums, theirs + i * 2048);
#pragma unroll
        for (int z = 0; z < 4; z++) d[4 * i + z] += __uint_as_float(sums[z]);
      }
    }
    blocks_meet();  // until then the first block reads from here
    if (part != 0) return;
#endif
#endif

    // Row r of a thread is row 4 (r / 2) + r % 2 of its warp's sixteen, and row r + 8 two further on (`packing.py`).
    const int row0 = (tile.out_tile * GROUPS + group) * 64 + (warp & 3) * 16, mine = row0 + 4 * (lane >> 3) + ((lane >> 2) & 1);
    if (p.acc != nullptr) {
      u64 from = (tile.row + 2 * quarter) * p.acc_pitch + mine * p.acc_step;
#pragma unroll
      for (int j = 0; j < TOKENS / 8; j++, from += 8 * p.acc_pitch) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u64 at = from + (i & 1) * p.acc_pitch + (i >> 1) * 2 * p.acc_step;
          if (tile.row + 8 * j + 2 * quarter + (i & 1) >= tile.end) continue;
          if (p.acc_halves) d[4 * j + i] += __uint_as_float(static_cast<const u16*>(p.acc)[at] << 16);
          else d[4 * j + i] += static_cast<const float*>(p.acc)[at];
        }
      }
    }
#if WIDE
    float* to = static_cast<float*>(p.out) + (tile.row + 2 * quarter) * p.out_pitch + mine;
    const int left = tile.end - tile.row - 2 * quarter;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++, to += 8 * p.out_pitch) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (8 * j + (i & 1) < left) to[(i & 1) * p.out_pitch + (i >> 1) * 2] = d[4 * j + i];
      }
    }
#else
    u16* to = static_cast<u16*>(p.out) + (tile.row + (lane >> 2)) * p.out_pitch + row0 + 4 * quarter;
    const int left = tile.end - tile.row - (lane >> 2);
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++, to += 8 * p.out_pitch) {
      const u32 low = transpose_pairs(round_pair(d[4 * j], d[4 * j + 1]));
      const u32 high = transpose_pairs(round_pair(d[4 * j + 2], d[4 * j + 3]));
      if (8 * j < left) *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
    }
#endif
  }
}
