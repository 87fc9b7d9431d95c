// A cube core and its two vector cores: addresses of the cube's memories, and signals to both vector cores at once.
#pragma once

#include "c_api/asc_simd.h"

template <class T>
__aicore__ inline __cbuf__ T* l1_at(uint32_t offset) {
  return (__cbuf__ T*)(uint64_t)offset;
}
template <class T>
__aicore__ inline __ca__ T* l0a_at(uint32_t offset) {
  return (__ca__ T*)(uint64_t)offset;
}
template <class T>
__aicore__ inline __cb__ T* l0b_at(uint32_t offset) {
  return (__cb__ T*)(uint64_t)offset;
}
__aicore__ inline __cc__ float* l0c_at(uint32_t offset) { return (__cc__ float*)(uint64_t)offset; }

// Vector cores number signals from 0; the cube core adds 16 for those of the second one.
__aicore__ inline void wait_both(pipe_t pipe, int id) {
  asc_sync_intra_wait(pipe, id);
  asc_sync_intra_wait(pipe, 16 + id);
}
__aicore__ inline void tell_both(pipe_t pipe, int id) {
  asc_sync_intra_arrive(pipe, id);
  asc_sync_intra_arrive(pipe, 16 + id);
}
