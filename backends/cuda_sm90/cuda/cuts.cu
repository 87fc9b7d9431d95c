// Which ids of a row its filters keep. A cluster of blocks holds a row in shared memory, as integers that sort as scores do
// (`place`), and finds each cut by histograms over the whole cluster: the first over how far a score is below the best, the
// others over places, each of the bin where the one before found the cut, until one place is left. Bins count ids, or their
// integer masses, so what is found does not depend on the order of addition; sums of exponentials are added in one order.
//
// Macros: CLUSTER 1, 2, 4 or 8, by which ids are divided.

constexpr u32 kThreads = 512, kWarps = kThreads / 32, kUnroll = 4;
constexpr u32 kGroups = 64, kBins = 32 * kGroups, kBinBits = 11;
constexpr float kBinsOfOne = 93.f;  // bins of a difference of 1. The last begins at 22, below which no id has a mass
constexpr u32 kWhole = 0xFFFFFFFFu;
constexpr u32 kInfinity = 0xFF800000u, kMinusInfinity = 0x007FFFFFu;  // places; NaN is above, 0 is no id and as a score NaN
constexpr float kMassOne = 2147483648.f;

struct Params {
  const float* logits;
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const int* cu_seqlens;  // or null: every row is a request
  int* keys;
  int* limits;
  float* tops;
  float* totals;
  int* usables;
  long long pitch;  // values from row to row
  int ids, requests, want_total;
};

struct Shared {
  u32 bins[kBins];
  u32 groups[kGroups][CLUSTER];   // sums of 32 bins of every block
  u32 given[2][CLUSTER][2];       // what blocks tell one another, by turns
  u32 sums[2][kWarps];
  u32 chosen[4];                  // a bin, what is above it, whether there is one; and up to a multiple of 16 bytes
};

// Ids that are kept: those with a greater place, and of those with this place the ones up to an id.
struct Cut {
  u32 place;
  int limit;
};

// --- the blocks of a cluster ------------------------------------------------------------------------------------------

// Before a block writes to others they have begun.
__device__ __forceinline__ void block_is_there() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void wait_for_blocks() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// What another block has at `p`.
__device__ __forceinline__ u32 word_of_block(const u32* p, u32 block) {
  u32 v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address_in_block(shared_address(p), block)) : "memory");
  return v;
}
__device__ __forceinline__ void give_block(u32* p, u32 block, u32 v) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_in_block(shared_address(p), block)), "r"(v) : "memory");
}

// --- scores -----------------------------------------------------------------------------------------------------------

// An integer that sorts as the value does: -0 as 0, and NaN above everything.
__device__ __forceinline__ u32 place_of(float v) {
  const u32 bits = v == 0.f ? 0u : __float_as_uint(v);
  return v != v ? kWhole : bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of(u32 place) {
  return __uint_as_float(place >> 31 ? place ^ 0x80000000u : ~place);
}
__device__ __forceinline__ u32 bin_of(float top, float score) {
  return static_cast<u32>(fminf(__fsub_rn(top, score) * kBinsOfOne, static_cast<float>(kBins - 1)));
}
__device__ __forceinline__ bool kept(u32 place, int id, const Cut& cut) {
  return place > cut.place || (place == cut.place && id <= cut.limit);
}

// A row as one block sees it: its own ids in shared memory, and what all blocks know.
struct Row {
  const uint4* places;
  u32 vectors;
  int first;  // id
  u32 rank;   // of the block
  float top;
  u32 turn;   // of telling one another
};

// The mass of a score: floor(p * 2^31) with p = exp(score - top) / total, rounded as a division is.
struct Masses {
  float top, total, inverse;

  __device__ __forceinline__ u32 operator()(float score) const {
    const float e = expf(__fsub_rn(score, top));
    if (e < 0x1p-32f) return 0;  // the total is at least 1
    float p = __fmul_rn(e, inverse);
    p = fmaf(fmaf(-p, total, e), inverse, p);
    p = fmaf(fmaf(-p, total, e), inverse, p);
    return static_cast<u32>(p * kMassOne);
  }
};
struct Ones {
  __device__ __forceinline__ u32 operator()(float) const { return 1; }
};

// Calls `f(place, id)` for every place of this block; places behind the last id are 0.
template <typename F>
__device__ __forceinline__ void for_each(const Row& row, F f) {
  for (u32 at = threadIdx.x; at < row.vectors; at += kThreads) {
    const uint4 four = row.places[at];
    const int id = row.first + static_cast<int>(4 * at);
    f(four.x, id);
    f(four.y, id + 1);
    f(four.z, id + 2);
    f(four.w, id + 3);
  }
}

// --- what the cluster knows -------------------------------------------------------------------------------------------

using Pair = u32[2];

// Every block gets a and b of the first warp of every block.
__device__ __forceinline__ const Pair* tell(Shared& s, Row& row, u32 a, u32 b) {
  Pair* const slots = s.given[row.turn++ & 1];
  if (threadIdx.x < CLUSTER) {
    give_block(&slots[row.rank][0], threadIdx.x, a);
    give_block(&slots[row.rank][1], threadIdx.x, b);
  }
  blocks_meet();
  return slots;
}

// The greatest a and the greatest b of all threads of the cluster.
__device__ __forceinline__ void greatest(Shared& s, Row& row, u32& a, u32& b) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  a = __reduce_max_sync(kWhole, a);
  b = __reduce_max_sync(kWhole, b);
  if (lane == 0) {
    s.sums[0][warp] = a;
    s.sums[1][warp] = b;
  }
  __syncthreads();
  if (warp == 0) {
    a = __reduce_max_sync(kWhole, s.sums[0][lane % kWarps]);
    b = __reduce_max_sync(kWhole, s.sums[1][lane % kWarps]);
  }
  const Pair* const slots = tell(s, row, a, b);
  a = b = 0;
#pragma unroll
  for (u32 i = 0; i < CLUSTER; i++) {
    a = max(a, slots[i][0]);
    b = max(b, slots[i][1]);
  }
}

