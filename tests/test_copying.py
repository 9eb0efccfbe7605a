"""Copies of kernels and plans: a kernel is its own copy, and pickles to what it exports."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch

from tests.batches import random_batch
from tests.cases import kernel
from tests.test_runtime_cuda import SPEC
from tvm_attn import variants
from tvm_attn._hook_code import hook_code
from tvm_attn.errors import PlanError


def test_a_copied_model_holds_the_same_kernel() -> None:
    model = torch.nn.Module()
    model.kernel = kernel("full", SPEC)
    assert copy.copy(model.kernel) is copy.deepcopy(model).kernel is model.kernel


def test_a_pickled_kernel_gives_the_same_bits() -> None:
    batch, module = random_batch(SPEC, [3, 1], [20, 70]), kernel("full", SPEC).with_ctas(3)
    again = pickle.loads(pickle.dumps(module))
    assert (str(again), again.params) == (str(module), module.params)
    plans: list[Any] = [each.plan(batch.fmt) for each in (module, again)]
    assert plans[0].to_json() == plans[1].to_json()
    assert torch.equal(*(plan.owner.run(plan, batch.q, batch.kv) for plan in plans))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_plans_are_not_copied(copied: Callable[[Any], Any]) -> None:
    plan = kernel("full", SPEC).plan(random_batch(SPEC, [1], [20]).fmt)
    with pytest.raises(PlanError, match="neither copied nor pickled; plan the batch again"):
        copied(plan)


def test_variants_of_this_library_are_pickled() -> None:
    made = [getattr(variants, name)() for name in variants.__all__ if name != "sigmoid"]
    for variant in (*made, variants.sigmoid(), reduce(operator.and_, made)):
        again = pickle.loads(pickle.dumps(variant))
        assert (str(again), hook_code(again)) == (str(variant), hook_code(variant))
        assert hook_code(variant) is not None
