// CUDA threads on the CPU: each is a coroutine, and a barrier or a warp's exchange lets the others run until all are there.
// Enough for kernels of this project whose only machine instructions are in small wrappers; those get plain C++ here.
// Blocks of a cluster run together, clusters one after another.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

using std::max;
using std::min;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
struct uint4 {
  u32 x, y, z, w;
};
struct uint2 {
  u32 x, y;
};
struct float4 {
  float x, y, z, w;
};
struct Place3 {
  u32 x, y, z;
};

namespace simt {

constexpr std::size_t kStackBytes = 64 << 10;

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  Place3 thread, block;
  bool done;
  u64 given;  // to the exchange of its warp
};
struct Barrier {
  int here = 0;
  u64 turn = 0;
};

inline std::vector<Thread> threads;
inline std::vector<Barrier> warps, blocks;
inline Barrier all;
inline std::vector<std::vector<u8>> shared;  // of each block
inline ucontext_t scheduler;
inline int current, per_block;
inline std::function<void()> kernel;

inline void wait(Barrier& barrier, int count) {
  const u64 turn = barrier.turn;
  if (++barrier.here == count) {
    barrier.here = 0;
    barrier.turn++;
    return;
  }
  while (barrier.turn == turn) swapcontext(&threads[current].context, &scheduler);
}
inline int rank() { return current / per_block; }
inline u8* memory(int block) { return reinterpret_cast<u8*>((reinterpret_cast<std::uintptr_t>(shared[block].data()) + 1023) & ~std::uintptr_t{1023}); }
inline u8* memory() { return memory(rank()); }

inline void body() {
  kernel();
  threads[current].done = true;
  swapcontext(&threads[current].context, &scheduler);
}

// Runs `cluster` blocks of `count` threads to their end; shared memory starts with bytes that are no useful number.
inline void run(int cluster, int count, std::size_t shared_bytes, Place3 first, std::function<void()> f) {
  per_block = count;
  kernel = std::move(f);
  threads.resize(cluster * count);
  warps.assign(cluster * count / 32, {});
  blocks.assign(cluster, {});
  all = {};
  shared.assign(cluster, std::vector<u8>(shared_bytes + 1024, 0xFF));
  for (int i = 0; i < cluster * count; i++) {
    Thread& t = threads[i];
    t.done = false;
    t.thread = {static_cast<u32>(i % count), 0, 0};
    t.block = {first.x + static_cast<u32>(i / count), first.y, first.z};
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.data();
    t.context.uc_stack.ss_size = t.stack.size();
    t.context.uc_link = &scheduler;
    makecontext(&t.context, body, 0);
  }
  for (int left = cluster * count; left > 0;) {
    for (current = 0; current < cluster * count; current++) {
      if (threads[current].done) continue;
      swapcontext(&scheduler, &threads[current].context);
      left -= threads[current].done;
    }
  }
}

template <typename To, typename From>
To cast(From from) {
  To to{};
  std::memcpy(&to, &from, min(sizeof to, sizeof from));
  return to;
}
// What `read` makes of what the lanes gave; it is called with the first lane's number.
template <typename T, typename F>
auto exchange(T value, F read) {
  threads[current].given = cast<u64>(value);
  wait(warps[current / 32], 32);
  const auto result = read(current / 32 * 32);
  wait(warps[current / 32], 32);
  return result;
}
template <typename T, typename F>
T combine(T value, F f) {
  return exchange(value, [&](int first) {
    T result = cast<T>(threads[first].given);
    for (int i = 1; i < 32; i++) result = f(result, cast<T>(threads[first + i].given));
    return result;
  });
}
template <typename T>
T lane(T value, int number) {
  return exchange(value, [&](int first) { return cast<T>(threads[first + number].given); });
}

}  // namespace simt

#define threadIdx (simt::threads[simt::current].thread)
#define blockIdx (simt::threads[simt::current].block)