// The sum of exp(score - top) over kept ids: a thread's, a warp's, a block's, the cluster's, always in this order.
__device__ __forceinline__ float sum_of_kept(Shared& s, Row& row, const Cut& cut) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float sum = 0.f;
  for_each(row, [&](u32 place, int id) {
    const float e = expf(__fsub_rn(score_of(place), row.top));
    sum = __fadd_rn(sum, kept(place, id, cut) ? e : 0.f);
  });
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kWhole, sum, step));
  if (lane == 0) s.sums[0][warp] = __float_as_uint(sum);
  __syncthreads();
  sum = 0.f;
  for (u32 i = 0; i < kWarps; i++) sum = __fadd_rn(sum, __uint_as_float(s.sums[0][i]));
  const Pair* const slots = tell(s, row, __float_as_uint(sum), 0);
  sum = 0.f;
  for (u32 i = 0; i < CLUSTER; i++) sum = __fadd_rn(sum, __uint_as_float(slots[i][0]));
  return sum;
}

__device__ __forceinline__ u32 sum_up_to_lane(u32 v) {
  const u32 lane = threadIdx.x & 31;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(kWhole, v, step);
    if (lane >= step) v += other;
  }
  return v;
}

// The bin with which the sum over bins of all blocks, from the first on, comes from `above` to `wanted`.
__device__ __forceinline__ void choose_bin(Shared& s, u32 rank, u32 wanted, u32 above) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (u32 group = warp; group < kGroups; group += kWarps) {
    const u32 sum = __reduce_add_sync(kWhole, s.bins[32 * group + lane]);
    if (lane < CLUSTER) give_block(&s.groups[group][rank], lane, sum);
  }
  blocks_meet();
  if (warp == 0) {
    u32 own[kGroups / 32], pair = 0;
#pragma unroll
    for (u32 i = 0; i < kGroups / 32; i++) {
      own[i] = 0;
      for (u32 block = 0; block < CLUSTER; block++) own[i] += s.groups[kGroups / 32 * lane + i][block];
      pair += own[i];
    }
    u32 before = above + sum_up_to_lane(pair) - pair, group = kGroups / 32 * lane;
    const u32 there = __ballot_sync(kWhole, before + pair >= wanted);
    if (there != 0) {
#pragma unroll
      for (u32 i = 0; i + 1 < kGroups / 32; i++) {
        if (before + own[i] >= wanted) break;
        before += own[i];
        group++;
      }
      before = __shfl_sync(kWhole, before, __ffs(there) - 1);
      group = __shfl_sync(kWhole, group, __ffs(there) - 1);
      u32 mine = 0;
#pragma unroll
      for (u32 block = 0; block < CLUSTER; block++) mine += word_of_block(&s.bins[32 * group + lane], block);
      before += sum_up_to_lane(mine) - mine;
      const u32 reaching = __ballot_sync(kWhole, before + mine >= wanted);
      if (static_cast<int>(lane) == __ffs(reaching) - 1) {
        s.chosen[0] = 32 * group + lane;
        s.chosen[1] = before;
      }
    }
    if (lane == 0) s.chosen[2] = there != 0;
  }
  __syncthreads();
}

