// One step between two sublayers in one pass over the streams: write the first sublayer's output back, read and norm for
// the second, and mix for it on tensor cores while the new streams are in shared memory.
//
// A cluster of 8 blocks takes a tile of at most 64 rows a turn, each block an eighth of the channels. Of a block, 16 warps
// write streams, 64 channels at a time, a row to every 8 lanes; 4 warps multiply what was written by the matrix
// (`mhc_terms.cu`), make the sums of the tile with the other blocks, and weights of the next step from them. What the second
// sublayer reads waits in shared memory for its mean square, which arrives while the next tile is being written: the lane
// that keeps a value finishes it just before it needs its place again. Sums of a row are made in one order for any number of
// rows and any tile: over the channels of a block, then over blocks.
//
// Macros: HIDDEN, a multiple of 512; STAGES of written streams; MATRICES, how many steps' parts of the matrix there is room
// for when a tile has 64 rows. What a narrower one does not keep is room for more.

constexpr int kStreams = 4, kColumns = kStreams * (kStreams + 2), kWidth = 3 * kColumns;  // three terms side by side
constexpr int kBlocks = 8, kRows = 64, kOwnRows = kRows / kBlocks;
constexpr int kWriters = 16, kMixers = 4, kThreads = 32 * (kWriters + kMixers), kWriterRows = 4;
// Of a thread: as launched, then as warps need them. More than the block was launched with would be waited for without end.
constexpr int kRegisters = 96, kWriterRegisters = 104, kMixerRegisters = 64;
constexpr int kStep = 64, kSlice = HIDDEN / kBlocks, kSteps = kSlice / kStep, kKept = kSteps + 2;
constexpr int kMostMatrices = 4;
constexpr u32 kTileBytes = kRows * 128, kStageBytes = kStreams * kTileBytes;
constexpr u32 kTermBytes = kWidth * 128, kMatrixBytes = kStreams * kTermBytes;        // of a step: of a stream, of all
constexpr int kPitch = kColumns + 4;                                                  // products of a row, then its square
constexpr u32 kPartBytes = kOwnRows * kPitch * 4, kSquareBytes = kRows * 4, kSentBytes = kPartBytes + kSquareBytes;
// Places in shared memory. Parts of the matrix are at the start of what they share with kept values, which are at its end.
constexpr u32 kStagesAt = 0, kMatricesAt = kStagesAt + STAGES * kStageBytes;
constexpr u32 kKeptEnd = kMatricesAt + MATRICES * kMatrixBytes + kKept * kWriters * 512;
constexpr u32 kWeightAt = kKeptEnd, kSquaresAt = kWeightAt + kSlice * 4;  // [3][kRows]: of streams; of what is read, by turns
constexpr u32 kSendAt = kSquaresAt + 3 * kSquareBytes, kReceivedAt = kSendAt + kBlocks * kPartBytes;
constexpr u32 kMixAt = kReceivedAt + 2 * kBlocks * kSentBytes, kInverseAt = kMixAt + kPartBytes;
constexpr u32 kTakenAt = kInverseAt + 2 * kSquareBytes, kWordBytes = 16;  // [kBlocks + 1]: of all blocks, and the one that is sent
constexpr u32 kBarriersAt = kTakenAt + (kBlocks + 1) * kWordBytes;
constexpr u32 kWritten = kBarriersAt, kMixed = kWritten + STAGES * 8, kFull = kMixed + STAGES * 8;
constexpr u32 kReceived = kFull + kMostMatrices * 8, kInverse = kReceived + 16, kTaken = kInverse + 8;
static_assert(kWriters * kWriterRegisters + kMixers * kMixerRegisters <= (kWriters + kMixers) * kRegisters);
static_assert(kStep * kSteps * kBlocks == HIDDEN && kSteps >= 3 && kSteps >= STAGES && kTermBytes % 1024 == 0);

struct Params {
  const u16* y;         // [rows, HIDDEN] bfloat16
  const u16* h;         // [rows, 4, HIDDEN] bfloat16
  const float* post;    // [rows, 4]
  const float* comb;    // [rows, 4, 4]
  const float* read;    // [rows, 4]
  const u8* terms;      // of `mhc_terms.cu`
  const float* scale;   // [3]
  const float* base;    // [24]
  const float* weight;  // [HIDDEN]
  u16* out;             // [rows, 4, HIDDEN]
  u16* normed;          // [rows, HIDDEN]
  float* next_pre;
  float* next_post;
  float* next_comb;
  int rows;
  int tile_rows, last_rows;  // of a tile, and of one of the last turn, which is no larger; multiples of 4
  int turns, iters, clusters;
  float hc_eps, norm_eps;
};

