// Numbers of 16 bits, matrices in shared memory, and products of a warpgroup (wgmma).
//
// A warp computes its 16 rows of them when they are committed or when they are waited for, by
// chance: what is read then must be there, and what is written must not be read before.
#include <cmath>

#define CUDART_INF_F INFINITY

static uint16_t to_half(float), to_bfloat(float);
static float of_half(uint16_t), of_bfloat(uint16_t);
struct half {
  uint16_t bits;
  half() = default;
  half(float x) : bits(to_half(x)) {}
  operator float() const { return of_half(bits); }
};
struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  nv_bfloat16(float x) : bits(to_bfloat(x)) {}
  operator float() const { return of_bfloat(bits); }
};
struct Product {
  int columns, lane_count;
  bool is_bfloat, left_is_shared, rows_of_right, adds;
  uint64_t left, right;
  uint words[WARP][4];
  float *out[WARP];
};
struct Products {
  std::deque<Product> open, begun;
  std::deque<size_t> groups;
  bool are_ordered;
};

static Products products[WARPS];
static uint64_t products_of[THREADS], products_begun[WARPS];
static float halves[1 << 16];

static float of_half(uint16_t bits) { return halves[bits]; }
static float of_bfloat(uint16_t bits) {
  uint word = (uint)bits << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}
static uint16_t to_half(float value) {
  _Float16 rounded = value;
  uint16_t bits;
  memcpy(&bits, &rounded, 2);
  return bits;
}
static uint16_t to_bfloat(float value) {
  uint word;
  memcpy(&word, &value, 4);
  if (value != value) return 0x7fff;
  return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
static void make_halves() {
  for (int i = 0; i < 1 << 16; i++) {
    _Float16 value;
    uint16_t bits = i;
    memcpy(&value, &bits, 2);
    halves[i] = value;
  }
}
static float to_float(uint16_t bits, bool is_bfloat) {
  return is_bfloat ? of_bfloat(bits) : of_half(bits);
}
static void pack_halves(uint &pair, float high, float low) {
  pair = (uint)to_half(high) << 16 | to_half(low);
}
static void pack_bfloats(uint &pair, float high, float low) {
  pair = (uint)to_bfloat(high) << 16 | to_bfloat(low);
}
static float max(float a, float b) { return fmaxf(a, b); }
static float min(float a, float b) { return fminf(a, b); }
static int __float_as_int(float x) {
  int word;
  memcpy(&word, &x, 4);
  return word;
}
static int __vimax3_s32(int a, int b, int c) { return std::max(std::max(a, b), c); }
static int64_t __ffsll(long long bits) { return __builtin_ffsll(bits); }

template <class T> static void load_words(T *to, const void *from, int count) {
  check_global(from, count * sizeof *to);
  memcpy(to, from, count * sizeof *to);
}
template <class T> static void store_words(const void *to, std::initializer_list<T> words) {
  check_global(to, words.size() * sizeof(T));
  memcpy((void *)to, words.begin(), words.size() * sizeof(T));
}
static void store_shared(uint to, std::initializer_list<uint> words) {
  memcpy(shared_pointer(to, 4 * words.size()), words.begin(), 4 * words.size());
  note_written(to, 4 * words.size(), current);
}

// Matrices of 8 rows: lane i has the address of row i % 8 of matrix i / 8, and a word of each.
static void load_matrices(std::initializer_list<uint *> words, uint address) {
  int64_t *rows = exchange("ldmatrix", address);
  int matrix = 0, lane = current % WARP;
  for (uint *word : words)
    memcpy(word, shared_pointer(rows[matrix++ * 8 + lane / 4], 16) + lane % 4 * 4, 4);
}
static void store_matrices(uint address, std::initializer_list<uint> words) {
  int64_t *rows = exchange("stmatrix", address);
  int matrix = 0, lane = current % WARP;
  for (uint word : words) {
    uint row = rows[matrix++ * 8 + lane / 4];
    memcpy(shared_pointer(row, 16) + lane % 4 * 4, &word, 4);
    note_written(row, 16, current);
  }
}

static void encode_descriptor(uint64_t *descriptor, void *to, int leading, int eight_rows, int) {
  *descriptor = (uint64_t)(shared_address(to) >> 4) | (uint64_t)leading << 16 |
                (uint64_t)eight_rows << 32 | (uint64_t)1 << 62;
}
// Where 8 neighbouring elements are.
static uint chunk(uint64_t descriptor, uint offset) {
  uint address = ((descriptor & 0x3fff) << 4) + offset;
  return address ^ (address >> 7 & 7) << 4;
}
static uint leading_bytes(uint64_t descriptor) { return (descriptor >> 16 & 0x3fff) << 4; }
static uint eight_rows_bytes(uint64_t descriptor) { return (descriptor >> 32 & 0x3fff) << 4; }

__attribute__((target_clones("avx2", "default"), optimize("O3"))) UNSEEN static void
multiply(const float (*left)[16], const float *right, float (*out)[256], int columns) {
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < columns; n++) out[row][n] += left[row][k] * right[k * 256 + n];
}

