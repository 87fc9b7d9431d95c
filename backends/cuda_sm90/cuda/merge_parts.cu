// Merges what blocks found for parts of rows (`sparse_attn.cu`), and divides by sums with the sink.
//
// A block takes eight heads of a row, a warp one of them. Macros: those of `attention.cuh`.

extern "C" __global__ void __launch_bounds__(256) merge_parts(const __grid_constant__ Params p) {
  const int row = blockIdx.x / (kHeads / 8), head = blockIdx.x % (kHeads / 8) * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  const float* lse = p.part_lse + static_cast<u64>(row) * p.parts * kHeads + head;
  const float infinity = __int_as_float(0x7F800000);
  float top = -infinity;
  for (int part = 0; part < p.parts; part++) top = fmaxf(top, lse[part * kHeads]);
  const float shift = top == -infinity ? 0.f : top;  // a row without keys
  float sum = 0.f, o[16];
#pragma unroll
  for (int i = 0; i < 16; i++) o[i] = 0.f;
  for (int part = 0; part < p.parts; part++) {
    const float weight = __expf(lse[part * kHeads] - shift);
    const float* from = p.part_out + ((static_cast<u64>(row) * p.parts + part) * kHeads + head) * kChannels + lane * 4;
    sum += weight;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 values = *reinterpret_cast<const float4*>(from + 128 * i);
      o[4 * i] = fmaf(weight, values.x, o[4 * i]);
      o[4 * i + 1] = fmaf(weight, values.y, o[4 * i + 1]);
      o[4 * i + 2] = fmaf(weight, values.z, o[4 * i + 2]);
      o[4 * i + 3] = fmaf(weight, values.w, o[4 * i + 3]);
    }
  }
  const float factor = sum == 0.f ? 0.f : 1.f / (sum + __expf(p.sink[head] - shift));
  u16* to = p.out + (static_cast<u64>(row) * kHeads + head) * kChannels + lane * 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 low = round_pair(o[4 * i] * factor, o[4 * i + 1] * factor), high = round_pair(o[4 * i + 2] * factor, o[4 * i + 3] * factor);
    *reinterpret_cast<uint2*>(to + 128 * i) = make_uint2(low, high);
  }
  if (lane == 0) p.lse[row * kHeads + head] = shift + __logf(sum);
}