// The tile that this block's cluster takes in a turn: how many rows, and the first.
__device__ __forceinline__ int rows_of(const Params& p, int turn) { return turn + 1 < p.turns ? p.tile_rows : p.last_rows; }
__device__ __forceinline__ int first_row(const Params& p, int turn) {
  return turn * p.clusters * p.tile_rows + static_cast<int>(blockIdx.x / kBlocks) * rows_of(p, turn);
}

__device__ __forceinline__ void cluster_meets() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void mixers_meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
// So many bytes to where another block of the cluster has what this block has at `to`, whose barrier there counts them.
__device__ __forceinline__ void send_to_block(u32 to, u32 block, u32 from, u32 bytes, u32 barrier) {
  asm volatile(
      "{\n.reg .b32 far, counts;\nmapa.shared::cluster.u32 far, %0, %1;\nmapa.shared::cluster.u32 counts, %4, %1;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [far], [%2], %3, [counts];\n}" ::"r"(to),
      "r"(block), "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Sixteen bytes that nobody reads again.
__device__ __forceinline__ void load_once(u32 (&v)[4], const u16* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(from));
}
__device__ __forceinline__ void store_global(u16* to, const u32 (&v)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
template <int Count>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.f, __fadd_rn(1.f, expf(-x))); }
__device__ __forceinline__ float inverse_root(float sum, float count, float eps) {
  return __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, count), eps)));
}

// --- writers ------------------------------------------------------------------------------------------------------------

// Weights of a row: to write with, to keep streams with, to read with. The 8 lanes of a row load three each.
struct Weights {
  float post[kStreams], comb[kStreams][kStreams], read[kStreams];
};
struct WeightsPart {
  float comb[2], other;
};
__device__ __forceinline__ WeightsPart load_weights(const Params& p, u64 row, int lane) {
  const float* const comb = p.comb + row * kStreams * kStreams + 2 * lane;
  return {{comb[0], comb[1]}, lane < kStreams ? p.post[row * kStreams + lane] : p.read[row * kStreams + lane - kStreams]};
}
__device__ __forceinline__ Weights spread_weights(const WeightsPart& part) {
  const int first = threadIdx.x % 32 / 8 * 8;
  Weights w;
#pragma unroll
  for (int i = 0; i < kStreams; i++) {
#pragma unroll
    for (int j = 0; j < kStreams; j++) w.comb[i][j] = __shfl_sync(0xFFFFFFFFu, part.comb[j % 2], first + 2 * i + j / 2);
    w.post[i] = __shfl_sync(0xFFFFFFFFu, part.other, first + i);
    w.read[i] = __shfl_sync(0xFFFFFFFFu, part.other, first + kStreams + i);
  }
  return w;
}

// Eight channels of every stream and of the output.
constexpr int kRowStretches = HIDDEN / 8;
template <typename T>
__device__ __forceinline__ T* stretch_at(T* values, u32 number) { return values + static_cast<u64>(number) * 8; }
struct Stretch {
  u32 y[4], h[kStreams][4];
};
__device__ __forceinline__ void load_stretch(Stretch& s, const Params& p, u32 y, u32 h) {
  load_once(s.y, stretch_at(p.y, y));
#pragma unroll
  for (int i = 0; i < kStreams; i++) load_once(s.h[i], stretch_at(p.h, h) + i * HIDDEN);
}

