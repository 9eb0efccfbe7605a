"""CTAs that share an item: a thread-block cluster, whose CTAs read one another's shared memory."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_attn.variant import Expr


def rank_in_cluster(tile: Any, size: Expr) -> Expr:
    """Return which CTA of its cluster of so many this one is."""
    return T.cta_id_in_cluster([size]) if tile.clusters else T.int32(0)


def shares_item(cta: Any) -> Expr:
    """Whether the CTA shares its items with others."""
    return cta.cluster > 1 if cta.tile.clusters else False


def arrive_at_cluster() -> Expr:
    """Tell the cluster that this thread has come so far, and show it what it wrote until then."""
    return T.ptx["barrier.cluster.arrive.release.aligned"]()


def wait_for_cluster() -> Expr:
    """Wait until all threads of the cluster have arrived."""
    return T.ptx["barrier.cluster.wait.acquire.aligned"]()


def address_in(peer: Any, address: Expr, rank: Expr) -> Expr:
    """Put the address that a place in shared memory has in another CTA of the cluster in `peer`."""
    return T.ptx["mapa.shared::cluster.u32"](peer, address, T.Cast("uint32", rank))


def load_peer(register: Any, address: Expr) -> Expr:
    """Load a float32 of another CTA."""
    return T.ptx["ld.shared::cluster.f32"](register, address)


def load_peer_quad(registers: Any, address: Expr) -> Expr:
    """Load four neighbouring float32 of another CTA."""
    return T.ptx["ld.shared::cluster.v4.f32"](*(registers[i] for i in range(4)), address)
