// Threads of a CUDA kernel as fibers on an x86-64 host, and the words that its source needs.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using std::max;
using std::min;
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __grid_constant__
#define UNSEEN __attribute__((no_sanitize("thread")))  // by what watches accesses
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short

struct Dim { int x; };
struct alignas(16) int4 { int x, y, z, w; };
struct ushort4 { unsigned short x, y, z, w; };
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static int __popc(uint word) { return __builtin_popcount(word); }

static Dim threadIdx, blockIdx;
#ifndef MOST_SHARED_BYTES
#define MOST_SHARED_BYTES 232448
#endif
alignas(1024) static uchar shared_memory[MOST_SHARED_BYTES];

static const int WARP = 32;
static void (*kernel)();
static void *scheduler, *places[THREADS];
static char *stacks[THREADS];
static int current;

extern "C" void switch_fiber(void **from, void *to);
asm(R"(
.text
switch_fiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

// What a thread does when its kernel is done: it never comes back.
static void end_thread();
static void live() {
  kernel();
  end_thread();
}

static void leave_thread() { switch_fiber(&places[current], scheduler); }
static void enter_thread(int t) {
  threadIdx.x = current = t;
  switch_fiber(&scheduler, places[t]);
}

// Let all threads of a CTA begin, with shared memory that holds nothing.
static void begin_threads(size_t stack_bytes) {
  memset(shared_memory, 0xA5, sizeof shared_memory);
  for (int t = 0; t < THREADS; t++) {
    if (!stacks[t]) stacks[t] = (char *)aligned_alloc(64, stack_bytes);
    void **top = (void **)(stacks[t] + stack_bytes - 64);
    memset(top - 6, 0, 48);
    top[0] = (void *)live;
    top[1] = nullptr;
    places[t] = top - 6;
  }
}
