"""CTAs that share an item: a thread-block cluster, which write to one another's shared memory."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_attn.variant import Expr

STORE_PEER_PAIR = r"""
__device__ __forceinline__ void store_peer_pair(unsigned address, unsigned barrier, float a,
                                                float b) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];"
               :: "r"(address), "r"(barrier), "f"(a), "f"(b) : "memory");
}
"""
STORE_PEER_QUAD = r"""
__device__ __forceinline__ void store_peer_quad(unsigned address, unsigned barrier, float a,
                                                float b, float c, float d) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[%0], {%2, %3, %4, %5}, [%1];"
               :: "r"(address), "r"(barrier), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
"""
"""Not among TVM's instructions."""


def rank_in_cluster(tile: Any, size: Expr) -> Expr:
    """Return which CTA of its cluster of so many this one is."""
    return T.cta_id_in_cluster([size]) if tile.clusters else T.int32(0)


def size_of_cluster(tile: Any, size: Expr) -> Expr:
    """Return how many CTAs share an item: as many as the kernel is told, one where none do."""
    return size if tile.clusters else T.int32(1)


def bits_of_size(tile: Any, size: Expr) -> Expr:
    """Return the logarithm of a cluster's size, which is a power of two."""
    larger = (tirx.Cast("int32", size >= each) for each in tile.clusters)
    return sum(larger, tirx.const(0, "int32"))


def shares_item(cta: Any) -> Expr:
    """Whether the CTA shares its items with others."""
    return cta.cluster > 1 if cta.tile.clusters else False


def arrive_at_cluster() -> Expr:
    """Tell the cluster that this thread has come so far, and show it what it wrote until then."""
    return T.ptx["barrier.cluster.arrive.release.aligned"]()


def join_cluster() -> Expr:
    """Tell the cluster that this thread runs: nothing of it is shown."""
    return T.ptx["barrier.cluster.arrive.relaxed.aligned"]()


def wait_for_cluster() -> Expr:
    """Wait until all threads of the cluster have arrived."""
    return T.ptx["barrier.cluster.wait.acquire.aligned"]()


def address_in(peer: Any, address: Expr, rank: Expr) -> Expr:
    """Put the address that a place in shared memory has in another CTA of the cluster in `peer`."""
    return T.ptx["mapa.shared::cluster.u32"](peer, address, T.Cast("uint32", rank))


def store_peer_pair(address: Expr, barrier: Expr, *values: Expr) -> Expr:
    """Begin to store two neighbouring float32 in another CTA, whose barrier counts their bytes."""
    given = {"source_code": STORE_PEER_PAIR, "return_type": "void"}
    return T.cuda.func_call("store_peer_pair", address, barrier, *values, **given)


def store_peer_quad(address: Expr, barrier: Expr, quad: Any) -> Expr:
    """Begin to store four neighbouring float32 in another CTA, as `store_peer_pair` does two."""
    given = {"source_code": STORE_PEER_QUAD, "return_type": "void"}
    values = (quad[e] for e in range(4))
    return T.cuda.func_call("store_peer_quad", address, barrier, *values, **given)
