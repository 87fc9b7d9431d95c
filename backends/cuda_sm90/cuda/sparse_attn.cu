// Sparse attention over paged records for any number of rows.
//
// One persistent block a multiprocessor, one row at a time, tiles of 64 keys in two buffers: producer warps bring keys as
// bfloat16, two consumer warpgroups multiply. Warpgroup w computes the scores of 32 of the 64 keys and the outputs of 256 of
// the 512 channels; both see all probabilities through shared memory. A tile is stored once and read twice, as keys (rows
// along K) and as values (columns along K). A row is worked on by one block, its keys in column order: equal bits in any
// batch.
//
// Producers come in two forms. Eight warps read records and decode them, a batch of pieces ahead of their use; or, where
// many rows share records that `gather_records.cu` decoded before, they copy them. Where room for all records is
// not certain both forms are launched, and one does the work: how many there are is known on the device only.
//
// A buffer is freed by quarters, the keys of two producer warps each, as products with them end. In the copying form the results
// of a row leave by bulk copies from the buffer of its last tile, while the next row's first tile is worked on; where decoding
// bounds the time, threads write them.
//
// Where equal bits in any batch are not asked for, a block of the decoding form may work on a part of one row instead: two of
// its tiles. The blocks of a row are a cluster, which merges what they find (`merge_parts.cuh`).
//
// Macros: GATHERED 1 for the copying form; PARTS the parts of a row, or 0; those of `attention.cuh`.

constexpr int kProducerWarps = 8, kKeysOfWarp = kKeys / kProducerWarps;
constexpr int kProducerRegisters = GATHERED ? 56 : 80, kConsumerRegisters = GATHERED ? 200 : 176;
constexpr u32 kProbabilityBytes = 8192;

// Place in the walk over rows of what producers bring: a tile, or of an e4m3 tile half of its channels.
struct Place {
  int row, batch;
};

// Four pieces of a key as they were read.
struct Batch {
  Piece pieces[4];
  bool there;
};

// What is known of a batch when its code is compiled: its records, and which half of an e4m3 tile it is.
template <bool Fp4, int Half>
struct Kind {
  static constexpr bool fp4 = Fp4;
  static constexpr int half = Half;
};

__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ __forceinline__ void producers_meet() { asm volatile("bar.sync 2, 256;" ::: "memory"); }

#if GATHERED
#define OUT_MAP const __grid_constant__ TensorMap out_map,
#else
#define OUT_MAP
#endif
#if PARTS
#define OF_A_CLUSTER __cluster_dims__(PARTS, 1, 1)
#else
#define OF_A_CLUSTER
#endif

