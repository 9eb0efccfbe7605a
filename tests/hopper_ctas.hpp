// Who goes on, of the warps of a CTA and of what copies for it, and when other CTAs do.
#include <memory>
#include <utility>

static bool can_go_on(const Thread &thread) {
  switch (thread.state) {
  case READY: return true;
  case AT_MBARRIER: return mbarrier(thread.word).phase != thread.parity;
  case AT_NAMED: return named[thread.word].generation != thread.generation;
  case AT_COPIES: return thread.done >= thread.awaited;
  case AT_STORES: return thread.stores == 0;
  default: return false;
  }
}
// Whether two lanes that wait do so for the same.
static bool is_same(const Thread &a, const Thread &b) {
  if (a.state != b.state) return false;
  if (a.state == AT_MBARRIER) return a.word == b.word && a.parity == b.parity;
  if (a.state == AT_NAMED) return a.word == b.word && a.generation == b.generation;
  return a.state == IN_WARP || a.state == DONE;
}
static bool can_act(int agent) {
  if (agent == COPIER) return are_copies_under_way();
  const Thread *lanes = threads + agent * WARP;
  for (int i = 0; i < WARP; i++)
    if ((!i || !is_same(lanes[i], lanes[i - 1])) && can_go_on(lanes[i])) return true;
  return false;
}
// Let lanes of a warp go on that can, all or some, or let something be copied.
static void act(int agent) {
  if (agent == COPIER) return copy_something();
  uint turned = chance() % 3 == 0 ? chance() % WARP : chance() % 2 * (WARP - 1);
  uint chosen = chance() % 4 == 0 ? chance() : ALL_LANES;
  for (uint i = 0; i < WARP; i++) {
    int lane = i ^ turned, t = agent * WARP + lane;
    if (chosen >> lane & 1 && can_go_on(threads[t])) enter_thread(t);
  }
}

static void describe(int warp) {
  const Thread *lanes = threads + warp * WARP;
  for (int i = 0; i < WARP; i++) {
    int first = i;
    while (i + 1 < WARP && is_same(lanes[first], lanes[i + 1])) i++;
    if (lanes[first].state == DONE) continue;
    say("\n  warp %d, lanes %d to %d: ", warp, first, i);
    if (lanes[first].state == IN_WARP) say("the other lanes, in %s", warps[warp].meeting);
    if (lanes[first].state == AT_NAMED) {
      Named &barrier = named[lanes[first].word];
      say("barrier %u, where %d of %d are", lanes[first].word, barrier.arrived, barrier.threads);
    }
    if (lanes[first].state == AT_MBARRIER) {
      Mbarrier &barrier = mbarrier(lanes[first].word);
      say("phase of parity %u of the mbarrier at word %u, which is in one of parity %u, lacks %u "
          "of %u arrivals and %d bytes", lanes[first].parity, lanes[first].word / 8, barrier.phase,
          barrier.pending, barrier.count, barrier.bytes);
    }
    if (lanes[first].state == AT_COPIES) say("copies");
  }
}
static void describe_all(int block) {
  say("block %d: all wait:", block);
  for (int i = 0; i < WARPS; i++) describe(i);
}

// Choose among those of the highest priority that can act; nobody can if it is negative.
static int choose(const int *priorities) {
  int best = -1, equals = 0;
  for (int i = 0; i < AGENTS; i++) {
    if (best >= 0 && priorities[i] < priorities[best]) continue;
    if (!can_act(i)) continue;
    equals = best >= 0 && priorities[i] == priorities[best] ? equals + 1 : 1;
    if (chance() % equals == 0) best = i;
  }
  return best;
}

// All that a CTA has: another one may have its place for a while.
struct Cta {
  decltype(shared_memory) bytes;
  decltype(places) own_places;
  decltype(stacks) own_stacks;
  decltype(threads) own_threads;
  decltype(warps) own_warps;
  decltype(named) own_named;
  decltype(written) own_written;
  decltype(published) own_published;
  decltype(writers) own_writers;
  decltype(copies) own_copies;
  decltype(waiting_stores) own_stores;
  decltype(boxes) own_boxes;
  decltype(copiers) own_copiers;
  decltype(products) own_products;
  decltype(products_of) own_products_of;
  decltype(products_begun) own_products_begun;
  int block;

