// Fibres: stacks of their own between which one host thread switches, so that a core or a SIMT thread can wait.
//
// A fault leaves a fibre for good. Kernels own nothing on their stacks that would have to be given back.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "qualifiers.h"

namespace twin {

#if defined(__x86_64__)
// Callee-saved registers go to the old stack; swapcontext would make two system calls for the signal mask.
extern "C" void twin_switch(void** from, void* to) __attribute__((visibility("hidden")));
__asm__(
    ".text\n"
    ".hidden twin_switch\n"
    ".weak twin_switch\n"
    "twin_switch:\n"
    "  push %rbp\n  push %rbx\n  push %r12\n  push %r13\n  push %r14\n  push %r15\n"
    "  mov %rsp, (%rdi)\n"
    "  mov %rsi, %rsp\n"
    "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n"
    "  ret\n");
#endif

class Fibre {
 public:
  using Body = void (*)(void*);

  explicit Fibre(size_t stack_bytes) : size_(stack_bytes) {
    void* place = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) std::abort();  // the host has no address space left
    stack_ = static_cast<uint8_t*>(place);
  }
  ~Fibre() { munmap(stack_, size_); }
  Fibre(const Fibre&) = delete;
  Fibre& operator=(const Fibre&) = delete;

  // Prepares a run of `body(argument)`. The body never returns: its last act is `leave`.
  TWIN_UNWATCHED void prepare(Body body, void* argument) {
    body_ = body;
    argument_ = argument;
#if defined(__x86_64__)
    auto* top = reinterpret_cast<uint64_t*>(stack_ + size_);
    *--top = 0;                                      // where the body would return to
    *--top = reinterpret_cast<uint64_t>(&enter);     // what the first switch returns into
    for (int i = 0; i < 6; ++i) *--top = 0;          // registers that the switch takes back
    place_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = size_;
    context_.uc_link = nullptr;
    makecontext(&context_, enter, 0);
#endif
  }

  // Runs the fibre until it calls `leave`.
  TWIN_UNWATCHED void resume() {
    Fibre* before = current();
    current() = this;
#if defined(__x86_64__)
    twin_switch(&back_, place_);
#else
    swapcontext(&caller_, &context_);
#endif
    current() = before;
  }

  // Back to who resumed this fibre; returns when it is resumed again.
  TWIN_UNWATCHED void leave() {
#if defined(__x86_64__)
    twin_switch(&place_, back_);
#else
    swapcontext(&context_, &caller_);
#endif
  }

  TWIN_UNWATCHED static Fibre*& current() {
    static thread_local Fibre* fibre = nullptr;
    return fibre;
  }

  TWIN_UNWATCHED bool holds(const void* address) const {
    const auto* byte = static_cast<const uint8_t*>(address);
    return byte >= stack_ && byte < stack_ + size_;
  }

 private:
  TWIN_UNWATCHED static void enter() {
    Fibre* self = current();
    self->body_(self->argument_);
    std::abort();  // a body that returned has no caller
  }

  size_t size_;
  uint8_t* stack_ = nullptr;
  Body body_ = nullptr;
  void* argument_ = nullptr;
#if defined(__x86_64__)
  void* place_ = nullptr;
  void* back_ = nullptr;
#else
  ucontext_t context_{};
  ucontext_t caller_{};
#endif
};

}  // namespace twin
