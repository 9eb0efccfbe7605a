// Who touched a word of memory, and whether that is known to have come before: by barriers.
//
// A thread knows its own past, and of others what they did before they met it: at `__syncwarp`, at
// a barrier of the CTA, or by way of an atomic. Shuffles and votes order nothing. A copy has
// written its words when the thread that began it has waited for it. A schedule does not matter.
#include <dlfcn.h>
#include <map>

#define UNSEEN __attribute__((no_sanitize("thread")))
#define SWIFT __attribute__((no_sanitize("thread"), optimize("O3")))
#define SEEN __attribute__((no_sanitize("thread"), noinline))
#define HERE ((const char *)__builtin_return_address(0))

static const int WORDS = SHARED_BYTES / 4 + 1, MOST_CTAS = 64, GAP = 4096;
static const int PEERS = THREADS, CLOCKS = THREADS + 1;  // stores of other CTAs have a clock, too

struct Word {
  int when;  // of the writer's clock
  int writer, cta;
  bool is_pending, is_barrier;
  const char *where;
};
struct Begun {
  uint to, bytes;
};
struct Released {
  int clocks[CLOCKS];
};
// What is known of CTAs: how many of their releases.
struct Known {
  int releases[MOST_CTAS];
};

static Word shared_words[WORDS];
static int clocks[CLOCKS][CLOCKS], reads[WORDS][THREADS], base_clock, racing_cta;
static const char *read_where[WORDS][THREADS];
static Known known[THREADS];
static std::deque<Begun> begun_copies[THREADS];
static uint64_t waited_for[THREADS];
static std::vector<std::vector<Word>> global_words;
static std::vector<Released> releases[MOST_CTAS];
static std::map<const void *, Known> atomics;
static std::map<const uchar *, std::vector<Word>> same_words;
static const uchar *arena_begin, *arena_end;

UNSEEN static unsigned long where_is(const char *where) {
  Dl_info info;
  return where && dladdr(where, &info) ? where - (const char *)info.dli_fbase - 1 : 0;
}
SWIFT static void join_clocks(int first, int count) {
  static int all[CLOCKS], others[MOST_CTAS];
  memset(all, 0, sizeof all);
  memset(others, 0, sizeof others);
  for (int t = first; t < first + count; t++) {
    for (int i = 0; i < CLOCKS; i++) all[i] = all[i] > clocks[t][i] ? all[i] : clocks[t][i];
    for (int i = 0; i < MOST_CTAS; i++)
      others[i] = others[i] > known[t].releases[i] ? others[i] : known[t].releases[i];
  }
  for (int t = first; t < first + count; t++) {
    memcpy(clocks[t], all, sizeof all);
    memcpy(known[t].releases, others, sizeof others);
  }
  for (int t = first; t < first + count; t++) clocks[t][t]++;
}
SWIFT static int reader_that_is_unknown(int word) {
  const int *when = reads[word], *own = clocks[current];
  bool all = true;
  for (int i = 0; i < THREADS; i++) all &= when[i] <= own[i];
  for (int i = 0; i < THREADS && !all; i++)
    if (when[i] > own[i]) return i;
  return -1;
}

UNSEEN static void expect_written(const Word &word, uint address, const char *verb,
                                  const char *where) {
  EXPECT(!word.is_pending || word.cta != racing_cta,
         "shared %u: %s at %#lx, while thread %d has not waited for the copy begun at %#lx",
         address, verb, where_is(where), word.writer, where_is(word.where));
  EXPECT(word.when <= clocks[current][word.writer],
         "shared %u: %s at %#lx, but thread %d may be writing it at %#lx", address, verb,
         where_is(where), word.writer, where_is(word.where));
}
UNSEEN static void touch_shared(uint address, uint bytes, bool writes, const char *where) {
  for (uint i = address / 4; i <= (address + bytes - 1) / 4; i++) {
    Word &word = shared_words[i];
    if (word.is_barrier) continue;
    expect_written(word, 4 * i, writes ? "written" : "read", where);
    if (!writes) {
      reads[i][current] = clocks[current][current];
      read_where[i][current] = where;
      continue;
    }
    int reader = reader_that_is_unknown(i);
    EXPECT(reader < 0, "shared %u: written at %#lx, but thread %d may be reading it at %#lx", 4 * i,
           where_is(where), reader, where_is(read_where[i][reader]));
    word = {clocks[current][current], current, racing_cta, false, false, where};
  }
}
// For what is read for sure: of plain reads, a compiler leaves out those that nothing comes of.
UNSEEN static void expect_something(uint address, uint bytes, const char *where) {
  for (uint i = address / 4; i <= (address + bytes - 1) / 4; i++)
    EXPECT(shared_words[i].where, "shared %u: read at %#lx, but nobody has written it", 4 * i,
           where_is(where));
}
UNSEEN static bool is_known(const Word &word) {
  if (word.cta == racing_cta) return word.when <= clocks[current][word.writer];
  int count = known[current].releases[word.cta];
  return count && word.when <= releases[word.cta][count - 1].clocks[word.writer];
}
// Several threads may write the same: who reads has to know of one of them.
UNSEEN static void touch_same(const uchar *at, const float *value, const char *where) {
  std::vector<Word> &writers = same_words[at];
  EXPECT(writers.empty() || !memcmp(at, value, 4), "another value at %#lx", where_is(where));
  writers.push_back({clocks[current][current], current, racing_cta, false, false, where});
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
    if (writes) words[i] = {clocks[current][current], current, racing_cta, false, false, where};
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

// Copies write when they begin, as nobody may look any more, and until they are waited for.
UNSEEN static void note_copy(uint to, uint bytes, const char *where) {
  touch_shared(to, bytes, true, where);
  for (uint i = to / 4; i < (to + bytes) / 4; i++) shared_words[i].is_pending = true;
  begun_copies[current].push_back({to, bytes});
}
UNSEEN static void note_copied(uint64_t end) {
  for (; waited_for[current] < end; waited_for[current]++) {
    Begun copy = begun_copies[current].front();
    begun_copies[current].pop_front();
    for (uint i = copy.to / 4; i < (copy.to + copy.bytes) / 4; i++) {
      shared_words[i].is_pending = false;
      shared_words[i].when = clocks[current][current];
    }
  }
}
// Release and acquire.
UNSEEN static void note_atomic(const void *place) {
  Released released;
  memcpy(released.clocks, clocks[current], sizeof released.clocks);
  releases[racing_cta].push_back(released);
  Known &there = atomics[place], &own = known[current];
  for (int i = 0; i < MOST_CTAS; i++) {
    int more = own.releases[i] > there.releases[i] ? own.releases[i] : there.releases[i];
    own.releases[i] = there.releases[i] = more;
  }
  there.releases[racing_cta] = releases[racing_cta].size();
  clocks[current][current]++;
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
  for (int t = 0; t < CLOCKS; t++)
    if (clocks[t][t] > base_clock) base_clock = clocks[t][t];
  for (int t = 0; t < THREADS; t++) {
    for (int i = 0; i < CLOCKS; i++) clocks[t][i] = base_clock;
    clocks[t][t]++;
    known[t] = Known();
    begun_copies[t].clear();
    waited_for[t] = 0;
  }
  clocks[PEERS][PEERS] = base_clock;
  for (Word &word : shared_words) word = Word();
}