  void change_places() {
    std::swap(bytes, shared_memory);
    std::swap(own_places, places);
    std::swap(own_stacks, stacks);
    std::swap(own_threads, threads);
    std::swap(own_warps, warps);
    std::swap(own_named, named);
    std::swap(own_written, written);
    std::swap(own_published, published);
    std::swap(own_writers, writers);
    std::swap(own_copies, copies);
    std::swap(own_stores, waiting_stores);
    std::swap(own_boxes, boxes);
    std::swap(own_copiers, copiers);
    std::swap(own_products, products);
    std::swap(own_products_of, products_of);
    std::swap(own_products_begun, products_begun);
    std::swap(block, blockIdx.x);
  }
};

static std::vector<int> ctas;  // that have not begun
static std::vector<int> preferred;
static int change_rate;  // how often, of a thousand times, somebody's priority becomes another

static bool run_cta();
// Let another CTA run from its beginning to its end while this one waits.
static bool run_other() {
  std::unique_ptr<Cta> own(new Cta());
  own->change_places();
  bool is_done = run_cta();
  for (char *stack : stacks) free(stack);
  own->change_places();
  return is_done;
}

static bool is_over() {
  return std::all_of(threads, threads + THREADS, [](auto &t) { return t.state == DONE; });
}
// Run the next CTA. Where it has told others something, some of them may run at once.
static bool run_cta() {
  std::vector<int> priorities = preferred;
  blockIdx.x = ctas.back();
  ctas.pop_back();
  begin_threads(STACK);
  std::fill(threads, threads + THREADS, Thread());
  std::fill(warps, warps + WARPS, Warp());
  std::fill(named, named + NAMED, Named());
  std::fill(written, std::end(written), 0);
  forget_copies();
  forget_products();
  int agent;
  while ((agent = choose(priorities.data())) >= 0) {
    EXPECT(agent != COPIER || !is_over(), "copies are under way, and there are no threads");
    act(agent);
    if (happens(change_rate)) priorities[chance() % AGENTS] = chance() % AGENTS;
    bool told = std::exchange(told_ctas, false);
    if (told && !ctas.empty() && happens(500) && !run_other()) return false;
  }
  if (!is_over()) describe_all(blockIdx.x);
  return is_over();
}

static void stop(int signal) {
  say("block %d, thread %d: %s", blockIdx.x, current, strsignal(signal));
  siglongjmp(stopped, 1);
}

// Run all CTAs. Returns whether all come to an end; else the report says why not.
static bool run_ctas(int blocks, uint seed, const int *priorities, int change, int seconds) {
  static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
  static uchar room[1 << 16];
  stack_t other = {room, 0, sizeof room}, before;
  struct sigaction action = {}, actions[4];
  itimerval limit = {{0, 0}, {seconds, 0}}, none = {};
  chance = Chance{seed + 1};
  action.sa_handler = stop;
  action.sa_flags = SA_ONSTACK;
  sigaltstack(&other, &before);
  for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &action, actions + i);
  setitimer(ITIMER_VIRTUAL, &limit, nullptr);
  volatile bool is_done = false;
  if (!sigsetjmp(stopped, 1)) {
    ctas.resize(blocks);
    for (int i = 0; i < blocks; i++) ctas[i] = i;
    std::shuffle(ctas.begin(), ctas.end(), chance);
    preferred.assign(priorities, priorities + AGENTS);
    change_rate = change;
    told_ctas = false;
    bool are_done = true;
    while (!ctas.empty() && are_done) are_done = run_cta();
    is_done = are_done;
  }
  setitimer(ITIMER_VIRTUAL, &none, nullptr);
  for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], actions + i, nullptr);
  sigaltstack(&before, nullptr);
  return is_done;
}
