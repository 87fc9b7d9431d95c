// Sparse attention for so few rows that one block a row would leave the device idle: eight blocks, a cluster, work on a row,
// and give the bits of `sparse_attn.cu`.
//
// Keys are divided first: a block decodes every eighth tile of 64 keys and scores it. Then channels are: a block multiplies
// the probabilities of all tiles with 64 of the 512 channels, tile after tile, so that each sum adds in the order of one
// block. In between, blocks send their tiles' maxima to all; everyone follows the references of all heads from tile to tile;
// tiles are cut into their eight parts, which go to the blocks that multiply with them, to where queries and unused keys
// were; and when all parts have come, a block fetches the probabilities of all tiles to where its own tile was.
//
// Macros: those of `attention.cuh`.

constexpr int kBlocks = 8, kMostTiles = 10;  // a block has room for two tiles of its own, or for one and nine parts
constexpr u32 kShareBytes = 8192, kSumBytes = 2048;

// One tile's pieces of a thread, as they were read.
struct Loaded {
  Piece pieces[4];
  bool there;
};

extern "C" __global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(512, 1)
    sparse_attn_few(const __grid_constant__ TensorMap query_map, const __grid_constant__ Params p) {
  extern __shared__ u8 raw[];
  const u32 query = (shared_address(raw) + 1023) & ~1023u, tiles = query + kQueryBytes;
  const u32 shares = tiles + 2 * kTileBytes, share_sums = shares + 2 * kShareBytes;
  const u32 maxima = share_sums + 2 * kSumBytes, masks = maxima + kMostTiles * 256;
  const u32 query_full = masks + 512, parts_full = query_full + 8;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, group = warp >> 2;
  const int block = blockIdx.x % kBlocks, row = blockIdx.x / kBlocks;
  block_is_there();
  const int window_tiles = tiles_of_window(p), num_tiles = window_tiles + tiles_of_kv(p);
  auto has = [&](int mine) { return block + kBlocks * mine < num_tiles; };
  if (thread == 480) {
    barrier_init(query_full, 1);
    barrier_init(parts_full, 1);
    barrier_init_done();
    if (has(0)) load_query(query, &query_map, row, query_full);
    barrier_expect(parts_full, (num_tiles - has(0) - has(1)) * kPart);
  }

  // Half of the warps decode the lower channels of a key, half the upper; lanes as in `sparse_attn.cu`.
  const int key8 = lane & 7, first_piece = lane >> 3, key = (warp & 7) * 8 + key8, half = warp >> 3;
  Loaded loaded[2] = {};
#pragma unroll
  for (int mine = 0; mine < 2; mine++) {
    if (!has(mine)) continue;
    const int tile = block + kBlocks * mine;
    const bool is_window = tile < window_tiles;
    const int column = (is_window ? tile : tile - window_tiles) * kKeys + key;
    int slot = -1;
    if (is_window && column < p.window_columns) slot = p.window_slots[row * p.window_pitch + column];
    if (!is_window && column < p.kv_columns) slot = p.kv_slots[row * p.kv_pitch + column];
    Loaded& to = loaded[mine];
    to.there = slot >= 0;
    if (!to.there) continue;
    const u8* record = is_window ? window_record(p, slot) : kv_record(p, slot);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (is_window || !kKvFp4) to.pieces[i] = load_e4m3(record, half * 16 + first_piece + 4 * i);
      else if (i < 2) to.pieces[i] = load_e2m1(record, half * 8 + first_piece + 4 * i);
    }
  }
