// Mixing logits of hyper-connections: twenty-four products of a row with float32 columns, over its root mean square.
//
// A block splits OWN neighbouring stretches of the matrix into three bfloat16 terms in shared memory, whose products tensor
// cores add in float32. Streams come by tensor map, 64 rows x 64 terms a stage; warps that multiply also square. Many rows: a
// block goes from tile to tile, and another launch adds the parts (`mix_finish.cu`), since the block that is behind would come
// last to every tile and finish all of them. Few rows: a block has one tile and one stretch, a cluster adds its blocks' sums
// up, and the warp that brings the last part of four rows finishes them.
//
// Macros: those of `mix_parts.cuh`; STAGES.

constexpr int kWidth = 3 * kColumns, kStretch = kTerms / kStretches, kStep = 64, kSteps = kStretch / kStep, kRows = 64;
constexpr int kMultipliers = 128, kShares = kStretches / OWN;          // threads; blocks of a tile
constexpr int kSums = kColumns / 2 + 1;                                // of a thread, the last of squares
constexpr u32 kStageBytes = kRows * 128, kMatrixBytes = kWidth * 128;  // of a step
// Places in shared memory.
constexpr u32 kStagesAt = 0, kMatrixAt = kStagesAt + STAGES * kStageBytes, kSumsAt = kMatrixAt + OWN * kSteps * kMatrixBytes;
constexpr u32 kSentBytes = 8 * kPitch * 4;  // sums of the rows that a block of a cluster adds up
constexpr u32 kSumsBytes = BLOCKS > 1 ? 2 * BLOCKS * kSentBytes : 4 * kQuadFloats * 4;
constexpr u32 kFull = kSumsAt + kSumsBytes, kEmpty = kFull + STAGES * 8, kSplit = kEmpty + STAGES * 8, kReceived = kSplit + 8;
static_assert(kSteps * kStep * kStretches == kTerms && kMatrixBytes % 1024 == 0 && OWN <= 2 && (BLOCKS == 1 || BLOCKS == 8));

// How many came before; what the warp wrote earlier is seen by whoever comes later.
__device__ __forceinline__ u32 arrive(u32* at) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
  return before;
}
// Blocks of a cluster say that their barriers are made, and wait for the others' before they send anything there; and that all
// has come that others sent, before which those must not end.
__device__ __forceinline__ void say_ready() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_until_ready() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// So many bytes to where another block of the cluster has what this block has at `to`, whose barrier there counts them.
__device__ __forceinline__ void send_to_block(u32 to, u32 block, u32 from, u32 bytes, u32 barrier) {
  asm volatile(
      "{\n.reg .b32 far, counts;\nmapa.shared::cluster.u32 far, %0, %1;\nmapa.shared::cluster.u32 counts, %4, %1;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [far], [%2], %3, [counts];\n}" ::"r"(to),
      "r"(block), "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ float4 load_own(u32 at) {
  u32 v[4];
  load_16(v, at);
  return {__uint_as_float(v[0]), __uint_as_float(v[1]), __uint_as_float(v[2]), __uint_as_float(v[3])};
}

// The block's stretches of the matrix in three terms, the largest first, in tiles of 64 along K with the swizzle of 128 bytes.
__device__ __forceinline__ void split_matrix(const Params& p, u32 memory) {
  constexpr int kChunks = OWN * kStretch / 8, kItems = kColumns * kChunks, kBatch = 8;  // chunks of eight run along a column
  const float* const from = p.matrix + blockIdx.x % kShares * (OWN * kStretch);
  for (int first = threadIdx.x; first < kItems; first += kBatch * kMultipliers) {
    float4 v[kBatch][2];
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int item = first + i * kMultipliers;
      if (item >= kItems) break;
      const float4* const chunk = reinterpret_cast<const float4*>(from + item / kChunks * kTerms + item % kChunks * 8);
      v[i][0] = __ldg(chunk);
      v[i][1] = __ldg(chunk + 1);
    }
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int item = first + i * kMultipliers, column = item / kChunks, place = item % kChunks;
      if (item >= kItems) break;
      const u32 to = memory + kMatrixAt + place / 8 * kMatrixBytes + column * 128 + (place % 8 ^ column % 8) * 16;
      float rest[8] = {v[i][0].x, v[i][0].y, v[i][0].z, v[i][0].w, v[i][1].x, v[i][1].y, v[i][1].z, v[i][1].w};
#pragma unroll
      for (int term = 0; term < 3; term++) {
        u32 pairs[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
          pairs[k] = round_pair(rest[2 * k], rest[2 * k + 1]);
          rest[2 * k] = __fsub_rn(rest[2 * k], low_value(pairs[k]));
          rest[2 * k + 1] = __fsub_rn(rest[2 * k + 1], high_value(pairs[k]));
        }
        store_16(to + term * kColumns * 128, pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
  fence_async_units();
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(memory + kSplit);
  barrier_wait(memory + kSplit, 0);
}

// This thread's half of a row in a stage, squared.
__device__ __forceinline__ void add_squares(float (&squares)[2], u32 stage) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 2;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 v[4];
    load_16(v, stage + row * 128 + ((lane % 2 * 4 + i) ^ row % 8) * 16);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      squares[0] = fmaf(low_value(v[k]), low_value(v[k]), squares[0]);
      squares[1] = fmaf(high_value(v[k]), high_value(v[k]), squares[1]);
    }
  }
}

