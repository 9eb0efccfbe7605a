// Kernels whose accesses are watched for races: what stands in for their instructions. Barriers,
// copies and products are the ones of `hopper_threads.hpp`, watched as well.
#define __syncwarp unwatched_syncwarp
#define __syncthreads unwatched_syncthreads
#define is_elected elect
#include "hopper_threads.hpp"
#undef __syncwarp
#undef __syncthreads
#undef is_elected
#include "watched_races.hpp"

#include "watched_barriers.hpp"
#include "watched_tiles.hpp"

// All CTAs of a cluster run at once: their threads, and shared memory in slices, are like a CTA's.
static const int CTA_THREADS = THREADS / CLUSTER, SLICE = SHARED_BYTES / CLUSTER;

UNSEEN static int own_cta() { return current / CTA_THREADS; }
UNSEEN static int own_thread() { return current % CTA_THREADS; }
UNSEEN static int own_block() { return blockIdx.x * CLUSTER + own_cta(); }
UNSEEN static uchar *own_shared_memory() { return shared_memory + own_cta() * SLICE; }
UNSEEN static void __syncthreads() { bar_sync_watched(own_cta(), CTA_THREADS); }

SEEN static void copy_later(uint to, const void *from, uint bytes, uint given) {
  if (given) touch_global((const uchar *)from, given, false, HERE);
  begin_copy(to, from, bytes, given);
  note_copy(to, bytes, HERE);
}
UNSEEN static void wait_until_copied(uint pending) {
  Thread &thread = threads[current];
  uint64_t end = 0;
  if (thread.groups.size() > pending) end = thread.groups[thread.groups.size() - 1 - pending];
  wait_for_copies(pending);
  note_copied(end);
}
UNSEEN static int count_at(int *word, int value) {
  check_global(word, 4);
  note_atomic(word);
  int before = *word;
  *word += value;
  let_others_go();
  return before;
}
template <class T> SEEN static void load_global(T *to, const void *from, int count) {
  touch_global((const uchar *)from, count * sizeof *to, false, HERE);
  memcpy(to, from, count * sizeof *to);
}
template <class T>
SEEN static void store_global(const void *to, std::initializer_list<T> words) {
  touch_global((const uchar *)to, words.size() * sizeof(T), true, HERE);
  memcpy((void *)to, words.begin(), words.size() * sizeof(T));
}
SEEN static void store_same(const void *to, float value) {
  check_global(to, 4);
  touch_same((const uchar *)to, &value, HERE);
  memcpy((void *)to, &value, 4);
}
SEEN static void load_near(std::initializer_list<uint *> words, uint from) {
  const uchar *place = shared_pointer(from, 4 * words.size());
  expect_something(from, 4 * words.size(), HERE);
  touch_shared(from, 4 * words.size(), false, HERE);
  for (uint *word : words) memcpy(word, place, 4), place += 4;
}
SEEN static void store_near(uint to, std::initializer_list<uint> words) {
  uchar *place = shared_pointer(to, 4 * words.size());
  touch_shared(to, 4 * words.size(), true, HERE);
  memcpy(place, words.begin(), 4 * words.size());
  note_written(to, 4 * words.size(), current);
}
SEEN static void note_address(uint to, uint64_t row) {
  touch_shared(to, 8, true, HERE);
  memcpy(shared_pointer(to, 8), &row, 8);
}
SEEN static void load_watched_matrices(std::initializer_list<uint *> words, uint address,
                                       bool is_transposed) {
  be_aligned();
  int64_t *rows = exchange("ldmatrix", address);
  int matrix = 0, lane = current % WARP;
  for (uint *word : words) {
    uint first = rows[matrix * 8 + lane / 4] + lane % 4 * 4, bits = 0;
    if (is_transposed) {
      for (int i = 0; i < 2; i++) {
        uint at = rows[matrix * 8 + lane % 4 * 2 + i] + lane / 4 * 2;
        expect_something(at, 2, HERE);
        touch_shared(at, 2, false, HERE);
        bits |= (uint) * (uint16_t *)shared_pointer(at, 2) << 16 * i;
      }
    } else {
      expect_something(first, 4, HERE);
      touch_shared(first, 4, false, HERE);
      bits = *(uint *)shared_pointer(first, 4);
    }
    *word = bits;
    matrix++;
  }
}

SEEN static void store_watched_matrices(uint address, std::initializer_list<uint> words) {
  be_aligned();
  int64_t *rows = exchange("stmatrix", address);
  int matrix = 0, lane = current % WARP;
  for (uint word : words) {
    uint row = rows[matrix++ * 8 + lane / 4], at = row + lane % 4 * 4;
    touch_shared(at, 4, true, HERE);
    memcpy(shared_pointer(row, 16) + lane % 4 * 4, &word, 4);
    note_written(at, 4, current);
  }
}

#include "mma_products.hpp"
#include "watched_clusters.hpp"

// A thread of a kernel; the first one of a CTA finds nothing known of it.
static void (*watched_kernel)();
UNSEEN static void live_watched() {
  if (racing_cta != blockIdx.x) begin_cta(), forget_barriers();
  watched_kernel();
}