#pragma unroll
  for (int mine = 0; mine < 2; mine++) {
    if (!has(mine)) continue;
    const bool is_window = block + kBlocks * mine < window_tiles;
    const Loaded& from = loaded[mine];
    const u32 to = tiles + mine * kTileBytes + key * 128;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (is_window || !kKvFp4) store_e4m3(to, key8, half * 16 + first_piece + 4 * i, from.pieces[i], from.there);
      else if (i < 2) store_e2m1(to, key8, half * 8 + first_piece + 4 * i, from.pieces[i], from.there);
    }
    if (half == 0 && first_piece == 0) store_f32(masks + mine * 256 + key * 4, from.there ? 0.f : kMasked);
  }
  fence_async_units();
  __syncthreads();
  wait_for_blocks();

  const int quarter = lane & 3, head = (warp & 3) * 16 + (lane >> 2);  // and head + 8
  const int tile = block + kBlocks * group;                           // that this warpgroup scores, if it is there
  const bool scores = group < 2 && tile < num_tiles;
  float s[32];
  if (scores) {
    const u64 query_rows = rows_along_k(query), key_rows = rows_along_k(tiles + group * kTileBytes);
    barrier_wait(query_full, 0);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const u64 at = (i >> 2) * (kPart / 16) + (i & 3) * 2;
      mma_scores(s, query_rows + at, key_rows + at, i != 0);
    }
    mma_commit();
    mma_wait_all();
    keep(s);
    float best0, best1;
    mask_and_find_maxima(s, masks + group * 256 + quarter * 8, best0, best1);
    if (quarter == 0) {
#pragma unroll
      for (int to = 0; to < kBlocks; to++) {
        const u32 there = address_in_block(maxima + tile * 256 + head * 4, to);
        store_far_f32(there, best0);
        store_far_f32(there + 32, best1);
      }
    }
  }
  blocks_meet();  // all maxima are here, and nobody needs queries any more

  auto best_of = [&](int i, int which) { return load_f32(maxima + i * 256 + (head + 8 * which) * 4); };
  if (scores) {
    if ((thread & 127) == 0) {
      for (int i = 1; i < kBlocks; i++) {
        const int to = (block + i) % kBlocks;  // not all to one at a time
        const int place = tile - (to < tile) - (to + kBlocks < tile);  // among the tiles that `to` does not have
        const u32 room = place < 8 ? query + place * kPart : tiles + kTileBytes + (place - 8) * kPart;
        copy_to_block(address_in_block(room, to), tiles + group * kTileBytes + to * kPart, kPart, address_in_block(parts_full, to));
      }
    }
    float top0 = kNothing, top1 = kNothing, lower0, lower1, upper0, upper1;
    for (int i = 0; i <= tile; i++) {
      move_reference(top0, best_of(i, 0), p.scale);
      move_reference(top1, best_of(i, 1), p.scale);
    }
    u32 first[8], second[8];
    find_probabilities(first, lower0, lower1, s, p.scale, top0, top1);
    find_probabilities(second, upper0, upper1, s + 16, p.scale, top0, top1);
    const u32 share = shares + group * kShareBytes + (thread & 127) * 16;
    store_16(share, first[0], first[1], first[2], first[3]);
    store_16(share + 2048, first[4], first[5], first[6], first[7]);
    store_16(share + 4096, second[0], second[1], second[2], second[3]);
    store_16(share + 6144, second[4], second[5], second[6], second[7]);
    store_floats(share_sums + group * kSumBytes + (thread & 127) * 16, lower0, lower1, upper0, upper1);
  }
  // A block's tile is used again when others have its parts, which only their barriers say: with one warp of every block that
  // waits for what comes, nothing is under way behind the meeting.
  if (warp == 15) barrier_wait(parts_full, 0);
  blocks_meet();  // all probabilities are there, and all parts

  // The first parts of a block's second buffer are its own tile's or one that came; so is one of the first buffer.
  auto probabilities_of = [&](int i) { return i < 7 ? tiles + (i + (i >= block)) * kPart : tiles + kTileBytes + (i - 5) * kPart; };
  const u32 sums = tiles + kTileBytes + 5 * kPart;
  {
    u32 fetched[kMostTiles][4], fetched_sums[kMostTiles][4];
    // tiles in turn from the block's own on: not all blocks fetch from one at a time
    auto turned = [&](int k) { return k < kBlocks ? (k + block) % kBlocks : k; };
#pragma unroll
    for (int k = 0; k < kMostTiles; k++) {
      const int i = turned(k);
      if (i >= num_tiles) continue;
      load_far_16(fetched[k], address_in_block(shares + i / kBlocks * kShareBytes + thread * 16, i % kBlocks));
      if (thread < 128) load_far_16(fetched_sums[k], address_in_block(share_sums + i / kBlocks * kSumBytes + thread * 16, i % kBlocks));
    }
#pragma unroll
    for (int k = 0; k < kMostTiles; k++) {
      const int i = turned(k);
      if (i >= num_tiles) continue;
      const u32(&a)[4] = fetched[k], (&b)[4] = fetched_sums[k];
      store_16(probabilities_of(i) + thread * 16, a[0], a[1], a[2], a[3]);
      if (thread < 128) store_16(sums + i * kSumBytes + thread * 16, b[0], b[1], b[2], b[3]);
    }
  }
  __syncthreads();

  if (group == 0) {
    float o[32];
#pragma unroll
    for (int i = 0; i < 32; i++) o[i] = 0.f;
    float top0 = kNothing, top1 = kNothing, lower0 = 0.f, lower1 = 0.f, upper0 = 0.f, upper1 = 0.f;
    barrier_wait(parts_full, 0);
    for (int i = 0; i < num_tiles; i++) {
      u32 probabilities[16], add[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        load_16(*reinterpret_cast<u32(*)[4]>(probabilities + 4 * c), probabilities_of(i) + c * 2048 + thread * 16);
      }
      load_16(add, sums + i * kSumBytes + thread * 16);
      const float shrink0 = move_reference(top0, best_of(i, 0), p.scale), shrink1 = move_reference(top1, best_of(i, 1), p.scale);
#pragma unroll
      for (int e = 0; e < 32; e += 4) {
        o[e] *= shrink0;
        o[e + 1] *= shrink0;
        o[e + 2] *= shrink1;
        o[e + 3] *= shrink1;
      }
      lower0 = fmaf(lower0, shrink0, __uint_as_float(add[0]));
      lower1 = fmaf(lower1, shrink1, __uint_as_float(add[1]));
      upper0 = fmaf(upper0, shrink0, __uint_as_float(add[2]));
      upper1 = fmaf(upper1, shrink1, __uint_as_float(add[3]));
      const int place = i - (block < i) - (block + kBlocks < i);
      u32 values = place < 8 ? query + place * kPart : tiles + kTileBytes + (place - 8) * kPart;
      if (i % kBlocks == block) values = tiles + i / kBlocks * kTileBytes + block * kPart;
      mma_fence();
#pragma unroll
      for (int c = 0; c < 4; c++) mma_values(o, probabilities + 4 * c, columns_along_k(values + c * 2048), 1);
      mma_commit();
      mma_wait_all();
      keep(o);
    }
    const float sum0 = sum_of_quad(lower0) + sum_of_quad(upper0), sum1 = sum_of_quad(lower1) + sum_of_quad(upper1);
    const float factor0 = last_factor(sum0, top0, p.sink[head], p.scale), factor1 = last_factor(sum1, top1, p.sink[head + 8], p.scale);
    u16* to = p.out + (static_cast<u64>(row) * kHeads + head) * kChannels + block * 64 + 8 * quarter;
#pragma unroll
    for (int i = 0; i < 2; i++) store_results(to + 32 * i, o + 16 * i, factor0, factor1, quarter);
    if (block == 0 && quarter == 0) {
      p.lse[row * kHeads + head] = lse_of(sum0, top0, p.scale);
      p.lse[row * kHeads + head + 8] = lse_of(sum1, top1, p.scale);
    }
  }
  // until then others read from here; results need no fence
  blocks_leave();
}
