// Sparse attention for few rows where equal bits in any batch are not asked for: a block works on a part of a row, two tiles of
// 64 keys of one list, and the blocks of a row, a cluster, merge what they find.
//
// All warps decode the part's records. Two warpgroups score a tile each, and blocks tell each other their maxima: probabilities
// are rounded against the row's own maximum as the contract's are, since those rounded against others can be further from them
// than its tolerance where few keys cancel. Then each warpgroup multiplies the probabilities of both tiles with 128 of the 512
// channels, and the sums are added up over blocks.
//
// A block's sums wait in its shared memory as float16, times a power of two for each head and 128 channels that brings the largest
// to 2^14: bfloat16's rounding shows where parts cancel, and float32 would double the bytes between blocks.
//
// Macros: PARTS, the parts of a row, at most eight; those of `attention.cuh`.

constexpr u32 kProbabilityBytes = 8192;

// One tile's pieces of a thread, as they were read.
struct Loaded {
  Piece pieces[4];
  bool there;
};

// Two powers of two whose product is 1: the first brings sums to at most 2^15 in magnitude, the second gives them back.
struct Powers {
  float there, back;
  // `largest`: the bits of the largest finite magnitude, one place up and with 1 added to the exponent.
  __device__ __forceinline__ explicit Powers(u32 largest) {
    const u32 bits = (max(largest >> 24, 16u) - 15) << 23;  // 16: both are normal numbers
    back = __uint_as_float(bits);
    there = __uint_as_float((254u << 23) - bits);
  }
};

__device__ __forceinline__ u32 round_half_pair(float low, float high) {  // to float16
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ void widen_half_pair(float& low, float& high, u32 pair) {
  asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(pair));
}

extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(512, 1)
    sparse_attn_parts(const __grid_constant__ TensorMap query_map, const __grid_constant__ Params p) {
  extern __shared__ u8 raw[];
  const u32 query = (shared_address(raw) + 1023) & ~1023u, tiles = query + kQueryBytes, results = tiles;
  const u32 probabilities = tiles + 2 * kTileBytes, maxima = probabilities + 2 * kProbabilityBytes;
  const u32 sums = maxima + 2 * PARTS * 256, backs = sums + 2 * 256, tops = backs + 4 * 256, masks = tops + 256;
  const u32 query_full = masks + 512;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, group = warp >> 2;
  const int row = blockIdx.x / PARTS, part = blockIdx.x % PARTS, of_window = (tiles_of_window(p) + 1) / 2;
  const bool is_window = part < of_window;
  const int first_tile = 2 * (is_window ? part : part - of_window);  // of its list; a second one may lie behind the list
  block_is_there();
  if (thread == 480) {
    barrier_init(query_full, 1);
    barrier_init_done();
    load_query(query, &query_map, row, query_full);
  }

  // Half of the warps decode the lower channels of a key, half the upper; lanes as in `sparse_attn.cu`.
  const int key8 = lane & 7, first_piece = lane >> 3, key = (warp & 7) * 8 + key8, half = warp >> 3;
  Loaded loaded[2] = {};
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
    const int column = (first_tile + tile) * kKeys + key;
    int slot = -1;
    if (is_window && column < p.window_columns) slot = p.window_slots[row * p.window_pitch + column];
    if (!is_window && column < p.kv_columns) slot = p.kv_slots[row * p.kv_pitch + column];
    Loaded& to = loaded[tile];
    to.there = slot >= 0;
    if (!to.there) continue;
    const u8* record = is_window ? window_record(p, slot) : kv_record(p, slot);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (is_window || !kKvFp4) to.pieces[i] = load_e4m3(record, half * 16 + first_piece + 4 * i);
      else if (i < 2) to.pieces[i] = load_e2m1(record, half * 8 + first_piece + 4 * i);
    }
  }
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
    const Loaded& from = loaded[tile];
    const u32 to = tiles + tile * kTileBytes + key * 128;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (is_window || !kKvFp4) store_e4m3(to, key8, half * 16 + first_piece + 4 * i, from.pieces[i], from.there);
      else if (i < 2) store_e2m1(to, key8, half * 8 + first_piece + 4 * i, from.pieces[i], from.there);
    }
    if (half == 0 && first_piece == 0) store_f32(masks + tile * 256 + key * 4, from.there ? 0.f : kMasked);
  }
  fence_async_units();
  __syncthreads();
  wait_for_blocks();

  const int quarter = lane & 3, head = (warp & 3) * 16 + (lane >> 2);  // and head + 8
  float s[32];
  if (group < 2) {  // a tile each
    const u64 query_rows = rows_along_k(query), key_rows = rows_along_k(tiles + group * kTileBytes);
    barrier_wait(query_full, 0);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const u64 at = (i >> 2) * (kPart / 16) + (i & 3) * 2;
      mma_scores(s, query_rows + at, key_rows + at, i != 0);
    }
    mma_commit();
    mma_wait_all();
    keep(s);
    float best0, best1;
    mask_and_find_maxima(s, masks + group * 256 + quarter * 8, best0, best1);
    if (quarter == 0) {
#pragma unroll
      for (int i = 0; i < PARTS; i++) {
        const u32 there = address_in_block(maxima + (2 * part + group) * 256 + head * 4, i);
        store_far_f32(there, best0);
        store_far_f32(there + 32, best1);
      }
    }
  }
  blocks_meet();  // all maxima are here

  if (group < 2) {
    float top0 = kNothing, top1 = kNothing, lower0, lower1, upper0, upper1;
#pragma unroll
    for (int i = 0; i < 2 * PARTS; i++) {
      top0 = fmaxf(top0, load_f32(maxima + i * 256 + head * 4));
      top1 = fmaxf(top1, load_f32(maxima + i * 256 + head * 4 + 32));
    }
    const u32 line = probabilities + group * kProbabilityBytes + ((warp & 3) * 16 + (lane & 15)) * 128;
    auto put = [&](const u32(&pairs)[8], int first) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const u32 at = line + (((first + i + (lane >> 4)) ^ (lane & 7)) << 4);
        store_matrices(at, pairs[2 * i], pairs[2 * i + 1], pairs[2 * i + 2], pairs[2 * i + 3]);
      }
    };
    u32 pairs[8];
    find_probabilities(pairs, lower0, lower1, s, p.scale, top0, top1);
    put(pairs, 0);
    find_probabilities(pairs, upper0, upper1, s + 16, p.scale, top0, top1);
    put(pairs, 4);
    const float sum0 = sum_of_quad(lower0 + upper0), sum1 = sum_of_quad(lower1 + upper1);
    if (quarter == 0) {
      store_f32(sums + group * 256 + head * 4, sum0);
      store_f32(sums + group * 256 + head * 4 + 32, sum1);
      if (group == 0) {
        store_f32(tops + head * 4, top0);
        store_f32(tops + head * 4 + 32, top1);
      }
    }
    fence_async_units();
  }
  __syncthreads();

  float o[64];
  mma_fence();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    mma_values(o, rows_along_k(probabilities + (i >> 2) * kProbabilityBytes + (i & 3) * 32),
               columns_along_k(tiles + (i >> 2) * kTileBytes + group * 2 * kPart + (i & 3) * 2048), i != 0);
  }
  mma_commit();
  mma_wait_all();
  keep(o);
  u32 largest0 = 0, largest1 = 0;  // as `Powers` takes them: infinity and NaN become less than any number
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    auto bits = [&](int k) { return __float_as_uint(o[i + k]) * 2 + 0x01000000u; };
    largest0 = max(largest0, max(bits(0), bits(1)));
    largest1 = max(largest1, max(bits(2), bits(3)));
  }
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    largest0 = max(largest0, __shfl_xor_sync(FULL_WARP, largest0, step));
    largest1 = max(largest1, __shfl_xor_sync(FULL_WARP, largest1, step));
  }
  const Powers powers0(largest0), powers1(largest1);
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");  // all warps of the group are done with its values
  // to where values were that only this group needed
  store_tile(results + group * 2 * kPart, o, powers0.there, powers1.there, round_half_pair);
  if (quarter == 0) {
    store_f32(backs + group * 256 + head * 4, powers0.back);
    store_f32(backs + group * 256 + head * 4 + 32, powers1.back);
  }
  blocks_meet();  // all sums are there

