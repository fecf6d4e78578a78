"""Pytest plugin that runs torchft's own tests, from its installed wheel, on our classes.

Run it with ``-p ch_testing.torchft.torchft_plugin --pyargs torchft.ddp_test``. It replaces torchft's classes by ours before the
test modules are imported, and copies no test. It changes the tests' training loop in two ways:

- Replicas listen on free ports. torchft's tests use fixed ones.
- All replicas copy one model. In torchft's tests each thread seeds the shared random number generator and makes its own
  model, while another thread may draw its first batch. Then two replicas sometimes begin with different weights, and
  ``test_ddp_skip_init_sync`` fails with any class.
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
    """Makes the Manager of a training loop listen on a free port."""

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