// The right operand by chunks, given an address and the first k and n: element (k, n) is in row n
// if rows are multiplied, else in row k.
template <class F> UNSEEN static void for_right(const Product &product, F act) {
  uint leading = leading_bytes(product.right), eight = eight_rows_bytes(product.right);
  if (product.rows_of_right) {
    for (int n = 0; n < product.columns; n++)
      for (int k = 0; k < 16; k += 8)
        act(chunk(product.right, n / 8 * eight + n % 8 * 128 + k * 2), k, n);
  } else {
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < product.columns; n += 8) {
        uint row = k / 8 * eight + k % 8 * 128;
        act(chunk(product.right, n / 64 * leading + row + n % 64 * 2), k, n);
      }
  }
}
// A warp's rows of a left operand in shared memory, as well.
template <class F> UNSEEN static void for_left(const Product &product, int warp, F act) {
  uint eight = eight_rows_bytes(product.left);
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k += 8) {
      int place = warp % 4 * 16 + row;
      act(chunk(product.left, place / 8 * eight + place % 8 * 128 + k * 2), row, k);
    }
}
UNSEEN static void read_chunk(const Product &product, int warp, uint address, float *to, int step) {
  const uint16_t *from = (const uint16_t *)shared_pointer(address, 16);
  expect_visible(address, warp * WARP, (warp + 1) * WARP);
  for (int i = 0; i < 8; i++) to[i * step] = to_float(from[i], product.is_bfloat);
}
static void read_right(const Product &product, int warp, float *right) {
  int step = product.rows_of_right ? 256 : 1;
  for_right(product, [=](uint address, int k, int n) {
    read_chunk(product, warp, address, right + k * 256 + n, step);
  });
}
static void read_left(const Product &product, int warp, float (*left)[16]) {
  if (product.left_is_shared)
    return for_left(product, warp, [=](uint address, int row, int k) {
      read_chunk(product, warp, address, left[row] + k, 1);
    });
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++) {
      uint word = product.words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      left[row][k] = to_float(word >> k % 2 * 16, product.is_bfloat);
    }
}
static float accumulators[16][256];
template <class F> static void for_accumulators(const Product &product, F act) {
  for (int lane = 0; lane < WARP; lane++)
    for (int i = 0; i < product.columns / 2; i++) {
      int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      act(product.out[lane][i], accumulators[row][column]);
    }
}
// Compute a product; `begins` and `ends` say whether those before and after it have other sums.
static void compute(const Product &product, int warp, bool begins, bool ends) {
  static float right[16 * 256], left[16][16];
  read_left(product, warp, left);
  read_right(product, warp, right);
  if (!product.adds) memset(accumulators, 0, sizeof accumulators);
  else if (begins) for_accumulators(product, [](float &own, float &sum) { sum = own; });
  multiply(left, right, accumulators, product.columns);
  if (ends) for_accumulators(product, [](float &own, float &sum) { own = sum; });
}

// A lane's part of a product; `first` and `last` are the accumulator's first and last element.
static void begin_product(Product product, float &first, float &last, const uint *words) {
  int warp = current / WARP, lane = current % WARP;
  Products &all = products[warp];
  EXPECT(&last - &first == product.columns / 2 - 1, "an accumulator in pieces");
  size_t place = products_of[current]++ - products_begun[warp];
  if (place == all.open.size()) all.open.push_back(product);
  Product &own = all.open[place];
  EXPECT(own.left == product.left && own.right == product.right && own.adds == product.adds &&
         own.columns == product.columns, "lanes multiply what differs");
  if (words) memcpy(own.words[lane], words, sizeof own.words[lane]);
  own.out[lane] = &first;
  own.lane_count++;
}
static void finish_products(int warp, size_t groups_left) {
  Products &all = products[warp];
  bool is_other = true;
  for (; all.groups.size() > groups_left; all.groups.pop_front())
    for (size_t i = 0, count = all.groups.front(); i < count; i++) {
      bool ends = i + 1 == count || all.begun[1].out[0] != all.begun[0].out[0];
      compute(all.begun.front(), warp, is_other, ends);
      is_other = ends;
      all.begun.pop_front();
    }
}
static void close_products() {
  int warp = current / WARP;
  meet("wgmma.commit_group", [=] {
    Products &all = products[warp];
    EXPECT(all.are_ordered, "products begin without a fence");
    all.are_ordered = false;
    for (Product &product : all.open) {
      EXPECT(product.lane_count == WARP, "a product of %d lanes", product.lane_count);
      all.begun.push_back(product);
    }
    all.groups.push_back(all.open.size());
    products_begun[warp] += all.open.size();
    all.open.clear();
    if (chance() % 2) finish_products(warp, 0);
  });
}
static void wait_for_products(size_t pending) {
  int warp = current / WARP;
  meet("wgmma.wait_group", [=] { finish_products(warp, pending); });
}
static void order_products() {
  int warp = current / WARP;
  meet("wgmma.fence", [=] { products[warp].are_ordered = true; });
}

static void forget_products() {
  if (!halves[1]) make_halves();
  for (Products &all : products) all = Products();
  std::fill(products_of, products_of + THREADS, 0);
  std::fill(products_begun, products_begun + WARPS, 0);
}
