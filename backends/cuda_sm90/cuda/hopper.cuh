// Hopper's own instructions as functions: shared-memory barriers, bulk copies, warpgroup MMA. One wrapper, one PTX line.
// Source: PTX ISA 8.x, sections on mbarrier, cp.async.bulk, wgmma.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// --- barriers: a count of arrivals and of bytes, and a phase bit that flips when both are complete ---------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;"); }
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN%=;\n}" ::"r"(
          barrier),
      "r"(phase)
      : "memory");
}

// --- copies and plain shared memory ------------------------------------------------------------------------------------

// A box of a tensor map at element (x, y) into shared memory; its bytes complete on `barrier`.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
// So many contiguous bytes, a multiple of 16, between places at multiples of 16.
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
// A box of shared memory to element (x, y) of a tensor map, with the thread's other copies (`wait_for_reads_of_copies`).
__device__ __forceinline__ void copy_box_out(const TensorMap* map, int x, int y, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x), "r"(y), "r"(from)
               : "memory");
}
// Sixteen bytes, or zeros without a read, between places at multiples of 16: a copy of a thread, in no bulk.
__device__ __forceinline__ void copy_16_or_zeros(u32 to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// The thread arrives when all its copies so far have; the barrier counts it as one of its own.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Orders writes of threads to shared memory before reads of the asynchronous units (MMA, bulk copies).
__device__ __forceinline__ void fence_async_units() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void store_16(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store_u32(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
__device__ __forceinline__ void store_f32(u32 at, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory"); }
__device__ __forceinline__ void store_floats(u32 at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ float load_f32(u32 at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ void store_8(u32 at, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void load_8(u32 (&v)[2], u32 at) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(at));
}
__device__ __forceinline__ void load_16(u32 (&v)[4], u32 at) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
}
// Four matrices of 8 rows x 8 values of 16 bits, of which each lane holds neighbours of row lane / 4. Lane 8 i + r gives the
// address of row r of matrix i.
__device__ __forceinline__ void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// --- the other blocks of a cluster, and their shared memory ---------------------------------------------------------------

// Threads of all blocks of a cluster meet, and see what the others wrote before.
__device__ __forceinline__ void blocks_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where another block has what this block has at `at`.
__device__ __forceinline__ u32 address_in_block(u32 at, u32 block) {
  u32 far;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(at), "r"(block));
  return far;
}
__device__ __forceinline__ void store_far_f32(u32 far, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(far), "f"(v) : "memory");
}
__device__ __forceinline__ void load_far_16(u32 (&v)[4], u32 far) {
  asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(far) : "memory");
}
__device__ __forceinline__ float load_far_f32(u32 far) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(far) : "memory");
  return v;
}
// The places that the thread's copies to global memory read from may be written again behind this. Copies to other blocks are
// not among those: only the barrier there says that they are done.
__device__ __forceinline__ void wait_for_reads_of_copies() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
// So many contiguous bytes to another block, whose `barrier` counts them.
__device__ __forceinline__ void copy_to_block(u32 far, u32 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(far), "r"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// --- warpgroup MMA -----------------------------------------------------------------------------------------------------

// Operand whose rows run along K: tiles of 8 rows x 128 bytes, 128-byte swizzle, groups of 8 rows 1024 bytes apart.
// Sixteen bfloat16 further along K is + 2 (in units of 16 bytes).
__device__ __forceinline__ u64 rows_along_k(u32 at) {
  return (u64)(at & 0x3FFFF) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// The same bytes read across: 64 columns an atom, atoms 8192 bytes apart, groups of 8 rows (now along K) 1024 apart.
__device__ __forceinline__ u64 columns_along_k(u32 at) {
  return (u64)(at & 0x3FFFF) >> 4 | 512ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_wait_all() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ void mma_wait_all_but_newest() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }
// As many groups as `Newest` may be under way still.
template <int Newest>
__device__ __forceinline__ void mma_wait_all_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Newest) : "memory");
}
// Pins accumulators behind a wait, so that the compiler moves no read of them before it.
template <int N>
__device__ __forceinline__ void keep(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// --- bfloat16 pairs ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float low_value(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_value(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {  // keeps subnormals, which the decoders need
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 round_pair(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float power_of_two(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// Transposes the 8 x 8 matrix of 16-bit values of which each lane holds a pair: lane 4 r + c has row r, columns 2 c and 2 c + 1.
__device__ __forceinline__ u32 transpose_pairs(u32 a) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}
