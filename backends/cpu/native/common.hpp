// What every kernel of the CPU backend shares: element kinds, addresses and scratch.
//
// Kernels take addresses, like those of any device: the Python side holds the tensors, checks their layout and keeps
// them alive for the call. No PyTorch header is needed, so one build serves every torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "math.hpp"
#include "parallel.hpp"

namespace deepinfer::cpu {

using i64 = std::int64_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;

// A tensor's first byte, as an integer; 0 is an absent tensor.
using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// How values are stored. The numbers are shared with `backends/cpu/tensors.py`.
enum Kind : int { kF32 = 0, kBF16 = 1, kMxfp8 = 2, kMxfp4 = 3, kNvfp4 = 4 };

inline i64 group_of(int kind) { return kind == kNvfp4 ? 16 : 32; }

// Bytes of n values; quantised kinds count their codes only.
inline i64 code_bytes(int kind, i64 n) {
    switch (kind) {
        case kF32: return 4 * n;
        case kBF16: return 2 * n;
        case kMxfp8: return n;
        default: return n / 2;
    }
}

// Bytes of the scales that belong to n values.
inline i64 scale_bytes(int kind, i64 n) { return kind < kMxfp8 ? 0 : (n + group_of(kind) - 1) / group_of(kind); }

// Uninitialised floats of one call, on cache line boundaries.
class Buffer {
public:
    explicit Buffer(i64 count)
        : data_(static_cast<float*>(
              ::operator new(static_cast<std::size_t>(count > 0 ? count : 1) * sizeof(float), std::align_val_t{64}))) {}
    float* get() { return data_.get(); }
    const float* get() const { return data_.get(); }

private:
    struct Free {
        void operator()(float* p) const { ::operator delete(p, std::align_val_t{64}); }
    };
    std::unique_ptr<float, Free> data_;
};

// A small array on the stack, or on the heap when a dimension is unusually large.
template <class T, int N>
class Small {
public:
    explicit Small(i64 count) : heap_(count > N ? new T[static_cast<std::size_t>(count)] : nullptr) {}
    T* get() { return heap_ ? heap_.get() : stack_; }

private:
    T stack_[N];
    std::unique_ptr<T[]> heap_;
};

// An index that would read outside its table is refused, as indexing a tensor refuses it.
inline void check_index(i64 index, i64 size, const char* what) {
    if (index < 0 || index >= size) {
        throw std::out_of_range(std::string(what) + " " + std::to_string(index) + " is outside [0, " +
                                std::to_string(size) + ")");
    }
}

// Threads that are worth waking: below some tens of microseconds of work a second one costs more than it brings.
inline int threads_for(double operations, int num_threads) { return operations < 4e5 ? 1 : num_threads; }

}  // namespace deepinfer::cpu
