// CUDA's own functions and this project's wrappers of machine instructions, for threads on the CPU (`cuda_threads.h`): enough for
// kernels whose only machine instructions are in small wrappers; those get plain C++ here.

#include "cuda_threads.h"

#define threadIdx (simt::threads[simt::current].thread)
#define blockIdx (simt::threads[simt::current].block)

inline void __syncthreads() { simt::wait(simt::blocks[simt::rank()], simt::per_block); }
template <typename T>
T __shfl_sync(u32, T v, int from, int width = 32) {
  return simt::lane(v, (simt::current & 31 & -width) | (from & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(u32, T v, int mask) {
  return simt::lane(v, (simt::current ^ mask) & 31);
}
template <typename T>
T __shfl_up_sync(u32, T v, u32 by) {
  const int own = simt::current & 31;
  return simt::lane(v, own < static_cast<int>(by) ? own : own - static_cast<int>(by));
}
inline u32 __ballot_sync(u32, bool p) { return simt::combine<u32>(p ? 1u << (simt::current & 31) : 0u, [](u32 a, u32 b) { return a | b; }); }
inline bool __any_sync(u32 mask, bool p) { return __ballot_sync(mask, p) != 0; }
inline u32 __reduce_or_sync(u32, u32 v) { return simt::combine(v, [](u32 a, u32 b) { return a | b; }); }
inline u32 __reduce_add_sync(u32, u32 v) { return simt::combine(v, [](u32 a, u32 b) { return a + b; }); }
inline u32 __reduce_max_sync(u32, u32 v) { return simt::combine(v, [](u32 a, u32 b) { return max(a, b); }); }
inline int __reduce_max_sync(u32, int v) { return simt::combine(v, [](int a, int b) { return max(a, b); }); }
template <typename T>
UNSEEN T atomicAdd(T* p, T v) {
  order::change(p, sizeof v, CALLED_FROM);
  const T before = *p;
  *p += v;
  return before;
}
template <typename T>
UNSEEN T atomicOr(T* p, T v) {
  order::change(p, sizeof v, CALLED_FROM);
  const T before = *p;
  *p |= v;
  return before;
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(u32 v) { return __builtin_ffs(static_cast<int>(v)); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<u32>(v)); }
inline int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll(static_cast<u64>(v)); }
inline u32 __float_as_uint(float v) { return simt::cast<u32>(v); }
inline u32 __vmaxu2(u32 a, u32 b) { return max(a & 0xFFFFu, b & 0xFFFFu) | max(a >> 16, b >> 16) << 16; }
inline u32 __vminu2(u32 a, u32 b) { return min(a & 0xFFFFu, b & 0xFFFFu) | min(a >> 16, b >> 16) << 16; }
inline u32 __vimax3_u16x2(u32 a, u32 b, u32 c) { return __vmaxu2(__vmaxu2(a, b), c); }
inline u32 __vimin3_u16x2(u32 a, u32 b, u32 c) { return __vminu2(__vminu2(a, b), c); }
inline u32 __byte_perm(u32 a, u32 b, u32 which) {
  const u64 all = static_cast<u64>(b) << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= static_cast<u32>(all >> (which >> 4 * i & 7u) * 8 & 0xFFu) << 8 * i;
  return r;
}
inline float __uint_as_float(u32 v) { return simt::cast<float>(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float a) { return 1.f / std::sqrt(a); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

// --- wrappers of machine instructions -----------------------------------------------------------------------------------

inline u32 shared_address(const void* p) { return static_cast<u32>(static_cast<const u8*>(p) - simt::memory()); }
inline void __syncwarp() { simt::wait(simt::warps[simt::current / 32], 32); }
inline void store_f32(u32 at, float v) { simt::put(at, v); }
inline float load_f32(u32 at) { return simt::get<float>(at); }
inline void store_16(u32 at, u32 a, u32 b, u32 c, u32 d) { simt::put(at, uint4{a, b, c, d}); }
inline void store_global(u16* to, const u32 (&v)[4]) { std::memcpy(to, v, 16); }
inline void load_once(u32 (&v)[4], const u16* from) { std::memcpy(v, from, 16); }

// A barrier in shared memory: arrivals of a phase, those still missing, bytes still missing, and the phase.
struct SharedBarrier {
  u16 arrivals, missing;
  int bytes : 31;
  u32 phase : 1;
};
UNSEEN inline SharedBarrier& shared_barrier(u32 at) { return *reinterpret_cast<SharedBarrier*>(simt::far(at)); }
UNSEEN inline simt::Arrivals& arrivals_at(u32 at) { return simt::arrivals[simt::far(at)]; }
UNSEEN inline void barrier_turn(u32 at) {
  SharedBarrier& b = shared_barrier(at);
  if (b.missing != 0 || b.bytes != 0) return;
  order::settle(arrivals_at(at).so_far);
  arrivals_at(at).ended[b.phase] = arrivals_at(at).so_far;
  b.phase ^= 1;
  simt::events++;
  b.missing = b.arrivals;
}
UNSEEN inline void barrier_init(u32 at, u32 arrivals) {
  order::write(simt::far(at), 8);
  order::make_barrier(simt::far(at));
  shared_barrier(at) = {static_cast<u16>(arrivals), static_cast<u16>(arrivals), 0, 0};
  simt::arrivals.erase(simt::far(at));
}
inline void barrier_init_done() { order::barriers_are_made(); }
UNSEEN inline void barrier_arrive(u32 at) {
  order::read(simt::far(at), 8);  // it must have been made
  order::give(arrivals_at(at).so_far);
  shared_barrier(at).missing--;
  barrier_turn(at);
}
UNSEEN inline void barrier_expect(u32 at, u32 bytes) {
  shared_barrier(at).bytes += static_cast<int>(bytes);
  barrier_arrive(at);
}
UNSEEN inline void barrier_wait(u32 at, u32 phase) {
  order::read(simt::far(at), 8);
  while (shared_barrier(at).phase == phase) simt::let_others_run();
  order::take(arrivals_at(at).ended[phase]);
}
// The bytes of a copy have come.
UNSEEN inline void barrier_counts(u32 at, u32 bytes) {
  shared_barrier(at).bytes -= static_cast<int>(bytes);
  barrier_turn(at);
}
UNSEEN inline void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  order::counted_copy(simt::far(to), bytes, simt::far(barrier), arrivals_at(barrier).so_far, CALLED_FROM);
  std::memcpy(simt::far(to), from, bytes);
  barrier_counts(barrier, bytes);
}
UNSEEN inline void copy_to_block(u32 far, u32 from, u32 bytes, u32 barrier) {
  order::counted_source(simt::far(from), bytes, simt::far(barrier), CALLED_FROM);
  copy_bytes(far, simt::far(from), bytes, barrier);
}
inline u32 address_in_block(u32 at, u32 block) { return at | (block + 1) << simt::kBlockBit; }
inline void send_to_block(u32 to, u32 block, u32 from, u32 bytes, u32 barrier) {
  copy_to_block(address_in_block(to, block), from, bytes, address_in_block(barrier, block));
}
inline void wait_for_reads_of_copies() { order::wait_copied_from(); }
// Of `count` threads of the block that come to one of its sixteen barriers.
inline void named_meet(int which, int count) { simt::wait(simt::named[simt::rank() * 16 + which], count); }
inline void named_arrive(int which, int count) { simt::come(simt::named[simt::rank() * 16 + which], count); }

template <int Count>
void more_registers() {}
template <int Count>
void fewer_registers() {}
inline void fence_async_units() { order::show(); }
inline void mma_fence() {}
inline void mma_commit() { order::commit_products(); }
// All lanes come here together, so what one has read another knows to be read.
template <int Newest>
void mma_wait_all_but() {
  order::wait_products(Newest);
  simt::Barrier& lanes = simt::products[simt::current / 32];
  simt::wait_for(lanes, simt::come(lanes, 32, true));
}
inline void mma_wait_all() { mma_wait_all_but<0>(); }
inline void mma_wait_all_but_newest() { mma_wait_all_but<1>(); }
template <int N>
void keep(float (&)[N]) {}
inline void store_u32(u32 at, u32 v) { simt::put(at, v); }
inline u32 load_u32(u32 at) { return simt::get<u32>(at); }
inline u64 load_u64(u32 at) { return simt::get<u64>(at); }
inline void load_16(u32 (&v)[4], u32 at) {
  const uint4 four = simt::get<uint4>(at);
  v[0] = four.x;
  v[1] = four.y;
  v[2] = four.z;
  v[3] = four.w;
}
inline void load_8(u32 (&v)[2], u32 at) {
  const uint2 two = simt::get<uint2>(at);
  v[0] = two.x;
  v[1] = two.y;
}
UNSEEN inline void fetch(u32 to, const void* from, u32 bytes, bool there) {
  order::own_copy(simt::far(to), bytes, CALLED_FROM);
  if (there) std::memcpy(simt::far(to), from, bytes);
  else std::memset(simt::far(to), 0, bytes);
}
inline void copy_16_or_zeros(u32 to, const void* from, bool there) { fetch(to, from, 16, there); }
inline void copy_4_or_zeros(u32 to, const void* from, bool there, bool chosen) {
  if (chosen) fetch(to, from, 4, there);
}
inline void fetch_commit() { order::commit_own_copies(); }
template <int Newest>
void fetch_wait() {
  order::wait_own_copies(Newest);
}

// Threads of all blocks of a cluster.
inline u64 come_to_blocks(bool relaxed) { return simt::threads[simt::current].cluster_turn = simt::come(simt::all, simt::left, relaxed); }
inline void cluster_meets() { simt::wait_for(simt::all, come_to_blocks(false)); }
inline void blocks_meet() { cluster_meets(); }
inline void blocks_leave() { simt::wait_for(simt::all, come_to_blocks(true)); }
inline void block_is_there() { come_to_blocks(true); }
inline void wait_for_blocks() { simt::wait_for(simt::all, simt::threads[simt::current].cluster_turn); }
inline void say_ready() { block_is_there(); }
inline void wait_until_ready() { wait_for_blocks(); }
inline u32 word_of_block(const u32* p, u32 block) { return simt::get<u32>(address_in_block(shared_address(p), block)); }
inline void give_block(u32* p, u32 block, u32 v) { simt::put(address_in_block(shared_address(p), block), v); }
inline u32 cluster_load(u32 at) { return simt::get<u32>(at); }
UNSEEN inline u32 cluster_add(u32 at, u32 v) { return atomicAdd(reinterpret_cast<u32*>(simt::far(at)), v); }
inline void cluster_store(u32 at, u64 v) { simt::put(at, v); }

inline float bf16_value(u32 bits) { return __uint_as_float(bits << 16); }
inline u32 bf16_bits(float v) {
  const u32 bits = __float_as_uint(v);
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}
// e4m3 by its definition: a sign, 4 bits of exponent with bias 7, 3 of mantissa; 448 is the largest, 0x7F is NaN.
inline float e4m3_value(u32 code) {
  const u32 exponent = code >> 3 & 15u, mantissa = code & 7u;
  const float size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8.f + mantissa, static_cast<int>(exponent) - 10);
  return (code & 0x7Fu) == 0x7Fu ? NAN : code & 0x80u ? -size : size;
}
inline u32 e4m3_code(float v) {
  const u32 sign = __float_as_uint(v) >> 31 << 7;
  const float size = std::fabs(v);
  if (size != size) return sign | 0x7Fu;
  u32 best = 0;
  for (u32 code = 1; code < 0x7Fu; code++) {
    const float nearer = std::fabs(e4m3_value(code) - size) - std::fabs(e4m3_value(best) - size);
    if (nearer < 0.f || (nearer == 0.f && code % 2 == 0)) best = code;
  }
  return sign | best;
}
// Half precision of numbers that are not negative.
inline u32 half_bits(float v) {
  if (!(v < 65520.f)) return 0x7C00u;
  const int exponent = v < 0x1p-14f ? -14 : std::ilogb(v);
  const u32 steps = static_cast<u32>(std::nearbyint(std::ldexp(v, 10 - exponent)));  // an implied bit counts 1024
  return (static_cast<u32>(exponent + 14) << 10) + steps;
}
inline u32 half_pair(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
inline u32 smaller_halves(u32 a, u32 b) { return __vminu2(a, b); }
inline u32 e4m3_codes(float low, float high) { return e4m3_code(low) | e4m3_code(high) << 8; }
inline u32 round_pair(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline u32 round_positive_pair(float low, float high) { return round_pair(low < 0.f ? 0.f : low, high < 0.f ? 0.f : high); }
inline u32 multiply_pair(u32 a, u32 b) {
  return round_pair(bf16_value(a & 0xFFFFu) * bf16_value(b & 0xFFFFu), bf16_value(a >> 16) * bf16_value(b >> 16));
}
// A product that a double holds, and a sum of which it holds all but what no tie depends on; rounded once.
inline u32 bf16_bits_of_sum(float a, float b, float c) {
  const double sum = static_cast<double>(a) * b + c;
  u32 bits = __float_as_uint(static_cast<float>(sum));
  const double kept = __uint_as_float(bits);
  if (kept != sum) bits = (bits - (std::fabs(kept) > std::fabs(sum))) | 1u;
  return bf16_bits(__uint_as_float(bits));
}
inline u32 add_product_pair(u32 a, u32 b, u32 c) {
  const auto one = [&](u32 by) { return bf16_bits_of_sum(bf16_value(a >> by & 0xFFFFu), bf16_value(b >> by & 0xFFFFu), bf16_value(c >> by & 0xFFFFu)); };
  return one(0) | one(16) << 16;
}
inline void add_columns(float (&sum)[4], u32 a, u32 b, u32 c, u32 d) {
  const auto four = [](u32 v, u32 w) { return bf16_value(v & 0xFFFFu) + bf16_value(v >> 16) + bf16_value(w & 0xFFFFu) + bf16_value(w >> 16); };
  float upper = four(a, c), lower = four(b, d);
  for (int step = 1; step <= 2; step *= 2) {
    upper += simt::lane(upper, (simt::current ^ step) & 31);
    lower += simt::lane(lower, (simt::current ^ step) & 31);
  }
  sum[0] += upper;
  sum[1] += upper;
  sum[2] += lower;
  sum[3] += lower;
}
inline void load_matrices(u32 (&v)[4], u32 row) {
  const int own = simt::current & 31;
  for (int i = 0; i < 4; i++) v[i] = load_u32(simt::lane(row, 8 * i + own / 4) + own % 4 * 4);
}
inline void hold(u32&) {}
inline void hold(u64&) {}
inline void hold(float&) {}
inline void store_score(u64 at, u32 v) { std::memcpy(reinterpret_cast<void*>(at), &v, 4); }
inline u32 load_u8(u32 at) { return simt::get<u8>(at); }
inline u32 multiply_add(u32 a, u32 b, u32 c) { return a * b + c; }

// --- bulk copies by a tensor map, and sums that blocks of a grid leave for each other -------------------------------------

// What `map_words` says of a matrix: its place, bytes of a pitch, rows, columns, and rows of a box; columns of a box are 64.
struct TensorMap;
UNSEEN inline void copy_box(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  const u64* const words = reinterpret_cast<const u64*>(map);
  for (u32 r = 0; r < words[4]; r++) {
    for (u32 chunk = 0; chunk < 8; chunk++) {
      const u64 row = y + r, column = x + chunk * 8;
      const bool there = row < words[2] && column < words[3];
      const u8* const from = reinterpret_cast<const u8*>(words[0]) + (there ? row * words[1] + column * 2 : 0);
      u8* const place = simt::far(to + r * 128 + (chunk ^ r % 8) * 16);
      if (there) std::memcpy(place, from, 16);
      else std::memset(place, 0, 16);
    }
  }
  const u32 bytes = static_cast<u32>(words[4]) * 128;
  order::counted_copy(simt::far(to), bytes, simt::far(barrier), arrivals_at(barrier).so_far, CALLED_FROM);
  barrier_counts(barrier, bytes);
}
inline void store_8(u32 at, u32 a, u32 b) { simt::put(at, uint2{a, b}); }
inline void store_floats(u32 at, float a, float b, float c, float d) { simt::put(at, float4{a, b, c, d}); }
inline float4 load_from_others(const float4* from) { return *from; }
inline u32 arrive(u32* at) { return atomicAdd(at, 1u); }

#include "cuda_on_cpu_mma.h"
