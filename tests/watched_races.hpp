// Who touched a word of memory, and whether that is known to have come before: by barriers.
//
// A thread knows its own past, and of others what they did before they met it: at `__syncwarp`, at
// a barrier, or by way of an atomic. Shuffles and votes order nothing. What goes on beside threads
// has times of its own, which are known to who has waited for it: copies, and what is brought to a
// barrier, have written their words then, products and stores of boxes have read theirs. A schedule
// does not matter.
#include <dlfcn.h>
#include <map>
#include <string>

#define SWIFT __attribute__((no_sanitize("thread"), optimize("O3")))
#define SEEN __attribute__((no_sanitize("thread"), noinline))
#define HERE ((const char *)__builtin_return_address(0))

// Whether instructions of a whole warp, such as elect.sync and wgmma.wait_group, order what its
// lanes do, as lanes that have converged are in fact: by the memory model they do not.
static const bool ALIGNED_MEET = false;
// Whether who has waited for a copy knows what its thread did before it began it, which comes before
// the copy; the text on cp.async.mbarrier.arrive promises no more than the copies themselves.
static const bool COPIES_SHOW = true;

static const int WORDS = SHARED_BYTES / 4 + 1, MOST_CTAS = 64, MOST_BARRIERS = 64, GAP = 4096;
// Whose times there are: threads, what each of them copies, what warps multiply and what they store
// in boxes, and what is brought to mbarriers.
static const int COPIES = THREADS, PRODUCTS = 2 * THREADS, STORES = PRODUCTS + WARPS;
static const int BROUGHT = STORES + WARPS, CLOCKS = BROUGHT + MOST_BARRIERS;

struct Word {
  int when;  // of the writer's clock
  int writer, cta;
  bool was_read, is_barrier;
  const char *where;
};
// What is known: the time of each clock, and of CTAs how many of their releases.
struct Past {
  int clocks[CLOCKS], releases[MOST_CTAS];
};

static Word shared_words[WORDS];
static Past pasts[THREADS], carried[THREADS];  // by threads, and by what they have copied
static int times[CLOCKS];  // but of threads
static int reads[WORDS][THREADS], late_reads[WORDS][2 * WARPS], base_clock, racing_cta;
static const char *read_where[WORDS][THREADS], *late_where[2 * WARPS];
static std::vector<std::vector<Word>> global_words;
static std::vector<Past> releases[MOST_CTAS];
static std::map<const void *, Past> atomics;
static std::map<const uchar *, std::vector<Word>> same_words;
static const uchar *arena_begin, *arena_end;

UNSEEN static unsigned long where_is(const char *where) {
  Dl_info info;
  return where && dladdr(where, &info) ? where - (const char *)info.dli_fbase - 1 : 0;
}
// Who has a clock, in words.
UNSEEN static std::string name_of(int clock) {
  auto name = [=](const char *what, int first) { return what + std::to_string(clock - first); };
  if (clock >= BROUGHT) return name("what is brought to mbarrier ", BROUGHT);
  if (clock >= STORES) return name("a store of warp ", STORES);
  if (clock >= PRODUCTS) return name("products of warp ", PRODUCTS);
  return clock >= COPIES ? name("a copy of thread ", COPIES) : name("thread ", 0);
}
SWIFT static void add_past(Past &to, const Past &from) {
  for (int i = 0; i < CLOCKS; i++)
    to.clocks[i] = to.clocks[i] > from.clocks[i] ? to.clocks[i] : from.clocks[i];
  for (int i = 0; i < MOST_CTAS; i++)
    to.releases[i] = to.releases[i] > from.releases[i] ? to.releases[i] : from.releases[i];
}
UNSEEN static int own_time() { return pasts[current].clocks[current]; }
UNSEEN static void learn(int clock, int time) {
  int &known = pasts[current].clocks[clock];
  if (time > known) known = time;
}
// Show others what a thread knows; what it does from now on is not shown.
UNSEEN static void show(Past &to, int thread) {
  add_past(to, pasts[thread]);
  pasts[thread].clocks[thread]++;
}
UNSEEN static void join_pasts(int first, int count) {
  static Past all;
  all = Past();
  for (int t = first; t < first + count; t++) add_past(all, pasts[t]);
  for (int t = first; t < first + count; t++) {
    pasts[t] = all;
    pasts[t].clocks[t]++;
  }
}
// The clock of who may be reading a word, or -1.
SWIFT static int reader_that_is_unknown(int word) {
  const int *when = reads[word], *late = late_reads[word], *own = pasts[current].clocks;
  bool all = true;
  for (int i = 0; i < THREADS; i++) all &= when[i] <= own[i];
  for (int i = 0; i < 2 * WARPS; i++) all &= late[i] <= own[PRODUCTS + i];
  for (int i = 0; i < THREADS && !all; i++)
    if (when[i] > own[i]) return i;
  for (int i = 0; i < 2 * WARPS && !all; i++)
    if (late[i] > own[PRODUCTS + i]) return PRODUCTS + i;
  return -1;
}