// A channel pair: what is stored of each stream, and what is read of them. Nothing is fused and the order is the contract's,
// since sums that nearly vanish show one bit of a stream.
__device__ __forceinline__ u32 write_pair(u32 (&stored)[kStreams], float& squares, u32 y, const u32 (&h)[kStreams], const Weights& w) {
  float low = 0.f, high = 0.f;
#pragma unroll
  for (int j = 0; j < kStreams; j++) {
    float a = __fmul_rn(w.comb[0][j], low_value(h[0])), b = __fmul_rn(w.comb[0][j], high_value(h[0]));
#pragma unroll
    for (int i = 1; i < kStreams; i++) {
      a = __fadd_rn(a, __fmul_rn(w.comb[i][j], low_value(h[i])));
      b = __fadd_rn(b, __fmul_rn(w.comb[i][j], high_value(h[i])));
    }
    stored[j] = round_pair(__fadd_rn(__fmul_rn(w.post[j], low_value(y)), a), __fadd_rn(__fmul_rn(w.post[j], high_value(y)), b));
    a = low_value(stored[j]);
    b = high_value(stored[j]);
    squares = fmaf(a, a, squares);
    squares = fmaf(b, b, squares);
    a = __fmul_rn(w.read[j], a);
    b = __fmul_rn(w.read[j], b);
    low = j == 0 ? a : __fadd_rn(low, a);
    high = j == 0 ? b : __fadd_rn(high, b);
  }
  return round_pair(low, high);
}

// A stretch that was kept, times its row's norm and the weights of its channels.
__device__ __forceinline__ void norm(u32 (&v)[4], float inverse, const u32 (&weights)[2][4]) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float low = __fmul_rn(__fmul_rn(low_value(v[k]), inverse), __uint_as_float(weights[k / 2][k % 2 * 2]));
    v[k] = round_pair(low, __fmul_rn(__fmul_rn(high_value(v[k]), inverse), __uint_as_float(weights[k / 2][k % 2 * 2 + 1])));
  }
}

__device__ __forceinline__ void write_streams(const Params& p, u32 memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = lane % 8, tile_row = warp * kWriterRows + lane / 8;
  if (warp * kWriterRows >= p.tile_rows) return;
  const u32 channel = blockIdx.x % kBlocks * (kSlice / 8) + chunk;
  const u32 kept_step = p.tile_rows * 128, first_kept = memory + kKeptEnd - kKept * kept_step + warp * 512 + lane * 16;
  const u32 own_tile = memory + kStagesAt + tile_row * 128 + (chunk ^ tile_row % 8) * 16;
  // Rows behind the end read the last one and write nothing. Places are counted in stretches, which spares registers.
  const auto row_of = [&](int turn) { return static_cast<u32>(min(first_row(p, turn) + tile_row, p.rows - 1)); };
  u32 y = row_of(0) * kRowStretches + channel, h = row_of(0) * kStreams * kRowStretches + channel;
  Stretch next;
  load_stretch(next, p, y, h);
  u32 stage = 0, mixed_phase = 1;  // no stage is in use before the first turn is over
  const auto next_stage = [&]() {
    if (++stage == STAGES) {
      stage = 0;
      mixed_phase ^= 1;
    }
  };
  // What leaves its place in a step was kept kKept steps before, mostly in the turn before.
  u32 kept = first_kept, old_normed = 0;
  bool old_live = false;
  float inverse = 0.f;
  u32 v[4], weights[2][4];
  const auto take = [&](int turn, int step) {
    if (step == kKept - kSteps && turn > 0) {
      old_live = tile_row < rows_of(p, turn - 1) && first_row(p, turn - 1) + tile_row < p.rows;
      old_normed = row_of(turn - 1) * kRowStretches + channel;
      barrier_wait(memory + kInverse, (turn - 1) & 1);
      inverse = load_f32(memory + kInverseAt + (turn - 1) % 2 * kSquareBytes + tile_row * 4);
    }
    const u32 own_weights = memory + kWeightAt + ((step + 2 * kSteps - kKept) % kSteps * kStep + chunk * 8) * 4;
    load_16(v, kept);
    load_16(weights[0], own_weights);
    load_16(weights[1], own_weights + 16);
  };
  const auto leave = [&]() {
    norm(v, inverse, weights);
    if (old_live) store_global(stretch_at(p.normed, old_normed), v);
    old_normed += kStep / 8;
  };
  const auto next_kept = [&]() {
    kept += kept_step;
    if (kept == first_kept + kKept * kept_step) kept = first_kept;
  };
  int turn = 0;
  for (; turn < p.turns && first_row(p, turn) < p.rows; turn++) {
    if (warp * kWriterRows >= rows_of(p, turn)) {  // nothing to write in the last turn
      for (int step = 0; step < kSteps; step++) {
        take(turn, step);
        leave();
        next_kept();
        barrier_wait(memory + kMixed + stage * 8, mixed_phase);
        __syncwarp();
        if (lane == 0) barrier_arrive(memory + kWritten + stage * 8);
        next_stage();
      }
      continue;
    }
    const Weights own = spread_weights(load_weights(p, row_of(turn), chunk));
    const bool live = first_row(p, turn) + tile_row < p.rows;
    float squares = 0.f, read_squares = 0.f;
#pragma unroll 1
    for (int step = 0; step < kSteps; step++) {
      const Stretch now = next;
      const u32 out = h;
      y += kStep / 8;
      h += kStep / 8;
      if (step + 1 == kSteps) {
        y = row_of(turn + 1) * kRowStretches + channel;
        h = row_of(turn + 1) * kStreams * kRowStretches + channel;
      }
      load_stretch(next, p, y, h);
      u32 stored[kStreams][4], seen[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const u32 old[kStreams] = {now.h[0][k], now.h[1][k], now.h[2][k], now.h[3][k]};
        u32 pair[kStreams];
        seen[k] = write_pair(pair, squares, now.y[k], old, own);
#pragma unroll
        for (int j = 0; j < kStreams; j++) stored[j][k] = pair[j];
        read_squares = fmaf(low_value(seen[k]), low_value(seen[k]), read_squares);
        read_squares = fmaf(high_value(seen[k]), high_value(seen[k]), read_squares);
      }
      take(turn, step);
      barrier_wait(memory + kMixed + stage * 8, mixed_phase);
#pragma unroll
      for (int j = 0; j < kStreams; j++) {
        store_16(own_tile + stage * kStageBytes + j * kTileBytes, stored[j][0], stored[j][1], stored[j][2], stored[j][3]);
      }
      if (step + 1 == kSteps) {
#pragma unroll
        for (int i = 1; i < 8; i *= 2) {
          squares = __fadd_rn(squares, __shfl_xor_sync(0xFFFFFFFFu, squares, i));
          read_squares = __fadd_rn(read_squares, __shfl_xor_sync(0xFFFFFFFFu, read_squares, i));
        }
        if (chunk == 0) {
          store_f32(memory + kSquaresAt + tile_row * 4, squares);
          store_f32(memory + kSquaresAt + (1 + turn % 2) * kSquareBytes + tile_row * 4, read_squares);
        }
      }
      fence_async_units();
      __syncwarp();
      if (lane == 0) barrier_arrive(memory + kWritten + stage * 8);
      next_stage();
      if (live) {
#pragma unroll
        for (int j = 0; j < kStreams; j++) store_global(stretch_at(p.out, out) + j * HIDDEN, stored[j]);
      }
      leave();
      store_16(kept, seen[0], seen[1], seen[2], seen[3]);
      next_kept();
    }
  }
  for (int i = 0; i < kKept; i++) {
    take(turn + i / kSteps, i % kSteps);
    leave();
    next_kept();
  }
}

