// Decodes the records that many rows name, each once, for the copying form of `sparse_attn.cu`.
//
// `mark_slots` sets a bit for every slot of both lists and counts the bits; `decode_records` gives the slots of each word of
// 32 bits neighbouring places and decodes their records there. Which places a word gets depends on the order in which warps
// come, which no result depends on: a place only says where equal bits are. Where there is no room for all records nothing is
// decoded, and attention reads the records themselves.
//
// Macros: those of `attention.cuh`.

extern "C" __global__ void __launch_bounds__(256) mark_slots(const __grid_constant__ Params p, u32* bits, u32* counts) {
  const int columns = p.window_columns + p.kv_columns, lane = threadIdx.x & 31;
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    u32 fresh = 0;
    for (int column = threadIdx.x; column < columns; column += 256) {
      const bool is_window = column < p.window_columns;
      const int slot = is_window ? p.window_slots[row * p.window_pitch + column]
                                 : p.kv_slots[row * p.kv_pitch + column - p.window_columns];
      if (slot < 0) continue;
      u32* word = bits + (static_cast<u32>(slot) >> 5) + (is_window ? 0u : p.window_words);
      const u32 bit = 1u << (slot & 31);
      if ((*word & bit) == 0) fresh += (atomicOr(word, bit) & bit) == 0;  // most were set by another row before
    }
    fresh = __reduce_add_sync(FULL_WARP, fresh);
    if (lane == 0 && fresh != 0) atomicAdd(counts, fresh);
  }
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

// counts[0] is what `mark_slots` counted; counts[1] is where the next word's places begin.
extern "C" __global__ void __launch_bounds__(256)
    decode_records(const __grid_constant__ Params p, const u32* bits, u32* places, u32* counts, uint4* to, int words) {
  if (counts[0] > p.capacity) return;
  const int lane = threadIdx.x & 31, step = gridDim.x * 8;
  for (int word = blockIdx.x * 8 + (threadIdx.x >> 5); word < words; word += step) {
    u32 left = bits[word];
    if (left == 0) continue;
    u32 place = 0;
    if (lane == 0) places[word] = place = atomicAdd(counts + 1, __popc(left));
    place = __shfl_sync(FULL_WARP, place, 0);
    const bool is_window = word < static_cast<int>(p.window_words);
    const u32 first = (is_window ? word : word - p.window_words) * 32;
    for (; left != 0; left &= left - 1, place++) {
      const u32 slot = first + __ffs(left) - 1;
      uint4* record = to + static_cast<u64>(place) * (kChannels / 8);
      if (is_window) decode_window(p, slot, record, lane);
      else decode_kv(p, slot, record, lane);
    }
  }
}
