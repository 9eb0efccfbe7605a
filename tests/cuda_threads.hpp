// What a CUDA kernel of integers needs, on an x86-64 host: its threads are fibers that take turns,
// each up to a barrier or a shuffle, in an order that can be chosen.
#include "fibers.hpp"

#include <functional>
#include <random>

enum State { READY, AT_BARRIER, IN_WARP, WAITING, DONE };
enum Order { FORWARD, BACKWARD, SHUFFLED };
static const int STACK = 1 << 16;
static State states[THREADS];
static int64_t slots[THREADS];

static void wait_as(State state) {
  states[current] = state;
  leave_thread();
}

static void end_thread() { wait_as(DONE); }

static void __syncthreads() { wait_as(AT_BARRIER); }
static void __threadfence() {}
static void __nanosleep(int) { wait_as(WAITING); }
static int atomicAdd(int *word, int value) { return (*word += value) - value; }
static int atomicMax(int *word, int value) {
  int before = *word;
  *word = max(before, value);
  return before;
}

template <class T> static T of_lane(T value, int lane) {
  int self = current;
  slots[self] = value;
  wait_as(IN_WARP);
  T other = slots[self / WARP * WARP + lane];
  wait_as(IN_WARP);
  return other;
}
template <class T> static T __shfl_sync(uint, T value, int lane, int) { return of_lane(value, lane); }
template <class T> static T __shfl_xor_sync(uint, T value, int bits, int) {
  return of_lane(value, (current % WARP) ^ bits);
}
template <class T> static T __shfl_up_sync(uint, T value, int lanes, int) {
  int lane = current % WARP;
  return of_lane(value, lane >= lanes ? lane - lanes : lane);
}
template <class F> static int reduce(int value, F combine) {
  int self = current, first = self / WARP * WARP;
  slots[self] = value;
  wait_as(IN_WARP);
  int total = slots[first];
  for (int i = 1; i < WARP; i++) total = combine(total, (int)slots[first + i]);
  wait_as(IN_WARP);
  return total;
}
static uint __match_any_sync(uint, int value) {
  int self = current, first = self / WARP * WARP;
  slots[self] = value;
  wait_as(IN_WARP);
  uint lanes = 0;
  for (int i = 0; i < WARP; i++) lanes |= (uint)(slots[first + i] == value) << i;
  wait_as(IN_WARP);
  return lanes;
}
static void __syncwarp() { wait_as(IN_WARP); }
static int __reduce_max_sync(uint, int x) { return reduce(x, [](int a, int b) { return max(a, b); }); }
static int __reduce_min_sync(uint, int x) { return reduce(x, [](int a, int b) { return min(a, b); }); }
static int __reduce_add_sync(uint, int x) { return reduce(x, [](int a, int b) { return a + b; }); }

static std::function<bool()> run_others;

// Run the CTAs that have not run yet, if a thread waits for them. Returns false if it need not.
static bool let_others_run() {
  if (std::count(states, states + THREADS, WAITING) == 0) return false;
  std::vector<uchar> shared(shared_memory, shared_memory + sizeof shared_memory);
  std::vector<void *> own_places(places, places + THREADS);
  std::vector<char *> own_stacks(stacks, stacks + THREADS);
  std::vector<State> own_states(states, states + THREADS);
  int block = blockIdx.x;
  std::fill(stacks, stacks + THREADS, nullptr);
  bool ran = run_others();
  for (char *stack : stacks) free(stack);
  blockIdx.x = block;
  std::copy(shared.begin(), shared.end(), shared_memory);
  std::copy(own_places.begin(), own_places.end(), places);
  std::copy(own_stacks.begin(), own_stacks.end(), stacks);
  std::copy(own_states.begin(), own_states.end(), states);
  std::replace(states, states + THREADS, WAITING, READY);
  return ran;
}

static bool all_are(State state, int begin, int end) {
  return std::all_of(states + begin, states + end, [=](State s) { return s == state; });
}

// Run a CTA. Returns false if threads wait for others that never come.
static bool run_cta(int block, Order order, std::mt19937 &random) {
  blockIdx.x = block;
  begin_threads(STACK);
  std::fill(states, states + THREADS, READY);
  std::vector<int> turns(THREADS);
  for (int t = 0; t < THREADS; t++) turns[t] = order == BACKWARD ? THREADS - 1 - t : t;
  while (!all_are(DONE, 0, THREADS)) {
    bool moved = false;
    if (order == SHUFFLED) std::shuffle(turns.begin(), turns.end(), random);
    for (int t : turns) {
      if (states[t] != READY) continue;
      enter_thread(t);
      moved = true;
    }
    if (all_are(AT_BARRIER, 0, THREADS)) {
      std::fill(states, states + THREADS, READY);
      continue;
    }
    for (int first = 0; first < THREADS; first += WARP)
      if (all_are(IN_WARP, first, first + WARP)) {
        std::fill(states + first, states + first + WARP, READY);
        moved = true;
      }
    if (!moved && !let_others_run()) return false;
  }
  return true;
}
