// Index scores `sum_h weight_h * relu(q_h . k)` of quantised heads and keys, with the model's bfloat16 rounding points.
//
// A tile is 64 keys, 16 a warp. Keys are the first operand of e4m3 products and stay in registers; heads lie in shared
// memory. Every group of 32 channels, which has one scale, is one product of 64 x 32 x 32 of its own: a sum of small whole
// numbers, exact in any order. Scales of keys enter in float32, `fma(p2, s2 / s3, fma(p1, s1 / s3, fma(p0, s0 / s3, p3)))`,
// and s3 at the very end. e4m3 holds e2m1 codes under scales of 14 octaves exactly, so scales of heads go into their codes,
// and what those of a head have in common into its weight. Heads and keys for which this does not suffice cost more and
// give the same bits. Rounded, weighted results are summed over heads by a product with ones. Every row is computed alone,
// whatever rows share the decoded keys, and every key alone, so a score has the same bits wherever its key was found.
//
// A block takes ROWS rows and `chunk` columns. Rows of one sequence, neighbours among them, share decoded keys. Where keys
// are is found beforehand for runs of GRAIN keys that lie together; what no row sees is read from somewhere and not used.
//
// Macros: MODE 0 columns are positions of the row's sequence, 1 they are of candidate blocks of CANDIDATE positions, 2 they
// follow the row's first key; RECORDS of a page (modes 0 and 1); GRAIN 16 or 8, or 1 where fewer keys lie together; ROWS;
// CHUNK, most columns of a block; STAGES of the ring of keys; RESIDENT blocks.

constexpr int kThreads = 128, kTile = 64, kHeads = 32, kRuns = (CHUNK + (STAGES - 1) * kTile) / GRAIN;
constexpr u32 kQueryBytes = kHeads * 128, kWarpBytes = 16 * (64 + 4), kStageBytes = 4 * kWarpBytes;
constexpr u32 kRunsAt = ROWS * kQueryBytes, kWeightsAt = kRunsAt + kRuns * 16, kScalesAt = kWeightsAt + ROWS * kHeads * 2;
constexpr u32 kRingAt = kScalesAt + ROWS * kHeads * 4, kWideAt = kRingAt + STAGES * kStageBytes, kCountsAt = kWideAt + ROWS * 4;

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

