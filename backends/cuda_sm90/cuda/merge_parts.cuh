// Merges what the blocks of a cluster found for the parts of a row (`sparse_attn.cu`), and divides by sums with the sink.
//
// Each block has the results of its part in shared memory, as bfloat16 and divided by the part's own sum: float32 would
// double the bytes between blocks, which are what merging takes its time for.
//
// Macros: PARTS, the parts of a row, at most eight; those of `attention.cuh`.

// Where channels `channel` to `channel` + 7 of a head are, among the results of a block: a head has a line of eight parts.
__device__ __forceinline__ u32 place_of_results(int head, int channel) {
  return (channel >> 6) * kPart + head * 128 + ((((channel >> 3) & 7) ^ (head & 7)) << 4);
}

// All warps of a block merge a share of the row's heads and channels. `results` is laid out as a tile; `stats` has the
// references of heads and behind them their sums.
__device__ __forceinline__ void merge_parts(const Params& p, u32 results, u32 stats) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  blocks_meet();
#pragma unroll 1
  for (int i = part * 16 + warp; i < kHeads * 2; i += PARTS * 16) {  // 256 channels of a head
    const int head = i >> 1, channel = (i & 1) * 256 + lane * 8;
    float top = kNothing, sum = 0.f;
    if (lane < PARTS) {
      const u32 there = address_in_block(stats + head * 4, lane);
      top = load_far_f32(there);
      sum = load_far_f32(there + 256);
    }
    u32 shares[PARTS][4];
    const u32 mine = results + place_of_results(head, channel);
#pragma unroll
    for (int of = 0; of < PARTS; of++) load_far_16(shares[of], address_in_block(mine, (part + of) % PARTS));  // not all from one
    float best = top;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) best = fmaxf(best, __shfl_xor_sync(FULL_WARP, best, step));
    const float weight = sum * power_of_two((top - best) * p.scale);
    sum = weight;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    best = __shfl_sync(FULL_WARP, best, 0);
    sum = __shfl_sync(FULL_WARP, sum, 0);
    float o[8] = {};
#pragma unroll
    for (int of = 0; of < PARTS; of++) {
      const float share = __shfl_sync(FULL_WARP, weight, (part + of) % PARTS);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        o[2 * k] = fmaf(share, __uint_as_float(shares[of][k] << 16), o[2 * k]);
        o[2 * k + 1] = fmaf(share, __uint_as_float(shares[of][k] & 0xFFFF0000u), o[2 * k + 1]);
      }
    }
    const float factor = last_factor(sum, best, p.sink[head], p.scale);
    *reinterpret_cast<uint4*>(p.out + (static_cast<u64>(row) * kHeads + head) * kChannels + channel) =
        make_uint4(round_pair(o[0] * factor, o[1] * factor), round_pair(o[2] * factor, o[3] * factor),
                   round_pair(o[4] * factor, o[5] * factor), round_pair(o[6] * factor, o[7] * factor));
    if ((i & 1) == 0 && lane == 0) p.lse[row * kHeads + head] = lse_of(sum, best, p.scale);
  }
  blocks_leave();
}
