// The mixing matrix as a sum of three bfloat16 terms, in the tiles that `mhc_step.cu` multiplies with: per 64 channels and
// stream 72 rows of 128 bytes, the largest terms of all 24 columns first, with the swizzle of 128 bytes.
//
// Macros: HIDDEN.

constexpr int kStreams = 4, kColumns = kStreams * (kStreams + 2), kTerms = 3;
constexpr int kLaneValues = 8, kStepValues = 64, kChunks = kStepValues / kLaneValues;
constexpr int kThreads = 256, kItems = kColumns * kStreams * HIDDEN / kLaneValues;

struct Params {
  const float* matrix;  // [kColumns, kStreams * HIDDEN]
  uint4* terms;         // [HIDDEN / 64, kStreams, kTerms * kColumns, 8]
};

extern "C" __global__ void __launch_bounds__(kThreads) mhc_terms(const __grid_constant__ Params p) {
  const int item = blockIdx.x * kThreads + threadIdx.x;  // chunk and column run fastest, so that accesses are neighbours
  if (item >= kItems) return;
  const int chunk = item % kChunks, column = item / kChunks % kColumns, stream = item / (kChunks * kColumns) % kStreams;
  const int step = item / (kChunks * kColumns * kStreams);
  const float* const from = p.matrix + (static_cast<u64>(column) * kStreams + stream) * HIDDEN + step * kStepValues + chunk * kLaneValues;
  float rest[kLaneValues];
#pragma unroll
  for (int i = 0; i < kLaneValues; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    rest[i] = four.x;
    rest[i + 1] = four.y;
    rest[i + 2] = four.z;
    rest[i + 3] = four.w;
  }
  uint4* const tile = p.terms + static_cast<u64>(step * kStreams + stream) * kTerms * kColumns * kChunks;
#pragma unroll
  for (int term = 0; term < kTerms; term++) {
    const int row = term * kColumns + column;
    u32 pairs[kLaneValues / 2];
#pragma unroll
    for (int i = 0; i < kLaneValues / 2; i++) {
      pairs[i] = round_pair(rest[2 * i], rest[2 * i + 1]);
      rest[2 * i] = __fsub_rn(rest[2 * i], low_value(pairs[i]));
      rest[2 * i + 1] = __fsub_rn(rest[2 * i + 1], high_value(pairs[i]));
    }
    tile[row * kChunks + (chunk ^ row % 8)] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}
