// Copies that are under way: what is there before they are done is no number.
//
// Those of a thread (cp.async) are done in their order, boxes of the copy engine in any.

struct CUtensorMap {
  uchar *base;
  int64_t rank, sizes[5], strides[5], box[5];  // strides in bytes, the first one of an element
};
struct Copy {
  uint to, bytes, given;
  const uchar *from;  // null of an arrival: at the barrier at `to`
};
struct Box {
  CUtensorMap map;
  int at[5], owner;
  uint shared, barrier;
  bool is_store;
  std::vector<uint> words;  // of a store to another CTA, which has nothing else of a box

  int64_t rows() const {
    return std::accumulate(map.box + 1, map.box + map.rank, (int64_t)1, std::multiplies<>());
  }
  int64_t bytes() const { return rows() * map.box[0] * 2; }
};
struct Span {
  const uchar *begin, *end;
};

static std::deque<Copy> copies[THREADS];
static std::vector<Box> boxes, waiting_stores[THREADS];
static std::vector<int> copiers;  // threads with copies under way
static std::vector<Span> arrays;  // what there is of global memory

static void check_global(const void *pointer, uint bytes) {
  const uchar *at = (const uchar *)pointer;
  for (Span span : arrays)
    if (span.begin <= at && at + bytes <= span.end) return;
  REFUSE("there is nothing at %p", pointer);
}

static void begin_copy(uint to, const void *from, uint bytes, uint given) {
  uchar *place = shared_pointer(to, bytes);
  if (given) check_global(from, given);
  memset(place, 0xFF, bytes);
  if (copies[current].empty()) copiers.push_back(current);
  copies[current].push_back({to, bytes, given, (const uchar *)from});
  threads[current].begun++;
}
static void arrive_after_copies(uint address) {
  mbarrier(address);
  if (copies[current].empty()) copiers.push_back(current);
  copies[current].push_back({address, 0, 0, nullptr});
  threads[current].begun++;
  let_others_go();
}
static void close_copies() { threads[current].groups.push_back(threads[current].begun); }
static void wait_for_copies(uint pending) {
  Thread &thread = threads[current];
  if (thread.groups.size() <= pending) return;
  thread.awaited = thread.groups[thread.groups.size() - 1 - pending];
  if (!pending) thread.groups.clear();
  wait_as(AT_COPIES);
}

static void begin_load(uint to, const void *map, std::initializer_list<int> at, uint barrier) {
  Box box = {*(const CUtensorMap *)map, {}, current, to, barrier, false};
  EXPECT((int64_t)at.size() == box.map.rank, "a map of %d dimensions", (int)box.map.rank);
  std::copy(at.begin(), at.end(), box.at);
  EXPECT(to % 128 == 0, "a box at %u", to);
  mbarrier(barrier);
  memset(shared_pointer(to, box.bytes()), 0xFF, box.bytes());
  boxes.push_back(box);
}
static void begin_store(const void *map, std::initializer_list<int> at, uint from) {
  Box box = {*(const CUtensorMap *)map, {}, current, from, 0, true};
  EXPECT((int64_t)at.size() == box.map.rank, "a map of %d dimensions", (int)box.map.rank);
  std::copy(at.begin(), at.end(), box.at);
  waiting_stores[current].push_back(box);
}
static void close_stores() {
  for (Box &box : waiting_stores[current]) boxes.push_back(box);
  threads[current].stores += waiting_stores[current].size();
  waiting_stores[current].clear();
}
static void wait_for_stores() { wait_as(AT_STORES); }

static void store_in_peer(const Box &box) {
  uint bytes = 4 * box.words.size();
  memcpy(shared_pointer(box.shared, bytes), box.words.data(), bytes);
  bytes_came(box.barrier, bytes);
}
// Copy a box, row by row of 128 bytes, whose 16-byte chunks are swizzled in shared memory.
UNSEEN static void copy_box(const Box &box) {
  if (!box.words.empty()) return store_in_peer(box);
  const CUtensorMap &map = box.map;
  int64_t rows = box.rows(), bytes = map.box[0] * 2;
  for (int64_t row = 0; row < rows; row++) {
    int64_t rest = row;
    uchar *place = map.base;
    bool is_inside = true;
    for (int i = 1; i < map.rank; i++) {
      int64_t at = box.at[i] + rest % map.box[i];
      rest /= map.box[i];
      is_inside = is_inside && 0 <= at && at < map.sizes[i];
      place += at * map.strides[i];
    }
    for (int64_t chunk = 0; chunk < bytes / 16; chunk++) {
      int64_t column = box.at[0] + chunk * 8, count = map.sizes[0] - column;
      uint address = box.shared + row * bytes + chunk * 16;
      uchar *shared = shared_pointer(address ^ (address >> 7 & 7) << 4, 16);
      count = is_inside ? 2 * std::clamp<int64_t>(count, 0, 8) : 0;
      if (box.is_store) {
        expect_visible(shared - shared_memory, box.owner, box.owner + 1);
        memcpy(place + column * 2, shared, count);
      } else {
        written[(shared - shared_memory) / 16] = 0;
        memset(shared, 0, 16);
        memcpy(shared, place + column * 2, count);
      }
    }
  }
  if (box.is_store)
    threads[box.owner].stores--;
  else
    bytes_came(box.barrier, rows * bytes);
}

static bool are_copies_under_way() { return !copiers.empty() || !boxes.empty(); }
UNSEEN static void finish_copies(int place) {
  int t = copiers[place];
  bool all = chance() % 2;
  while (!copies[t].empty()) {
    Copy copy = copies[t].front();
    copies[t].pop_front();
    threads[t].done++;
    if (!copy.from) {
      arrive_at(copy.to, 0);
      if (!all) break;
      continue;
    }
    uchar *to = shared_memory + copy.to;
    note_written(copy.to, copy.bytes, t);
    memset(to, 0, copy.bytes);
    if (copy.given) memcpy(to, copy.from, copy.given);
    if (!all && chance() % 8 == 0) break;
  }
  if (copies[t].empty()) {
    copiers[place] = copiers.back();
    copiers.pop_back();
  }
}
static void copy_something() {
  uint place = chance() % (copiers.size() + boxes.size());
  if (place < copiers.size()) return finish_copies(place);
  place -= copiers.size();
  Box box = boxes[place];
  boxes[place] = boxes.back();
  boxes.pop_back();
  copy_box(box);
}

static void forget_copies() {
  for (auto &queue : copies) queue.clear();
  for (auto &stores : waiting_stores) stores.clear();
  copiers.clear();
  boxes.clear();
}
