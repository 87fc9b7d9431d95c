// Decodes the records that many rows name, each once, for `sparse_attn_gathered.cu`.
//
// `mark_slots` sets a bit for every slot of both lists and counts the bits; `decode_records` gives the slots of each word of
// 32 bits neighbouring places and decodes their records there. Which places a word gets depends on the order in which warps
// come, which no result depends on: a place only says where equal bits are. Where there is no room for all records nothing is
// decoded, and attention reads the records themselves.
//
// Macros: those of `attention.cuh`.

constexpr int kMarkThreads = 1024, kMarked = 10;  // slots that a thread reads at once

// A block marks the slots of neighbouring rows in shared memory first, where there is room for a bit of every slot.
extern "C" __global__ void __launch_bounds__(kMarkThreads)
    mark_slots(const __grid_constant__ Params p, u32* bits, u32* counts, int words, int shared_words) {
  extern __shared__ u32 seen[];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, columns = p.window_columns + p.kv_columns;
  const int rows = (p.rows + gridDim.x - 1) / gridDim.x, first_row = blockIdx.x * rows, end_row = min(first_row + rows, p.rows);
  const bool gathers = words <= shared_words;
  u32 fresh = 0;
  auto mark = [&](int word, u32 these) {
    if ((~bits[word] & these) != 0) fresh += __popc(~atomicOr(bits + word, these) & these);  // most were set by others before
  };
  if (gathers) {
    for (int i = thread; i < words; i += kMarkThreads) seen[i] = 0;
    __syncthreads();
  }
  for (int row = first_row + warp; row < end_row; row += kMarkThreads / 32) {
    const int* window_slots = p.window_slots + row * p.window_pitch + lane;
    const int* kv_slots = p.kv_slots + row * p.kv_pitch + lane - p.window_columns;
    for (int first = lane; first < columns; first += 32 * kMarked) {
      int slots[kMarked];
#pragma unroll
      for (int i = 0; i < kMarked; i++) {
        const int column = first + 32 * i, at = column - lane;
        slots[i] = column >= columns ? -1 : column < p.window_columns ? window_slots[at] : kv_slots[at];
      }
#pragma unroll
      for (int i = 0; i < kMarked; i++) {
        if (slots[i] < 0) continue;
        const bool is_window = first + 32 * i < p.window_columns;
        const u32 slot = slots[i], word = (slot >> 5) + (is_window ? 0u : p.window_words), bit = 1u << (slot & 31);
        if (!gathers) mark(word, bit);
        else if ((seen[word] & bit) == 0) atomicOr(seen + word, bit);
      }
    }
  }
  if (gathers) {
    __syncthreads();
    for (int i = thread; i < words; i += kMarkThreads) {
      if (seen[i] != 0) mark(i, seen[i]);
    }
  }
  fresh = __reduce_add_sync(FULL_WARP, fresh);
  if (lane == 0 && fresh != 0) atomicAdd(counts, fresh);
}

// A lane decodes eight channels of the record's lower half and eight of its upper half.
__device__ __forceinline__ void decode_window(const Params& p, u32 slot, uint4* to, int lane) {
  const u8* record = window_record(p, slot);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint2 codes = *reinterpret_cast<const uint2*>(record + half * 256 + lane * 8);
    const u32 words[2] = {codes.x, codes.y};
    u32 pairs[4];
    decode_e4m3(pairs, words, record[kChannels + half * 8 + (lane >> 2)], true);
    to[half * 32 + lane] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}
__device__ __forceinline__ void decode_kv(const Params& p, u32 slot, uint4* to, int lane) {
  const u8* record = kv_record(p, slot);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 pairs[4];
    if (kKvFp4) {
      u32 factors[2];
      e2m1_factors(factors, record[kChannels / 2 + half * 16 + (lane >> 1)], true);
      decode_e2m1(pairs, *reinterpret_cast<const u32*>(record + half * 128 + lane * 4), factors[0]);
    } else {
      const uint2 codes = *reinterpret_cast<const uint2*>(record + half * 256 + lane * 8);
      const u32 words[2] = {codes.x, codes.y};
      decode_e4m3(pairs, words, record[kChannels + half * 8 + (lane >> 2)], true);
    }
    to[half * 32 + lane] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// counts[0] is what `mark_slots` counted; counts[1] is where the next places begin. A block takes eight words at a time, far
// from each other since marked slots are often neighbours, and a warp four slots of each.
extern "C" __global__ void __launch_bounds__(256)
    decode_records(const __grid_constant__ Params p, const u32* bits, u32* places, u32* counts, uint4* to, int words) {
  if (counts[0] > p.capacity) return;
  __shared__ u32 begins[2];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int turn = 0;
  for (int first = blockIdx.x; first < words; first += 8 * gridDim.x) {
    const int mine = first + lane * gridDim.x;
    const u32 marked = lane < 8 && mine < words ? bits[mine] : 0;
    u32 place = __popc(marked);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      const u32 before = __shfl_up_sync(FULL_WARP, place, step);
      if (lane >= step) place += before;
    }
    const u32 total = __shfl_sync(FULL_WARP, place, 7);
    if (total == 0) continue;
    if (threadIdx.x == 0) begins[turn] = atomicAdd(counts + 1, total);
    __syncthreads();  // `begins` of two turns ago is free: all have passed the last turn's barrier behind it
    place += begins[turn] - __popc(marked);
    turn ^= 1;
    if (warp == 0 && marked != 0) places[mine] = place;
    for (int i = 0; i < 8; i++) {
      const u32 word = __shfl_sync(FULL_WARP, marked, i);
      u32 at = __shfl_sync(FULL_WARP, place, i) + __popc(word & ((1u << 4 * warp) - 1));
      const int from = first + i * gridDim.x;
      const bool is_window = from < static_cast<int>(p.window_words);
      const u32 first_slot = (is_window ? from : from - p.window_words) * 32;
      for (u32 left = word & (0xFu << 4 * warp); left != 0; left &= left - 1, at++) {
        const u32 slot = first_slot + __ffs(left) - 1;
        uint4* record = to + static_cast<u64>(at) * (kChannels / 8);
        if (is_window) decode_window(p, slot, record, lane);
        else decode_kv(p, slot, record, lane);
      }
    }
  }
}
