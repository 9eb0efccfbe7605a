// CTAs of a cluster: their barrier, and stores to one another that a barrier there counts.

static const int OF_CLUSTER = NAMED - 1;
static int shown[2][CLOCKS];  // by threads that arrive, in turns of phases
static uint64_t arrivals_of[WARPS];
static int landed[CLUSTER];   // by clocks: the last store that came to a CTA

static void note_stored(const Box &);
UNSEEN static void forget_cluster() {
  when_stored = note_stored;
  memset(shown, 0, sizeof shown);
  memset(landed, 0, sizeof landed);
}
UNSEEN static void arrive_at_cluster(bool shows) {
  int warp = current / WARP;
  meet("barrier.cluster.arrive", [=] {
    uint64_t phase = named[OF_CLUSTER].generation;
    for (int t = warp * WARP; t < (warp + 1) * WARP && shows; t++) {
      for (int i = 0; i < CLOCKS; i++)
        if (clocks[t][i] > shown[phase % 2][i]) shown[phase % 2][i] = clocks[t][i];
      clocks[t][t]++;
    }
    arrive_at_named(OF_CLUSTER, THREADS);
    arrivals_of[warp] = phase;
    if (named[OF_CLUSTER].generation != phase) memset(shown[1 - phase % 2], 0, sizeof shown[0]);
  });
  let_others_go();
}
UNSEEN static void wait_for_cluster() {
  uint64_t phase = arrivals_of[current / WARP];
  meet("barrier.cluster.wait");
  wait_at_named(OF_CLUSTER, phase);
  for (int i = 0; i < CLOCKS; i++)
    if (shown[phase % 2][i] > clocks[current][i]) clocks[current][i] = shown[phase % 2][i];
}
UNSEEN static uint address_in_peer(uint address, uint rank) {
  EXPECT(rank < CLUSTER, "CTA %u of a cluster of %d", rank, CLUSTER);
  return address % SLICE + rank * SLICE;
}

UNSEEN static void begin_watched_mbarrier(uint address, uint count) {
  shared_words[address / 4].is_barrier = shared_words[address / 4 + 1].is_barrier = true;
  begin_mbarrier(address, count);
}
UNSEEN static void wait_watched(void *barrier, int parity) {
  mbarrier_wait(barrier, parity);
  int when = landed[shared_address(barrier) / SLICE];
  if (when > clocks[current][PEERS]) clocks[current][PEERS] = when;
}
SEEN static void store_peer(uint to, uint barrier, std::initializer_list<float> values) {
  EXPECT(to / SLICE == barrier / SLICE, "a store to %u is counted at %u", to, barrier);
  Box box = {};
  box.owner = current, box.shared = to, box.barrier = barrier;
  for (float value : values) box.words.push_back(__float_as_int(value));
  touch_shared(to, 4 * values.size(), true, HERE);
  for (uint i = to / 4; i < to / 4 + values.size(); i++) shared_words[i].is_pending = true;
  memset(shared_pointer(to, 4 * values.size()), 0xFF, 4 * values.size());
  boxes.push_back(box);
  let_others_go();
}
// What has come is written by nobody in particular.
UNSEEN static void note_stored(const Box &box) {
  int when = ++clocks[PEERS][PEERS];
  landed[box.barrier / SLICE] = when;
  for (uint i = box.shared / 4; i < box.shared / 4 + box.words.size(); i++) {
    shared_words[i].is_pending = false;
    shared_words[i].writer = PEERS;
    shared_words[i].when = when;
  }
}
