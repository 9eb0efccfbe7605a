// Barriers that show those who wait what those knew who arrived: warps at named barriers, phase by
// phase, and threads at mbarriers.

// What is shown in a phase, and in the one before it.
struct Phases {
  Past shown[2];
  uint64_t phase;
  Past &now() { return shown[phase % 2]; }
  void end() {
    phase++;
    now() = Past();
  }
};
static Phases of_named[NAMED], of_mbarriers[MOST_BARRIERS];
static int mbarriers;

UNSEEN static void meet_lanes() {
  int first = current / WARP * WARP;
  meet("__syncwarp", [=] { join_pasts(first, WARP); });
}
UNSEEN static void __syncwarp() { meet_lanes(); }
UNSEEN static void be_aligned() {
  if (ALIGNED_MEET) meet_lanes();
}
UNSEEN static int is_elected() {
  be_aligned();
  return elect();
}

// A warp arrives as a whole.
UNSEEN static void show_at_named(int place, int count, bool shows) {
  uint64_t generation = named[place].generation;
  int first = current / WARP * WARP;
  for (int t = first; t < first + WARP && shows; t++) show(of_named[place].now(), t);
  arrive_at_named(place, count);
  if (named[place].generation != generation) of_named[place].end();
}
UNSEEN static void wait_at_named(int place, uint64_t generation) {
  threads[current].word = place;
  threads[current].generation = generation;
  if (named[place].generation == generation) wait_as(AT_NAMED);
  add_past(pasts[current], of_named[place].shown[generation % 2]);
}
UNSEEN static void bar_sync_watched(int place, int count) {
  meet("bar.sync", [=] { show_at_named(place, count, true); });
  wait_at_named(place, warps[current / WARP].generation);
}
UNSEEN static void bar_arrive_watched(int place, int count) {
  meet("bar.arrive", [=] { show_at_named(place, count, true); });
  let_others_go();
}

// The number of an mbarrier is where the writer of its words would be.
UNSEEN static int number_of_mbarrier(uint address) {
  const Word &word = shared_words[address / 4];
  EXPECT(word.is_barrier, "there is no barrier at %u", address);
  return word.writer;
}
UNSEEN static Phases &phases_of(uint address) { return of_mbarriers[number_of_mbarrier(address)]; }
UNSEEN static void begin_watched_mbarrier(uint address, uint count) {
  EXPECT(mbarriers < MOST_BARRIERS, "more than %d barriers", mbarriers);
  for (uint i = address / 4; i < address / 4 + 2; i++)
    shared_words[i].is_barrier = true, shared_words[i].writer = mbarriers;
  mbarriers++;
  begin_mbarrier(address, count);
}
UNSEEN static void end_phase(uint address) {
  phases_of(address).end();
  times[BROUGHT + number_of_mbarrier(address)]++;
}
UNSEEN static void arrive_watched(uint address, uint arrivals) {
  show(phases_of(address).now(), current);
  mbarrier_arrive(address, arrivals);
}
UNSEEN static void expect_watched(uint address, uint bytes) {
  show(phases_of(address).now(), current);
  mbarrier_expect(address, bytes);
}
UNSEEN static void arrive_watched_after_copies(uint address) {
  add_past(phases_of(address).now(), carried[current]);
  arrive_after_copies(address);
}
UNSEEN static void wait_watched(void *barrier, int parity) {
  await_phase(barrier, parity);
  add_past(pasts[current], phases_of(shared_address(barrier)).shown[parity]);
  let_others_go();
}
// What is brought in a phase is known to who has waited for its end.
UNSEEN static void bring_late(uint to, uint bytes, uint barrier, const char *where) {
  int clock = BROUGHT + number_of_mbarrier(barrier), time = times[clock] + 1;
  write_late(to, bytes, clock, time, where);
  Past &shown = phases_of(barrier).now();
  if (COPIES_SHOW) show(shown, current);
  shown.clocks[clock] = time;
}

UNSEEN static void forget_barriers() {
  when_complete = end_phase;
  mbarriers = 0;
  for (Phases &each : of_named) each = Phases();
  for (Phases &each : of_mbarriers) each = Phases();
}
