// Index scores `sum_h weight_h * relu(q_h . k)` of quantised heads and keys, with the model's bfloat16 rounding points.
//
// A tile is 64 keys, 16 a warp. Keys are the first operand and stay in registers: a lane decodes 32 channels of two keys,
// which are one group of the format and one 16-byte load, and the order of channels within the product follows from that;
// heads lie in shared memory in the same order. A row's 32 heads are one product of 64 x 32 x 128, or half of one for two
// rows, which the tensor cores do in the same time; its rounded, weighted results are then summed over heads by another
// one with ones. Every row is computed alone, whatever rows share the decoded keys, and every key alone, so a score has
// the same bits wherever its key was found.
//
// A block takes ROWS rows and `chunk` columns. Rows of one sequence, neighbours among them, share decoded keys. Where keys
// are is found beforehand for runs of GRAIN keys that lie together; what no row sees is read from somewhere and not used.
//
// Macros: MODE 0 columns are positions of the row's sequence, 1 they are of candidate blocks of CANDIDATE positions, 2 they
// follow the row's first key; RECORDS of a page (modes 0 and 1); GRAIN 8, or 1 where fewer keys lie together; ROWS; STAGES
// of the ring of keys; RESIDENT blocks.

constexpr int kThreads = 128, kTile = 64, kHeads = 32, kChunk = 1024, kRuns = kChunk / GRAIN;
constexpr u32 kQueryBytes = kHeads * 256, kStageBytes = kThreads * 2 * (16 + 4);
constexpr u32 kRunsAt = ROWS * kQueryBytes, kCountsAt = kRunsAt + kRuns * 16, kWeightsAt = kCountsAt + kRuns;
constexpr u32 kRingAt = kWeightsAt + ROWS * kHeads * 2;

struct Params {
  const u8* q;         // [rows, 32, 64] codes
  const u8* q_scales;  // [rows, 32, 4]
  const u8* keys;      // pages, or [keys, 64] codes
  const u8* scales;    // [keys, 4], mode 2 only
  const u16* weights;  // [rows, 32] bfloat16
  const int* ends;     // positions that a row sees; in mode 2 one past its last key
  const int* starts;   // mode 2 only
  const int* blocks;   // [rows, num_blocks], mode 1 only
  const int* block_table;
  const int* row_to_seq;
  float* out;  // [rows, columns]
  u64 page_bytes, weights_pitch, table_pitch;
  int rows, columns, num_blocks, table_columns, chunk;
};

__device__ __forceinline__ void copy_4_or_zeros(u32 to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory");
}
__device__ __forceinline__ void fetch_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Newest>
__device__ __forceinline__ void fetch_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Newest) : "memory");
}
__device__ __forceinline__ u32 load_u32(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
// Rounds both to bfloat16, negative ones to zero; NaN stays.
__device__ __forceinline__ u32 round_positive_pair(float low, float high) {
  u32 r;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Adds to sums of rows r and r + 8 (of lane 4 r + c) sixteen columns each of a 16 x 16 operand.
__device__ __forceinline__ void add_columns(float (&sum)[4], u32 a, u32 b, u32 c, u32 d) {
  constexpr u32 ones = 0x3F803F80u;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%8}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a), "r"(b), "r"(c), "r"(d), "r"(ones));
}

// Thirty-two e2m1 codes under one ue8m0 scale to pairs of bfloat16; pair 4 j + i has codes i and i + 4 of word j. Signs go
// to bit 15 and magnitudes to bits 8..6, 2^-126 times the code, which the scale's factor makes up for.
__device__ __forceinline__ void decode(u32 (&pairs)[16], const u32 (&words)[4], u32 scale) {
  constexpr u32 mask = 0x81C081C0u;
  const u32 factor = scale == 255u ? 0x7FC07FC0u : min(scale + 126u, 254u) * 0x00800080u;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const u32 low = words[j], high = low >> 8;
    pairs[4 * j] = multiply_pair(((low & 0x000F000Fu) * 4160u) & mask, factor);
    pairs[4 * j + 1] = multiply_pair(((low & 0x00F000F0u) * 260u) & mask, factor);
    pairs[4 * j + 2] = multiply_pair(((high & 0x000F000Fu) * 4160u) & mask, factor);
    pairs[4 * j + 3] = multiply_pair(((high & 0x00F000F0u) * 260u) & mask, factor);
  }
}
// What one factor of `decode` cannot hold; 1 for scales up to 2.
__device__ __forceinline__ u32 rest_of(u32 scale) { return (scale > 128u && scale < 255u ? scale - 1u : 127u) * 0x00800080u; }

