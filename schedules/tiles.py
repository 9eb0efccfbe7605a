"""Tile shapes: how much of the problem a work item holds, and how a schedule cuts it for registers.

Two families of query tiles cover all requests. Decoding has few fused rows per request and lives on
memory bandwidth; prefill has many and lives on arithmetic. A request belongs to the short family
if all its rows fit one short tile, so that the choice is a function of the request alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tvm_attn.errors import SpecError
from tvm_attn.spec import AttentionSpec
from tvm_attn.target import BuildTarget

FLOAT_BITS = 32
BLOCK = 32
"""Keys of a block: few enough to keep K and V in the L1 cache and to mask little in vain."""
LONG_ROWS = 64
"""Query rows that share what reading and converting a block costs."""
MIN_ROWS = 4
"""Query rows that a core works on in the time it takes to read a key from memory."""


@dataclass(frozen=True)
class TileConfig:
    """A kernel's tile: `rows` fused query rows against blocks of `block` keys, and how it is cut.

    Parameters
    ----------
    family : {"short", "long"}
        Which requests the kernel serves.
    rows, block : int
        Fused query rows of an item; keys of a block. `block` is also the granule in which the
        planner cuts and counts the KV range.
    vector : {"rows", "dims"}
        What lies along a vector register: neighbouring rows, or the elements of a head.
    lanes : int
        float32 elements of a vector register.
    qk : tuple of int
        (rows, keys) of the register tile of queries times keys.
    pv : tuple of int
        (rows, dims) of the register tile of weights times values.
    overhead : int
        What an item costs besides its keys, in blocks: for the planner's cost model.

    Raises
    ------
    SpecError
        If the sizes do not divide one another; the message names the field.
    """

    family: Literal["short", "long"]
    rows: int
    block: int
    vector: Literal["rows", "dims"]
    lanes: int
    qk: tuple[int, int]
    pv: tuple[int, int]
    overhead: int = 1

    def __post_init__(self) -> None:
        """Validate."""
        if self.family not in ("short", "long") or self.vector not in ("rows", "dims"):
            raise SpecError(f"family={self.family!r}, vector={self.vector!r} are not known")
        along_rows = self.lanes if self.vector == "rows" else 1
        along_dims = self.lanes if self.vector == "dims" else 1
        checks = (
            ("block", self.block, self.lanes),
            ("rows", self.rows, along_rows),
            ("rows", self.rows, self.qk[0]),
            ("qk rows", self.qk[0], along_rows),
            ("block", self.block, self.qk[1]),
            ("rows", self.rows, self.pv[0]),
            ("pv rows", self.pv[0], along_rows),
            ("pv dims", self.pv[1], along_dims),
        )
        for name, size, unit in checks:
            if unit < 1 or size < 1 or size % unit:
                raise SpecError(f"{name}={size} must be a multiple of {unit} in {self}")
        if self.vector == "dims" and not 2 <= self.qk[1] <= self.lanes // self.qk[0]:
            raise SpecError(f"qk keys={self.qk[1]} must be 2 or more, and fit the lanes, in {self}")


def cpu_tiles(spec: AttentionSpec, target: BuildTarget) -> tuple[TileConfig, TileConfig]:
    """Return the short and the long tile of a CPU kernel.

    Parameters
    ----------
    spec : AttentionSpec
        Group size and head dims decide.
    target : BuildTarget
        The CPU: how wide its vector registers are, and how many it has.

    Returns
    -------
    short : TileConfig
        For requests of at most `short.rows` fused rows: one query token of a large group, up to
        four of a small one, where more rows cost less than reading the keys does.
    long : TileConfig
        For all others.

    Examples
    --------
    >>> spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim_qk=128)
    >>> short, long = cpu_tiles(spec, BuildTarget("llvm", mcpu="x86-64-v4"))
    >>> short.rows, short.vector, long.rows, long.vector
    (4, 'dims', 64, 'rows')
    """
    lanes = target.vector_bits // FLOAT_BITS
    accumulators = 16 if target.vector_bits == 512 else 8
    group = spec.group_size
    if 2 * group <= lanes:
        rows = group * -(-MIN_ROWS // group)
        short = _tile_of_dims(rows, spec.dim_vo // lanes, lanes, spec.kv_dtype == "float32")
    else:
        short = _tile_of_rows("short", -(-group // lanes) * lanes, lanes, accumulators)
    return short, _tile_of_rows("long", LONG_ROWS, lanes, accumulators)


def _tile_of_rows(
    family: Literal["short", "long"], rows: int, lanes: int, accumulators: int
) -> TileConfig:
    vectors = max(v for v in (1, 2, 3, 4) if rows // lanes % v == 0)
    others = max(n for n in (1, 2, 4, 8, 16) if n * vectors <= accumulators)
    register = (vectors * lanes, others)
    return TileConfig(family, rows, BLOCK, "rows", lanes, register, register)


def _tile_of_dims(rows: int, vectors: int, lanes: int, wide: bool) -> TileConfig:
    """Few accumulators, to stay in registers; more for `wide` elements, where memory is the limit.

    More accumulators are fewer passes over the values of a block, which keeps memory busier.
    """
    qk_rows = max(r for r in _divisors(rows) if 2 * r <= lanes)
    accumulators = 8 if lanes < 16 else 16 if wide else 12
    pv_rows, pv_vectors = _cheapest_register_tile(rows, vectors, accumulators)
    register = (pv_rows, pv_vectors * lanes)
    return TileConfig("short", rows, BLOCK, "dims", lanes, (qk_rows, 2), register)


def _cheapest_register_tile(rows: int, vectors: int, accumulators: int) -> tuple[int, int]:
    """Rows and vectors of values with the fewest instructions a key besides multiply-adds.

    At least half of the accumulators are used: fewer do not hide a multiply-add's latency.
    """

    def instructions(tile: tuple[int, int]) -> int:
        row_passes, dim_passes = rows // tile[0], vectors // tile[1]
        values, weights = row_passes * vectors, dim_passes * rows
        locating, prefetching = 6 * row_passes * dim_passes, 10 * dim_passes
        return 2 * values + weights + locating + prefetching

    tiles = [(r, v) for r in _divisors(rows) for v in _divisors(vectors)]
    fitting = [tile for tile in tiles if tile[0] * tile[1] <= accumulators]
    hiding = [tile for tile in fitting if 2 * tile[0] * tile[1] >= accumulators]
    return min(hiding or fitting, key=instructions)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
