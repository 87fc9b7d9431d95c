// What the two programs of the mixing logits share: how sums lie in memory, and what becomes of them.
//
// The terms of a row are cut into 64 stretches, each summed from its own zero and then added up as a binary tree, whatever
// the number of rows and whoever adds: a row has the same bits alone and in any batch.
//
// Macros: HIDDEN, a multiple of 1024; OWN stretches of a block and BLOCKS of a cluster, powers of two.

constexpr int kStreams = 4, kColumns = kStreams * (kStreams + 2), kTerms = kStreams * HIDDEN, kStretches = 64;
constexpr int kParts = kStretches / (OWN * BLOCKS);             // of a row, in memory
constexpr int kPitch = kColumns + 4, kQuadFloats = 4 * kPitch;  // products of a row and its square; of four rows

struct Params {
  TensorMap streams;    // [rows, kTerms] bfloat16
  const float* matrix;  // [kColumns, kTerms]
  float* parts;         // [rows / 4, kParts, 4, kPitch]
  u32* arrivals;        // of parts of four rows; zero before and after
  float* out;           // [rows, kColumns]
  int rows, at_once;    // tiles
  float eps;
};

// Sixteen bytes that another multiprocessor may have written.
__device__ __forceinline__ float4 load_from_others(const float4* from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}
template <int N>
__device__ __forceinline__ float4 add_as_tree(float4 (&v)[N]) {
#pragma unroll
  for (int step = 1; step < N; step *= 2) {
#pragma unroll
    for (int i = 0; i < N; i += 2 * step) v[i] = add(v[i], v[i + step]);
  }
  return v[0];
}

// The parts of four rows, added up and divided by the root.
__device__ __forceinline__ void finish(const Params& p, int quad) {
  const int lane = threadIdx.x % 32, row = lane / 8, chunk = lane % 8, at = quad * 4 + row;
  const float4* const from = reinterpret_cast<const float4*>(p.parts) + static_cast<u64>(quad) * kParts * (kQuadFloats / 4) + row * (kPitch / 4) + min(chunk, 6);
  float4 v[kParts];
#pragma unroll
  for (int i = 0; i < kParts; i++) v[i] = load_from_others(from + i * (kQuadFloats / 4));
  const float4 total = add_as_tree(v);
  const float mean = __fdiv_rn(__shfl_sync(0xFFFFFFFFu, total.x, row * 8 + kColumns / 4), kTerms);
  const float inverse = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(mean, p.eps)));
  if (at < p.rows && chunk < kColumns / 4) {
    const float4 mix = {__fmul_rn(total.x, inverse), __fmul_rn(total.y, inverse), __fmul_rn(total.z, inverse), __fmul_rn(total.w, inverse)};
    reinterpret_cast<float4*>(p.out)[static_cast<u64>(at) * (kColumns / 4) + chunk] = mix;
  }
}
