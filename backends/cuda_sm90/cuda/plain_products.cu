// Products of bfloat16 tokens with a small bfloat16 matrix: the router, the compressor, what index scores are made of.
//
// The weight is the first operand, 64 or 128 of its rows by TOKENS tokens are a tile; both operands come through tensor maps
// with swizzle, 128 of K a stage. So small a matrix has few tiles: K is split into parts that depend on the matrix only, each
// summed from its own zero and added up from the first to the last, by a cluster of one block a part (few tokens; the first
// block adds and stores) or by one block alone (many): a token's bits do not depend on how many come with it.
//
// Macros: TOKENS a multiple of 8; STAGES; GROUPS warpgroups that multiply, 64 weight rows each; RESIDENT blocks of a
// multiprocessor; WIDE 1 for float32 results, 0 for bfloat16; SPLIT parts of K; CLUSTER 1 for a block each.

constexpr u32 kDepth = 128, kConsumers = 128 * GROUPS;
constexpr u32 kWeightBytes = GROUPS * 64 * kDepth * 2, kTokenBytes = TOKENS * kDepth * 2;
constexpr int kBlocksOfTile = CLUSTER ? SPLIT : 1;

struct Params {
  void* out;
  u64 out_pitch;
  int rows, out_tiles, num_tiles, depth_blocks;
  float factor;  // of the results
};

extern "C" __global__ void __cluster_dims__(kBlocksOfTile, 1, 1) __launch_bounds__(kConsumers + 32, RESIDENT)
    plain_products(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap token_map,
                   const __grid_constant__ Params p) {
  extern __shared__ u8 raw[];
  const u32 tokens = (shared_address(raw) + 1023) & ~1023u, weights = tokens + STAGES * kTokenBytes;
  const u32 full = weights + STAGES * kWeightBytes, empty = full + 8 * STAGES;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  if (thread == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * GROUPS);
    }
    barrier_init_done();
  }
  __syncthreads();
  const int part = blockIdx.x % kBlocksOfTile, first_number = blockIdx.x / kBlocksOfTile, numbers = gridDim.x / kBlocksOfTile;
  auto start_of = [&](int i) { return i * p.depth_blocks / SPLIT; };
  const int first_block = CLUSTER ? start_of(part) : 0, end_block = CLUSTER ? start_of(part + 1) : p.depth_blocks;
  u32 stage = 0, phase = 0;
  auto advance = [&] {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  };

  if (warp == 4 * GROUPS) {  // the producer
    if (lane != 0) return;
    for (int number = first_number; number < p.num_tiles; number += numbers) {
      const int out_row = number % p.out_tiles * 64 * GROUPS, token = number / p.out_tiles * TOKENS;
      for (int k = first_block; k < end_block; k++) {
        const u32 barrier = full + 8 * stage;
        barrier_wait(empty + 8 * stage, phase ^ 1);
        barrier_expect(barrier, kWeightBytes + kTokenBytes);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int column = k * static_cast<int>(kDepth) + 64 * half;
          copy_box(weights + stage * kWeightBytes + half * (kWeightBytes / 2), &weight_map, column, out_row, barrier);
          copy_box(tokens + stage * kTokenBytes + half * (kTokenBytes / 2), &token_map, column, token, barrier);
        }
        advance();
      }
    }
    return;
  }

  const int group = warp >> 2, quarter = lane & 3;
  const u64 weight_rows = rows_along_k(weights + group * 8192), token_rows = rows_along_k(tokens);
  constexpr bool kAddsParts = SPLIT > 1 && !CLUSTER;
  float d[TOKENS / 2], total[kAddsParts ? TOKENS / 2 : 1];  // the total is on the stack, since it is used once a part
  for (int number = first_number; number < p.num_tiles; number += numbers) {
    int summed = 0, opens = first_block, closes = kAddsParts ? start_of(1) : end_block;  // parts, and the bounds of the next
    u32 before = 0;
    for (int k = first_block; k < end_block; k++) {
      barrier_wait(full + 8 * stage, phase);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const u64 a = weight_rows + stage * (kWeightBytes / 16) + (i >> 2) * (kWeightBytes / 32) + (i & 3) * 2;
        const u64 b = token_rows + stage * (kTokenBytes / 16) + (i >> 2) * (kTokenBytes / 32) + (i & 3) * 2;
        multiply(d, a, b, k != opens || i != 0);
      }
      mma_commit();
      mma_wait_all_but_newest();
      if (k > first_block && lane == 0) barrier_arrive(empty + 8 * before);
      before = stage;
      advance();
      if (kAddsParts && k + 1 == closes) {
        mma_wait_all();
        keep(d);
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) total[kAddsParts ? i : 0] = summed == 0 ? d[i] : total[kAddsParts ? i : 0] + d[i];
        opens = closes;
        closes = start_of(++summed + 1);
      }
    }
    mma_wait_all();
    keep(d);
    if (lane == 0) barrier_arrive(empty + 8 * before);
    if (kAddsParts) {
#pragma unroll
      for (int i = 0; i < TOKENS / 2; i++) d[i] = total[kAddsParts ? i : 0];
    }
#if CLUSTER
    // Sums wait where tokens were, of which no copy is under way any more, as this was the only tile, and which no warp's
    // products read any more.
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
    const u32 exchange = tokens + thread * 16;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++) store_floats(exchange + i * 2048, d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
    blocks_meet();
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

    const int row0 = (number % p.out_tiles * GROUPS + group) * 64 + (warp & 3) * 16, first_token = number / p.out_tiles * TOKENS;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        d[4 * j + i] *= p.factor;
        const int at = first_token + 8 * j + 2 * quarter + (i & 1), row = row0 + (lane >> 2) + (i >> 1) * 8;
        if (WIDE && at < p.rows) static_cast<float*>(p.out)[at * p.out_pitch + row] = d[4 * j + i];
      }
      if (!WIDE) {
        const u32 low = transpose_pairs(round_pair(d[4 * j], d[4 * j + 1])), high = transpose_pairs(round_pair(d[4 * j + 2], d[4 * j + 3]));
        const int at = first_token + 8 * j + (lane >> 2);
        u16* to = static_cast<u16*>(p.out) + at * p.out_pitch + row0 + 2 * quarter;
        if (at < p.rows) {
          *reinterpret_cast<u32*>(to) = low;
          *reinterpret_cast<u32*>(to + 8) = high;
        }
      }
    }
  }
}
