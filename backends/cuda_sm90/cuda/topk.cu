// Exact top-k of long rows, in one pass over them: a sample gives a threshold that a little more than k values reach, the
// pass keeps those, and the k best of them are found in shared memory.
//
// A value and its column make one 64-bit number, `place`: larger values first, among equal ones the smaller column. Places
// are distinct, so every threshold between two of them cuts ties as the contract wants, and a row of equal values is no
// special case. The threshold decides only how much work there is: where too few or too many places reach it, the pass is
// repeated with another one, at last by bisection, which always ends. Columns come out in order through a bitmap.
//
// A cluster of CLUSTER blocks shares a row: each keeps what reaches the threshold in its part, the first block finishes.
//
// Macros: HALF 1 for bfloat16, 0 for float32; CLUSTER 1, 2, 4 or 8.

constexpr int kThreads = 512, kWarps = kThreads / 32, kUnroll = 4;
constexpr int kVector = HALF ? 8 : 4;  // values of 16 bytes
constexpr u32 kKept = 8192;            // places that shared memory holds
constexpr u32 kBins = 2048, kBinBits = 11;
constexpr u64 kLowest = 0x00800000ull << 32;    // above every place of -inf
constexpr u64 kHighest = 0xFF800001ull << 32;  // above every place
constexpr u32 kWhole = 0xFFFFFFFFu;

struct Params {
  const void* x;
  const int* lens;
  int* out;
  long long pitch;  // values from row to row
  int columns, k;
};

struct Shared {
  u64 kept[kKept];
  u64 few[32];
  u32 bins[kBins];
  u32 sums[kWarps];
  u32 varying[2];    // bits in which numbers differ from the lowest: low and high half
  u32 chosen[3];     // a bin, how many are above it, how many in it
  u32 num_few;
  u32 num_kept;      // of this block
  u32 num_sent[2];   // of the other blocks, by turns
};

// An integer that sorts as the value does: -0 as 0, and NaN as -inf, below `kLowest`.
__device__ __forceinline__ u32 sortable(float v) {
  const u32 bits = v == 0.f ? 0u : __float_as_uint(v);
  return v != v ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(u32 sorted) {
  return __uint_as_float(sorted >> 31 ? sorted ^ 0x80000000u : ~sorted);
}
__device__ __forceinline__ u64 place_of(float v, u32 column) { return static_cast<u64>(sortable(v)) << 32 | (kWhole - column); }

__device__ __forceinline__ float value_at(const void* x, long long i) {
#if HALF
  return __uint_as_float(static_cast<u32>(static_cast<const u16*>(x)[i]) << 16);
#else
  return static_cast<const float*>(x)[i];
#endif
}
__device__ __forceinline__ void unpack(float (&v)[kVector], const uint4& raw) {
  const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if HALF
    v[2 * i] = __uint_as_float(words[i] << 16);
    v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
#else
    v[i] = __uint_as_float(words[i]);
#endif
  }
}

// --- the blocks of a cluster ------------------------------------------------------------------------------------------

__device__ __forceinline__ void cluster_meets() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}
// Where the first block of the cluster has what this block has at `p`.
__device__ __forceinline__ u32 in_first_block(const void* p) {
  return CLUSTER > 1 ? address_in_block(shared_address(p), 0) : shared_address(p);
}
__device__ __forceinline__ u32 cluster_load(u32 at) {
  u32 v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ u32 cluster_add(u32 at, u32 v) {
  u32 before;
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(at), "r"(v) : "memory");
  return before;
}
__device__ __forceinline__ void cluster_store(u32 at, u64 v) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(at), "l"(v) : "memory");
}

// --- within a block ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 sum_up_to_lane(u32 v) {
  const u32 lane = threadIdx.x & 31;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(kWhole, v, step);
    if (lane >= step) v += other;
  }
  return v;
}

// The sum of `v` over the threads before this one.
__device__ __forceinline__ u32 sum_before(Shared& s, u32 v) {
  const u32 warp = threadIdx.x >> 5, upto = sum_up_to_lane(v);
  if ((threadIdx.x & 31) == 31) s.sums[warp] = upto;
  __syncthreads();
  u32 before = upto - v;
  for (u32 i = 0; i < warp; i++) before += s.sums[i];
  return before;
}

