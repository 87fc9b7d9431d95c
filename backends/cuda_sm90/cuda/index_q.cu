// Index queries: rotation, rounding to bfloat16 and e2m1 codes under ue8m0 scales of 32 values. A quarter of a warp has a
// head, of which a lane has two stretches of eight neighbouring values; a warp takes 16 heads of a row, loaded at once.
//
// Macros: WIDTH of the rotated tail, at most 64 of the 128 values.

constexpr int kThreads = 128, kDim = 128, kLanes = 8, kTurns = 4, kGroup = 32;
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
#pragma unroll
  for (int i = 0; i < kTurns; i++) {
    const int head = first_head + i * (32 / kLanes);
    const u64 place = static_cast<u64>(row) * p.heads + head;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 pairs[4] = {raw[i][half].x, raw[i][half].y, raw[i][half].z, raw[i][half].w};
      if (half == 1 && turning >= 0) rotate(pairs, cosine, sine);
      const u32 code = scale_code<2>(largest_of<kGroup / 8>(pairs));
      if (head >= p.heads) continue;
      if (lane % (kGroup / 8) == 0) p.scales[place * (kDim / kGroup) + half * 2 + lane / (kGroup / 8)] = static_cast<u8>(code);
      *reinterpret_cast<u32*>(p.codes + place * (kDim / 2) + half * (kDim / 4) + lane * 4) = eight_codes(pairs, power_value(254u - code) * 0x1p-14f);
    }
  }
}
