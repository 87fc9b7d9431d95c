// `deepinfer.backends.cpu._kernels`: row kernels of the CPU backend. Stubs and argument lists: `_kernels.pyi`.
#include "bind.hpp"

PYBIND11_MODULE(_kernels, m) {
    m.doc() = "Row kernels of the CPU backend: every row is computed by one code path in one order of additions.";
    using namespace deepinfer::cpu;
    bind_norm(m);
    bind_gemm(m);
    bind_cache(m);
    bind_attention(m);
    bind_scores(m);
    bind_select(m);
    bind_compress(m);
    bind_mhc(m);
    bind_engram(m);
    bind_moe(m);
    bind_heads(m);
    bind_step(m);
    bind_sampling(m);
}