// The greatest place that, with all better ones, has `wanted` of the weights of kept ids, and what the better ones have;
// false where all do not have it. 0 < wanted. All weights together stay far below 2^32: masses add up to about 2^31.
template <typename Weights>
__device__ __forceinline__ bool reach(Shared& s, Row& row, const Cut& cut, u32 wanted, const Weights& weight, u32& place,
                                      u32& above) {
  const u32 thread = threadIdx.x;
  above = 0;
  for (u32 i = thread; i < kBins; i += kThreads) s.bins[i] = 0;
  __syncthreads();
  for_each(row, [&](u32 p, int id) {
    if (!kept(p, id, cut)) return;
    const float score = score_of(p);
    const u32 w = weight(score);
    if (w != 0) atomicAdd(&s.bins[bin_of(row.top, score)], w);
  });
  __syncthreads();
  choose_bin(s, row.rank, wanted, above);
  if (s.chosen[2] == 0) return false;
  above = s.chosen[1];
  u32 bin = s.chosen[0], high = 0, low = 0;
  for_each(row, [&](u32 p, int id) {
    if (!kept(p, id, cut) || bin_of(row.top, score_of(p)) != bin) return;
    high = max(high, p);
    low = max(low, ~p);
  });
  for (;;) {
    greatest(s, row, high, low);  // blocks meet: bins may be written again, or this block end
    low = ~low;
    place = high;
    if (low == high) return true;
    const u32 shift = max(0, 32 - __clz(static_cast<int>(high - low)) - static_cast<int>(kBinBits));
    for (u32 i = thread; i < kBins; i += kThreads) s.bins[i] = 0;
    __syncthreads();
    for_each(row, [&](u32 p, int id) {
      if (p < low || p > high || !kept(p, id, cut)) return;
      const u32 w = weight(score_of(p));
      if (w != 0) atomicAdd(&s.bins[(high - p) >> shift], w);
    });
    __syncthreads();
    choose_bin(s, row.rank, wanted, above);
    above = s.chosen[1];
    bin = s.chosen[0];
    const u32 best = high;
    high = 0;
    low = 0;
    for_each(row, [&](u32 p, int id) {
      if (p > best || (best - p) >> shift != bin || !kept(p, id, cut)) return;
      high = max(high, p);
      low = max(low, ~p);
    });
  }
}

// The id of the `number`-th id at a place, from 1, but not more than `limit`.
__device__ __forceinline__ int id_of_tie(Shared& s, Row& row, u32 place, u32 number, int limit) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, share = (row.vectors + kWarps - 1) / kWarps;
  const u32 first = min(warp * share, row.vectors), end = min(first + share, row.vectors);
  const auto ties = [&](u32 at) {
    const uint4 four = at < end ? row.places[at] : make_uint4(0, 0, 0, 0);
    return (four.x == place) + 2 * (four.y == place) + 4 * (four.z == place) + 8 * (four.w == place);
  };
  u32 count = 0;
  for (u32 at = first + lane; at < end; at += 32) count += __popc(ties(at));
  count = __reduce_add_sync(kWhole, count);
  if (lane == 0) s.sums[0][warp] = count;
  __syncthreads();
  const u32 upto = sum_up_to_lane(lane < kWarps ? s.sums[0][lane] : 0);
  const Pair* const slots = tell(s, row, __shfl_sync(kWhole, upto, 31), 0);
  u32 before = 0, all = 0;
  for (u32 i = 0; i < CLUSTER; i++) {
    before += i < row.rank ? slots[i][0] : 0;
    all += slots[i][0];
  }
  if (all < number) return limit;
  before += __shfl_sync(kWhole, upto, warp) - count;
  u32 found = 0;  // the id and one
  if (before < number && before + count >= number) {
    for (u32 base = first; base < end; base += 32) {
      u32 some = ties(base + lane);
      const u32 sum = sum_up_to_lane(__popc(some)), in_all = __shfl_sync(kWhole, sum, 31);
      u32 left = number - before;  // of which the lane has those behind the lanes before it
      const u32 skipped = sum - __popc(some);
      if (left > skipped && left <= sum) {
        for (left -= skipped; left > 1; left--) some &= some - 1;
        found = row.first + 4 * (base + lane) + __ffs(some);
      }
      if (before + in_all >= number) break;
      before += in_all;
    }
  }
  u32 none = 0;
  greatest(s, row, found, none);
  return min(static_cast<int>(found) - 1, limit);
}

// --- a row --------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ long long owner_of(const Params& p, long long row) {
  if (p.cu_seqlens == nullptr) return row;
  u32 ended = 0;
  for (int i = threadIdx.x & 31; i < p.requests; i += 32) ended += p.cu_seqlens[1 + i] <= row;
  return min(static_cast<int>(__reduce_add_sync(kWhole, ended)), p.requests - 1);
}