#pragma unroll 1
  for (int i = part * 16 + warp; i < kHeads * 2; i += PARTS * 16) {  // a warp adds up 256 channels of a head, eight a lane
    const int of_head = i >> 1, channel = (i & 1) * 256 + lane * 8;
    // eight lanes know of a part each
    float sum = 0.f, back = 0.f;
    if ((lane & 7) < PARTS) {
      const u32 there = address_in_block(sums + of_head * 4, lane & 7);
      sum = load_far_f32(there) + load_far_f32(there + 256);
      back = load_far_f32(there + (backs - sums) + (channel >> 7) * 256);
    }
    u32 shares[PARTS][4];
    const u32 mine = results + (channel >> 6) * kPart + of_head * 128 + ((((channel >> 3) & 7) ^ (of_head & 7)) << 4);
#pragma unroll
    for (int k = 0; k < PARTS; k++) load_far_16(shares[k], address_in_block(mine, (part + k) % PARTS));  // not all from one
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    float total[8] = {};
#pragma unroll
    for (int k = 0; k < PARTS; k++) {
      const float share = __shfl_sync(FULL_WARP, back, (part + k) % PARTS, 16);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float low, high;
        widen_half_pair(low, high, shares[k][c]);
        total[2 * c] = fmaf(share, low, total[2 * c]);
        total[2 * c + 1] = fmaf(share, high, total[2 * c + 1]);
      }
    }
    const float top = load_f32(tops + of_head * 4), factor = last_factor(sum, top, p.sink[of_head], p.scale);
    *reinterpret_cast<uint4*>(p.out + (static_cast<u64>(row) * kHeads + of_head) * kChannels + channel) =
        make_uint4(round_pair(total[0] * factor, total[1] * factor), round_pair(total[2] * factor, total[3] * factor),
                   round_pair(total[4] * factor, total[5] * factor), round_pair(total[6] * factor, total[7] * factor));
    if ((i & 1) == 0 && lane == 0) p.lse[row * kHeads + of_head] = lse_of(sum, top, p.scale);
  }
  // until then others read from here; results need no fence
  blocks_leave();
}