// Sums of a tile over the block's stretches: products of rows lane / 4 and 8 below it of the warp's sixteen, as the MMA has
// them, and the square of row lane / 2. `position` counts stages since the block began.
__device__ __forceinline__ void sum_tile(float (&sums)[kSums], u32 memory, int position) {
  float kept[2][kSums];  // of the tree's levels
#pragma unroll
  for (int stretch = 0; stretch < OWN; stretch++) {
    float d[kWidth / 2], squares[2] = {};
#pragma unroll 1
    for (int step = 0; step < kSteps; step++, position++) {
      const u32 stage = position % STAGES, at = memory + kStagesAt + stage * kStageBytes;
      barrier_wait(memory + kFull + stage * 8, position / STAGES & 1);
      const u64 rows = rows_along_k(at), columns = rows_along_k(memory + kMatrixAt + (stretch * kSteps + step) * kMatrixBytes);
      mma_fence();
#pragma unroll
      for (int k = 0; k < kStep / 16; k++) multiply(d, rows + 2 * k, columns + 2 * k, step > 0 || k > 0);
      mma_commit();
      add_squares(squares, at);
      mma_wait_all();
      keep(d);
      keep(squares);
      __syncwarp();  // all lanes have read
      if (threadIdx.x % 32 == 0) barrier_arrive(memory + kEmpty + stage * 8);
    }
#pragma unroll
    for (int i = 0; i < kColumns / 2; i++) sums[i] = __fadd_rn(__fadd_rn(d[2 * (kColumns / 2) + i], d[kColumns / 2 + i]), d[i]);
    const float square = __fadd_rn(squares[0], squares[1]);
    sums[kSums - 1] = __fadd_rn(square, __shfl_xor_sync(0xFFFFFFFFu, square, 1));
#pragma unroll
    for (int level = 0; level < 2; level++) {
      if ((stretch >> level & 1) == 0) {
#pragma unroll
        for (int i = 0; i < kSums; i++) kept[level][i] = sums[i];
        break;
      }
#pragma unroll
      for (int i = 0; i < kSums; i++) sums[i] = __fadd_rn(kept[level][i], sums[i]);
    }
  }
}

// Rows 8 `half` to 8 `half` + 7 of the warp's sixteen, from where the MMA has them to rows of kPitch floats: of a thread whose
// row is among `count` from `first` on.
__device__ __forceinline__ void lay_out(u32 to, const float (&sums)[kSums], int half, int first, int count) {
  const int lane = threadIdx.x % 32, row = lane / 4 - first, own = lane / 2 - 8 * half - first;
  if (row >= 0 && row < count) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++) {
      store_8(to + (row * kPitch + n * 8 + lane % 4 * 2) * 4, __float_as_uint(sums[n * 4 + half * 2]), __float_as_uint(sums[n * 4 + half * 2 + 1]));
    }
  }
  if (lane % 2 == 0 && own >= 0 && own < count) store_floats(to + (own * kPitch + kColumns) * 4, sums[kSums - 1], 0.f, 0.f, 0.f);
}

