// Sparse attention over paged records for any number of rows.
//
// One persistent block a multiprocessor, one row at a time, tiles of 64 keys in two buffers: producer warps bring keys as
// bfloat16, two consumer warpgroups multiply. Warpgroup w computes the scores of 32 of the 64 keys and the outputs of 256 of
// the 512 channels; both see all probabilities through shared memory. A tile is stored once and read twice, as keys (rows
// along K) and as values (columns along K). A row is worked on by one block, its keys in column order: equal bits in any
// batch.
//
// Eight producer warps read records and decode them, a batch of pieces ahead of their use. Where many rows share records,
// `sparse_attn_gathered.cu` works on records that were decoded before. If room for all of them is not certain both are
// launched, and one does the work: how many there are is known on the device only.
//
// A buffer is freed by quarters, the keys of two producer warps each, as products with them end.
//
// Macros: those of `attention.cuh`.

constexpr int kProducerWarps = 8, kKeysOfWarp = kKeys / kProducerWarps;
constexpr int kProducerRegisters = 80, kConsumerRegisters = 176;
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

extern "C" __global__ void __launch_bounds__(512, 1)
    sparse_attn(const __grid_constant__ TensorMap query_map, const __grid_constant__ Params p) {
  if (p.num_gathered != nullptr && *p.num_gathered <= p.capacity) return;
  extern __shared__ u8 raw[];
  const u32 query = (shared_address(raw) + 1023) & ~1023u, tiles = query + kQueryBytes;
  const u32 probabilities = tiles + 2 * kTileBytes, maxima = probabilities + kProbabilityBytes, sums = maxima + 1024;
  const u32 masks = sums + 512, full = masks + 512, empty = full + 16;  // `empty`: four quarters of each buffer
  const u32 query_full = empty + 64, query_empty = query_full + 8;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, first_row = blockIdx.x, row_step = gridDim.x;
  const int window_tiles = tiles_of_window(p), kv_tiles = tiles_of_kv(p), num_tiles = window_tiles + kv_tiles;
  if (thread == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(full + 8 * i, 32 * kProducerWarps);
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
    // A lane holds key (lane & 7) of its warp's eight and every fourth piece: eight lanes write eight keys, and the
    // swizzle spreads them over all banks. Records come one batch ahead of their use, slots two, across rows.
    const int key8 = lane & 7, first_piece = lane >> 3, key = (warp - 8) * kKeysOfWarp + key8;
    const int window_batches = 2 * window_tiles, num_batches = window_batches + (kKvFp4 ? 1 : 2) * kv_tiles;
    auto next = [&](Place& at) {
      if (++at.batch == num_batches) at = Place{at.row + row_step, 0};
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

    Place ahead{first_row, 0};
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
      for (int i = 0; i < window_batches; i += 2) two_batches(Kind<false, 0>{}, Kind<false, 1>{});
#pragma unroll 1
      for (int i = window_batches; i < num_batches; i += 2) two_batches(Kind<kKvFp4, 0>{}, Kind<kKvFp4, 1>{});
    }
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
    for (int j = 0; j < num_tiles; j++, tile++) {
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
      if (j == num_tiles - 1 && lane == 0) barrier_arrive(query_empty);

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
      mma_wait_all_but<3>();
      if (lane == 0) barrier_arrive(freed);
      mma_wait_all_but<2>();
      if (lane == 0) barrier_arrive(freed + 8);
      mma_wait_all_but<1>();
      if (lane == 0) barrier_arrive(freed + 16);
      mma_wait_all();
      keep(o[0]);
      keep(o[1]);
      if (lane == 0) barrier_arrive(freed + 24);
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
    const float factor0 = last_factor(sum0, top0, p.sink[head], p.scale), factor1 = last_factor(sum1, top1, p.sink[head + 8], p.scale);
    u16* to = p.out + (static_cast<u64>(row) * kHeads + head) * kChannels + group * 256 + 8 * quarter;
#pragma unroll
    for (int i = 0; i < 8; i++) store_results(to + 32 * i, o[i >> 2] + (i & 3) * 16, factor0, factor1, quarter);
    if (group == 0 && quarter == 0) {
      p.lse[row * kHeads + head] = lse_of(sum0, top0, p.scale);
      p.lse[row * kHeads + head + 8] = lse_of(sum1, top1, p.scale);
    }
  }
}
