// Products of a warp (mma.sync), and numbers of 8 bits, which kernels with them widen.

struct Fragments {
  uint left[WARP][4], right[WARP][2];
  float sums[WARP][4];
};
static Fragments fragments[WARPS];

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
