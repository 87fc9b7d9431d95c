// Adds the parts that `mix.cu` left of many rows, a warp for every four.

constexpr int kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads) mix_finish(const __grid_constant__ Params p) {
  const int quad = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (quad * 4 < p.rows) finish(p, quad);
}