// Heads of a row to shared memory: head h is row h of the MMA's second operand, 16-byte pieces swizzled, halves of the
// depth apart, so that heads of the next row follow.
__device__ __forceinline__ void stage_query(u32 to, const Params& p, int row) {
  const u32 head = threadIdx.x >> 2, quarter = threadIdx.x & 3;
  const u64 at = static_cast<u64>(row) * kHeads + head;
  const uint4 raw = *reinterpret_cast<const uint4*>(p.q + at * 64 + quarter * 16);
  const u32 words[4] = {raw.x, raw.y, raw.z, raw.w}, scale = p.q_scales[at * 4 + quarter], rest = rest_of(scale);
  u32 pairs[16];
  decode(pairs, words, scale);
#pragma unroll
  for (u32 i = 0; i < 16; i++) {  // piece i: eight channels of the product's depth, a pair of each quarter
    const u32 place = (i >> 3) * (ROWS * 4096) + head * 128 + (((i & 7) ^ (head & 7)) << 4);
    store_u32(to + place + 4 * quarter, multiply_pair(pairs[i], rest));
  }
}

struct Run {
  const u8 *codes, *scales;  // of its first key
};

// Where the run of keys that starts at a row's column lies, and how many of them the row sees.
__device__ __forceinline__ Run find_run(const Params& p, int row, int sequence, int end, int column, int& seen) {
#if MODE == 2
  const int key = p.starts[row] + column;
  seen = min(max(end - key, 0), GRAIN);
  const u64 first = seen > 0 ? key : 0;
  return {p.keys + first * 64, p.scales + first * 4};
#else
  int position = column;
#if MODE == 1
  const int block = p.blocks[static_cast<u64>(row) * p.num_blocks + column / CANDIDATE];
  position = block < 0 ? end : block * CANDIDATE + column % CANDIDATE;
#endif
  seen = min(max(end - position, 0), GRAIN);
  const u8* page = p.keys;
  u32 offset = 0;
  if (seen > 0) {
    const int place = min(position / RECORDS, p.table_columns - 1);
    page += static_cast<u32>(p.block_table[sequence * p.table_pitch + place]) * p.page_bytes;
    offset = position % RECORDS;
  }
  return {page + offset * 64, page + RECORDS * 64 + offset * 4};
#endif
}

