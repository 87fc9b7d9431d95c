// Norm, rotation, codes and cache record of a row without leaving registers: a warp per row of 512 values, half a warp per
// row of 128. A lane has stretches of eight neighbouring values, so groups of a format are neighbouring lanes.
//
// Macros: DIM 512 or 128; KIND 1 e4m3 under ue8m0 scales of 32 values, 2 e2m1 under such scales in a section behind the
// codes of the page, 3 e2m1 under e4m3 scales of 16; WIDTH of the rotated tail; RECORDS of a page.

constexpr u32 kWhole = 0xFFFFFFFFu;
constexpr int kThreads = 128, kLanes = DIM >= 256 ? 32 : DIM / 8, kStretches = DIM / (8 * kLanes);
constexpr int kRowsOfBlock = kThreads / kLanes;
constexpr int kGroup = KIND == 3 ? 16 : 32, kCodeBytes = KIND == 1 ? DIM : DIM / 2, kScaleBytes = DIM / kGroup;
constexpr int kRecordBytes = KIND == 2 ? kCodeBytes : kCodeBytes + kScaleBytes;  // from record to record

struct Params {
  const u16* x;         // rows of bfloat16
  const float* weight;  // [DIM]
  const int* positions;
  const float* table;  // [positions, WIDTH]: cosines, then sines
  u8* cache;
  const int* slots;
  u16* normed;  // [rows, DIM] bfloat16; null where nobody wants them
  u64 pitch, page_bytes;
  int rows, ratio;
  float eps;
};

__device__ __forceinline__ u32 e4m3_codes(float low, float high) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float e4m3_value(u32 code) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(static_cast<u16>(code)));
  float v;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(v) : "r"(r));
  return v;
}
__device__ __forceinline__ float power_value(u32 code) {  // of a ue8m0 code
  return __uint_as_float(code == 0u ? 0x00400000u : code == 255u ? 0x7FC00000u : code << 23);
}
__device__ __forceinline__ float low_value(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_value(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// The scale code of a group from the bits of its largest magnitude; NaN sorts above every number.
__device__ __forceinline__ u32 scale_code(u32 largest) {
  const float amax = __uint_as_float(largest);
  if (KIND == 3) {
    const float target = fminf(__fdiv_rn(fmaxf(amax, 6.f * 0x1p-9f), 6.f), 448.f);
    return largest < 0x7F800000u ? e4m3_codes(target, 0.f) & 0xFFu : 0x7Fu;
  }
  const float target = KIND == 1 ? __fdiv_rn(fmaxf(amax, 1e-4f), 448.f) : __fdiv_rn(fmaxf(amax, 6.f * 0x1p-126f), 6.f);
  return largest < 0x7F800000u ? (__float_as_uint(target) + 0x7FFFFFu) >> 23 & 0xFFu : 255u;
}

// Magnitude codes by comparison with midpoints; a tie goes to the even code.
__device__ __forceinline__ u32 e2m1_code(float x, float scale) {
  const float size = fabsf(x);
  u32 code = size > 0.25f * scale;
  code += size >= 0.75f * scale;
  code += size > 1.25f * scale;
  code += size >= 1.75f * scale;
  code += size > 2.5f * scale;
  code += size >= 3.5f * scale;
  code += size > 5.f * scale;
  return code | (__float_as_uint(x) >> 31) << 3;
}

extern "C" __global__ void __launch_bounds__(kThreads) kv_store(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % kLanes, row = blockIdx.x * kRowsOfBlock + threadIdx.x / kLanes;
  const bool live = row < p.rows;  // all lanes stay for their neighbours' exchanges
  const u64 at = live ? row : 0;
  const int slot = live ? p.slots[at] : -1;
  const float* const turn = p.table + static_cast<u64>(live ? p.positions[at] / p.ratio * p.ratio : 0) * WIDTH;
  float v[kStretches][8], sum = 0.f;
#pragma unroll
  for (int i = 0; i < kStretches; i++) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p.x + at * p.pitch + (i * kLanes + lane) * 8);
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      v[i][2 * j] = low_value(words[j]);
      v[i][2 * j + 1] = high_value(words[j]);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) sum = __fadd_rn(sum, __fmul_rn(v[i][j], v[i][j]));
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kWhole, sum, step));
  const float inverse = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, static_cast<float>(DIM)), p.eps)));

  const u32 page = slot < 0 ? 0 : static_cast<u32>(slot) / RECORDS, offset = slot < 0 ? 0 : static_cast<u32>(slot) % RECORDS;
  u8* const base = p.cache + page * p.page_bytes;
  u8* const codes = base + offset * kRecordBytes;
  u8* const scales = KIND == 2 ? base + RECORDS * kCodeBytes + offset * kScaleBytes : codes + kCodeBytes;
#pragma unroll
  for (int i = 0; i < kStretches; i++) {
    const int first = (i * kLanes + lane) * 8;
    float weight[8];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float4 w = *reinterpret_cast<const float4*>(p.weight + first + 4 * j);
      weight[4 * j] = w.x;
      weight[4 * j + 1] = w.y;
      weight[4 * j + 2] = w.z;
      weight[4 * j + 3] = w.w;
    }
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float low = __fmul_rn(__fmul_rn(v[i][2 * j], inverse), weight[2 * j]);
      pairs[j] = round_pair(low, __fmul_rn(__fmul_rn(v[i][2 * j + 1], inverse), weight[2 * j + 1]));
    }
    if (live && p.normed != nullptr) {
      *reinterpret_cast<uint4*>(p.normed + at * DIM + first) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    if (first >= DIM - WIDTH) {
      const float4 cosines = *reinterpret_cast<const float4*>(turn + (first - (DIM - WIDTH)) / 2);
      const float4 sines = *reinterpret_cast<const float4*>(turn + WIDTH / 2 + (first - (DIM - WIDTH)) / 2);
      const float c[4] = {cosines.x, cosines.y, cosines.z, cosines.w}, s[4] = {sines.x, sines.y, sines.z, sines.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float even = low_value(pairs[j]), odd = high_value(pairs[j]);
        pairs[j] = round_pair(__fsub_rn(__fmul_rn(even, c[j]), __fmul_rn(odd, s[j])), __fadd_rn(__fmul_rn(even, s[j]), __fmul_rn(odd, c[j])));
      }
    }
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) largest = max(largest, max(pairs[j] << 16 & 0x7FFFFFFFu, pairs[j] & 0x7FFF0000u));
#pragma unroll
    for (int step = 1; step < kGroup / 8; step *= 2) largest = max(largest, __shfl_xor_sync(kWhole, largest, step));
    const u32 code = scale_code(largest);
    if (slot < 0) continue;
    if (lane % (kGroup / 8) == 0) scales[first / kGroup] = static_cast<u8>(code);
    if constexpr (KIND == 1) {
      const float factor = power_value(254u - code);  // exact, so the product is the quotient
      const auto two = [&](u32 pair) { return e4m3_codes(low_value(pair) * factor, high_value(pair) * factor); };
      *reinterpret_cast<uint2*>(codes + first) = make_uint2(two(pairs[0]) | two(pairs[1]) << 16, two(pairs[2]) | two(pairs[3]) << 16);
    } else {
      const float scale = KIND == 3 ? e4m3_value(code) : power_value(code);
      u32 word = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        word |= e2m1_code(low_value(pairs[j]), scale) << (8 * j) | e2m1_code(high_value(pairs[j]), scale) << (8 * j + 4);
      }
      *reinterpret_cast<u32*>(codes + first / 2) = word;
    }
  }
}