UNSEEN static void expect_written(const Past &known, uint address, const char *verb,
                                  const char *where) {
  const Word &word = shared_words[address / 4];
  EXPECT(word.when <= known.clocks[word.writer],
         "shared %u: %s at %#lx, but %s may be writing it at %#lx", address, verb,
         where_is(where), name_of(word.writer).c_str(), where_is(word.where));
}
UNSEEN static void touch_shared(uint address, uint bytes, bool writes, const char *where) {
  for (uint i = address / 4; i <= (address + bytes - 1) / 4; i++) {
    Word &word = shared_words[i];
    if (word.is_barrier) continue;
    expect_written(pasts[current], 4 * i, writes ? "written" : "read", where);
    if (!writes) {
      word.was_read = true;
      reads[i][current] = own_time();
      read_where[i][current] = where;
      continue;
    }
    int reader = word.was_read ? reader_that_is_unknown(i) : -1;
    EXPECT(reader < 0, "shared %u: written at %#lx, but %s may be reading it at %#lx", 4 * i,
           where_is(where), name_of(reader).c_str(),
           where_is(reader < PRODUCTS ? read_where[i][reader] : late_where[reader - PRODUCTS]));
    word = {own_time(), current, racing_cta, false, false, where};
  }
}
// What writes beside a thread may do so from now on, as nobody may look any more, up to a time.
UNSEEN static void write_late(uint to, uint bytes, int clock, int time, const char *where) {
  touch_shared(to, bytes, true, where);
  for (uint i = to / 4; i < (to + bytes) / 4; i++) {
    shared_words[i].writer = clock;
    shared_words[i].when = time;
  }
}
// What reads beside threads that know something may do so from now on, up to a time.
UNSEEN static void read_late(uint from, uint bytes, const Past &known, int clock, int time,
                             const char *where) {
  late_where[clock - PRODUCTS] = where;
  for (uint i = from / 4; i < (from + bytes) / 4; i++) {
    expect_written(known, 4 * i, "read", where);
    shared_words[i].was_read = true;
    late_reads[i][clock - PRODUCTS] = time;
  }
}
// For what is read for sure: of plain reads, a compiler leaves out those that nothing comes of.
UNSEEN static void expect_something(uint address, uint bytes, const char *where) {
  for (uint i = address / 4; i <= (address + bytes - 1) / 4; i++)
    EXPECT(shared_words[i].where, "shared %u: read at %#lx, but nobody has written it", 4 * i,
           where_is(where));
}
UNSEEN static bool is_known(const Word &word) {
  if (word.cta == racing_cta) return word.when <= pasts[current].clocks[word.writer];
  int count = pasts[current].releases[word.cta];
  return count && word.when <= releases[word.cta][count - 1].clocks[word.writer];
}
// Several threads may write the same: who reads has to know of one of them.
UNSEEN static void touch_same(const uchar *at, const float *value, const char *where) {
  std::vector<Word> &writers = same_words[at];
  EXPECT(writers.empty() || !memcmp(at, value, 4), "another value at %#lx", where_is(where));
  writers.push_back({own_time(), current, racing_cta, false, false, where});
}
UNSEEN static bool knows_of_one(const uchar *at) {
  for (const Word &word : same_words[at])
    if (is_known(word)) return true;
  return false;
}
UNSEEN static void touch_global(const uchar *at, uint bytes, bool writes, const char *where) {
  size_t span = 0;
  while (span < arrays.size() && !(arrays[span].begin <= at && at + bytes <= arrays[span].end))
    span++;
  EXPECT(span < arrays.size(), "there is no array at %p, touched at %#lx", at, where_is(where));
  if (atomics.count(at)) return;
  if (!writes && same_words.count(at)) {
    EXPECT(knows_of_one(at), "word of array %ld: read at %#lx, but threads may be writing it at "
           "%#lx", (long)span, where_is(where), where_is(same_words[at][0].where));
    return;
  }
  std::vector<Word> &words = global_words[span];
  if (words.empty() && !writes) return;
  if (words.empty()) words.resize((arrays[span].end - arrays[span].begin) / 4 + 1);
  size_t first = (at - arrays[span].begin) / 4;
  for (size_t i = first; i < first + (bytes + 3) / 4; i++) {
    EXPECT(!words[i].where || is_known(words[i]),
           "word %ld of array %ld: %s at %#lx, but thread %d of CTA %d may be writing it at %#lx",
           (long)i, (long)span, writes ? "written" : "read", where_is(where), words[i].writer,
           words[i].cta, where_is(words[i].where));
    if (writes) words[i] = {own_time(), current, racing_cta, false, false, where};
  }
}
UNSEEN static void touch(const void *pointer, uint bytes, bool writes, const char *where) {
  const uchar *at = (const uchar *)pointer;
  size_t address = at - shared_memory;
  if (address < SHARED_BYTES) return touch_shared(address, bytes, writes, where);
  if (arena_begin <= at && at < arena_end) touch_global(at, bytes, writes, where);
}