// A part's sums of N times four rows, eight lanes a row, to memory.
template <int N>
__device__ __forceinline__ void store_part(const Params& p, const float4 (&sums)[N], int quad, int part) {
  const int lane = threadIdx.x % 32;
  float4* const to = reinterpret_cast<float4*>(p.parts) + (static_cast<u64>(quad) * kParts + part) * (kQuadFloats / 4) + lane / 8 * (kPitch / 4) + lane % 8;
#pragma unroll
  for (int i = 0; i < N; i++) {
    if ((quad + i) * 4 < p.rows && lane % 8 < kPitch / 4) to[i * kParts * (kQuadFloats / 4)] = sums[i];
  }
}

// Adds up what the blocks of a cluster sent of four rows; the warp that brings the last part of them finishes them.
__device__ __forceinline__ void add_up(const Params& p, u32 received, int quad, int part) {
  const int lane = threadIdx.x % 32;
  float4 v[BLOCKS], total[1];
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) v[i] = load_own(received + i * kSentBytes + ((threadIdx.x / 32 * 4 + lane / 8) * kPitch + min(lane % 8, 6) * 4) * 4);
  total[0] = add_as_tree(v);
  if (quad * 4 >= p.rows) return;
  store_part(p, total, quad, part);
  __syncwarp();
  const u32 before = lane == 0 ? arrive(p.arrivals + quad) : 0;
  if (__shfl_sync(0xFFFFFFFFu, before, 0) != kParts - 1) return;
  __syncwarp();  // what the first lane has seen of others' parts all lanes see
  finish(p, quad);
  if (lane == 0) p.arrivals[quad] = 0;
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(kMultipliers + 32) mix(const __grid_constant__ Params p) {
  extern __shared__ u8 raw[];
  const u32 memory = (shared_address(raw) + 1023) & ~1023u;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = blockIdx.x % kShares, first = blockIdx.x / kShares;
  const int tiles = (p.rows + kRows - 1) / kRows;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(memory + kFull + i * 8, 1);
      barrier_init(memory + kEmpty + i * 8, 4);
    }
    barrier_init(memory + kSplit, 4);
    barrier_init(memory + kReceived, 1);
    barrier_init_done();
    if (BLOCKS > 1) barrier_expect(memory + kReceived, BLOCKS * kSentBytes);
  }
  __syncthreads();
  if (BLOCKS > 1) say_ready();

  if (warp == 4) {  // streams
    int position = 0;
    for (int tile = first; lane == 0 && tile < tiles; tile += p.at_once) {
      for (int step = 0; step < OWN * kSteps; step++, position++) {
        const u32 stage = position % STAGES;
        if (position >= STAGES) barrier_wait(memory + kEmpty + stage * 8, (position / STAGES - 1) & 1);
        barrier_expect(memory + kFull + stage * 8, kStageBytes);
        copy_box(memory + kStagesAt + stage * kStageBytes, &p.streams, (share * OWN * kSteps + step) * kStep, tile * kRows, memory + kFull + stage * 8);
      }
    }
    return;
  }

  split_matrix(p, memory);
  float sums[kSums];
  if (BLOCKS > 1) {
    sum_tile(sums, memory, 0);
    const u32 own = memory + kSumsAt + warp * 2 * kSentBytes, received = memory + kSumsAt + BLOCKS * kSentBytes;
    lay_out(own, sums, 0, 0, 8);
    lay_out(own + kSentBytes, sums, 1, 0, 8);
    fence_async_units();
    __syncwarp();
    wait_until_ready();
    if (lane < 2) {  // eight rows of the tile to each block
      send_to_block(received + share % BLOCKS * kSentBytes, warp * 2 + lane, own + lane * kSentBytes, kSentBytes, memory + kReceived);
    }
    if (warp < 2) barrier_wait(memory + kReceived, 0);
    __syncwarp();
    say_ready();
    if (warp < 2) add_up(p, received, first * (kRows / 4) + share % BLOCKS * 2 + warp, share / BLOCKS);
    __syncwarp();
    wait_until_ready();  // what this block sent has come
    return;
  }
  const u32 own = memory + kSumsAt + warp * kQuadFloats * 4;
  int position = 0;
  for (int tile = first; tile < tiles; tile += p.at_once, position += OWN * kSteps) {
    sum_tile(sums, memory, position);
    float4 quads[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      lay_out(own, sums, i / 2, i % 2 * 4, 4);
      __syncwarp();
      quads[i] = load_own(own + (lane / 8 * kPitch + min(lane % 8, 6) * 4) * 4);
      __syncwarp();
    }
    store_part(p, quads, tile * (kRows / 4) + warp * 4, share);
  }
}
