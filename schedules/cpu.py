"""CPU schedules: how the phases of the definition run on cores with vector registers.

Threads share the CTAs of the work list. Inside of an item there are two mappings; the tile says
which:

- ``vector="rows"`` (prefill, large groups): neighbouring query rows lie along a vector register.
  Tiles are stored with rows innermost, so softmax needs no reduction across a register, and keys
  and values are read element by element as broadcasts: gathered once per block, never transposed.
- ``vector="dims"`` (decoding): the elements of a head lie along a register. There are too few rows
  to pay for a copy, so keys and values stream from the cache straight into the products, and
  are asked for a block ahead.

Both keep a register tile's accumulators in registers during the whole reduction, and apply what
follows (logits and mask; rescaling) to the register tile.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from tvm_attn.schedules.lanes import sum_lanes
from tvm_attn.schedules.prefetch import Ahead, CacheRow, prefetch_in, uses
from tvm_attn.schedules.tiles import TileConfig

Schedule = Any
Loop = Any

LONGEST_CHAIN = 128
"""Most products added one after the other into one float32; more lose too much precision."""

KEYS_AT_ONCE = 2
"""Keys whose values are added in one iteration, after asking for as many keys of the next block."""


def schedule(function: tirx.PrimFunc, tile: TileConfig) -> Schedule:
    """Schedule an attention definition for a CPU.

    Parameters
    ----------
    function : tvm.tirx.PrimFunc
        What `tvm_attn.tir.attention.attention` returned for the rows and block of `tile`.
    tile : TileConfig
        The tile.

    Returns
    -------
    tvm.s_tir.Schedule
        Its ``mod`` holds the scheduled function. Elementary functions are left as calls:
        `tvm_attn.codegen.vector_math` turns them into arithmetic.
    """
    sch = s_tir.Schedule(function)
    for name in ("cta", "merge"):
        sch.parallel(sch.get_loops(sch.get_sblock(name))[0])
    sch.compute_inline(sch.get_sblock("logits"))
    if tile.vector == "rows":
        _rows_along_vectors(sch, tile)
        return sch
    return s_tir.Schedule(_dims_along_vectors(sch, tile))


def _rows_along_vectors(sch: Schedule, tile: TileConfig) -> None:
    """Map rows to vector lanes, in every phase."""
    _store_rows_innermost(sch)
    for name in ("gather_k", "gather_v", "store_state"):
        _vectorize(sch, _loops(sch, name, 1)[0], tile.lanes)
    if int(sch.get(_loops(sch, "qk", 1)[0]).extent) > LONGEST_CHAIN:
        _product_in_chunks(sch, "qk", "mask", tile.qk, tile.lanes)
    else:
        _product_of_rows(sch, "qk", "mask", tile.qk, tile.lanes)
    _softmax_of_rows(sch, tile.lanes)
    _product_of_rows(sch, "pv", "new_o", tile.pv, tile.lanes)
    for name in ("init_state", "close_state"):
        _vectorize(sch, _loops(sch, name, 1)[0], tile.lanes)


def _store_rows_innermost(sch: Schedule) -> None:
    """Transpose every tile that has rows.

    Before: ``q[i, d]``, ``s[i, j]``, ``o[i, d]``. After: ``q[d, i]``, ``s[j, i]``, ``o[d, i]``.
    """
    for name in ("load_q", "qk", "mask", "weigh", "pv", "init_o"):
        sch.transform_layout(sch.get_sblock(name), ("write", 0), lambda i, x: (x, i))


def _product_of_rows(
    sch: Schedule, name: str, epilogue: str, register: tuple[int, int], lanes: int
) -> None:
    """Compute a product by register tiles of rows, along vectors, times keys or dims.

    Before: ``for i, x, r: acc[x, i] += a[r, i] * b[x, r]``, then ``for i, x: epilogue(acc[x, i])``.
    After: ``for x0, i0: (for r: for x1, i1, lane: acc += ...), (for x1, i1, lane: epilogue)``
    with `x1`, `i1` unrolled: ``b`` is a broadcast, and ``acc`` fits the registers.
    """
    product = sch.get_sblock(name)
    rows, columns, reduction = sch.get_loops(product)[-3:]
    tile = _tile_product(sch, (rows, columns), [reduction], register, lanes)
    _follow(sch, epilogue, tile, lanes)
    sch.decompose_reduction(product, reduction)


def _product_in_chunks(
    sch: Schedule, name: str, epilogue: str, register: tuple[int, int], lanes: int
) -> None:
    """Compute a product as `_product_of_rows` does, in four sums that are added in the end.

    Before: ``for r: acc[x, i] += ...``. After: ``for c: (for r: part[c, x, i] += ...)``, then
    ``for c: acc[x, i] += part[c, x, i]``, for every register tile: shorter chains of additions.
    """
    reduction = sch.get_loops(sch.get_sblock(name))[-1]
    chunk, element = sch.split(reduction, [4, None])
    part = sch.rfactor(chunk, factor_axis=0)
    rows, columns, chunk, element = sch.get_loops(part)[-4:]
    tile = _tile_product(sch, (rows, columns), [chunk, element], register, lanes)
    chunk = _follow(sch, name, tile, lanes)
    _follow(sch, epilogue, tile, lanes)
    sch.decompose_reduction(part, element)
    sch.decompose_reduction(sch.get_sblock(name), chunk)


def _tile_product(
    sch: Schedule,
    spatial: tuple[Loop, Loop],
    reduction: list[Loop],
    register: tuple[int, int],
    lanes: int,
) -> Loop:
    """Put a register tile of (rows, columns) innermost, and return the loop over tiles."""
    outer_row, row = sch.split(spatial[0], [None, register[0]])
    outer_column, column = sch.split(spatial[1], [None, register[1]])
    vector, lane = _unroll_vectors(sch, row, lanes)
    sch.reorder(outer_column, outer_row, *reduction, column, vector, lane)
    sch.unroll(column)
    return outer_row


def _follow(sch: Schedule, name: str, tile: Loop, lanes: int) -> Loop:
    """Compute a later sblock on the register tile; return its outermost loop there."""
    after = sch.get_sblock(name)
    sch.reverse_compute_at(after, tile, preserve_unit_loops=True)
    loops = sch.get_loops(after)
    own = loops[[sch.get(loop).loop_var for loop in loops].index(sch.get(tile).loop_var) + 1 :]
    *reduction, row, column = own
    sch.reorder(*reduction, column, *_unroll_vectors(sch, row, lanes))
    sch.unroll(column)
    return own[0]


def _softmax_of_rows(sch: Schedule, lanes: int) -> None:
    """Run softmax, and zero the output rows, on vectors of rows.

    Before: ``for i, j: peak[i] = max(peak[i], s[j, i])``. After: ``for j: for i0, lane:
    peak[i] = max(peak[i], s[j, i])`` with `i0` unrolled: as many chains as there are vectors.
    """
    for name in ("init_o", "weigh", "block_peak", "block_total"):
        rows, other = _loops(sch, name, 2)
        sch.reorder(other, *_unroll_vectors(sch, rows, lanes))
        if name.startswith("block"):
            sch.decompose_reduction(sch.get_sblock(name), other)
    for name in ("new_peak", "new_reference", "new_total"):
        _vectorize(sch, _loops(sch, name, 1)[0], lanes)


def _dims_along_vectors(sch: Schedule, tile: TileConfig) -> tvm.IRModule:
    """Map the elements of a head to vector lanes; keys, where there are no dims."""
    locate, gather_k, gather_v = (
        sch.get(sch.get_sblock(name)) for name in ("locate", "gather_k", "gather_v")
    )
    for name in ("gather_k", "gather_v"):
        _stream(sch, name, tile.lanes)
    scores = _scores_of_dims(sch, tile)
    for name in ("load_q", "init_o", "mask", "weigh", "store_state"):
        _vectorize(sch, _loops(sch, name, 1)[0], tile.lanes)
    for name in ("block_peak", "block_total"):
        _reduce_in_vectors(sch, name, tile.lanes)
    values = _values_of_dims(sch, tile)
    key = CacheRow.of(gather_k, locate).located_by(locate)
    return _ask_ahead(sch, tile, scores, values, CacheRow.of(gather_v, locate), key)


def _ask_ahead(
    sch: Schedule,
    tile: TileConfig,
    scores: Loop,
    values: tuple[Loop, Loop, Loop],
    value: CacheRow,
    key: CacheRow,
) -> tvm.IRModule:
    """Ask for values while their scores are computed, and for the next keys meanwhile.

    A register tile of scores asks for the value rows of its keys, and every pass over the values
    for its share of the key rows of the next block, a few at a time: a core has few misses in
    flight, and what is asked for at once stalls the arithmetic.
    """
    tokens, dims, rows, keys = (sch.get(loop).loop_var for loop in (scores, *values))
    passes = int(sch.get(values[0]).extent)
    mod = prefetch_in(sch.mod, tokens, Ahead(value, tokens * tile.qk[1], tile.qk[1]))
    after = keys * KEYS_AT_ONCE + tile.block
    return prefetch_in(mod, keys, Ahead(key, after, KEYS_AT_ONCE, dims, passes, rows == 0))


def _stream(sch: Schedule, name: str, lanes: int) -> None:
    """Read cache elements where they are used, unless a transform made them dear.

    Before: ``for j, d: k_tile[j, d] = k[page, slot, head, d]``, then ``... * k_tile[j, d]``.
    After: ``... * k[page, slot, head, d]``.
    """
    if _is_plain(sch.get(sch.get_sblock(name)).body):
        sch.compute_inline(sch.get_sblock(name))
    else:
        _vectorize(sch, _loops(sch, name, 1)[0], lanes)


def _is_plain(store: Any) -> bool:
    """Whether a gathered element is the cache's own, converted at most.

    A transform reads other elements of its row or calls functions; that is not to be repeated for
    every query row.
    """
    element = store.indices[-1]
    transforms: list[Any] = []

    def visit_load(load: Any) -> None:
        last = load.indices[-1]
        if not last.same_as(element) and uses(last, element):
            transforms.append(load)

    def visit_call(call: Any) -> None:
        if call.op.name != "tirx.reinterpret":
            transforms.append(call)

    tvm_ffi.structural_walk(
        store.value, ((tvm.ir.TensorLoad, visit_load), (tvm.ir.Call, visit_call))
    )
    return not transforms


def _scores_of_dims(sch: Schedule, tile: TileConfig) -> Loop:
    """Multiply queries and keys in vectors of dims, and add up the lanes at the end.

    Before: ``for i, j, d: s[i, j] += q[i, d] * k[j, d]``. After, for each register tile
    ``j0, i0``: ``for d0: for j1, i1, lane: v[i, j, lane] += q[i, d0, lane] * k[j, d0, lane]``, then
    ``for i1, j1, lane: s[i, j] += v[i, j, lane]`` as one intrinsic. Returns the loop over ``j0``.
    """
    product = sch.get_sblock("qk")
    _, lane = sch.split(_loops(sch, "qk", 1)[0], [None, tile.lanes])
    vectors = sch.rfactor(lane, factor_axis=2)
    rows, keys, dims, lane = sch.get_loops(vectors)[-4:]
    outer_row, row = sch.split(rows, [None, tile.qk[0]])
    outer_key, key = sch.split(keys, [None, tile.qk[1]])
    sch.reorder(outer_key, outer_row, dims, key, row, lane)
    _unroll(sch, key, row)
    sch.vectorize(lane)
    sch.reverse_compute_at(product, outer_row, preserve_unit_loops=True)
    lane, row, key = sch.get_loops(product)[-3:]
    sch.reorder(row, key, lane)
    sch.tensorize(row, sum_lanes(*tile.qk, tile.lanes))
    sch.decompose_reduction(vectors, dims)
    return outer_key


def _reduce_in_vectors(sch: Schedule, name: str, lanes: int) -> None:
    """Reduce each row in vectors of keys, then across the vector.

    Before: ``for i, j: peak[i] = max(peak[i], s[i, j])``. After: ``for i: (for j0: v[lanes] =
    max(v[lanes], s[i, j0, lanes])), (for lane: peak[i] = max(peak[i], v[lane]))``.
    """
    total = sch.get_sblock(name)
    if not isinstance(sch.get(total).body.value, tirx.Max | tirx.Add):
        return  # a plain sum has no peak
    _, lane = sch.split(sch.get_loops(total)[-1], [None, lanes])
    vectors = sch.rfactor(lane, factor_axis=1)
    row, vector, lane = sch.get_loops(vectors)[-3:]
    sch.vectorize(lane)
    sch.unroll(vector)
    sch.reverse_compute_at(total, row, preserve_unit_loops=True)
    sch.decompose_reduction(vectors, vector)


def _values_of_dims(sch: Schedule, tile: TileConfig) -> tuple[Loop, Loop, Loop]:
    """Add weighted values to register tiles of rows times vectors of dims.

    Before: ``for i, d, j: o[i, d] += w[i, j] * v[j, d]``, then ``for i, d: rescale``. After, for
    each register tile ``d0, i0``: ``for j0: for j1, i1, d1, lane: o[i, d] += w[i, j] * v[j, d]``
    with all but `j0` unrolled, then ``for i1, d1, lane: rescale``. Returns the loops over ``d0``,
    ``i0`` and ``j0``.
    """
    product, after = sch.get_sblock("pv"), sch.get_sblock("new_o")
    rows, dims, keys = sch.get_loops(product)[-3:]
    outer_row, row = sch.split(rows, [None, tile.pv[0]])
    outer_dim, dim = sch.split(dims, [None, tile.pv[1]])
    outer_key, key = sch.split(keys, [None, KEYS_AT_ONCE])
    vector, lane = _unroll_vectors(sch, dim, tile.lanes)
    sch.reorder(outer_dim, outer_row, outer_key, key, row, vector, lane)
    _unroll(sch, key, row)
    sch.reverse_compute_at(after, outer_row, preserve_unit_loops=True)
    row, dim = sch.get_loops(after)[-2:]
    sch.unroll(row)
    _unroll_vectors(sch, dim, tile.lanes)
    sch.decompose_reduction(product, outer_key)
    return outer_dim, outer_row, outer_key


def _loops(sch: Schedule, name: str, count: int) -> list[Loop]:
    return list(sch.get_loops(sch.get_sblock(name))[-count:])


def _vectorize(sch: Schedule, loop: Loop, lanes: int) -> None:
    _, lane = sch.split(loop, [None, lanes])
    sch.vectorize(lane)


def _unroll_vectors(sch: Schedule, loop: Loop, lanes: int) -> tuple[Loop, Loop]:
    vector, lane = sch.split(loop, [None, lanes])
    sch.unroll(vector)
    sch.vectorize(lane)
    return vector, lane


def _unroll(sch: Schedule, *loops: Loop) -> None:
    for loop in loops:
        sch.unroll(loop)
