// A CTA of Hopper's on an x86-64 host: warps, their barriers, and who may go on, of those who can.
//
// Threads are fibers. One goes on until it waits, or has told others something: an arrival at a
// barrier, a copy that has begun. Who is next is decided by priorities, and by chance among equals;
// copies that are under way are one more to choose from. So a warp that has the lowest priority
// moves, a step at a time, only when nothing else can.
#pragma GCC push_options
#pragma GCC optimize("O2")
#include "fibers.hpp"

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <deque>
#include <functional>
#include <numeric>
#include <sys/time.h>

static const int WARPS = THREADS / WARP, COPIER = WARPS, AGENTS = WARPS + 1, NAMED = 16;
static const size_t STACK = 1 << 18;
static const uint ALL_LANES = 0xffffffff;

enum State { READY, IN_WARP, AT_MBARRIER, AT_NAMED, AT_COPIES, AT_STORES, DONE };

struct Thread {
  State state;
  uint word, parity;     // of an mbarrier
  uint64_t generation;   // of a named barrier
  uint64_t begun, done;  // copies, and arrivals that wait for them
  std::vector<uint64_t> groups;
  uint64_t awaited;
  int stores;            // begun and not yet done
};
struct Warp {
  int met;
  const char *meeting;
  uint64_t meetings, generation;
  int64_t words[2][WARP];
};
struct Named {
  int threads, arrived;
  uint64_t generation;
};
// Numbers by chance.
struct Chance {
  using result_type = uint;
  uint64_t word = 1;
  static constexpr uint min() { return 0; }
  static constexpr uint max() { return ~0u; }
  uint operator()() {
    word = word * 6364136223846793005u + 1442695040888963407u;
    return word >> 32;
  }
};
// An mbarrier's 8 bytes in shared memory.
struct Mbarrier {
  uint count : 15, pending : 15, phase : 1, is_there : 1;
  int bytes;
};

static Thread threads[THREADS];
static Warp warps[WARPS];
static Named named[NAMED];
static Chance chance;
static char *report;
static size_t report_bytes;
static bool told_ctas;  // a thread has told other CTAs something
static sigjmp_buf stopped;

static bool happens(int per_mille) { return (int)(chance() % 1000) < per_mille; }

static void say(const char *format, ...) {
  size_t used = strlen(report);
  va_list values;
  va_start(values, format);
  vsnprintf(report + used, report_bytes - used, format, values);
  va_end(values);
}

// Give up: the CTA has done what none may do.
#define REFUSE(...)                                            \
  do {                                                         \
    say("block %d, thread %d: ", blockIdx.x, current);         \
    say(__VA_ARGS__);                                          \
    siglongjmp(stopped, 1);                                    \
  } while (0)
#define EXPECT(holds, ...) \
  if (!(holds)) REFUSE(__VA_ARGS__)

static void wait_as(State state) {
  threads[current].state = state;
  leave_thread();
}
static void let_others_go() { wait_as(READY); }
static void end_thread() { wait_as(DONE); }

// Who wrote 16 bytes of shared memory last, by instructions, and when; and when threads made what
// they wrote, or know of, visible to what reads asynchronously.
static uint64_t now, written[SHARED_BYTES / 16 + 1], published[THREADS];
static uint16_t writers[SHARED_BYTES / 16 + 1];

static void note_written(uint address, uint bytes, int thread) {
  for (uint i = address / 16; i <= (address + bytes - 1) / 16; i++) {
    written[i] = ++now;
    writers[i] = thread;
  }
}
static void publish() { published[current] = ++now; }
static void expect_visible(uint address, int first, int end) {
  uint64_t when = written[address / 16];
  if (!when) return;
  auto later = [=](uint64_t time) { return time > when; };
  bool known = std::all_of(published + first, published + end, later);
  EXPECT(known || published[writers[address / 16]] > when,
         "what thread %d wrote at %u is read asynchronously before a fence",
         writers[address / 16], address);
}

static uint shared_address(const void *pointer) { return (uchar *)pointer - shared_memory; }
static uchar *shared_pointer(uint address, uint bytes) {
  EXPECT(address + bytes <= SHARED_BYTES, "shared memory ends before %u", address + bytes);
  EXPECT(address % bytes == 0 || bytes > 16, "%u is no multiple of %u", address, bytes);
  return shared_memory + address;
}

// Meet the other lanes of the warp; the last one that comes does something for all.
template <class F> static uint64_t meet(const char *name, F action) {
  Warp &warp = warps[current / WARP];
  uint64_t meeting = warp.meetings;
  if (!warp.met) warp.meeting = name;
  EXPECT(!strcmp(warp.meeting, name), "%s meets %s in a warp", name, warp.meeting);
  if (++warp.met < WARP) {
    wait_as(IN_WARP);
    return meeting;
  }
  warp.met = 0;
  warp.meetings++;
  action();
  Thread *lanes = threads + current / WARP * WARP;
  for (int i = 0; i < WARP; i++) lanes[i].state = READY;
  return meeting;
}
static void meet(const char *name) {
  meet(name, [] {});
}

