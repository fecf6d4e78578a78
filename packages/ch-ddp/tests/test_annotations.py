"""Attach refuses a hook whose annotations say that it is no hook."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks

Result = torch.futures.Future[torch.Tensor]


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduce(bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])


def returns_int(state: object, bucket: dist.GradBucket) -> int:
    return 1


def returns_none(state: object, bucket: dist.GradBucket) -> None:
    return None


def returns_str(state: object, bucket: dist.GradBucket) -> "str":
    return ""


def takes_tensor(state: object, bucket: torch.Tensor) -> Result:
    return reduce(bucket)


def as_torch_wants(state: object, bucket: dist.GradBucket) -> Result:
    return reduce(bucket)


def bare_future(state: object, bucket: dist.GradBucket) -> torch.futures.Future:
    return reduce(bucket)


def quoted(state: object, bucket: "dist.GradBucket") -> "torch.futures.Future[torch.Tensor]":
    return reduce(bucket)


def unknown(state: object, bucket: "NoSuchName") -> "NoSuchName":  # noqa: F821
    return reduce(bucket)


def anything(state: Any, bucket: Any) -> Any:
    return reduce(bucket)


def as_object(state: object, bucket: object) -> object:
    return reduce(bucket)


def silent(state, bucket):
    return reduce(bucket)


def model() -> DistributedDataParallel:
    return DistributedDataParallel(torch.nn.Linear(3, 3))


@pytest.mark.parametrize("hook", [returns_int, returns_none, returns_str, takes_tensor])
def test_no_hook_by_its_own_account(hook: Callable[..., Any]) -> None:
    wrapped = model()
    with pytest.raises(commhooks.HookConfigError, match=rf"{hook.__name__} is annotated .*GradBucket"):
        commhooks.attach(wrapped, hook)
    commhooks.attach(wrapped, silent)  # the refusal took no slot


@pytest.mark.parametrize("hook", [as_torch_wants, bare_future, quoted, unknown, anything, as_object, silent])
def test_objects_that_may_be_a_hook(hook: Callable[..., Any]) -> None:
    wrapped = model()
    handle = commhooks.attach(wrapped, hook)
    wrapped(torch.ones(1, 3)).sum().backward()
    handle.assert_active()
