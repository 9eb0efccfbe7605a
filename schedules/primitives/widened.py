"""float8 to float16 in registers: four elements of a word at a time."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_attn.variant import Expr

E4M3 = "widen_e4m3"
E5M2 = "widen_e5m2"
SWAP = "swap_inner_bytes"

SOURCES = {
    E4M3: r"""
__device__ __forceinline__ void widen_e4m3(unsigned word, unsigned& low, unsigned& high) {
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
      : "=r"(low), "=r"(high) : "r"(word));
#else
  unsigned pairs[2] = {__byte_perm(word, 0, 0x1404), __byte_perm(word, 0, 0x3424)};
  for (int i = 0; i < 2; ++i) {  // exponents are 8 too small: 2^8 is 0x5c00
    unsigned bits = (pairs[i] & 0x80008000u) | ((pairs[i] & 0x7f007f00u) >> 1);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(bits), "r"(0x5c005c00u));
  }
  low = pairs[0]; high = pairs[1];
#endif
}
""",
    E5M2: r"""
__device__ __forceinline__ void widen_e5m2(unsigned word, unsigned& low, unsigned& high) {
  low = __byte_perm(word, 0, 0x1404); high = __byte_perm(word, 0, 0x3424);
}
""",
    SWAP: r"""
__device__ __forceinline__ unsigned swap_inner_bytes(unsigned word) {
  return __byte_perm(word, word, 0x3120);
}
""",
}
"""Before sm_89, NaN of e4m3 widens to 480."""


def widen(dtype: str, word: Expr, low: Expr, high: Expr) -> Expr:
    """Widen the float8 elements of a word: the first two to `low`, the others to `high`."""
    name = E4M3 if dtype == "float8_e4m3fn" else E5M2
    return T.cuda.func_call(name, word, low, high, source_code=SOURCES[name], return_type="void")


def swap_inner(word: Expr) -> Expr:
    """Return a word with its two middle bytes swapped: bytes 0 and 2, then 1 and 3."""
    return T.cuda.func_call(SWAP, word, source_code=SOURCES[SWAP], return_type="uint32")
