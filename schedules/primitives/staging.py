"""Tiles in shared memory, and asynchronous copies of rows into them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.shapes import (
    CHUNK_BYTES,
    LINE_CHUNKS,
    WORD_BYTES,
    is_swizzled,
    pitch,
)
from tvm_attn.tir.signature import itemsize

Expr = Any


def shared_address(buffer: Any) -> Expr:
    """Return the 32-bit address of a buffer in shared memory, in a register."""
    address = T.alloc_local((1,), "uint32")
    T.buffer_store(address, T.cuda.cvta_generic_to_shared(buffer.ptr_to([0])), [0])
    return address[0]


@dataclass(frozen=True)
class SharedTile:
    """A tile of ``rows x columns`` in shared memory, in `stages` copies.

    Parameters
    ----------
    buffer : Buffer
        One-dimensional.
    origin : Expr
        Address of its first element in shared memory, uint32.
    rows, columns, stages : int
        Shape.
    dtype : str
        Of the elements.
    """

    buffer: Any
    origin: Expr
    rows: int
    columns: int
    stages: int
    dtype: str

    @staticmethod
    def allocate(pool: Any, rows: int, columns: int, dtype: str, stages: int = 1) -> SharedTile:
        """Allocate a tile in a pool of shared memory."""
        size = SharedTile.elements(rows, columns, dtype, stages)
        buffer = pool.alloc((size,), dtype, align=128)
        return SharedTile(buffer, shared_address(buffer), rows, columns, stages, dtype)

    @staticmethod
    def elements(rows: int, columns: int, dtype: str, stages: int = 1) -> int:
        """Elements that such a tile takes."""
        return stages * rows * pitch(columns, dtype)

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return CHUNK_BYTES // itemsize(self.dtype)

    def index(self, stage: Expr, row: Expr, column: Expr) -> Expr:
        """Index of an element in the buffer."""
        return (stage * self.rows + row) * pitch(self.columns, self.dtype) + column

    def element(self, stage: Expr, row: Expr, column: Expr) -> Expr:
        """Read an element."""
        return self.buffer[self.index(stage, row, column)]

    def pointer(self, stage: Expr, row: Expr, column: Expr) -> Expr:
        """Address of an element in shared memory."""
        offset = self.index(stage, row, column) * itemsize(self.dtype)
        return self.origin + tirx.Cast("uint32", offset)

    def corner_pointer(self, corner: Expr, rows: Expr, columns: Expr) -> Expr:
        """Address of the element some rows and columns after one in a row's first two chunks.

        Both are multiples of 16.
        """
        beyond = (rows * pitch(self.columns, self.dtype) + columns) * itemsize(self.dtype)
        return corner + tirx.Cast("uint32", beyond)


@dataclass(frozen=True)
class SwizzledTile(SharedTile):
    """A tile without padding, where the chunks of a row are in an order of the row's own.

    Eight neighbouring rows, from a multiple of eight on, have the same chunk in eight different
    groups of banks, as those of a padded tile do. But a line of the cache is copied to one line of
    shared memory here, and to parts of two there, at which a multiprocessor's copies do not keep up
    with the memory.
    """

    @staticmethod
    def allocate(pool: Any, rows: int, columns: int, dtype: str, stages: int = 1) -> SwizzledTile:
        """Allocate a tile in a pool of shared memory."""
        buffer = pool.alloc((stages * rows * columns,), dtype, align=128)
        return SwizzledTile(buffer, shared_address(buffer), rows, columns, stages, dtype)

    @property
    def ordered(self) -> int:
        """Chunks next to each other that rows have in orders of their own."""
        return math.gcd(self.columns // self.chunk, LINE_CHUNKS)

    def order(self, row: Expr) -> Expr:
        """Return what the numbers of a row's chunks are combined with to find their places."""
        return tirx.floormod(tirx.floordiv(row, LINE_CHUNKS // self.ordered), self.ordered)

    def index(self, stage: Expr, row: Expr, column: Expr) -> Expr:
        """Index of an element in the buffer."""
        chunk = tirx.bitwise_xor(tirx.floordiv(column, self.chunk), self.order(row))
        begin = (stage * self.rows + row) * self.columns + chunk * self.chunk
        return begin + tirx.floormod(column, self.chunk)

    def corner_pointer(self, corner: Expr, rows: Expr, columns: Expr) -> Expr:
        """Address of the element some rows and columns after one in a row's first two chunks.

        Rows begin at a multiple of the chunks that they have in orders of their own, so bits of the
        corner's address are all that has to be changed to change chunks.
        """
        size = itemsize(self.dtype)
        run = self.ordered * CHUNK_BYTES
        flipped = tirx.Cast("uint32", tirx.floormod(columns * size, run))
        beyond = rows * self.columns * size + tirx.floordiv(columns * size, run) * run
        return tirx.bitwise_xor(corner, flipped) + tirx.Cast("uint32", beyond)

    def chunk_pointer(self, stage: Expr, row: Expr, chunk: Expr, pair: Expr) -> Expr:
        """Address of the chunk 0 or 1 of a row's `pair`-th pair of chunks, for many pairs."""
        if self.ordered == 1:
            return self.pointer(stage, row, (2 * pair + chunk) * self.chunk)
        whole = tirx.floordiv(2 * pair, self.ordered) * self.ordered
        place = tirx.bitwise_xor(chunk, self.order(row)) * CHUNK_BYTES
        rest = tirx.floormod(2 * pair, self.ordered) * CHUNK_BYTES
        begin = (stage * self.rows + row) * self.columns * itemsize(self.dtype)
        offset = begin + tirx.bitwise_xor(place, rest) + whole * CHUNK_BYTES
        return self.origin + tirx.Cast("uint32", offset)


def allocate_tile(pool: Any, rows: int, columns: int, dtype: str, stages: int = 1) -> SharedTile:
    """Allocate a tile in a pool of shared memory, padded or not, as its rows are better kept."""
    kind = SwizzledTile if is_swizzled(columns, dtype) else SharedTile
    return kind.allocate(pool, rows, columns, dtype, stages)


def copy_chunk(destination: Expr, source: Expr, is_valid: Expr) -> Expr:
    """Begin to copy 16 bytes to shared memory, or to zero them."""
    size = T.Select(is_valid, T.uint32(CHUNK_BYTES), T.uint32(0))
    return T.ptx["cp.async.cg.shared.global.L2::128B"](destination, source, CHUNK_BYTES, size)


def copy_word(destination: Expr, source: Expr) -> Expr:
    """Begin to copy 4 bytes to shared memory."""
    return T.ptx["cp.async.ca.shared.global"](destination, source, WORD_BYTES)


@dataclass(frozen=True)
class Copy:
    """A copy of rows of a strided tensor to a tile, in turns: each thread copies a chunk a turn.

    Parameters
    ----------
    tile : SharedTile
        Where to.
    stage : Expr
        Which of its copies.
    source : Buffer
        Where from; rows are contiguous.
    place : callable
        From a row of the tile to the offset of its row in the source, in elements; below 0 if there
        is none: it becomes 0.
    thread : Expr
        0..`threads`.
    threads : int
        Threads that take part.
    """

    tile: SharedTile
    stage: Expr
    source: Any
    place: Callable[[Expr], Expr]
    thread: Expr
    threads: int

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.tile.columns // self.tile.chunk

    @property
    def lanes(self) -> int:
        """Neighbouring threads that share a row: each copies every `lanes`-th of its chunks.

        Eight of them ask for a whole line of the cache at once; fewer rows of a thread have to be
        looked up then than if the threads of a row were more.
        """
        common = math.gcd(self.chunks, LINE_CHUNKS)
        return common if common >= LINE_CHUNKS // 2 else self.chunks

    @property
    def parts(self) -> int:
        """Chunks that a thread copies of a row."""
        return self.chunks // self.lanes

    @property
    def turns(self) -> int:
        """How many rows every thread copies chunks of."""
        return -(-self.tile.rows * self.lanes // self.threads)

    def row(self, turn: Expr) -> Expr:
        """Row that this thread copies chunks of in a turn."""
        return tirx.floordiv(turn * self.threads + self.thread, self.lanes)

    def column(self, turn: Expr, part: Expr) -> Expr:
        """First column of a chunk that this thread copies in a turn."""
        lane = tirx.floormod(turn * self.threads + self.thread, self.lanes)
        return (part * self.lanes + lane) * self.tile.chunk

    def is_mine(self, turn: Expr) -> Expr:
        """Whether this thread copies anything in a turn."""
        if self.tile.rows * self.lanes % self.threads == 0:
            return tirx.const(True, "bool")
        return turn * self.threads + self.thread < self.tile.rows * self.lanes

    @property
    def place_dtype(self) -> str:
        """Of a place."""
        return "int64"

    def room(self) -> Any:
        """Allocate registers for where the rows are that this thread copies chunks of."""
        return T.alloc_local((self.turns,), self.place_dtype)

    def is_there(self, place: Expr) -> Expr:
        """Whether a place is that of a row."""
        return T.Cast("int32", T.shift_right(place, T.int64(32))) != -1

    def chunk_at(self, place: Expr, turn: Expr, part: Expr) -> Expr:
        """Address of a chunk that this thread copies in a turn from the row at a place."""
        origin = [0] * (len(self.source.shape) - 1)
        return self.source.ptr_to([*origin, place + self.column(turn, part)])


@T.inline
def find_rows(copy, places):
    """Read where the rows are that this thread copies chunks of."""
    for i in T.unroll(copy.turns):
        if copy.is_mine(i):
            places[i] = copy.place(copy.row(i))


@T.inline
def copy_found(copy, places, share, shares):
    """Begin to copy the rows that were found: those of a share of the turns."""
    for i in T.unroll(copy.turns):
        if T.And(i % shares == share, copy.is_mine(i)):
            for part in T.unroll(copy.parts):
                copy_chunk(
                    copy.tile.pointer(copy.stage, copy.row(i), copy.column(i, part)),
                    copy.chunk_at(places[i], i, part),
                    copy.is_there(places[i]),
                )


@T.inline
def copy_rows(copy):
    """Begin to copy rows: all addresses are known before the first copy begins."""
    places = T.meta_var(copy.room())
    find_rows(copy, places)
    copy_found(copy, places, 0, 1)


def commit_copies() -> Expr:
    """Close the group of copies begun since the last."""
    return T.ptx.cp.async_.commit_group()


def wait_for_copies() -> Expr:
    """Wait for all of this thread's copies."""
    return T.ptx.cp.async_.wait_group(0)


@T.inline
def settle_warp():
    """Wait until all that the warp copied is there for all of its lanes."""
    commit_copies()
    wait_for_copies()
    T.cuda.warp_sync()