inline void __syncthreads() { simt::wait(simt::blocks[simt::rank()], simt::per_block); }
template <typename T>
T __shfl_sync(u32, T v, int from) {
  return simt::lane(v, from & 31);
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
T atomicAdd(T* p, T v) {
  const T before = *p;
  *p += v;
  return before;
}
template <typename T>
T atomicOr(T* p, T v) {
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
inline void store_f32(u32 at, float v) { std::memcpy(simt::memory() + at, &v, 4); }
inline float load_f32(u32 at) {
  float v;
  std::memcpy(&v, simt::memory() + at, 4);
  return v;
}
inline void store_16(u32 at, u32 a, u32 b, u32 c, u32 d) {
  const u32 v[4] = {a, b, c, d};
  std::memcpy(simt::memory() + at, v, 16);
}
inline void store_global(u16* to, const u32 (&v)[4]) { std::memcpy(to, v, 16); }
inline void load_once(u32 (&v)[4], const u16* from) { std::memcpy(v, from, 16); }

// A barrier in shared memory: arrivals of a phase, those still missing, bytes still missing, and the phase.
struct SharedBarrier {
  signed char arrivals, missing;
  u16 phase;
  int bytes;
};
inline SharedBarrier& shared_barrier(u32 at) { return *reinterpret_cast<SharedBarrier*>(simt::memory() + at); }
inline void barrier_turn(SharedBarrier& b) {
  if (b.missing != 0 || b.bytes != 0) return;
  b.phase ^= 1;
  b.missing = b.arrivals;
}
inline void barrier_init(u32 at, u32 arrivals) {
  shared_barrier(at) = {static_cast<signed char>(arrivals), static_cast<signed char>(arrivals), 0, 0};
}
inline void barrier_init_done() {}
inline void barrier_arrive(u32 at) {
  shared_barrier(at).missing--;
  barrier_turn(shared_barrier(at));
}
inline void barrier_expect(u32 at, u32 bytes) {
  shared_barrier(at).bytes += static_cast<int>(bytes);
  barrier_arrive(at);
}
inline void barrier_wait(u32 at, u32 phase) {
  while (shared_barrier(at).phase == phase) swapcontext(&simt::threads[simt::current].context, &simt::scheduler);
}
inline void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  std::memcpy(simt::memory() + to, from, bytes);
  shared_barrier(barrier).bytes -= static_cast<int>(bytes);
  barrier_turn(shared_barrier(barrier));
}

inline void send_to_block(u32 to, u32 block, u32 from, u32 bytes, u32 barrier) {
  std::memcpy(simt::memory(static_cast<int>(block)) + to, simt::memory() + from, bytes);
  auto& b = *reinterpret_cast<SharedBarrier*>(simt::memory(static_cast<int>(block)) + barrier);
  b.bytes -= static_cast<int>(bytes);
  barrier_turn(b);
}
inline void wait_for_reads_of_copies() {}
inline void mixers_meet() {
  static std::vector<simt::Barrier> of_block(16);
  simt::wait(of_block[simt::rank()], 128);
}

template <int Count>
void more_registers() {}
template <int Count>
void fewer_registers() {}
inline void fence_async_units() {}
inline void mma_fence() {}
inline void mma_commit() {}
inline void mma_wait_all() {}
template <int N>
void keep(float (&)[N]) {}
inline void store_u32(u32 at, u32 v) { std::memcpy(simt::memory() + at, &v, 4); }
inline u32 load_u32(u32 at) {
  u32 v;
  std::memcpy(&v, simt::memory() + at, 4);
  return v;
}
inline void load_16(u32 (&v)[4], u32 at) { std::memcpy(v, simt::memory() + at, 16); }
inline void fetch(u32 to, const void* from, u32 bytes, bool there) {
  if (there) std::memcpy(simt::memory() + to, from, bytes);
  else std::memset(simt::memory() + to, 0, bytes);
}
inline void copy_16_or_zeros(u32 to, const void* from, bool there) { fetch(to, from, 16, there); }
inline void copy_4_or_zeros(u32 to, const void* from, bool there, bool chosen) {
  if (chosen) fetch(to, from, 4, there);
}
inline u64 load_u64(u32 at) {
  u64 v;
  std::memcpy(&v, simt::memory() + at, 8);
  return v;
}
inline void fetch_commit() {}
template <int Newest>
void fetch_wait() {}

inline void cluster_meets() { simt::wait(simt::all, static_cast<int>(simt::threads.size())); }
inline void blocks_meet() { cluster_meets(); }
inline void block_is_there() {}
inline void wait_for_blocks() {}
inline u32 word_of_block(const u32* p, u32 block) {
  u32 v;
  std::memcpy(&v, simt::memory(static_cast<int>(block)) + shared_address(p), 4);
  return v;
}
inline void give_block(u32* p, u32 block, u32 v) { std::memcpy(simt::memory(static_cast<int>(block)) + shared_address(p), &v, 4); }
inline u32 address_in_block(u32 at, u32) { return at; }  // wrappers know which block is meant
inline u32 cluster_load(u32 at) {
  u32 v;
  std::memcpy(&v, simt::memory(0) + at, 4);
  return v;
}
inline u32 cluster_add(u32 at, u32 v) { return atomicAdd(reinterpret_cast<u32*>(simt::memory(0) + at), v); }
inline void cluster_store(u32 at, u64 v) { std::memcpy(simt::memory(0) + at, &v, 8); }

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
// A warpgroup's product of 64 x 32 in registers and 32 x 2 N in shared memory, e4m3, rows along K with the 128-byte swizzle.
template <int N>
void mma_dots(float (&d)[N], const u32* a, u64 b, u32 accumulate) {
  static std::vector<u32> first;
  first.resize(simt::threads.size() * 4);
  std::memcpy(&first[simt::current * 4], a, 16);
  __syncthreads();
  const int warp = simt::current / 32 * 32, lane = simt::current & 31;
  for (int i = 0; i < N; i++) {
    const int row = (lane >> 2) + (i >> 1 & 1) * 8, column = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1);
    float sum = accumulate ? d[i] : 0.f;
    for (int k = 0; k < 32; k++) {
      const u32 four = first[(warp + (row & 7) * 4 + ((k & 15) >> 2)) * 4 + (row >> 3) + (k >> 4) * 2];
      const u32 plain = (static_cast<u32>(b & 0x3FFF) << 4) + (column >> 3) * 1024 + (column & 7) * 128 + k;
      sum += e4m3_value(four >> 8 * (k & 3) & 255u) * e4m3_value(simt::memory()[plain ^ ((plain >> 7 & 7) << 4)]);
    }
    d[i] = sum;
  }
  __syncthreads();
}
inline void load_matrices(u32 (&v)[4], u32 row) {
  const int own = simt::current & 31;
  for (int i = 0; i < 4; i++) v[i] = load_u32(simt::lane(row, 8 * i + own / 4) + own % 4 * 4);
}
inline void hold(u32&) {}
inline void hold(u64&) {}
inline void hold(float&) {}
inline void store_score(u64 at, u32 v) { std::memcpy(reinterpret_cast<void*>(at), &v, 4); }
inline u32 load_u8(u32 at) { return simt::memory()[at]; }
inline u32 multiply_add(u32 a, u32 b, u32 c) { return a * b + c; }
// What a descriptor of rows along K with the 128-byte swizzle has in row r, so many bfloat16 along.
inline float tile_value(u64 rows, int r, int k) {
  const u32 plain = (static_cast<u32>(rows & 0x3FFF) << 4) + (r >> 3) * 1024 + (r & 7) * 128 + k * 2;
  u16 bits;
  std::memcpy(&bits, simt::memory() + (plain ^ ((plain >> 7 & 7) << 4)), 2);
  return bf16_value(bits);
}
// A warpgroup's product of 64 x 16 and 16 x 2 N, both in shared memory.
template <int N>
void multiply(float (&d)[N], u64 a, u64 b, u32 accumulate) {
  const int warp = simt::current % simt::per_block / 32 % 4, lane = simt::current & 31;
  for (int i = 0; i < N; i++) {
    const int row = warp * 16 + (lane >> 2) + (i >> 1 & 1) * 8, column = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1);
    float sum = accumulate ? d[i] : 0.f;
    for (int k = 0; k < 16; k++) sum += tile_value(a, row, k) * tile_value(b, column, k);
    d[i] = sum;
  }
}