// What the compiler calls before loads and stores.
#define TOUCHES(bytes)                                                                    \
  extern "C" SEEN void __tsan_read##bytes(void *at) { touch(at, bytes, false, HERE); }    \
  extern "C" SEEN void __tsan_write##bytes(void *at) { touch(at, bytes, true, HERE); }    \
  extern "C" SEEN void __tsan_unaligned_read##bytes(void *at) { touch(at, bytes, false, HERE); } \
  extern "C" SEEN void __tsan_unaligned_write##bytes(void *at) { touch(at, bytes, true, HERE); }
TOUCHES(1)
TOUCHES(2)
TOUCHES(4)
TOUCHES(8)
TOUCHES(16)
extern "C" SEEN void __tsan_read_range(void *at, long bytes) { touch(at, bytes, false, HERE); }
extern "C" SEEN void __tsan_write_range(void *at, long bytes) { touch(at, bytes, true, HERE); }
extern "C" SEEN void __tsan_vptr_update(void **, void *) {}
extern "C" SEEN void __tsan_func_entry(void *) {}
extern "C" SEEN void __tsan_func_exit() {}
extern "C" SEEN void __tsan_init() {}

UNSEEN static void note_copy(uint to, uint bytes, const char *where) {
  int time = times[COPIES + current] = base_clock + threads[current].begun;
  write_late(to, bytes, COPIES + current, time, where);
  if (COPIES_SHOW) show(carried[current], current);
  carried[current].clocks[COPIES + current] = time;
}
UNSEEN static void note_copied(uint64_t begun) { learn(COPIES + current, base_clock + begun); }
// Release and acquire.
UNSEEN static void note_atomic(const void *place) {
  releases[racing_cta].push_back(pasts[current]);
  Past &there = atomics[place], &own = pasts[current];
  for (int i = 0; i < MOST_CTAS; i++) {
    int more = own.releases[i] > there.releases[i] ? own.releases[i] : there.releases[i];
    own.releases[i] = there.releases[i] = more;
  }
  there.releases[racing_cta] = releases[racing_cta].size();
  own.clocks[current]++;
}

UNSEEN static void begin_races() {
  global_words.assign(arrays.size(), {});
  for (auto &each : releases) each.clear();
  atomics.clear();
  same_words.clear();
  arena_begin = arrays[0].begin, arena_end = arrays[0].end;
  for (Span span : arrays) {
    if (span.begin < arena_begin) arena_begin = span.begin;
    if (span.end > arena_end) arena_end = span.end;
  }
  arena_begin -= GAP, arena_end += GAP;
  racing_cta = -1;
}
// Clocks go on from CTA to CTA, so that nothing is left to clear but a few words.
UNSEEN static void begin_cta() {
  racing_cta = blockIdx.x;
  for (int i = 0; i < CLOCKS; i++)
    base_clock = std::max(base_clock, i < THREADS ? pasts[i].clocks[i] : times[i]);
  std::fill(times, times + CLOCKS, base_clock);
  for (int t = 0; t < THREADS; t++) {
    pasts[t] = carried[t] = Past();
    std::fill(pasts[t].clocks, pasts[t].clocks + CLOCKS, base_clock);
    pasts[t].clocks[t]++;
  }
  for (Word &word : shared_words) word = Word();
}
