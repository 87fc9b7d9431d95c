// Sparse attention over records that `gather_records.cu` decoded before, for many rows that share them. Gives the bits of
// `sparse_attn.cu`.
//
// One persistent block a multiprocessor, one row at a time, tiles of 64 keys in pairs: four producer warps copy keys to two
// buffers, two consumer warpgroups multiply. Group 0 scores the first tile of a pair, group 1 the second, so that a tile's
// scores read the queries from shared memory once; both multiply both tiles' probabilities with 256 of the 512 channels each, the
// first tile's first, and have those of their own tile in registers. One computes a softmax while the other multiplies:
//
//   group 0:  scores 0 | softmax 0 | values 0 |                   values 1
//   group 1:                         values 0 | scores 1 | softmax 1 | values 1
//
// A buffer is freed by quarters, the keys of a producer warp each, as products with them end; group 1 multiplies the first tile
// before it scores the second, so that the next first tile comes while the second is worked on: copies take longer than
// products. What has no barrier of its own is ordered by those: who has a buffer's next tile knows that everyone is done with
// what was found for the last one. The results of a row leave by bulk copies from the second buffer, while the next row's first
// tile is worked on.
//
// Macros: those of `attention.cuh`.

constexpr int kProducerWarps = 4, kKeysOfWarp = kKeys / kProducerWarps;
constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;
constexpr u32 kProbabilityBytes = 8192, kSumBytes = 2048;

// Place in the walk over rows of a tile that producers bring.
struct Place {
  int row, tile;
};

// A group says that what it found for its tile is there, and waits for nobody; the other group waits for that.
__device__ __forceinline__ void first_is_there() { asm volatile("bar.arrive 1, 256;" ::: "memory"); }
__device__ __forceinline__ void wait_for_first() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ __forceinline__ void second_is_there() { asm volatile("bar.arrive 2, 256;" ::: "memory"); }
__device__ __forceinline__ void wait_for_second() { asm volatile("bar.sync 2, 256;" ::: "memory"); }
__device__ __forceinline__ void group_meets(int group) { asm volatile("bar.sync %0, 128;" ::"r"(4 + group) : "memory"); }
__device__ __forceinline__ void producers_meet() { asm volatile("bar.sync 3, 128;" ::: "memory"); }

// What a thread knows of its two heads' softmax: references, and its shares of the sums over lower and upper keys of tiles.
struct Softmax {
  float top0, top1, lower0, lower1, upper0, upper1;
  float shrink0, shrink1;  // factors of what was summed before the last tile