// --- bulk copies by a tensor map, and sums that blocks of a grid leave for each other -------------------------------------

// What `map_words` says of a matrix: its place, bytes of a pitch, rows, columns, and rows of a box; columns of a box are 64.
struct TensorMap;
inline void copy_box(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
  const u64* const words = reinterpret_cast<const u64*>(map);
  for (u32 r = 0; r < words[4]; r++) {
    for (u32 chunk = 0; chunk < 8; chunk++) {
      const u64 row = y + r, column = x + chunk * 8;
      const bool there = row < words[2] && column < words[3];
      const u8* const from = reinterpret_cast<const u8*>(words[0]) + (there ? row * words[1] + column * 2 : 0);
      fetch(to + r * 128 + (chunk ^ r % 8) * 16, from, 16, there);
    }
  }
  shared_barrier(barrier).bytes -= static_cast<int>(words[4]) * 128;
  barrier_turn(shared_barrier(barrier));
}
inline void store_8(u32 at, u32 a, u32 b) {
  const u32 v[2] = {a, b};
  std::memcpy(simt::memory() + at, v, 8);
}
inline void store_floats(u32 at, float a, float b, float c, float d) {
  const float v[4] = {a, b, c, d};
  std::memcpy(simt::memory() + at, v, 16);
}
inline float4 load_from_others(const float4* from) { return *from; }
inline u32 arrive(u32* at) { return atomicAdd(at, 1u); }
inline u64 ready = 0;  // threads of all clusters so far
inline void say_ready() { ready++; }
inline void wait_until_ready() {
  while (ready % simt::threads.size() != 0) swapcontext(&simt::threads[simt::current].context, &simt::scheduler);
}