// The largest number that at least `wanted` of the `count` kept ones reach, all from `base` up, or a smaller one that at
// most `limit` reach. 0 < wanted <= count.
__device__ u64 reached_by(Shared& s, u32 count, u64 base, u32 wanted, u32 limit) {
  const u32 thread = threadIdx.x, lane = thread & 31;
  __syncthreads();
  if (thread < 2) s.varying[thread] = 0;
  __syncthreads();
  u64 varying = 0;
  for (u32 i = thread; i < count; i += kThreads) varying |= s.kept[i] - base;
  const u32 low = __reduce_or_sync(kWhole, static_cast<u32>(varying)), high = __reduce_or_sync(kWhole, static_cast<u32>(varying >> 32));
  if (lane == 0) {
    atomicOr(&s.varying[0], low);
    atomicOr(&s.varying[1], high);
  }
  __syncthreads();
  varying = static_cast<u64>(s.varying[1]) << 32 | s.varying[0];
  u32 bits = 64 - __clzll(static_cast<long long>(varying)), above = 0;  // numbers are below base + 2^bits
  while (bits > 0) {
    const u32 shift = bits > kBinBits ? bits - kBinBits : 0;
    for (u32 i = thread; i < kBins; i += kThreads) s.bins[i] = 0;
    if (thread == 0) s.num_few = 0;
    __syncthreads();
    for (u32 i = thread; i < count; i += kThreads) {
      const u64 bin = (s.kept[i] - base) >> shift;
      if (s.kept[i] >= base && bin >> (bits - shift) == 0) atomicAdd(&s.bins[bin], 1u);
    }
    __syncthreads();
    u32 mine[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) mine[i] = s.bins[kBins - 1 - 4 * thread - i];  // from the largest down
    u32 before = above + sum_before(s, mine[0] + mine[1] + mine[2] + mine[3]);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      if (before < wanted && before + mine[i] >= wanted) {
        s.chosen[0] = kBins - 1 - 4 * thread - i;
        s.chosen[1] = before;
        s.chosen[2] = mine[i];
      }
      before += mine[i];
    }
    __syncthreads();
    const u32 in_bin = s.chosen[2];
    base += static_cast<u64>(s.chosen[0]) << shift;
    above = s.chosen[1];
    if (above + in_bin <= limit || shift == 0) break;
    bits = shift;
    if (in_bin > 32) continue;
    // so few are left that each warp ranks them
    for (u32 i = thread; i < count; i += kThreads) {
      if (s.kept[i] >= base && (s.kept[i] - base) >> shift == 0) s.few[atomicAdd(&s.num_few, 1u)] = s.kept[i];
    }
    __syncthreads();
    const u64 own = lane < in_bin ? s.few[lane] : 0;
    u32 rank = above + 1;
    for (u32 i = 0; i < in_bin; i++) rank += s.few[i] > own || (s.few[i] == own && i < lane);
    const u32 found = __ballot_sync(kWhole, lane < in_bin && rank == wanted);
    base = s.few[__ffs(found) - 1];
    break;
  }
  return base;
}

// Writes the columns that `map` has, in order, and -1 behind them.
__device__ void write_columns(Shared& s, const u32* map, u32 words, int* out, u32 k) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 per_warp = (words + kThreads - 1) / kThreads * 32, first = warp * per_warp, end = min(first + per_warp, words);
  u32 mine = 0;
  for (u32 i = first + lane; i < end; i += 32) mine += __popc(map[i]);
  const u32 in_warp = __reduce_add_sync(kWhole, mine);
  if (lane == 0) s.sums[warp] = in_warp;
  __syncthreads();
  u32 at = 0, total = 0;
  for (u32 i = 0; i < kWarps; i++) {
    at += i < warp ? s.sums[i] : 0;
    total += s.sums[i];
  }
  for (u32 i = first; i < end; i += 32) {
    u32 word = i + lane < end ? map[i + lane] : 0;
    if (!__any_sync(kWhole, word != 0)) continue;
    const u32 number = __popc(word), upto = sum_up_to_lane(number);
    for (u32 to = at + upto - number; word != 0; word &= word - 1) out[to++] = static_cast<int>((i + lane) * 32 + __ffs(word) - 1);
    at += __shfl_sync(kWhole, upto, 31);
  }
  for (u32 i = total + threadIdx.x; i < k; i += kThreads) out[i] = -1;
}