static void __syncwarp() { meet("__syncwarp"); }
// What all lanes of a warp give. Nobody writes there again before all of them have read it.
template <class T> static int64_t *exchange(const char *name, T value) {
  Warp &warp = warps[current / WARP];
  int64_t *words = warp.words[warp.meetings % 2];
  words[current % WARP] = 0;
  memcpy(words + current % WARP, &value, sizeof value);
  meet(name);
  return words;
}
template <class T> static T of_lane(const char *name, T value, int lane) {
  int64_t *words = exchange(name, value);
  memcpy(&value, words + lane, sizeof value);
  return value;
}
template <class T> static T __shfl_sync(uint, T value, int lane, int) {
  return of_lane("__shfl_sync", value, lane % WARP);
}
template <class T> static T __shfl_xor_sync(uint, T value, int bits, int) {
  return of_lane("__shfl_xor_sync", value, current % WARP ^ bits);
}
template <class T> static T __shfl_up_sync(uint, T value, int lanes, int) {
  int lane = current % WARP;
  return of_lane("__shfl_up_sync", value, lane >= lanes ? lane - lanes : lane);
}
template <class T> static T __shfl_down_sync(uint, T value, int lanes, int) {
  int lane = current % WARP;
  return of_lane("__shfl_down_sync", value, lane + lanes < WARP ? lane + lanes : lane);
}
static uint __ballot_sync(uint, int holds) {
  int64_t *words = exchange("__ballot_sync", holds);
  uint lanes = 0;
  for (int i = 0; i < WARP; i++) lanes |= (uint)((int)words[i] != 0) << i;
  return lanes;
}
static int __any_sync(uint lanes, int holds) { return __ballot_sync(lanes, holds) != 0; }
static int is_elected() {
  meet("elect.sync");
  return current % WARP == 0;
}

static void set_registers(int) { meet("setmaxnreg"); }
static void __nanosleep(int) { let_others_go(); }
template <class T> static T add_to_global(T *word, T value) {
  T before = *word;
  *word += value;
  told_ctas = true;
  let_others_go();
  return before;
}

// Named barriers: a warp arrives as a whole.
static void arrive_at_named(int place, int count) {
  Named &barrier = named[place];
  if (!barrier.arrived) barrier.threads = count;
  EXPECT(barrier.threads == count, "barrier %d is of %d threads, not %d", place, barrier.threads,
         count);
  warps[current / WARP].generation = barrier.generation;
  barrier.arrived += WARP;
  EXPECT(barrier.arrived <= count, "too many threads arrive at barrier %d", place);
  if (barrier.arrived == count) {
    barrier.arrived = 0;
    barrier.generation++;
  }
}
static void bar_arrive(int place, int count) {
  meet("bar.arrive", [=] { arrive_at_named(place, count); });
  let_others_go();
}
static void bar_sync(int place, int count) {
  meet("bar.sync", [=] { arrive_at_named(place, count); });
  Thread &thread = threads[current];
  thread.word = place;
  thread.generation = warps[current / WARP].generation;
  wait_as(AT_NAMED);
}
static void __syncthreads() { bar_sync(0, THREADS); }

// Barriers in shared memory, phase by phase.
static Mbarrier &mbarrier(uint address) {
  Mbarrier &barrier = *(Mbarrier *)shared_pointer(address, 8);
  EXPECT(barrier.is_there && barrier.count && barrier.pending <= barrier.count,
         "there is no barrier at %u", address);
  return barrier;
}
static void begin_mbarrier(uint address, uint count) {
  *(Mbarrier *)shared_pointer(address, 8) = {count, count, 0, 1, 0};
}
static void (*when_complete)(uint);
static void complete(uint address) {
  Mbarrier &barrier = mbarrier(address);
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.count;
  barrier.phase ^= 1;
  if (when_complete) when_complete(address);
}
static void arrive_at(uint address, int bytes, uint arrivals = 1) {
  Mbarrier &barrier = mbarrier(address);
  EXPECT(barrier.pending >= arrivals, "too many arrive at the barrier at %u", address);
  barrier.bytes += bytes;
  barrier.pending -= arrivals;
  complete(address);
}
static void bytes_came(uint address, int bytes) {
  mbarrier(address).bytes -= bytes;
  complete(address);
}
static void mbarrier_arrive(uint address, uint arrivals) {
  arrive_at(address, 0, arrivals);
  let_others_go();
}
static void mbarrier_expect(uint address, uint bytes) {
  arrive_at(address, bytes);
  let_others_go();
}
static void await_phase(void *pointer, int parity) {
  Thread &thread = threads[current];
  thread.word = shared_address(pointer);
  thread.parity = parity;
  mbarrier(thread.word);
  wait_as(AT_MBARRIER);
}
static void mbarrier_wait(void *pointer, int parity) {
  await_phase(pointer, parity);
  let_others_go();
}

#include "hopper_copies.hpp"
#include "hopper_products.hpp"
#include "hopper_ctas.hpp"
#pragma GCC pop_options