// --- mixers -------------------------------------------------------------------------------------------------------------

// This block's sums of a tile to the blocks that go on with them: of 8 rows each, and squares of what is read to all. Only
// who receives a copy knows that its source has been read, and says so (`receive`): sums wait for that before they come there
// again. Squares come to two places in turn. What others send in the next turn they send after they received these, and writers
// wait for its `kInverse` before they come to the same place.
__device__ __forceinline__ void send(u32 memory, const float (&d)[kWidth / 2], int turn) {
  const int thread = threadIdx.x % 128, group = thread % 32 / 4, block = blockIdx.x % kBlocks;
  if (turn > 0) barrier_wait(memory + kTaken, (turn - 1) & 1);
  if (thread == 0) barrier_expect(memory + kTaken, kBlocks * kWordBytes);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 own = memory + kSendAt + (thread / 32 * 2 + half) * kPartBytes + group * kPitch * 4;
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const auto term = [&](int which) { return d[(which * (kColumns / 8) + n) * 4 + half * 2 + i]; };
        store_f32(own + (n * 8 + thread % 4 * 2 + i) * 4, __fadd_rn(__fadd_rn(term(2), term(1)), term(0)));
      }
    }
  }
  if (thread < kRows) {
    store_f32(memory + kSendAt + thread / kOwnRows * kPartBytes + (thread % kOwnRows * kPitch + kColumns) * 4, load_f32(memory + kSquaresAt + thread * 4));
  }
  fence_async_units();
  mixers_meet();
  if (thread < kBlocks) {
    const u32 to = memory + kReceivedAt + turn % 2 * kBlocks * kSentBytes + block * kPartBytes;
    const u32 squares = memory + kReceivedAt + (turn % 2 * kBlocks * kSentBytes + kBlocks * kPartBytes) + block * kSquareBytes;
    const u32 barrier = memory + kReceived + turn % 2 * 8;
    send_to_block(to, thread, memory + kSendAt + thread * kPartBytes, kPartBytes, barrier);
    send_to_block(squares, thread, memory + kSquaresAt + (1 + turn % 2) * kSquareBytes, kSquareBytes, barrier);
  }
  __syncwarp();
}

