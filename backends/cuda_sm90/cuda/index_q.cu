// Index queries: rotation, rounding to bfloat16 and e2m1 codes under ue8m0 scales of 32 values. A quarter of a warp has a
// head, of which a lane has two stretches of eight neighbouring values; a warp takes 8 heads of a row, loaded at once.
// Instructions were the bound: what both stretches need is worked out for both in the halves of a register, and codes come
// from packed bfloat16.
//
// Macros: WIDTH of the rotated tail, at most 64 of the 128 values.

constexpr int kThreads = 128, kDim = 128, kLanes = 8, kTurns = 2, kGroup = 32;
constexpr int kHeads = kTurns * 32 / kLanes;

struct Params {
  const u16* x;  // [rows, heads, 128] bfloat16
  const int* positions;
  const float* table;  // [positions, WIDTH]: cosines, then sines
  u8* codes;           // [rows, heads, 64]
  u8* scales;          // [rows, heads, 4]
  u64 row_pitch, head_pitch;
  int rows, heads;
};

// Scale codes of two groups in bits 0 to 7 and 16 to 23, from `raised` below: its exponents less those of 6 and of rounding
// up, or 255 where a magnitude is no finite number.
__device__ __forceinline__ u32 scale_codes(u32 raised) {
  return ((raised >> 7 & 0x01FF01FFu) - 0x00020002u) | (raised + 0x00410041u >> 15 & 0x00010001u) * 255u;
}

extern "C" __global__ void __launch_bounds__(kThreads) index_q(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % kLanes, parts = (p.heads + kHeads - 1) / kHeads;
  const int number = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const int row = number / parts, first_head = number % parts * kHeads + threadIdx.x % 32 / kLanes;
  if (row >= p.rows) return;
  const u16* const from = p.x + row * p.row_pitch + lane * 8;
  uint4 raw[kTurns][2];
#pragma unroll
  for (int i = 0; i < kTurns; i++) {
    const u64 head = min(first_head + i * (32 / kLanes), p.heads - 1);  // all lanes stay for their neighbours' exchanges
#pragma unroll
    for (int half = 0; half < 2; half++) {
      raw[i][half] = *reinterpret_cast<const uint4*>(from + head * p.head_pitch + half * (kDim / 2));
    }
  }
  const int turning = lane * 8 - (kDim / 2 - WIDTH);  // of the second stretch
  const float* const turn = p.table + static_cast<u64>(p.positions[row]) * WIDTH + turning / 2;
  float cosine[4], sine[4];
  if (turning >= 0) {
    load_four(cosine, turn);
    load_four(sine, turn + WIDTH / 2);
  }
  const u64 first_place = static_cast<u64>(row) * p.heads;
  u32 own = 0;  // the turn of which the lane writes scales
#pragma unroll
  for (int i = 0; i < kTurns; i++) {
    u32 pairs[2][4] = {{raw[i][0].x, raw[i][0].y, raw[i][0].z, raw[i][0].w}, {raw[i][1].x, raw[i][1].y, raw[i][1].z, raw[i][1].w}};
    if (turning >= 0) rotate(pairs[1], cosine, sine);
    const u32 most[2] = {largest_pair(pairs[0]), largest_pair(pairs[1])};
    u32 largest = __vmaxu2(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));  // of either stretch
    largest = __vmaxu2(largest, __shfl_xor_sync(kWhole, largest, 1));
    largest = __vimax3_u16x2(largest, __shfl_xor_sync(kWhole, largest, 2), 0x01C001C0u);  // 6 * 2^-126 at least
    const u32 raised = largest + 0x003F003Fu;  // to the next exponent where the mantissa is above that of 6
    if (lane % (kGroup / 8) == i) own = raised;
    const u32 factors = 0x80008000u - (raised & 0x7F807F80u);  // 2^127 over the exponents, so one over the scales
    const int head = first_head + i * (32 / kLanes);
    if (head >= p.heads) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32* const eight = reinterpret_cast<u32*>(p.codes + (first_place + head) * (kDim / 2) + half * (kDim / 4) + lane * 4);
      *eight = eight_codes_by_power(pairs[half], __byte_perm(factors, factors, half == 0 ? 0x1010 : 0x3232));
    }
  }
  // groups 0 and 2 of a head are with its first lanes, 1 and 3 with the others
  const u32 other = __shfl_xor_sync(kWhole, own, kLanes / 2);
  const int head = first_head + lane * (32 / kLanes);
  if (lane < kTurns && head < p.heads) {
    *reinterpret_cast<u32*>(p.scales + (first_place + head) * (kDim / kGroup)) = scale_codes(own) | scale_codes(other) << 8;
  }
}