struct Row {
  const void* x;  // its first value
  const uint4* vectors;
  u32 head;       // values of the first vector that are not of the row
  u32 length, num_vectors;
};

// A threshold from a sample of the row's vectors: about what `wanted` of all values reach, and rather more than fewer.
__device__ u64 guess(Shared& s, const Row& row, u32 k) {
  const u32 thread = threadIdx.x, most = kKept / (kThreads * kVector);
  const u32 rounds = min(most, row.length < (1u << 17) ? 1u : row.length < (1u << 19) ? 2u : 4u);
  const u32 samples = rounds * kThreads, count = samples * kVector, stride = row.num_vectors / samples;
  for (u32 i = 0; i < rounds; i++) {
    const u32 n = i * kThreads + thread;
    // somewhere in its share of the row, so that no period of the columns is met again and again
    const u32 at = static_cast<u32>(static_cast<u64>(n) * row.num_vectors / samples) + (stride > 1 ? (n * 2654435761u >> 16) % stride : 0);
    float v[kVector];
    unpack(v, row.vectors[at]);
#pragma unroll
    for (u32 j = 0; j < kVector; j++) {
      const u32 column = at * kVector + j - row.head;  // wraps to a large one before the row
      const u64 place = column < row.length ? place_of(v[j], column) : 0;
      s.kept[i * kThreads * kVector + j * kThreads + thread] = max(place, kLowest);
    }
  }
  // five deviations above what the sample should hold of the k best
  const float share = static_cast<float>(k) * count / row.length;
  const u32 wanted = min(static_cast<u32>(share + 5.f * sqrtf(share)) + 12, count);
  return reached_by(s, count, kLowest, wanted, wanted + wanted / 4);
}

// Keeps the places of this block's vectors that reach `threshold`, and counts them even where they do not fit.
__device__ void keep_reaching(Shared& s, const Row& row, u32 first, u32 end, u64 threshold) {
  const u32 lane = threadIdx.x & 31;
  const float least = value_of(static_cast<u32>(threshold >> 32));
  const u32 last_tie = kWhole - static_cast<u32>(threshold);  // the largest column that `least` itself may have
  for (u32 base = first + (threadIdx.x & ~31u); base < end; base += kThreads * kUnroll) {
    uint4 raw[kUnroll];
#pragma unroll
    for (u32 u = 0; u < kUnroll; u++) {
      const u32 at = base + u * kThreads + lane;
      raw[u] = at < end ? __ldg(row.vectors + at) : make_uint4(0, 0, 0, 0);
    }
    u32 hits = 0;
#pragma unroll
    for (u32 u = 0; u < kUnroll; u++) {
      const u32 at = base + u * kThreads + lane, column = at * kVector - row.head;
      float v[kVector];
      unpack(v, raw[u]);
      u32 some = 0;
#pragma unroll
      for (u32 j = 0; j < kVector; j++) some |= (v[j] > least || (v[j] == least && column + j <= last_tie) ? 1u : 0u) << j;
      if (at == 0) some &= kWhole << row.head;
      if (at >= end) some = 0;
      else if ((at + 1) * kVector - row.head > row.length) some &= (1u << (row.length - column)) - 1;
      hits |= some << (u * kVector);
    }
    if (!__any_sync(kWhole, hits != 0)) continue;
    const u32 number = __popc(hits), upto = sum_up_to_lane(number);
    u32 to = 0;
    if (lane == 31) to = atomicAdd(&s.num_kept, upto);
    to = __shfl_sync(kWhole, to, 31) + upto - number;
    for (; hits != 0; hits &= hits - 1) {
      const u32 bit = __ffs(hits) - 1, column = (base + bit / kVector * kThreads + lane) * kVector + bit % kVector - row.head;
      if (to < kKept) s.kept[to] = place_of(value_at(row.x, column), column);
      to++;
    }
  }
}