// Sums over all blocks: what norms of the tile need, and mixes of this block's rows.
__device__ __forceinline__ void receive(const Params& p, u32 memory, int turn, bool last) {
  const int thread = threadIdx.x % 128;
  const u32 parts = memory + kReceivedAt + turn % 2 * kBlocks * kSentBytes;
  barrier_wait(memory + kReceived + turn % 2 * 8, turn / 2 & 1);
  if (!last && thread < kBlocks) {  // a word to all whose parts are here; its bytes mean nothing
    send_to_block(memory + kTakenAt + blockIdx.x % kBlocks * kWordBytes, thread, memory + kTakenAt + kBlocks * kWordBytes, kWordBytes, memory + kTaken);
  }
  const auto sum = [&](u32 at, u32 pitch) {
    float total = load_f32(at);
#pragma unroll
    for (int i = 1; i < kBlocks; i++) total = __fadd_rn(total, load_f32(at + i * pitch));
    return total;
  };
  if (thread < kRows) {
    const float squares = sum(parts + kBlocks * kPartBytes + thread * 4, kSquareBytes);
    store_f32(memory + kInverseAt + turn % 2 * kSquareBytes + thread * 4, inverse_root(squares, HIDDEN, p.norm_eps));
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(memory + kInverse);
  }
  for (int i = thread; i < kOwnRows * kPitch; i += 128) store_f32(memory + kMixAt + i * 4, sum(parts + i * 4, kPartBytes));
  mixers_meet();
}

// Weights of this block's rows of a tile, 16 lanes a row; lane 4 i + j has element (i, j) of the matrix.
__device__ __forceinline__ void weigh(const Params& p, u32 memory, int turn) {
  const int thread = threadIdx.x % 128, lane = thread % 16;
  const u32 mix = memory + kMixAt + thread / 16 * kPitch * 4;
  const int tile_row = blockIdx.x % kBlocks * kOwnRows + thread / 16, row = first_row(p, turn) + tile_row;
  const float inverse = inverse_root(load_f32(mix + kColumns * 4), kStreams * HIDDEN, p.norm_eps);
  const float own = __fmul_rn(load_f32(mix + (2 * kStreams + lane) * 4), inverse);
  const float third = fmaf(own, p.scale[2], p.base[2 * kStreams + lane]);
  const auto over = [&](float v, int step, auto f) {
    v = f(v, __shfl_xor_sync(0xFFFFFFFFu, v, step));
    return f(v, __shfl_xor_sync(0xFFFFFFFFu, v, 2 * step));
  };
  const auto sum = [&](float v, int step) { return over(v, step, [](float a, float b) { return __fadd_rn(a, b); }); };
  const float weight = expf(__fsub_rn(third, over(third, 1, [](float a, float b) { return fmaxf(a, b); })));
  float m = __fadd_rn(__fdiv_rn(weight, sum(weight, 1)), p.hc_eps);
  m = __fdiv_rn(m, __fadd_rn(sum(m, 4), p.hc_eps));
  for (int i = 1; i < p.iters; i++) {
    m = __fdiv_rn(m, __fadd_rn(sum(m, 1), p.hc_eps));
    m = __fdiv_rn(m, __fadd_rn(sum(m, 4), p.hc_eps));
  }
  if (tile_row >= rows_of(p, turn) || row >= p.rows) return;
  p.next_comb[static_cast<u64>(row) * kStreams * kStreams + lane] = m;
  if (lane < 2 * kStreams) {
    const int part = lane / kStreams, stream = lane % kStreams;
    const float value = sigmoid(fmaf(__fmul_rn(load_f32(mix + lane * 4), inverse), p.scale[part], p.base[lane]));
    (part == 0 ? p.next_pre : p.next_post)[static_cast<u64>(row) * kStreams + stream] = part == 0 ? __fadd_rn(value, p.hc_eps) : __fmul_rn(2.f, value);
  }
}