extern "C" __global__ void OF_A_CLUSTER __launch_bounds__(512, 1)
    sparse_attn(const __grid_constant__ TensorMap query_map, OUT_MAP const __grid_constant__ Params p) {
  if (p.num_gathered != nullptr && (*p.num_gathered <= p.capacity) != (GATHERED != 0)) return;
  extern __shared__ u8 raw[];
  const u32 query = (shared_address(raw) + 1023) & ~1023u, tiles = query + kQueryBytes;
  const u32 probabilities = tiles + 2 * kTileBytes, maxima = probabilities + kProbabilityBytes, sums = maxima + 1024;
  const u32 masks = sums + 512, full = masks + 512, empty = full + 16;  // `empty`: four quarters of each buffer
  const u32 query_full = empty + 64, query_empty = query_full + 8;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int window_tiles = tiles_of_window(p), kv_tiles = tiles_of_kv(p), num_tiles = window_tiles + kv_tiles;
#if PARTS
  const int first_row = blockIdx.x / PARTS, row_step = p.rows, part = blockIdx.x % PARTS, of_window = parts_of_window(p);
  const int first_tile = part < of_window ? 2 * part : window_tiles + 2 * (part - of_window);
  const int end_tile = min(first_tile + 2, part < of_window ? window_tiles : num_tiles);
#else
  const int first_row = blockIdx.x, row_step = gridDim.x, first_tile = 0, end_tile = num_tiles;
#endif
  if (thread == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(full + 8 * i, 32 * kProducerWarps + (GATHERED ? kProducerWarps : 0));
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
    const u32 my_empty = empty + (warp - 8) / 2 * 8;
    auto bring_query = [&](int row) {
      if (row != first_row) barrier_wait(query_empty, query_phase ^ 1);
      query_phase ^= 1;
      load_query(query, &query_map, row, query_full);
    };
#if GATHERED
    // Results of the row whose last tile is number `closing` leave before the next tile but one comes to where they are.
    u32 closing = num_tiles - 1;
    int closing_row = first_row;
    auto send_results = [&](u32 next_tile) {
      if (next_tile != closing + 2) return;
      if (leads) {
        for (int i = 0; i < 8; i++) {
          copy_box_out(&out_map, i * 64, closing_row * kHeads, tiles + (next_tile & 1) * kTileBytes + i * kPart);
        }
        wait_for_reads_of_copies();
      }
      __syncwarp();
      producers_meet();
      closing += num_tiles;
      closing_row += row_step;
    };

    // A warp copies eight keys of a tile. Of each, lanes know the place; slots are read two tiles ahead, places one.
    const int key = (warp - 8) * kKeysOfWarp + (lane & (kKeysOfWarp - 1));
    auto next = [&](Place& at) {
      if (++at.batch == num_tiles) at = Place{at.row + row_step, 0};
    };
    auto slot_of = [&](const Place& at) -> int {
      if (at.row >= p.rows) return -1;
      const bool is_window = at.batch < window_tiles;
      const int column = (is_window ? at.batch : at.batch - window_tiles) * kKeys + key;
      if (column >= (is_window ? p.window_columns : p.kv_columns)) return -1;
      const int* list = is_window ? p.window_slots + at.row * p.window_pitch : p.kv_slots + at.row * p.kv_pitch;
      return list[column];
    };
    auto place_of = [&](const Place& at, int slot) -> int {
      if (slot < 0) return -1;
      const u32 word = (static_cast<u32>(slot) >> 5) + (at.batch < window_tiles ? 0u : p.window_words);
      return p.gathered_places[word] + __popc(p.gathered_bits[word] & ((1u << (slot & 31)) - 1));
    };
    Place now{first_row, 0}, ahead = now, further;
    int place = place_of(now, slot_of(now));
    next(ahead);
    int slot = slot_of(ahead);
    while (now.row < p.rows) {
      if (now.batch == 0 && leads) bring_query(now.row);
      const u32 buffer = tile & 1, keys = tiles + buffer * kTileBytes;
      const int here = place;
      place = place_of(ahead, slot);
      further = ahead;
      next(further);
      slot = slot_of(further);
      barrier_wait(my_empty + 32 * buffer, ((tile >> 1) & 1) ^ 1);
      send_results(tile);
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
    for (u32 i = tile; i < tile + 2; i++) {  // what no tile comes behind
      if (i != closing + 2) continue;
      barrier_wait(my_empty + 32 * (i & 1), ((i >> 1) & 1) ^ 1);
      send_results(i);
    }
#else
    // A lane holds key (lane & 7) of its warp's eight and every fourth piece: eight lanes write eight keys, and the
    // swizzle spreads them over all banks. Records come one batch ahead of their use, slots two, across rows.
    const int key8 = lane & 7, first_piece = lane >> 3, key = (warp - 8) * kKeysOfWarp + key8;
    const int window_batches = 2 * window_tiles;
    auto batch_of = [&](int tile) { return tile < window_tiles ? 2 * tile : window_batches + (kKvFp4 ? 1 : 2) * (tile - window_tiles); };
    const int first_batch = batch_of(first_tile), end_batch = batch_of(end_tile);
    auto next = [&](Place& at) {
      if (++at.batch == end_batch) at = Place{at.row + row_step, first_batch};
    };
    auto slot_of = [&](const Place& at) -> int {
      if (at.row >= p.rows) return -1;
      if (at.batch < window_batches) {
        const int column = (at.batch >> 1) * kKeys + key;
        return column < p.window_columns ? p.window_slots[at.row * p.window_pitch + column] : -1;
      }
      const int column = ((at.batch - window_batches) >> (kKvFp4 ? 0 : 1)) * kKeys + key;
      return column < p.kv_columns ? p.kv_slots[at.row * p.kv_pitch + column] : -1;
    };
    auto fetch = [&](const Place& at, int slot, Batch& batch) {
      batch.there = slot >= 0;
      if (!batch.there) return;
      const bool is_window = at.batch < window_batches;
      const u8* record = is_window ? window_record(p, slot) : kv_record(p, slot);
      const int piece = is_window || !kKvFp4 ? (at.batch & 1) * 16 + first_piece : first_piece;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        batch.pieces[i] = is_window || !kKvFp4 ? load_e4m3(record, piece + 4 * i) : load_e2m1(record, piece + 4 * i);
      }
    };
    auto put = [&](const Batch& batch, auto kind) {
      const u32 buffer = tile & 1, to = tiles + buffer * kTileBytes + key * 128;
      constexpr bool opens = kind.fp4 || kind.half == 0, closes = kind.fp4 || kind.half == 1;
      if (opens) {
        barrier_wait(my_empty + 32 * buffer, ((tile >> 1) & 1) ^ 1);
        if (first_piece == 0) store_f32(masks + buffer * 256 + key * 4, batch.there ? 0.f : kMasked);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int piece = first_piece + 4 * i;
        if constexpr (kind.fp4) {
          store_e2m1(to, key8, piece, batch.pieces[i], batch.there);
        } else {
          store_e4m3(to, key8, kind.half * 16 + piece, batch.pieces[i], batch.there);
        }
      }
      if (closes) {
        barrier_arrive(full + 8 * buffer);
        tile++;
      }
    };

    Place ahead{first_row, first_batch};
    Batch even = {}, odd = {};
    fetch(ahead, slot_of(ahead), even);
    next(ahead);
    int slot = slot_of(ahead);
    auto two_batches = [&](auto first, auto second) {
      fetch(ahead, slot, odd);
      next(ahead);
      slot = slot_of(ahead);
      put(even, first);
      fetch(ahead, slot, even);
      next(ahead);
      slot = slot_of(ahead);
      put(odd, second);
    };
    for (int row = first_row; row < p.rows; row += row_step) {
      if (leads) bring_query(row);
#pragma unroll 1
      for (int i = first_batch; i < min(end_batch, window_batches); i += 2) two_batches(Kind<false, 0>{}, Kind<false, 1>{});
#pragma unroll 1
      for (int i = max(first_batch, window_batches); i < end_batch; i += 2) two_batches(Kind<kKvFp4, 0>{}, Kind<kKvFp4, 1>{});
    }
#endif
#if PARTS
    merge_parts(p, tiles, maxima);
#endif
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
  const int group = warp >> 2, quarter = lane & 3, head = (warp & 3) * 16 + (lane >> 2);  // and head + 8
  const u64 query_rows = rows_along_k(query);
  float o[2][64], s[16];
  u32 tile = 0, query_phase = 0;
  for (int row = first_row; row < p.rows; row += row_step, query_phase ^= 1) {
    float top0 = kNothing, top1 = kNothing, sum0 = 0.f, sum1 = 0.f;
#pragma unroll
    for (int i = 0; i < 64; i++) o[0][i] = o[1][i] = 0.f;
    barrier_wait(query_full, query_phase);
    for (int j = first_tile; j < end_tile; j++, tile++) {
      const u32 buffer = tile & 1, keys = tiles + buffer * kTileBytes;
      barrier_wait(full + 8 * buffer, (tile >> 1) & 1);
      fence_async_units();
      mma_fence();
      const u64 key_rows = rows_along_k(keys + group * 4096);
#pragma unroll
      for (int i = 0; i < 32; i++) {
        const u64 at = (i >> 2) * (kPart / 16) + (i & 3) * 2;
        mma_scores(s, query_rows + at, key_rows + at, i != 0);
      }
      mma_commit();
      mma_wait_all();
      keep(s);
      if (j == end_tile - 1 && lane == 0) barrier_arrive(query_empty);

      float best0, best1, add0, add1;
      mask_and_find_maxima(s, masks + buffer * 256 + group * 128 + quarter * 8, best0, best1);
      const u32 mine = maxima + buffer * 512 + group * 256 + head * 4, theirs = mine ^ 256;
      if (quarter == 0) {
        store_f32(mine, best0);
        store_f32(mine + 32, best1);
      }
      consumers_meet();
      const float shrink0 = move_reference(top0, fmaxf(best0, load_f32(theirs)), p.scale);
      const float shrink1 = move_reference(top1, fmaxf(best1, load_f32(theirs + 32)), p.scale);
      u32 pairs[8];
      find_probabilities(pairs, add0, add1, s, p.scale, top0, top1);
      sum0 = fmaf(sum0, shrink0, add0);
      sum1 = fmaf(sum1, shrink1, add1);
      {  // sixteen heads of the warp by 32 keys
        const u32 line = probabilities + ((warp & 3) * 16 + (lane & 15)) * 128;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const u32 at = line + (((group * 4 + i + (lane >> 4)) ^ (lane & 7)) << 4);
          store_matrices(at, pairs[2 * i], pairs[2 * i + 1], pairs[2 * i + 2], pairs[2 * i + 3]);
        }
      }
      if (__any_sync(FULL_WARP, shrink0 != 1.f || shrink1 != 1.f)) {
#pragma unroll
        for (int i = 0; i < 128; i += 4) {
          o[i >> 6][i & 63] *= shrink0;
          o[i >> 6][(i & 63) + 1] *= shrink0;
          o[i >> 6][(i & 63) + 2] *= shrink1;
          o[i >> 6][(i & 63) + 3] *= shrink1;
        }
      }
      fence_async_units();
      consumers_meet();
      mma_fence();
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          mma_values(o[half], rows_along_k(probabilities + 32 * i),
                     columns_along_k(keys + (group * 4 + half * 2) * kPart + i * 2048), 1);
        }
        mma_commit();
      }
      const u32 freed = empty + 32 * buffer;
      const bool frees = lane == 0 && !(GATHERED && j == end_tile - 1);  // there, results come to the buffer first
      mma_wait_all_but<3>();
      if (frees) barrier_arrive(freed);
      mma_wait_all_but<2>();
      if (frees) barrier_arrive(freed + 8);
      mma_wait_all_but<1>();
      if (frees) barrier_arrive(freed + 16);
      mma_wait_all();
      keep(o[0]);
      keep(o[1]);
      if (frees) barrier_arrive(freed + 24);
    }

    sum0 = sum_of_quad(sum0);
    sum1 = sum_of_quad(sum1);
    if (quarter == 0) {
      store_f32(sums + group * 256 + head * 4, sum0);
      store_f32(sums + group * 256 + head * 4 + 32, sum1);
    }
    consumers_meet();  // behind it, both groups are done with all tiles
    // the lower keys first in both groups, so that both divide by the same bits
    sum0 = load_f32(sums + head * 4) + load_f32(sums + 256 + head * 4);
    sum1 = load_f32(sums + head * 4 + 32) + load_f32(sums + 256 + head * 4 + 32);