#if CLUSTER > 1
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 2) topk(const __grid_constant__ Params p) {
#else
extern "C" __global__ void __launch_bounds__(kThreads, 2) topk(const __grid_constant__ Params p) {
#endif
  extern __shared__ u64 raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  u32* const map = reinterpret_cast<u32*>(raw + sizeof(Shared) / 8);
  const u32 thread = threadIdx.x, rank = blockIdx.x % CLUSTER, k = p.k;
  const long long number = blockIdx.x / CLUSTER;
  constexpr u32 bytes = 16 / kVector;
  Row row;
  row.x = static_cast<const char*>(p.x) + number * p.pitch * bytes;
  row.length = static_cast<u32>(max(0, min(p.lens[number], p.columns)));
  row.head = static_cast<u32>(reinterpret_cast<u64>(row.x) & 15) / bytes;
  // the vectors that hold the row begin and end within its own 16 bytes
  row.vectors = reinterpret_cast<const uint4*>(static_cast<const char*>(row.x) - row.head * bytes);
  row.num_vectors = row.length == 0 ? 0 : (row.head + row.length + kVector - 1) / kVector;
  const u32 words = (row.length + 31) / 32, part = (row.num_vectors + CLUSTER - 1) / CLUSTER;
  const u32 first = min(rank * part, row.num_vectors), end = min(first + part, row.num_vectors);
  if (rank == 0) {
    for (u32 i = thread; i < words; i += kThreads) map[i] = 0;
  }
  if (thread < 2) s.num_sent[thread] = 0;

  // every block of a cluster finds the same thresholds, and sees the same totals
  u64 below = kLowest, above = kHighest, threshold = row.length <= kKept ? kLowest : guess(s, row, k);
  u32 total, own, base;
  for (u32 turn = 0;; turn++) {
    if (threshold >> 32 == 0x7FFFFFFFu) threshold = 0x80000000ull << 32;  // a number that only -0 would have
    __syncthreads();
    if (thread == 0) s.num_kept = 0;
    if (turn == 0) cluster_meets();
    else __syncthreads();
    keep_reaching(s, row, first, end, threshold);
    __syncthreads();
    own = s.num_kept;
#if CLUSTER > 1
    const u32 sent = in_first_block(&s.num_sent[turn & 1]);
    if (thread == 0 && rank != 0) s.sums[0] = cluster_add(sent, own);
    if (thread == 0 && rank == 0) s.num_sent[(turn + 1) & 1] = 0;  // all have read it a turn ago
    cluster_meets();
    base = cluster_load(in_first_block(&s.num_kept));
    total = base + cluster_load(sent);
    base += rank != 0 ? s.sums[0] : 0;
    cluster_meets();  // before counts change
#else
    base = 0;
    total = own;
#endif
    if (total > kKept) below = threshold;
    else if (total < k && threshold > kLowest) above = threshold;
    else break;
    // steps that double until thresholds on both sides are known, then halves
    const u64 step = 1ull << min(51 + turn, 62u), next = total > kKept ? threshold + step : threshold - step;
    const bool one_sided = total > kKept ? above == kHighest : below == kLowest;
    threshold = one_sided && next > below && next < above ? next : below + (above - below) / 2;
  }
#if CLUSTER > 1
  if (rank != 0) {
    const u32 to = in_first_block(s.kept);
    for (u32 i = thread; i < own; i += kThreads) cluster_store(to + (base + i) * 8, s.kept[i]);
  }
  cluster_meets();
  if (rank != 0) return;
#endif
  const u64 cut = total > k ? reached_by(s, total, threshold, k, k) : kLowest;
  for (u32 i = thread; i < total; i += kThreads) {
    if (s.kept[i] < cut) continue;
    const u32 column = kWhole - static_cast<u32>(s.kept[i]);
    atomicOr(&map[column / 32], 1u << (column % 32));
  }
  __syncthreads();
  write_columns(s, map, words, p.out + number * k, k);
}