// The part of the matrix for a step to a place that all mixers have left.
__device__ __forceinline__ void fetch(const Params& p, u32 memory, int step, int place) {
  const u32 full = memory + kFull + place * 8;
  barrier_expect(full, kMatrixBytes);
  copy_bytes(memory + kMatricesAt + place * kMatrixBytes, p.terms + static_cast<u64>(blockIdx.x % kBlocks * kSteps + step) * kMatrixBytes, kMatrixBytes, full);
}

__device__ __forceinline__ void mix_streams(const Params& p, u32 memory) {
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const int turns = first_row(p, p.turns - 1) < p.rows ? p.turns : p.turns - 1;
  const int places = min(kMostMatrices, static_cast<int>((kKeptEnd - kMatricesAt - kKept * p.tile_rows * 128) / kMatrixBytes));
  int left = turns * kSteps, ahead = 0;  // parts to fetch; the step of the next
  if (thread == 0) {
    for (int i = 0; i < places && left > 0; i++, left--) {
      fetch(p, memory, ahead, i);
      ahead = ahead + 1 == kSteps ? 0 : ahead + 1;
    }
  }
  int stage = 0, place = 0;
  u32 written_phase = 0, full_phase = 0;
  for (int turn = 0; turn < turns; turn++) {
    if (thread == 0) barrier_expect(memory + kReceived + turn % 2 * 8, kBlocks * kSentBytes);
    float d[kWidth / 2];
#pragma unroll
    for (int i = 0; i < kWidth / 2; i++) d[i] = 0.f;
#pragma unroll 1
    for (int step = 0; step < kSteps; step++) {
      const u64 rows = rows_along_k(memory + kStagesAt + stage * kStageBytes);
      const u64 columns = rows_along_k(memory + kMatricesAt + place * kMatrixBytes);
      barrier_wait(memory + kFull + place * 8, full_phase);
      barrier_wait(memory + kWritten + stage * 8, written_phase);
      mma_fence();
#pragma unroll
      for (int j = 0; j < kStreams; j++) {
#pragma unroll
        for (int k = 0; k < kStep / 16; k++) multiply(d, rows + j * (kTileBytes / 16) + 2 * k, columns + j * (kTermBytes / 16) + 2 * k, 1);
      }
      mma_commit();
      mma_wait_all();
      keep(d);
      mixers_meet();  // all have left that part of the matrix
      if (thread == 0 && left > 0) {
        fetch(p, memory, ahead, place);
        ahead = ahead + 1 == kSteps ? 0 : ahead + 1;
        left--;
      }
      if (++place == places) {
        place = 0;
        full_phase ^= 1;
      }
      if (step + 1 == kSteps) send(memory, d, turn);  // what writers put beside the last stage is read there
      if (lane == 0) barrier_arrive(memory + kMixed + stage * 8);
      if (++stage == STAGES) {
        stage = 0;
        written_phase ^= 1;
      }
      if (turn > 0 && step == 0) receive(p, memory, turn - 1, false);
      if (turn > 0 && step == 1) weigh(p, memory, turn - 1);
    }
  }
  receive(p, memory, turns - 1, true);
  weigh(p, memory, turns - 1);
}

// --- the block ----------------------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(kThreads, 1) mhc_step(const __grid_constant__ Params p) {
  extern __shared__ u8 raw[];
  const u32 memory = (shared_address(raw) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(memory + kWritten + i * 8, p.tile_rows / kWriterRows);
      barrier_init(memory + kMixed + i * 8, kMixers);
    }
    for (int i = 0; i < kMostMatrices; i++) barrier_init(memory + kFull + i * 8, 1);
    for (int i = 0; i < 2; i++) barrier_init(memory + kReceived + i * 8, 1);
    barrier_init(memory + kInverse, 2);
    barrier_init(memory + kTaken, 1);
    barrier_init_done();
  }
  for (int i = threadIdx.x; i < kSlice; i += kThreads) store_f32(memory + kWeightAt + i * 4, p.weight[blockIdx.x % kBlocks * kSlice + i]);
  cluster_meets();
  if (threadIdx.x < 32 * kWriters) {
    more_registers<kWriterRegisters>();
    write_streams(p, memory);
  } else {
    fewer_registers<kMixerRegisters>();
    mix_streams(p, memory);
  }
  cluster_meets();  // nobody copies to this block any more
}
