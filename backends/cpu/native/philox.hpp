// Philox4x32-10 words and the Gumbels made of them: the numbers of ops/philox.py, many at a time.
#pragma once

#include <cstdint>

#include "math.hpp"

namespace deepinfer::cpu {

// Everything of a draw but the token id: the key, and three of the four words of the counter.
struct DrawKey {
    std::uint64_t seed = 0;
    std::uint32_t output_index = 0;
    std::uint32_t purpose_and_choice = 0;
    std::uint32_t anchor = 0;
};

// A word as a uniform in (0, 1): min((float(w) + 0.5) * 2^-32, 1 - 2^-24).
DEEPINFER_INLINE float uniform_f32(std::uint32_t word) {
    const float u = (static_cast<float>(word) + 0.5F) * 0x1p-32F;
    return u < 0x1.fffffep-1F ? u : 0x1.fffffep-1F;
}

// A word as a Gumbel: falls as the word grows, up to the last bits of the logarithms.
DEEPINFER_INLINE float gumbel_f32(std::uint32_t word) { return -log_f32(-log1p_f32(-uniform_f32(word))); }

// Above every Gumbel (the greatest is 22.874), and above what the logarithms' last bits can add to one.
constexpr float kGumbelCeiling = 22.9F;
constexpr float kGumbelSlack = 1e-4F;

}  // namespace deepinfer::cpu