  __device__ __forceinline__ void start() {
    top0 = top1 = kNothing;
    lower0 = lower1 = upper0 = upper1 = 0.f;
  }
  __device__ __forceinline__ void move(float best0, float best1, float scale) {
    shrink0 = move_reference(top0, best0, scale);
    shrink1 = move_reference(top1, best1, scale);
  }
  __device__ __forceinline__ void add(float of_lower0, float of_lower1, float of_upper0, float of_upper1) {
    lower0 = fmaf(lower0, shrink0, of_lower0);
    lower1 = fmaf(lower1, shrink1, of_lower1);
    upper0 = fmaf(upper0, shrink0, of_upper0);
    upper1 = fmaf(upper1, shrink1, of_upper1);
  }
  __device__ __forceinline__ void rescale(float (&o)[128]) const {
    if (!__any_sync(FULL_WARP, shrink0 != 1.f || shrink1 != 1.f)) return;
#pragma unroll
    for (int i = 0; i < 128; i += 4) {
      o[i] *= shrink0;
      o[i + 1] *= shrink0;
      o[i + 2] *= shrink1;
      o[i + 3] *= shrink1;
    }
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    sparse_attn_gathered(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap out_map,
                         const __grid_constant__ Params p) {
  if (*p.num_gathered > p.capacity) return;
  extern __shared__ u8 raw[];
  const u32 query = (shared_address(raw) + 1023) & ~1023u, tiles = query + kQueryBytes;
  const u32 probabilities = tiles + 2 * kTileBytes, sums = probabilities + 2 * kProbabilityBytes;
  const u32 maxima = sums + 2 * kSumBytes, masks = maxima + 512;
  const u32 full = masks + 512, empty = full + 16;  // `empty`: four quarters of each buffer
  const u32 query_full = empty + 64, query_empty = query_full + 8;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int window_tiles = tiles_of_window(p), num_pairs = (window_tiles + tiles_of_kv(p) + 1) / 2;
  const int first_row = blockIdx.x, row_step = gridDim.x;
  if (thread == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(full + 8 * i, 33 * kProducerWarps);
      for (int k = 0; k < 4; k++) barrier_init(empty + 32 * i + 8 * k, 8);
    }
    barrier_init(query_full, 1);
    barrier_init(query_empty, 8);
    barrier_init_done();
  }
  __syncthreads();

  if (warp >= 8) {  // producers
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    u32 tile = 0, query_phase = 0;
    const bool leads = thread == 256;
    const u32 my_empty = empty + (warp - 8) * 8;
    // The results of a row leave before the second tile of the next one comes to where they are.
    auto send_results = [&](int row) {
      if (leads) {
        for (int i = 0; i < 8; i++) copy_box_out(&out_map, i * 64, row * kHeads, tiles + kTileBytes + i * kPart);
        wait_for_reads_of_copies();
      }
      __syncwarp();
      producers_meet();
    };

    // A warp copies sixteen keys of a tile. Of each, lanes know the place; slots are read two tiles ahead, places one.
    const int key = (warp - 8) * kKeysOfWarp + (lane & (kKeysOfWarp - 1));
    auto next = [&](Place& at) {
      if (++at.tile == 2 * num_pairs) at = Place{at.row + row_step, 0};
    };
    auto slot_of = [&](const Place& at) -> int {
      if (at.row >= p.rows) return -1;
      const bool is_window = at.tile < window_tiles;
      const int column = (is_window ? at.tile : at.tile - window_tiles) * kKeys + key;
      if (column >= (is_window ? p.window_columns : p.kv_columns)) return -1;
      const int* list = is_window ? p.window_slots + at.row * p.window_pitch : p.kv_slots + at.row * p.kv_pitch;
      return list[column];
    };
    auto place_of = [&](const Place& at, int slot) -> int {
      if (slot < 0) return -1;
      const u32 word = (static_cast<u32>(slot) >> 5) + (at.tile < window_tiles ? 0u : p.window_words);
      return p.gathered_places[word] + __popc(p.gathered_bits[word] & ((1u << (slot & 31)) - 1));
    };
    Place now{first_row, 0}, ahead = now, further;
    int place = place_of(now, slot_of(now));
    next(ahead);
    int slot = slot_of(ahead);
    while (now.row < p.rows) {
      if (now.tile == 0 && leads) {
        if (now.row != first_row) barrier_wait(query_empty, query_phase ^ 1);
        query_phase ^= 1;
        load_query(query, &query_map, now.row, query_full);
      }
      const u32 buffer = tile & 1, keys = tiles + buffer * kTileBytes;
      const int here = place;
      place = place_of(ahead, slot);
      further = ahead;
      next(further);
      slot = slot_of(further);
      barrier_wait(my_empty + 32 * buffer, ((tile >> 1) & 1) ^ 1);
      if (now.tile == 1 && now.row != first_row) send_results(now.row - row_step);
      if (lane < kKeysOfWarp) store_f32(masks + buffer * 256 + key * 4, here < 0 ? kMasked : 0.f);
      __syncwarp();
      if (lane == 0) barrier_arrive(full + 8 * buffer);
#pragma unroll 4
      for (int i = 0; i < kKeysOfWarp; i++) {
        const int from = __shfl_sync(FULL_WARP, here, i), row = (warp - 8) * kKeysOfWarp + i;
        const u16* record = p.gathered + static_cast<u64>(max(from, 0)) * kChannels + lane * 8;
        const u32 to = keys + (lane >> 3) * kPart + row * 128 + (((lane & 7) ^ (row & 7)) << 4);
        copy_16_or_zeros(to, record, from >= 0);
        copy_16_or_zeros(to + 4 * kPart, record + 256, from >= 0);
      }
      arrive_after_copies(full + 8 * buffer);
      now = ahead;
      ahead = further;
      tile++;
    }
    barrier_wait(my_empty + 32, ((tile >> 1) & 1) ^ 1);
    send_results(now.row - row_step);
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
  const int group = warp >> 2, quarter = lane & 3, head = (warp & 3) * 16 + (lane >> 2);  // and head + 8
  const u64 query_rows = rows_along_k(query);
  float o[128], s[32];
  u32 pairs[16];
  Softmax softmax;
  u32 phase = 0, query_phase = 0;

  auto wait_for_tile = [&](int buffer) {
    barrier_wait(full + 8 * buffer, phase);
    fence_async_units();
    mma_fence();
  };
  auto score = [&](int buffer) {
    const u64 key_rows = rows_along_k(tiles + buffer * kTileBytes);
    wait_for_tile(buffer);
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const u64 at = (i >> 2) * (kPart / 16) + (i & 3) * 2;
      mma_scores(s, query_rows + at, key_rows + at, i != 0);
    }
    mma_commit();
    mma_wait_all();
    keep(s);
  };
  // Makes probabilities of the scores, and puts down what the other group needs of them.
  auto finish_tile = [&](float best0, float best1) {
    const u32 line = probabilities + group * kProbabilityBytes + ((warp & 3) * 16 + (lane & 15)) * 128;
    float lower0, lower1, upper0, upper1;
    softmax.move(best0, best1, p.scale);
    find_probabilities(*reinterpret_cast<u32(*)[8]>(pairs), lower0, lower1, s, p.scale, softmax.top0, softmax.top1);
    find_probabilities(*reinterpret_cast<u32(*)[8]>(pairs + 8), upper0, upper1, s + 16, p.scale, softmax.top0, softmax.top1);
    softmax.add(lower0, lower1, upper0, upper1);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const u32 at = line + (((i + (lane >> 4)) ^ (lane & 7)) << 4);
      store_matrices(at, pairs[2 * i], pairs[2 * i + 1], pairs[2 * i + 2], pairs[2 * i + 3]);
    }
    store_floats(sums + group * kSumBytes + (thread & 127) * 16, lower0, lower1, upper0, upper1);
    fence_async_units();
  };
  auto put_maxima = [&](float best0, float best1) {
    if (quarter != 0) return;
    store_f32(maxima + group * 256 + head * 4, best0);
    store_f32(maxima + group * 256 + head * 4 + 32, best1);
  };
  // Follows the other group's tile.
  auto follow = [&](int other) {
    const u32 bests = maxima + other * 256 + head * 4;
    u32 more[4];
    softmax.move(load_f32(bests), load_f32(bests + 32), p.scale);
    load_16(more, sums + other * kSumBytes + (thread & 127) * 16);
    softmax.add(__uint_as_float(more[0]), __uint_as_float(more[1]), __uint_as_float(more[2]), __uint_as_float(more[3]));
  };
  auto multiply_own = [&]() {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      mma_own_values(o, pairs + 4 * i, columns_along_k(tiles + group * kTileBytes + group * 4 * kPart + i * 2048), 1);
      mma_commit();
    }
  };
  auto multiply_others = [&](int other) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      mma_values(o, rows_along_k(probabilities + other * kProbabilityBytes + 32 * i),
                 columns_along_k(tiles + other * kTileBytes + group * 4 * kPart + i * 2048), 1);
      mma_commit();
    }
  };
  auto free_quarters = [&](int buffer, bool frees) {
    const u32 freed = empty + 32 * buffer;
    frees = frees && lane == 0;
    mma_wait_all_but<3>();
    if (frees) barrier_arrive(freed);
    mma_wait_all_but<2>();
    if (frees) barrier_arrive(freed + 8);
    mma_wait_all_but<1>();
    if (frees) barrier_arrive(freed + 16);
    mma_wait_all();
    keep(o);
    if (frees) barrier_arrive(freed + 24);
  };

  for (int row = first_row; row < p.rows; row += row_step, query_phase ^= 1) {
    softmax.start();
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = 0.f;
    barrier_wait(query_full, query_phase);
    if (group == 0) {
      for (int pair = 0; pair < num_pairs; pair++, phase ^= 1) {
        const bool is_last = pair == num_pairs - 1;
        float best0, best1;
        score(0);
        if (is_last && lane == 0) barrier_arrive(query_empty);
        mask_and_find_maxima(s, masks + quarter * 8, best0, best1);
        put_maxima(best0, best1);
        finish_tile(best0, best1);
        first_is_there();
        softmax.rescale(o);
        mma_fence();
        multiply_own();
        free_quarters(0, true);
        wait_for_second();
        follow(1);
        softmax.rescale(o);
        wait_for_tile(1);
        multiply_others(1);
        free_quarters(1, !is_last);
      }
    } else {
      for (int pair = 0; pair < num_pairs; pair++, phase ^= 1) {
        const bool is_last = pair == num_pairs - 1;
        float best0, best1;
        wait_for_first();
        follow(0);
        softmax.rescale(o);
        wait_for_tile(0);
        multiply_others(0);
        free_quarters(0, true);
        score(1);
        if (is_last && lane == 0) barrier_arrive(query_empty);
        mask_and_find_maxima(s, masks + 256 + quarter * 8, best0, best1);
        put_maxima(best0, best1);
        finish_tile(best0, best1);
        second_is_there();
        softmax.rescale(o);
        mma_fence();
        multiply_own();
        free_quarters(1, !is_last);
      }
    }

    // the lower keys first, as everywhere
    const float sum0 = sum_of_quad(softmax.lower0) + sum_of_quad(softmax.upper0);
    const float sum1 = sum_of_quad(softmax.lower1) + sum_of_quad(softmax.upper1);
    group_meets(group);  // all its warps are done with the values that results replace
    store_tile(tiles + kTileBytes + group * 4 * kPart, o, last_factor(sum0, softmax.top0, p.sink[head], p.scale),
               last_factor(sum1, softmax.top1, p.sink[head + 8], p.scale), round_pair);
    fence_async_units();
    __syncwarp();
    if (lane < 4) barrier_arrive(empty + 32 + 8 * lane);  // what the last pair has not freed
    if (group == 0 && quarter == 0) {
      p.lse[row * kHeads + head] = lse_of(sum0, softmax.top0, p.scale);
      p.lse[row * kHeads + head + 8] = lse_of(sum1, softmax.top1, p.scale);
    }
  }
}