// Four bytes, or zeros without a read; of `chosen` threads only.
__device__ __forceinline__ void copy_4_or_zeros(u32 to, const void* from, bool there, bool chosen) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p cp.async.ca.shared.global [%0], [%1], 4, %2;\n}" ::"r"(to), "l"(from),
               "r"(there ? 4 : 0), "r"(static_cast<u32>(chosen))
               : "memory");
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
__device__ __forceinline__ void store_score(u64 at, u32 v) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
__device__ __forceinline__ u32 load_u8(u32 at) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ u64 load_u64(u32 at) {
  u64 v;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(at));
  return v;
}
// Four 8 x 8 matrices of 16 bits, rows of 16 bytes: lane l says where row l % 8 of matrix l / 8 is, lane 4 r + c gets pair c of
// row r of each.
__device__ __forceinline__ void load_matrices(u32 (&v)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(row)
               : "memory");
}
// Keeps a value in a register, which the compiler would rather compute again.
__device__ __forceinline__ void hold(u32& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void hold(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void hold(u64& v) { asm volatile("" : "+l"(v)); }
// One instruction, which shifts and additions that the compiler makes of it are not.
__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
  u32 r;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
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

// --- codes and scales --------------------------------------------------------------------------------------------------

// e2m1 codes to e4m3 codes of 2^-6 times the value, by their bits alone: of the low halves of bytes, and of the high ones.
// In the sum, a sign of 32 and 96 make 128, and 96 alone is masked.
__device__ __forceinline__ u32 decode_low(u32 word) { return multiply_add(word & 0x0F0F0F0Fu, 4, 0x60606060u) & 0x9C9C9C9Cu; }
__device__ __forceinline__ u32 decode_high(u32 word) { return (word & 0x80808080u) | (word >> 2 & 0x1C1C1C1Cu); }

// e4m3 code of 2^power times the value of a positive e2m1 code, for powers of -8 to 6.
__device__ __forceinline__ u32 scaled_code(u32 code, int power) {
  const u32 mantissa = code > 1 ? 8 + 4 * (code & 1) : 8;
  const int exponent = (code > 1 ? static_cast<int>(code >> 1) - 1 : -1) + power + 7;
  return code == 0 ? 0 : exponent > 0 ? exponent * 8 + (mantissa & 7) : mantissa >> (1 - exponent);
}
// Value of a ue8m0 scale.
__device__ __forceinline__ float scale_value(u32 code) {
  return __uint_as_float(code == 255 ? 0x7FC00000u : code == 0 ? 0x00400000u : code << 23);
}

// A row's heads to shared memory: head h is row h of the MMA's second operand, 16-byte pieces swizzled. Of each group,
// channels at even places stand before those at odd ones, as in decoded keys. A thread does a group of a head.
__device__ __forceinline__ void stage_query(u8* shared, u32 queries, const Params& p, int slot, int row) {
  const u32 head = threadIdx.x >> 2, group = threadIdx.x & 3, lane = threadIdx.x & 31;
  const u64 at = static_cast<u64>(row) * kHeads + head;
  const uint4 raw = *reinterpret_cast<const uint4*>(p.q + at * 64 + group * 16);
  const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
  const int scale = p.q_scales[at * 4 + group];
  const bool some = ((raw.x | raw.y | raw.z | raw.w) & 0x77777777u) != 0;
  int largest = some ? scale : 0;
  largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
  largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
  const bool far = scale == 255 || (some && (scale < largest - 14 || largest < 64 || largest > 191));
  const u32 all_far = __ballot_sync(0xFFFFFFFFu, far);
  const bool wide = (all_far >> (lane & 28u) & 15u) != 0;
  const int power = wide || !some ? 6 : scale - largest + 6;
  u32 low = 0, high = 0;  // codes of sizes 0 to 3 and 4 to 7
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    low |= scaled_code(i, power) << (8 * i);
    high |= scaled_code(i + 4, power) << (8 * i);
  }
  u32 even[4], odd[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 sizes = words[i] & 0x77777777u;
    const u32 first = __byte_perm(low, high, sizes & 0xFFFFu), second = __byte_perm(low, high, sizes >> 16);
    even[i] = __byte_perm(first, second, 0x6420u) | (words[i] << 4 & 0x80808080u);
    odd[i] = __byte_perm(first, second, 0x7531u) | (words[i] & 0x80808080u);
  }
  const u32 to = queries + slot * kQueryBytes + head * 128;
  store_16(to + ((2 * group ^ (head & 7)) << 4), even[0], even[1], even[2], even[3]);
  store_16(to + (((2 * group + 1) ^ (head & 7)) << 4), odd[0], odd[1], odd[2], odd[3]);
  const int common = largest == 0 ? 127 : min(max(largest, 64), 191);
  const int rest = !wide ? 127 : scale == 255 ? 255 : min(max(127 + scale - common, 0), 254);
  shared[kScalesAt + slot * kHeads * 4 + threadIdx.x] = static_cast<u8>(rest);
  if (lane == 0) shared[kWideAt + slot * 4 + (threadIdx.x >> 5)] = all_far != 0;
  if (group == 0) {  // a quarter's weights of heads 8 j + 2 quarter and the next lie together
    const u32 place = (head >> 1 & 3) * 8 + (head >> 3) * 2 + (head & 1);
    const u32 weight = multiply_pair(p.weights[row * p.weights_pitch + head], common << 7);
    reinterpret_cast<u16*>(shared + kWeightsAt)[slot * kHeads + place] = static_cast<u16>(weight);
  }
}

// How the groups of a lane's two keys are put together.
struct Scales {
  float by_last[2][3];  // scales of groups 0 to 2 divided by that of group 3
  float last[2];
  bool far;        // some key of the warp is not as above: group 3 counts `third` times,
  float third[2];  // and `last` is another common factor
};

// Not 0 where one of four scales is outside of 2^-31 to 2^32: its upper bits are neither 011 nor 100.
__device__ __forceinline__ u32 far_scales(u32 word) { return (word ^ word << 1 ^ 0x80808080u) & 0xC0C0C0C0u; }

__device__ __forceinline__ Scales scales_of(u32 first, u32 second) {
  const u32 words[2] = {first, second};
  Scales s;
  s.far = __any_sync(0xFFFFFFFFu, (far_scales(first) | far_scales(second)) != 0);
  u32 ratios[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 last = words[i] >> 24;
    ratios[i] = words[i] + 0x7F7F7F7Fu - last * 0x01010101u;
    s.last[i] = __uint_as_float(last << 23);
  }
  if (s.far) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 common = words[i] >> 24;
      if (far_scales(words[i]) != 0) {
        common = max(max(words[i] & 255u, words[i] >> 8 & 255u), max(words[i] >> 16 & 255u, common));
      }
      ratios[i] = 0;
#pragma unroll
      for (int g = 0; g < 4; g++) {
        const int ratio = static_cast<int>(words[i] >> (8 * g) & 255u) + 127 - static_cast<int>(common);
        ratios[i] |= static_cast<u32>(max(ratio, 0)) << (8 * g);
      }
      s.last[i] = scale_value(common);
      s.third[i] = __uint_as_float(ratios[i] >> 24 << 23);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    s.by_last[i][0] = __uint_as_float(ratios[i] << 23 & 0x7F800000u);
    s.by_last[i][1] = __uint_as_float(ratios[i] << 15 & 0x7F800000u);
    s.by_last[i][2] = __uint_as_float(ratios[i] << 7 & 0x7F800000u);
  }
  return s;
}

