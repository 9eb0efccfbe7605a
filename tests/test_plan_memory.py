"""Memory of plans: who may have it next, what of it is the same for batches alike."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

import tvm_attn as ta
from tests.batches import Batch, random_batch
from tests.test_runtime_cuda import SPEC, for_gpu
from tvm_attn.errors import PlanError
from tvm_attn.runtime import buffers, cuda
from tvm_attn.runtime.buffers import ALIGNMENT, KEPT, Block, Layout, Pool
from tvm_attn.runtime.plan import Family
from tvm_attn.runtime.shelf import REMEMBERED, STEP, Extent, Shelf, rounded
from tvm_attn.runtime.workspace import PlanLimits

SHAPES: dict[str, tuple[int, ...]] = {"some": (3, 8), "none": (0, 4), "more": (5,)}
FAMILIES = (
    Family("decode", 16, 64, 1, 2, cluster=8),
    Family("decode", 16, 64, 1, 2, cluster=1),
    Family("short", 64, 64, 1, 2),
    Family("long", 128, 64, 1, 2),
)
CTAS = (29, 264, 264, 132)


class Upload:
    """A copy that is made when it is said to be."""

    def __init__(self) -> None:
        self.is_made = False

    def is_over(self) -> bool:
        return self.is_made


pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture
def pool() -> Pool:
    return Pool(Layout(SHAPES, {"list": ("more", "some")}), pinned=False)


# Blocks


def test_arrays_are_zero_and_aligned_and_do_not_overlap(pool: Pool) -> None:
    block = pool.take()
    assert {name: array.shape for name, array in block.arrays.items()} == SHAPES
    for value, array in enumerate(block.arrays.values(), 1):
        assert not array.any()
        assert array.ctypes.data % ALIGNMENT == 0
        array[:] = value
    assert all((array == n).all() for n, array in enumerate(block.arrays.values(), 1))
    for name, array in block.arrays.items():
        begin = pool.layout.begins[name]
        assert np.array_equal(block.memory[begin : begin + array.size].numpy(), array.ravel())
    arrays, packed = block.lists["list"]
    assert (
        [array.shape for array in arrays] == [tensor.shape for tensor in packed] == [(5,), (3, 8)]
    )


def test_a_block_goes_to_the_next_unless_somebody_holds_an_array(pool: Pool) -> None:
    block = pool.take()
    block.give_back()
    assert pool.take() is block
    held = block.arrays["some"][:2]
    block.give_back()
    other = pool.take()
    assert other is not block
    del held
    block.give_back()
    assert pool.take() is block


def test_a_block_that_is_being_copied_waits_for_its_turn(pool: Pool) -> None:
    upload: Any = Upload()
    block = pool.take()
    block._upload = upload
    block.give_back()
    other = pool.take()
    assert other is not block
    other.give_back()
    upload.is_made = True
    assert pool.take() is block
    assert pool.take() is other


def test_few_idle_blocks_are_kept_but_none_is_lost_in_a_copy(pool: Pool) -> None:
    upload: Any = Upload()
    blocks = [pool.take() for _ in range(KEPT + 3)]
    blocks[0]._upload = upload
    for block in blocks:
        block.give_back()
    assert len(pool._idle) == KEPT + 3
    upload.is_made = True
    for _ in range(2 * KEPT):
        pool.take().give_back()
    blocks[0].give_back()
    assert len(pool._idle) <= KEPT + 3


def test_of_large_blocks_one_is_kept(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "LARGE", 10)
    blocks = [pool.take() for _ in range(3)]
    for block in blocks:
        block.give_back()
    assert len(pool._idle) == 1


def test_scratch_grows_and_stays(pool: Pool) -> None:
    block = pool.take()
    first = block.scratch(10)
    assert first.shape == (10,)
    assert block.scratch(7) is first
    assert block.scratch(11).shape == (11,)


def test_what_is_sent_is_the_first_words(pool: Pool) -> None:
    block = pool.take()
    block.memory.copy_(torch.arange(len(block.memory)))
    target = torch.zeros(len(block.memory), dtype=torch.int32)
    block.send(target, 20)
    assert torch.equal(target[:20], torch.arange(20))


def test_it_is_sent_to_where_it_should_go_though_the_place_before_is_gone(pool: Pool) -> None:
    """A target may be at the address of one that is no more: no view keeps that, in this mode."""
    block = pool.take()
    block.memory[:] = 1
    with torch.inference_mode():
        for _ in range(20):
            target = torch.zeros(block.layout.size, dtype=torch.int32)
            block.send(target, block.layout.size)
            assert target.all()
            del target


# Sizes


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(FAMILIES, num_kv_heads=2)


def units(decode: int, short: int = 0, long: int = 0, pieces: int = 0) -> tuple[int, ...]:
    return (decode, short, long, *[pieces] * 3)


def taken(shelf: Shelf, extent: Extent, needed: tuple[int, ...]) -> Block:
    return shelf.fitting(shelf.take(extent), needed)


def test_counts_are_rounded_up_a_little() -> None:
    for count in range(3000):
        assert count <= rounded(count) <= max(count + STEP - 1, count * 5 // 4)
    assert len({rounded(count) for count in range(4096)}) < 40


def test_batches_alike_take_the_same_memory(shelf: Shelf) -> None:
    block = taken(shelf, Extent(60, 900, CTAS), units(60))
    block.give_back()
    for size, pages in ((33, 1000), (64, 600), (50, 513)):
        again = shelf.take(Extent(size, pages, CTAS))
        assert again is block
        assert shelf.fitting(again, units(size)) is block
        block.give_back()
    for extent in (Extent(65, 900, CTAS), Extent(60, 1025, CTAS), Extent(60, 900, (1, 2, 3, 4))):
        assert taken(shelf, extent, units(extent.requests)) is not block


def test_other_work_takes_other_memory_which_the_next_batch_gets_at_once(shelf: Shelf) -> None:
    extent = Extent(20, 100, CTAS)
    first = shelf.take(extent)
    mixed = shelf.fitting(first, units(18, 1, 70))
    assert mixed is not first
    assert ("long", "items") in mixed.arrays
    assert ("long", "items") not in first.arrays
    mixed.give_back()
    assert shelf.take(extent) is mixed
    assert shelf.fitting(mixed, units(20)) is first, "back to decoding alone"


@pytest.mark.parametrize("needed", [units(20), units(0, 20), units(0, 0, 300), units(9, 9, 9, 500)])
def test_there_is_room_for_all_work(shelf: Shelf, needed: tuple[int, ...]) -> None:
    block = taken(shelf, Extent(20, 100, CTAS), needed)
    for family, bound, pieces in zip(FAMILIES[1:], needed[:3], needed[3:], strict=True):
        if bound:
            items, cta_indptr, merge_items, merge_indptr = block.lists[family][0]
            assert len(items) >= 2 * max(bound, pieces)
            assert len(cta_indptr) == CTAS[FAMILIES.index(family)] + 1
            assert len(merge_items) + 1 == len(merge_indptr)
    if needed[0]:
        assert block.lists[FAMILIES[0]] == block.lists[FAMILIES[1]], "clusters take another's place"


def test_what_was_not_used_for_long_is_forgotten(shelf: Shelf) -> None:
    for size in range(1, 3 * REMEMBERED):
        taken(shelf, Extent(STEP * size, 10, CTAS), units(STEP * size)).give_back()
    assert len(shelf._pools) <= REMEMBERED


# Plans


@pytest.fixture
def batch() -> Batch:
    return random_batch(SPEC, [1, 7, 0, 40, 3, 1], [200, 30, 5, 90, 0, 3000])


def test_what_a_dead_plan_had_goes_to_the_next(batch: Batch) -> None:
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt)
    assert plan.block is not None
    block, launches, text = plan.block, plan.placement.launches, plan.to_json()
    other = module.plan(batch.fmt)
    assert other.block is not block
    del plan
    gc.collect()
    again = module.plan(batch.fmt)
    assert again.block is block
    assert again.placement.launches == launches, "launches are kept"
    assert again.to_json() == other.to_json() == text


@pytest.mark.parametrize("limits", [None, PlanLimits(8, 60, 8000)], ids=["free", "limits"])
@pytest.mark.parametrize("first", [True, False])
def test_plans_may_be_made_in_inference_mode_or_not(
    batch: Batch, limits: PlanLimits | None, first: bool
) -> None:
    module, plan = for_gpu("full", SPEC), None
    for number in range(6):
        with torch.inference_mode(number % 2 == first):
            plan = module.plan(batch.fmt, limits=limits, out=plan)
            assert np.array_equal(plan.placed("kv_len")[:6], plan.lengths[1])


def test_plans_at_the_same_time_have_partial_states_of_their_own(batch: Batch) -> None:
    module = for_gpu("full", SPEC)

    def places() -> tuple[ta.Plan, set[int]]:
        plan = module.plan(batch.fmt)
        return plan, {states.data_ptr() for parts in plan.partials for states in parts[:2]}

    (first, mine), (second, other) = places(), places()
    assert first.num_slots > 0
    assert mine.isdisjoint(other)
    del first
    gc.collect()
    third, again = places()
    assert again == mine
    del second, third
    gc.collect()
    assert places()[1] in (mine, other)


def test_a_workspace_is_not_kept(batch: Batch) -> None:
    module = for_gpu("full", SPEC)
    workspace = torch.empty(module.workspace_size(PlanLimits(10, 100, 4000))[0], dtype=torch.uint8)
    plan = module.plan(batch.fmt, workspace=workspace)
    del plan
    gc.collect()
    for states in module.plan(batch.fmt).partials:
        assert states[0].untyped_storage().data_ptr() != workspace.untyped_storage().data_ptr()


def test_what_somebody_looks_at_is_left_alone(batch: Batch) -> None:
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt)
    arrays = [*plan.batch, *(array for work in plan.work for array in work.arrays)]
    before = [array.copy() for array in arrays]
    del plan
    for lens in ([1] * 6, [5, 0, 70, 1, 1, 2]):
        module.plan(random_batch(SPEC, lens, [100] * 6).fmt)
    assert all(map(np.array_equal, arrays, before))


def test_memory_that_another_stream_uses_is_not_handed_on(batch: Batch) -> None:
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt)
    assert plan.block is not None
    block, memory = plan.block, plan.placement.there
    plan.placement.moved = True
    del plan
    gc.collect()
    again = module.plan(batch.fmt)
    assert again.block is block
    assert again.placement.there is not memory


def test_a_wrong_batch_gives_its_memory_back(batch: Batch) -> None:
    module = for_gpu("full", SPEC)
    block = module.plan(batch.fmt).block
    with pytest.raises(PlanError, match="qo_indptr"):
        module.plan([0, -1, 2, 3, 4, 5, 6], *[[0] * 7, [], [1] * 6])
    assert module.plan(batch.fmt).block is block


@pytest.mark.parametrize("limits", [None, PlanLimits(6, 60, 4000)], ids=["free", "limits"])
def test_in_a_capture_nothing_is_asked_of_a_gpu(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, limits: PlanLimits | None
) -> None:
    """Asking whether a copy is made would end the capture."""
    module = for_gpu("full", SPEC)
    plan = module.plan(batch.fmt, limits=limits)
    before = plan.placement

    def asked(*_: Any) -> bool:
        raise AssertionError("a block was asked for")

    monkeypatch.setattr(cuda, "is_capturing", lambda device: True)
    monkeypatch.setattr(Pool, "take", asked)
    with pytest.raises(PlanError, match="cannot capture"):
        module.plan(batch.fmt, out=plan)
    assert plan.placement is before


def test_behind_the_last_cut_unit_there_is_nothing(batch: Batch) -> None:
    module = for_gpu("full", SPEC)
    for lens in ([3000] * 3, [9000, 1, 1], [64] * 3):
        plan = module.plan(random_batch(SPEC, [1] * 3, lens).fmt)
        assert plan.block is not None
        for work in plan.work:
            _, cta_indptr, merge_items, merge_indptr = plan.block.lists[work.family][0]
            assert not merge_items[len(work.merge_items) :].any()
            assert (merge_indptr[len(work.merge_items) :] == work.num_slots).all()
            assert (cta_indptr[work.num_ctas :] == len(work.items)).all()
