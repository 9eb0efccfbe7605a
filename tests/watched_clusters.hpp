// CTAs of a cluster: their barrier, and stores to one another that a barrier there counts.

static const int OF_CLUSTER = NAMED - 1;
static uint64_t arrivals_of[WARPS];

UNSEEN static void arrive_at_cluster(bool shows) {
  int warp = current / WARP;
  meet("barrier.cluster.arrive", [=] {
    arrivals_of[warp] = named[OF_CLUSTER].generation;
    show_at_named(OF_CLUSTER, THREADS, shows);
  });
  let_others_go();
}
UNSEEN static void wait_for_cluster() {
  uint64_t phase = arrivals_of[current / WARP];
  meet("barrier.cluster.wait");
  wait_at_named(OF_CLUSTER, phase);
}
UNSEEN static uint address_in_peer(uint address, uint rank) {
  EXPECT(rank < CLUSTER, "CTA %u of a cluster of %d", rank, CLUSTER);
  return address % SLICE + rank * SLICE;
}

SEEN static void store_peer(uint to, uint barrier, std::initializer_list<float> values) {
  EXPECT(to / SLICE == barrier / SLICE, "a store to %u is counted at %u", to, barrier);
  Box box = {};
  box.owner = current, box.shared = to, box.barrier = barrier;
  for (float value : values) box.words.push_back(__float_as_int(value));
  bring_late(to, 4 * values.size(), barrier, HERE);
  memset(shared_pointer(to, 4 * values.size()), 0xFF, 4 * values.size());
  boxes.push_back(box);
  let_others_go();
}