#if PARTS
    store_tile(tiles, o, group, sum0 == 0.f ? 0.f : 1.f / sum0, sum1 == 0.f ? 0.f : 1.f / sum1);
    if (group == 0 && quarter == 0) {
      store_f32(maxima + head * 4, top0);
      store_f32(maxima + head * 4 + 32, top1);
      store_f32(maxima + 256 + head * 4, sum0);
      store_f32(maxima + 256 + head * 4 + 32, sum1);
    }
    merge_parts(p, tiles, maxima);
#else
    const float factor0 = last_factor(sum0, top0, p.sink[head], p.scale), factor1 = last_factor(sum1, top1, p.sink[head + 8], p.scale);
#if GATHERED
    const u32 last_buffer = (tile - 1) & 1;
    store_tile(tiles + last_buffer * kTileBytes, o, group, factor0, factor1);
    fence_async_units();
    __syncwarp();
    if (lane < 4) barrier_arrive(empty + 32 * last_buffer + 8 * lane);
#else
    u16* to = p.out + (static_cast<u64>(row) * kHeads + head) * kChannels + group * 256 + 8 * quarter;
#pragma unroll
    for (int i = 0; i < 8; i++) store_results(to + 32 * i, o[i >> 2] + (i & 3) * 16, factor0, factor1, quarter);
#endif
    if (group == 0 && quarter == 0) {
      p.lse[row * kHeads + head] = lse_of(sum0, top0, p.scale);
      p.lse[row * kHeads + head + 8] = lse_of(sum1, top1, p.scale);
    }
#endif
  }
}
