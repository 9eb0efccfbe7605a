// Tiles in shared memory that are read and written beside threads: boxes (TMA), and operands of
// products (wgmma). What they read they may read until they are waited for.

SEEN static void load_watched(uint to, const void *map, std::initializer_list<int> at,
                              uint barrier) {
  begin_load(to, map, at, barrier);
  bring_late(to, boxes.back().bytes(), barrier, HERE);
}
SEEN static void store_watched(const void *map, std::initializer_list<int> at, uint from) {
  int clock = STORES + current / WARP;
  EXPECT(current % WARP == 0, "a lane stores a box that may not wait for it");
  begin_store(map, at, from);
  uint bytes = waiting_stores[current].back().bytes();
  read_late(from, bytes, pasts[current], clock, times[clock] + 1, HERE);
}
UNSEEN static void close_watched_stores() {
  close_stores();
  times[STORES + current / WARP]++;
}
UNSEEN static void wait_for_watched_stores() {
  wait_for_stores();
  learn(STORES + current / WARP, times[STORES + current / WARP]);
}

// What all lanes of a warp know.
SWIFT static void find_common(int warp, Past &common) {
  common = pasts[warp * WARP];
  for (int t = warp * WARP + 1; t < (warp + 1) * WARP; t++)
    for (int i = 0; i < CLOCKS; i++)
      common.clocks[i] = common.clocks[i] < pasts[t].clocks[i] ? common.clocks[i]
                                                               : pasts[t].clocks[i];
}
UNSEEN static void watch_products(int warp, const char *where) {
  static Past common;
  int time = ++times[PRODUCTS + warp];
  find_common(warp, common);
  auto read = [=](uint address, int, int) UNSEEN {
    read_late(address, 16, common, PRODUCTS + warp, time, where);
  };
  for (const Product &product : products[warp].open) {
    if (product.left_is_shared) for_left(product, warp, read);
    for_right(product, read);
  }
}
SEEN static void close_watched_products() {
  int warp = current / WARP;
  const char *where = HERE;
  be_aligned();
  meet("operands", [=] { watch_products(warp, where); });
  close_products();
}
UNSEEN static void wait_for_watched_products(uint pending) {
  int clock = PRODUCTS + current / WARP;
  wait_for_products(pending);
  learn(clock, times[clock] - pending);
  be_aligned();
}
UNSEEN static void order_watched_products() {
  order_products();
  be_aligned();
}
