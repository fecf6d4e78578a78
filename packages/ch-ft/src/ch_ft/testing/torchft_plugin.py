"""A pytest plugin: torchft's own tests, from its installed wheel, on our classes.

Run with ``-p ch_ft.testing.torchft_plugin --pyargs torchft.ddp_test``. Nothing of theirs is copied; their names
are pointed at ours before their test modules are imported. Two things of their training loop are changed: its replicas
listen on fixed ports, here they take any; and each thread seeds the one random number generator and makes its model
while another may already be drawing its first batch, so that now and then, on anybody's classes, two replicas begin
with other weights and ``test_ddp_skip_init_sync`` fails. Here they copy one model.
"""

import copy
import functools
from typing import Any

import torchft.ddp
import torchft.manager

import ch_ft

torchft.ddp.DistributedDataParallel = ch_ft.DistributedDataParallel
torchft.ddp.PureDistributedDataParallel = ch_ft.PureDistributedDataParallel


class AnyPort:
    """The Manager of their training loops, on a free port."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def __call__(self, **kwargs: Any) -> Any:
        return self.manager(**{**kwargs, "port": 0})


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for module in {item.module for item in items}:
        if module.__name__.endswith("manager_integ_test") and not isinstance(module.Manager, AnyPort):
            functools.update_wrapper(made := AnyPort(module.Manager), module.Manager)
            module.Manager = made
            module.MyModel = functools.partial(copy.deepcopy, module.MyModel())