// The scores of COUNT rows for a lane's two keys, as pairs of bfloat16.
template <int COUNT>
__device__ __forceinline__ void score_rows(u32 (&scores)[COUNT], const u32 (&keys)[2][16], u32 queries, u32 weights) {
  const u64 heads = rows_along_k(queries);
  float dots[16 * COUNT];
  mma_fence();
#pragma unroll
  for (int s = 0; s < 8; s++) {
    const u32 a[4] = {keys[0][2 * s], keys[1][2 * s], keys[0][2 * s + 1], keys[1][2 * s + 1]};
    mma_dots(dots, a, heads + (s >> 2) * (ROWS * 256) + (s & 3) * 2, s != 0);
  }
  mma_commit();
  u32 weight[COUNT][4];
#pragma unroll
  for (int row = 0; row < COUNT; row++) load_16(weight[row], weights + row * kHeads * 2);
  mma_wait_all();
  keep(dots);
#pragma unroll
  for (int row = 0; row < COUNT; row++) {
    u32 gated[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float* const d = dots + 16 * row + 4 * j;
      gated[2 * j] = multiply_pair(round_positive_pair(d[0], d[1]), weight[row][j]);
      gated[2 * j + 1] = multiply_pair(round_positive_pair(d[2], d[3]), weight[row][j]);
    }
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    add_columns(sum, gated[0], gated[1], gated[2], gated[3]);
    add_columns(sum, gated[4], gated[5], gated[6], gated[7]);
    scores[row] = round_pair(sum[0], sum[2]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT) index_scores(const __grid_constant__ Params p) {
  extern __shared__ u8 raw[];
  const u32 queries = (shared_address(raw) + 1023) & ~1023u, ring = queries + kRingAt;
  u8* const aligned = raw + (queries - shared_address(raw));
  Run* const runs = reinterpret_cast<Run*>(aligned + kRunsAt);
  u8* const counts = aligned + kCountsAt;
  u16* const weights = reinterpret_cast<u16*>(aligned + kWeightsAt);
  int* const lasts = reinterpret_cast<int*>(aligned + kRingAt);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, quarter = lane & 3;
  const int first_row = blockIdx.x * ROWS, rows = min(ROWS, p.rows - first_row);
  const int first_column = blockIdx.y * p.chunk, end_column = min(first_column + p.chunk, p.columns);
  for (int i = 0; i < rows; i++) {
    stage_query(queries + i * 4096, p, first_row + i);
    // a quarter's weights of heads 8 j + 2 quarter and the next lie together
    if (thread < kHeads) {
      const int to = ((thread >> 1) & 3) * 8 + (thread >> 3) * 2 + (thread & 1);
      weights[i * kHeads + to] = p.weights[(first_row + i) * p.weights_pitch + thread];
    }
  }
  fence_async_units();

  const int own_key = warp * 16 + (lane >> 2);  // of a tile, and the eighth behind it
  const u32 in_run = (lane >> 2) % GRAIN, own_run = own_key / GRAIN;
  for (int begin = 0, count; begin < rows; begin += count) {  // rows of one sequence
    const int row = first_row + begin;
    const int sequence = MODE == 2 ? 0 : p.row_to_seq[row];
    int most = p.ends[row];
    for (count = 1; begin + count < rows && p.row_to_seq[row + count] == sequence; count++) most = max(most, p.ends[row + count]);
    // columns that the row sees which this lane writes
    const int own_end = MODE == 2 ? most - p.starts[row] : p.ends[row + min(quarter, count - 1)];
    __syncthreads();
    int used = 0;
    for (int i = thread; first_column + i * GRAIN < end_column; i += kThreads) {
      int seen;
      runs[i] = find_run(p, row, sequence, most, first_column + i * GRAIN, seen);
      counts[i] = static_cast<u8>(seen);
      if (seen > 0) used = i * GRAIN + seen;
    }
    used = __reduce_max_sync(0xFFFFFFFFu, used);
    if (lane == 0) lasts[warp] = used;
    __syncthreads();
    used = max(max(lasts[0], lasts[1]), max(lasts[2], lasts[3]));
    const int num_tiles = (used + kTile - 1) / kTile;
    for (int i = (end_column - first_column + GRAIN - 1) / GRAIN + thread; i < num_tiles * (kTile / GRAIN); i += kThreads) {
      runs[i] = runs[0];  // behind the last column
      counts[i] = 0;
    }
    __syncthreads();

    auto fetch = [&](int tile) {
      if (tile < num_tiles) {
        const u32 to = ring + tile % STAGES * kStageBytes;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int number = tile * (kTile / GRAIN) + own_run + i * 8 / GRAIN;
          const Run run = runs[number];
          const bool there = MODE != 2 || in_run < counts[number];  // there is nothing behind the last dense key
          copy_16_or_zeros(to + (i * kThreads + thread) * 16, run.codes + in_run * 64 + quarter * 16, there);
          copy_4_or_zeros(to + kThreads * 32 + (i * kThreads + thread) * 4, run.scales + in_run * 4, there);
        }
      }
      fetch_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(i);
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; tile++) {
      fetch_wait<STAGES - 2>();  // a thread reads what it fetched itself, so none waits for another
      const u32 from = ring + tile % STAGES * kStageBytes;
      u32 keys[2][16], scale[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 words[4];
        load_16(words, from + (i * kThreads + thread) * 16);
        scale[i] = load_u32(from + kThreads * 32 + (i * kThreads + thread) * 4) >> (8 * quarter) & 255u;
        decode(keys[i], words, scale[i]);
      }
      if (__any_sync(0xFFFFFFFFu, max(scale[0], scale[1]) > 128u)) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
          for (int j = 0; j < 16; j++) keys[i][j] = multiply_pair(keys[i][j], rest_of(scale[i]));
        }
      }
      fetch(tile + STAGES - 1);
      u32 score = 0;  // of the row that this lane writes
      int i = 0;
      if constexpr (ROWS > 1) {
#pragma unroll 1
        for (; i + 1 < count; i += 2) {
          u32 two[2];
          score_rows<2>(two, keys, queries + (begin + i) * 4096, queries + kWeightsAt + (begin + i) * kHeads * 2 + quarter * 16);
          if (quarter == i) score = two[0];
          if (quarter == i + 1) score = two[1];
        }
      }
      if (i < count) {
        u32 one[1];
        score_rows<1>(one, keys, queries + (begin + i) * 4096, queries + kWeightsAt + (begin + i) * kHeads * 2 + quarter * 16);
        if (quarter == i) score = one[0];
      }
      // the lanes of a key write one row each
      if (quarter < count) {
        float* const out = p.out + static_cast<u64>(row + quarter) * p.columns;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int place = tile * kTile + own_key + 8 * i, column = first_column + place;
          if (column >= end_column) continue;
          const bool seen = MODE == 1 ? in_run < counts[place / GRAIN] : column < own_end;
          out[column] = __uint_as_float(!seen ? 0xFF800000u : i == 0 ? score << 16 : score & 0xFFFF0000u);
        }
      }
    }
    for (int i = 0; i < count; i++) {
      float* const out = p.out + static_cast<u64>(row + i) * p.columns;
      for (int column = first_column + num_tiles * kTile + thread; column < end_column; column += kThreads) {
        out[column] = __uint_as_float(0xFF800000u);
      }
    }
  }
}