// Four logits from `x`, of which `count` are the row's; 16 bytes where `x` is at a multiple of them.
__device__ __forceinline__ float4 load_four(const float* x, int count, bool aligned) {
  if (aligned && count >= 4) return *reinterpret_cast<const float4*>(x);
  return {x[0], count > 1 ? x[1] : 0.f, count > 2 ? x[2] : 0.f, count > 3 ? x[3] : 0.f};
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 3) cuts(const __grid_constant__ Params p) {
  extern __shared__ uint4 raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  uint4* const places = raw + sizeof(Shared) / 16;
  block_is_there();
  const u32 thread = threadIdx.x;
  const long long number = blockIdx.x / CLUSTER, owner = owner_of(p, number);
  const int part = (p.ids + 4 * CLUSTER - 1) / (4 * CLUSTER) * 4;
  Row row;
  row.places = places;
  row.rank = blockIdx.x % CLUSTER;
  row.first = min(static_cast<int>(row.rank) * part, p.ids);
  row.turn = 0;
  const int count = min(part, p.ids - row.first);
  row.vectors = (count + 3) / 4;
  const float* const logits = p.logits + number * p.pitch + row.first;
  const bool aligned = (reinterpret_cast<u64>(logits) & 15) == 0;
  const float heat = p.temperature[owner];
  const bool warm = heat > 0.f && heat != 1.f;

  u32 best = 0, broken = 0;
  for (u32 base = thread; base < row.vectors; base += kThreads * kUnroll) {
    float4 values[kUnroll];
#pragma unroll
    for (u32 u = 0; u < kUnroll; u++) {
      const u32 at = base + u * kThreads;
      if (at < row.vectors) values[u] = load_four(logits + 4 * at, count - 4 * static_cast<int>(at), aligned);
    }
#pragma unroll
    for (u32 u = 0; u < kUnroll; u++) {
      const u32 at = base + u * kThreads;
      if (at >= row.vectors) break;
      const int there = count - 4 * static_cast<int>(at);
      const float given[4] = {values[u].x, values[u].y, values[u].z, values[u].w};
      u32 own[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        own[i] = i < there ? place_of(warm ? __fdiv_rn(given[i], heat) : given[i]) : 0;
        if (own[i] >= kInfinity) broken = 1;
        else best = max(best, own[i]);
      }
      places[at] = make_uint4(own[0], own[1], own[2], own[3]);
    }
  }
  wait_for_blocks();
  greatest(s, row, best, broken);
  const bool usable = broken == 0 && best > kMinusInfinity;
  row.top = score_of(max(best, kMinusInfinity));

  Cut cut = {0, -1};  // all ids, and not what is behind the last
  int limit = p.ids;
  float total = 0.f;
  if (usable && heat > 0.f) {
    const float share = p.min_p[owner], mass = p.top_p[owner];
    const int most = p.top_k[owner];
    if (share > 0.f) {
      const float floor = static_cast<float>(log(static_cast<double>(min(share, 1.f))));
      u32 lowest = 0, none = 0;
      for_each(row, [&](u32 place, int) {
        if (__fsub_rn(score_of(place), row.top) >= floor) lowest = max(lowest, ~place);
      });
      greatest(s, row, lowest, none);
      cut = {~lowest, limit};
    }
    u32 place, above;
    if (most > 0 && most < p.ids && reach(s, row, cut, most, Ones{}, place, above)) {
      limit = id_of_tie(s, row, place, most - above, limit);
      cut = {place, limit};
    }
    if (mass < 1.f || p.want_total) total = sum_of_kept(s, row, cut);
    if (mass < 1.f) {
      // the best id is kept whatever the mass is
      const u32 target = max(1u, static_cast<u32>(max(0.f, mass) * kMassOne));
      const Masses masses = {row.top, total, __frcp_rn(total)};
      if (reach(s, row, cut, target, masses, place, above)) {
        const u32 each = masses(score_of(place));
        limit = id_of_tie(s, row, place, (target - above + each - 1) / each, place > cut.place ? p.ids : limit);
        cut = {place, limit};
      }
      if (p.want_total) total = sum_of_kept(s, row, cut);
    }
  }
  if (row.rank == 0 && thread == 0) {
    p.keys[number] = static_cast<int>(cut.place ^ 0x80000000u);
    p.limits[number] = limit;
    p.tops[number] = row.top;
    p.totals[number] = total;
    p.usables[number] = usable;
  }
}
