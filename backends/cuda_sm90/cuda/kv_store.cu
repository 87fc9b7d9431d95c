// Norm, rotation, codes and cache record of a row without leaving registers: a warp per row of 512 values, a quarter of one
// per row of 128. A lane has two stretches of eight neighbouring values, so groups of a format are neighbouring lanes. Lanes
// take row after row and load the next one before they work on this one.
//
// Macros: DIM 512 or 128; KIND 1 e4m3 under ue8m0 scales of 32 values, 2 e2m1 under such scales in a section behind the
// codes of the page, 3 e2m1 under e4m3 scales of 16; WIDTH of the rotated tail; RECORDS of a page; RESIDENT blocks of a
// multiprocessor.

constexpr int kThreads = 128, kStretches = 2, kLanes = DIM / (8 * kStretches);
constexpr int kRowsOfBlock = kThreads / kLanes;
constexpr int kGroup = KIND == 3 ? 16 : 32, kCodeBytes = KIND == 1 ? DIM : DIM / 2, kScaleBytes = DIM / kGroup;
constexpr int kRecordBytes = KIND == 2 ? kCodeBytes : kCodeBytes + kScaleBytes;  // from record to record

struct Params {
  const u16* x;         // rows of bfloat16
  const float* weight;  // [DIM]
  const int* positions;
  const float* table;  // [positions, WIDTH]: cosines, then sines
  u8* cache;
  const int* slots;
  u16* normed;  // [rows, DIM] bfloat16; null where nobody wants them
  u64 pitch, page_bytes;
  int rows, stride;  // of the grid
  int ratio, mask;   // a position less what `ratio` leaves of it is its bits in `mask`, unless that is 0
  float eps;
};

// What a lane loads of a row.
struct Row {
  uint4 x[kStretches];
  int slot, position;
};
__device__ __forceinline__ Row load_row(const Params& p, int row, int lane) {
  Row r;
  const u64 at = row < p.rows ? row : p.rows - 1;  // all lanes stay for their neighbours' exchanges
  r.slot = row < p.rows ? p.slots[at] : -1;
  r.position = p.positions[at];
#pragma unroll
  for (int i = 0; i < kStretches; i++) r.x[i] = *reinterpret_cast<const uint4*>(p.x + at * p.pitch + (i * kLanes + lane) * 8);
  return r;
}

extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT) kv_store(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % kLanes, own = threadIdx.x / kLanes;
  float weight[kStretches][8];
#pragma unroll
  for (int i = 0; i < kStretches; i++) {
#pragma unroll
    for (int j = 0; j < 8; j += 4) load_four(weight[i] + j, p.weight + (i * kLanes + lane) * 8 + j);
  }
  Row next = load_row(p, blockIdx.x * kRowsOfBlock + own, lane);
  for (int first_row = blockIdx.x * kRowsOfBlock; first_row < p.rows; first_row += p.stride) {
    const Row now = next;
    const int row = first_row + own;
    const int from = p.mask != 0 ? now.position & p.mask : now.position / p.ratio * p.ratio;
    const float* const turn = p.table + static_cast<u64>(static_cast<u32>(from)) * WIDTH;
    if (first_row + p.stride < p.rows) next = load_row(p, row + p.stride, lane);
    float cosine[kStretches][4], sine[kStretches][4];
#pragma unroll
    for (int i = 0; i < kStretches; i++) {
      const int first = (i * kLanes + lane) * 8 - (DIM - WIDTH);
      if ((i + 1) * kLanes * 8 > DIM - WIDTH && first >= 0) {
        load_four(cosine[i], turn + first / 2);
        load_four(sine[i], turn + WIDTH / 2 + first / 2);
      }
    }
    float sum = 0.f;
    u32 pairs[kStretches][4];
#pragma unroll
    for (int i = 0; i < kStretches; i++) {
      const u32 words[4] = {now.x[i].x, now.x[i].y, now.x[i].z, now.x[i].w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        pairs[i][j] = words[j];
        sum = fmaf(low_value(words[j]), low_value(words[j]), sum);
        sum = fmaf(high_value(words[j]), high_value(words[j]), sum);
      }
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kWhole, sum, step));
    const float inverse = rsqrtf(fmaf(sum, 1.f / DIM, p.eps));

    const u32 place = now.slot < 0 ? 0 : now.slot, page = place / RECORDS, offset = place % RECORDS;
    u8* const base = p.cache + page * p.page_bytes;
    u8* const codes = base + offset * kRecordBytes;
    u8* const scales = KIND == 2 ? base + RECORDS * kCodeBytes + offset * kScaleBytes : codes + kCodeBytes;
#pragma unroll
    for (int i = 0; i < kStretches; i++) {
      const int first = (i * kLanes + lane) * 8;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float low = __fmul_rn(__fmul_rn(low_value(pairs[i][j]), inverse), weight[i][2 * j]);
        pairs[i][j] = round_pair(low, __fmul_rn(__fmul_rn(high_value(pairs[i][j]), inverse), weight[i][2 * j + 1]));
      }
      if (p.normed != nullptr && row < p.rows) {
        *reinterpret_cast<uint4*>(p.normed + static_cast<u64>(row) * DIM + first) = make_uint4(pairs[i][0], pairs[i][1], pairs[i][2], pairs[i][3]);
      }
      if ((i + 1) * kLanes * 8 > DIM - WIDTH && first >= DIM - WIDTH) rotate(pairs[i], cosine[i], sine[i]);
      const u32 code = scale_code<KIND>(largest_of<kGroup / 8>(pairs[i]));
      if (now.slot < 0) continue;
      if (lane % (kGroup / 8) == 0) scales[first / kGroup] = static_cast<u8>(code);
      if constexpr (KIND == 1) {
        const float factor = power_value(254u - code);  // exact, so the product is the quotient
        const auto two = [&](u32 pair) { return e4m3_codes(low_value(pair) * factor, high_value(pair) * factor); };
        *reinterpret_cast<uint2*>(codes + first) = make_uint2(two(pairs[i][0]) | two(pairs[i][1]) << 16, two(pairs[i][2]) | two(pairs[i][3]) << 16);
      } else {
        u32* const eight = reinterpret_cast<u32*>(codes + first / 2);
        if constexpr (KIND == 2) *eight = eight_codes_by_power(pairs[i], (254u - code) * 0x00800080u);
        else *eight = eight_codes(pairs[i], __fdividef(0x1p-14f, e4m3_value(code)));
      }
    }
  }
}