// --- where keys are ----------------------------------------------------------------------------------------------------

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

// --- scores ------------------------------------------------------------------------------------------------------------

// Where a row's operands are in shared memory, the latter three for a lane.
struct Row {
  u64 heads;  // a descriptor
  u32 weights, wide, scales;

  __device__ Row behind(u32 rows) const {
    return {heads + rows * (kQueryBytes / 16), weights + rows * kHeads * 2, wide + rows * 4, scales + rows * kHeads * 4};
  }
};

// A row's scores of a lane's two keys, without what the groups of a key have in common; `odd` where heads or keys may be.
__device__ __forceinline__ void score_row(float (&scores)[2], const u32 (&keys)[4][4], const Scales& s, bool odd, const Row& row) {
  float dots[4][16];
  mma_fence();
#pragma unroll
  for (int g = 0; g < 4; g++) mma_dots(dots[g], keys[g], row.heads + 2 * g, 0);
  mma_commit();
  u32 weight[4];
  load_16(weight, row.weights);
  mma_wait_all();
#pragma unroll
  for (int g = 0; g < 4; g++) keep(dots[g]);
  if (odd) {
    if (load_u32(row.wide) != 0) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int b = 0; b < 2; b++) {
          const u32 scales = load_u32(row.scales + (8 * j + b) * 4);
#pragma unroll
          for (int g = 0; g < 4; g++) {
            const float scale = scale_value(scales >> (8 * g) & 255u);
            dots[g][4 * j + b] *= scale;
            dots[g][4 * j + 2 + b] *= scale;
          }
        }
      }
    }
    if (s.far) {
#pragma unroll
      for (int i = 0; i < 16; i++) dots[3][i] *= s.third[i >> 1 & 1];
    }
  }
  u32 gated[8];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = 4 * j + i, key = i >> 1;
      sum[i] = fmaf(dots[0][at], s.by_last[key][0], dots[3][at]);
      sum[i] = fmaf(dots[1][at], s.by_last[key][1], sum[i]);
      sum[i] = fmaf(dots[2][at], s.by_last[key][2], sum[i]);
    }
    gated[2 * j] = multiply_pair(round_positive_pair(sum[0], sum[1]), weight[j]);
    gated[2 * j + 1] = multiply_pair(round_positive_pair(sum[2], sum[3]), weight[j]);
  }
  float total[4] = {0.f, 0.f, 0.f, 0.f};
  add_columns(total, gated[0], gated[1], gated[2], gated[3]);
  add_columns(total, gated[4], gated[5], gated[6], gated[7]);
  scores[0] = total[0];
  scores[1] = total[2];
}

extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT) index_scores(const __grid_constant__ Params p) {
  extern __shared__ u8 raw[];
  const u32 queries = (shared_address(raw) + 1023) & ~1023u;
  u8* const shared = raw + (queries - shared_address(raw));
  Run* const runs = reinterpret_cast<Run*>(shared + kRunsAt);
  u8* const counts = shared + kCountsAt;
  int* const lasts = reinterpret_cast<int*>(shared + kRingAt);
  const u32 thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, quarter = lane & 3, eighth = lane >> 2;
  const int first_row = blockIdx.x * ROWS, rows = min(ROWS, p.rows - first_row);
  const int first_column = blockIdx.y * p.chunk, width = min(p.chunk, p.columns - first_column);

  // A warp's part of a stage is the codes of 16 keys, 16-byte pieces swizzled so that matrices are read at once, and scales.
  // A lane has keys `eighth` and 8 more; it fetches a piece of each, and the scales of one.
  const u32 ring = queries + kRingAt + warp * kWarpBytes, key = warp * 16 + eighth, scaled_key = key + 8 * (quarter & 1);
  u32 piece = ring + eighth * 64 + ((quarter ^ (lane >> 3)) << 4);
  u32 matrix_row = ring + (lane & 7) * 64 + (((lane >> 3) ^ (lane >> 1 & 3)) << 4);
  // lanes of the third and fourth quarter fetch no scale
  u32 scale = ring + 1024 + (quarter & 1) * 32 + eighth * 4, scales_read = ring + 1024 + eighth * 4;
  u32 own_code = eighth % GRAIN * 64 + quarter * 16, own_scale = scaled_key % GRAIN * 4;
  const u32 counted = queries + kCountsAt + key / GRAIN;
  u32 run = queries + kRunsAt + key / GRAIN * 16, scaled_run = queries + kRunsAt + scaled_key / GRAIN * 16;
  hold(piece);
  hold(matrix_row);
  hold(scale);
  hold(scales_read);
  hold(own_code);
  hold(own_scale);
  hold(run);
  hold(scaled_run);
  bool any_wide = false;
  for (int begin = 0, count; begin < rows; begin += count) {  // rows of one sequence
    const int row = first_row + begin;
    const int sequence = MODE == 2 ? 0 : p.row_to_seq[row];
    int most = p.ends[row];
    for (count = 1; begin + count < rows && p.row_to_seq[row + count] == sequence; count++) most = max(most, p.ends[row + count]);
    __syncthreads();
    int used = 0;
    for (int i = thread; i * GRAIN < width; i += kThreads) {
      int seen;
      runs[i] = find_run(p, row, sequence, most, first_column + i * GRAIN, seen);
      counts[i] = static_cast<u8>(seen);
      if (seen > 0) used = i * GRAIN + seen;
    }
    used = __reduce_max_sync(0xFFFFFFFFu, used);
    if (lane == 0) lasts[warp] = used;
    __syncthreads();
    used = __reduce_max_sync(0xFFFFFFFFu, lasts[quarter]);  // known to be the same in all lanes, which spares addresses
    const int num_tiles = (used + kTile - 1) / kTile;
    // behind the last column, and what is fetched behind the last tile
    for (int i = (width + GRAIN - 1) / GRAIN + thread; i < (num_tiles + STAGES - 1) * (kTile / GRAIN); i += kThreads) {
      runs[i] = runs[0];
      counts[i] = 0;
    }
    __syncthreads();

    auto fetch = [&](u32 stage, u32 tile) {
      const u32 number = tile * (kTile / GRAIN);
      u64 codes[2], scales;
      codes[0] = load_u64(run + number * 16);
      codes[1] = GRAIN == 16 ? codes[0] + 512 : load_u64(run + number * 16 + 8 / GRAIN * 16);
      scales = load_u64(scaled_run + number * 16 + 8);
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        const u32 in_run = (eighth + 8 * i) % GRAIN;
        // there is nothing behind the last dense key
        const bool there = MODE != 2 || in_run < load_u8(counted + number + 8 * i / GRAIN);
        copy_16_or_zeros(piece + stage + i * 512, reinterpret_cast<const u8*>(codes[i]) + own_code, there);
      }
      const bool there = MODE != 2 || scaled_key % GRAIN < load_u8(counted + number + scaled_key / GRAIN - key / GRAIN);
      copy_4_or_zeros(scale + stage, reinterpret_cast<const u8*>(scales) + own_scale, there, quarter < 2);
      fetch_commit();
    };
    if (num_tiles > 0) {
#pragma unroll
      for (int i = 0; i < STAGES - 1; i++) fetch(i * kStageBytes, i);
    }
    if (begin == 0) {
      for (int i = 0; i < rows; i++) stage_query(shared, queries, p, i, first_row + i);
      fence_async_units();
      __syncthreads();
      for (int i = 0; i < rows; i++) any_wide |= load_u32(queries + kWideAt + i * 4) != 0;
    }
    // The lanes of a key write one row each, or both keys of the only one.
    constexpr u32 kEach = ROWS > 1 ? 2 : 1;
    const u32 own_row = ROWS > 1 ? quarter : 0, own_key = ROWS > 1 ? key : scaled_key;
    const bool writes = own_row < count && (ROWS > 1 || quarter < 2);
    u32 own_width = writes ? width - own_key : 0;
    const int row_seen = MODE == 2 ? most - p.starts[row] : p.ends[writes ? row + own_row : row];
    u32 own_seen = row_seen - first_column - own_key;
    u64 own_out = reinterpret_cast<u64>(p.out + static_cast<u64>(row + own_row) * p.columns + first_column + own_key);
    hold(own_width);
    hold(own_seen);
    hold(own_out);
    const u32 own_count = queries + kCountsAt + own_key / GRAIN;
    const u32 own_weights = queries + kWeightsAt + quarter * 16, own_scales = queries + kScalesAt + quarter * 8;
    Row operands = {rows_along_k(queries), own_weights, queries + kWideAt, own_scales};
    if (ROWS > 1) operands = operands.behind(begin);
    hold(operands.weights);
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; tile++) {
      fetch_wait<STAGES - 2>();
      __syncwarp();  // lanes read what others fetched, and have read the stage that is fetched next
      const u32 stage = tile % STAGES * kStageBytes;
      u32 words[2][4], keys[4][4];
      load_matrices(words[0], matrix_row + stage);
      load_matrices(words[1], matrix_row + stage + 512);
      const u32 first = load_u32(scales_read + stage), second = load_u32(scales_read + stage + 32);
      fetch((tile + STAGES - 1) % STAGES * kStageBytes, tile + STAGES - 1);
      bool seen[kEach];
#pragma unroll
      for (u32 i = 0; i < kEach; i++) {
        const u32 in_run = (own_key + 8 * i) % GRAIN;
        if (MODE == 1) seen[i] = in_run < load_u8(own_count + tile * (kTile / GRAIN) + 8 * i / GRAIN);
        else seen[i] = tile * kTile + static_cast<int>(8 * i) < static_cast<int>(own_seen);
      }
#pragma unroll
      for (int g = 0; g < 4; g++) {
        keys[g][0] = decode_low(words[0][g]);
        keys[g][1] = decode_low(words[1][g]);
        keys[g][2] = decode_high(words[0][g]);
        keys[g][3] = decode_high(words[1][g]);
      }
      Scales scales = scales_of(first, second);
      const bool odd = scales.far || any_wide;
      if (ROWS > 1) {
#pragma unroll
        for (int i = 0; i < 6; i++) hold(scales.by_last[i / 3][i % 3]);
      }
      float scores[2];
      score_row(scores, keys, scales, odd, operands);
      if constexpr (ROWS > 1) {
#pragma unroll 1
        for (u32 i = 1; i < count; i++) {
          float next[2];
          score_row(next, keys, scales, odd, operands.behind(i));
          scores[0] = own_row == i ? next[0] : scores[0];
          scores[1] = own_row == i ? next[1] : scores[1];
        }
      } else {
        scores[0] = quarter == 0 ? scores[0] * scales.last[0] : scores[1] * scales.last[1];
      }
#pragma unroll
      for (u32 i = 0; i < kEach; i++) {
        const float score = ROWS > 1 ? scores[i] * scales.last[i] : scores[0];
        const u32 bits = seen[i] ? round_pair(0.f, score) : 0xFF800000u;
        const int place = tile * kTile + 8 * i;
        if (place < static_cast<int>(own_width)) store_score(own_out + static_cast<u32>(place) * 4, bits);
      }
    }
    fetch_wait<0>();  // nothing of these rows arrives among keys of the next
    for (int i = 0; i < count; i++) {
      float* const out = p.out + static_cast<u64>(row + i) * p.columns + first_column;
      for (int column = num_tiles * kTile + thread; column < width; column += kThreads) {
        out[column] = __uint_as_float(0xFF800000u);
      }
    }
  }
}
