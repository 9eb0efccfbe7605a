// What kernels with mma.sync need besides what Hopper's do: products of a warp, and accesses that
// are watched for races. Barriers are the ones of `hopper_threads.hpp`, watched as well.
#define __syncwarp unwatched_syncwarp
#define __syncthreads unwatched_syncthreads
#include "hopper_threads.hpp"
#undef __syncwarp
#undef __syncthreads
#include "mma_races.hpp"

// All CTAs of a cluster run at once: their threads, and shared memory in slices, are like a CTA's.
static const int CTA_THREADS = THREADS / CLUSTER, SLICE = SHARED_BYTES / CLUSTER;

struct Fragments {
  uint left[WARP][4], right[WARP][2];
  float sums[WARP][4];
};
static Fragments fragments[WARPS];

UNSEEN static int own_cta() { return current / CTA_THREADS; }
UNSEEN static int own_thread() { return current % CTA_THREADS; }
UNSEEN static int own_block() { return blockIdx.x * CLUSTER + own_cta(); }
UNSEEN static uchar *own_shared_memory() { return shared_memory + own_cta() * SLICE; }
UNSEEN static void wait_at_named(int place, uint64_t generation) {
  threads[current].word = place;
  threads[current].generation = generation;
  if (named[place].generation == generation) wait_as(AT_NAMED);
}

UNSEEN static void __syncwarp() {
  int first = current / WARP * WARP;
  meet("__syncwarp", [=] { join_clocks(first, WARP); });
}
UNSEEN static void __syncthreads() {
  meet("bar.sync", [] {
    arrive_at_named(own_cta(), CTA_THREADS);
    if (!named[own_cta()].arrived) join_clocks(own_cta() * CTA_THREADS, CTA_THREADS);
  });
  wait_at_named(own_cta(), warps[current / WARP].generation);
}

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
}
SEEN static void note_address(uint to, uint64_t row) {
  touch_shared(to, 8, true, HERE);
  memcpy(shared_pointer(to, 8), &row, 8);
}
SEEN static void load_watched_matrices(std::initializer_list<uint *> words, uint address,
                                       bool is_transposed) {
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

SWIFT static void add_product(const float (*left)[16], const float (*right)[8], float (*out)[8]) {
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8; n++) out[row][n] += left[row][k] * right[k][n];
}
// The product of fragments, which takes the place of what is added to it.
UNSEEN static void add_fragments(Fragments &all, bool is_bfloat) {
  static float left[16][16], right[16][8], out[16][8];
  for (int lane = 0; lane < WARP; lane++) {
    int row = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 4; i++)
      for (int e = 0; e < 2; e++) {
        uint16_t bits = all.left[lane][i] >> 16 * e;
        left[row + i % 2 * 8][pair + i / 2 * 8 + e] = to_float(bits, is_bfloat);
        out[row + i / 2 * 8][pair + i % 2] = all.sums[lane][i];
      }
    for (int i = 0; i < 2; i++)
      for (int e = 0; e < 2; e++) {
        uint16_t bits = all.right[lane][i] >> 16 * e;
        right[pair + i * 8 + e][row] = to_float(bits, is_bfloat);
      }
  }
  add_product(left, right, out);
  for (int lane = 0; lane < WARP; lane++)
    for (int i = 0; i < 4; i++)
      all.sums[lane][i] = out[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}
UNSEEN static void multiply_fragments(std::initializer_list<float *> out,
                                      std::initializer_list<uint> left,
                                      std::initializer_list<uint> right,
                                      std::initializer_list<float> sums, bool is_bfloat) {
  Fragments &all = fragments[current / WARP];
  int lane = current % WARP;
  memcpy(all.left[lane], left.begin(), 16);
  memcpy(all.right[lane], right.begin(), 8);
  memcpy(all.sums[lane], sums.begin(), 16);
  meet("mma.sync", [&all, is_bfloat] { add_fragments(all, is_bfloat); });
  const float *sum = all.sums[lane];
  for (float *each : out) *each = *sum++;
}

UNSEEN static uint __byte_perm(uint low, uint high, uint selector) {
  uint64_t bytes = (uint64_t)high << 32 | low;
  uint word = 0;
  for (int i = 0; i < 4; i++)
    word |= (uint)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return word;
}
// Four float8 as float16: those of e4m3 have exponents that are 8 too small.
UNSEEN static void widen_bytes(uint word, uint &low, uint &high, bool is_e5m2) {
  uint16_t values[4];
  for (int i = 0; i < 4; i++) {
    uint16_t bits = (word >> 8 * i & 0xff) << 8;
    if (!is_e5m2) bits = to_half(of_half((bits & 0x8000) | (bits & 0x7f00) >> 1) * 256);
    values[i] = bits;
  }
  low = values[0] | (uint)values[1] << 16;
  high = values[2] | (uint)values[3] << 16;
}

struct __nv_fp8_e4m3 {
  uchar bits;
  UNSEEN operator float() const { return of_half((bits & 0x80) << 8 | (bits & 0x7f) << 7) * 256; }
};
struct __nv_fp8_e5m2 {
  uchar bits;
  UNSEEN operator float() const { return of_half(bits << 8); }
};

#include "mma_clusters.hpp"

// A thread of a kernel; the first one of a CTA finds nothing known of it.
static void (*watched_kernel)();
UNSEEN static void live_watched() {
  if (racing_cta != blockIdx.x) begin_cta(), forget_cluster();
  watched_kernel();
}
