"""Pytest plugin of the kit: the option ``--device`` and two fixtures. Loading it imports neither torch nor hypothesis."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from ch_testing import rank_device

if TYPE_CHECKING:
    from commhooks import Registry

for _module in ("case", "average", "description", "feedback", "fsdp1", "processes", "shards", "state"):
    pytest.register_assert_rewrite(f"ch_testing.contract_{_module}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device``."""
    parser.getgroup("commhooks").addoption(
        "--device",
        choices=rank_device.CHOICES,
        default="cpu",
        help="device of the ranks that tests start; with another one than cpu, only such tests run",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device of all ranks, and declare the marks."""
    config.addinivalue_line("markers", "cpu(reason): its ranks are for CPU tensors or gloo, whatever --device is")
    config.addinivalue_line("markers", "nccl: needs an NVIDIA GPU, and runs with --device cuda only")
    rank_device.choose(config.getoption("--device"))


def pytest_report_header(config: pytest.Config) -> str:
    """Name the device of the ranks, and how several share one GPU."""
    return rank_device.headline(config.getoption("--device"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With another device than the CPU, keep only tests that start ranks and that are not marked to stay on the CPU."""
    device = config.getoption("--device")
    reason = rank_device.missing(device)
    kept = []
    for item in items:
        needs_gpu, mark = item.get_closest_marker("nccl") is not None, item.get_closest_marker("cpu")
        if mark is not None and not (mark.args and str(mark.args[0]).strip()):
            raise pytest.UsageError(
                f"{item.nodeid}: pytest.mark.cpu needs a reason, as in pytest.mark.cpu('tests gloo')"
            )
        if device == "cpu":
            kept.append(item)
            if needs_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a GPU: pytest --device cuda"))
        elif mark is None and (device == "cuda" if needs_gpu else starts_ranks(item)):
            kept.append(item)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def starts_ranks(item: pytest.Item) -> bool:
    """True if a test, its fixtures, or a function that they name, calls :func:`ch_testing.spawn` or ``Ranks``."""
    if not isinstance(item, pytest.Function):
        return False
    from ch_testing.processes import Ranks, spawn

    fixtures = [one.func for found in item._fixtureinfo.name2fixturedefs.values() for one in found]
    todo: list[Any] = [item.function, *fixtures]
    seen: set[int] = set()
    while todo:
        each = inspect.unwrap(todo.pop())
        if each is spawn or each is Ranks:
            return True
        each = getattr(each, "__func__", each)
        if (
            id(each) in seen
            or not inspect.isfunction(each)
            or each.__module__.partition(".")[0] in ("torch", "_pytest")
        ):
            continue
        seen.add(id(each))
        names = _names(each.__code__)
        found = [each.__globals__[name] for name in names if name in each.__globals__]
        found += [
            vars(one)[name] for one in found if isinstance(one, ModuleType) for name in names if name in vars(one)
        ]
        found += [getattr(item.cls, name, None) for name in names]
        found += [cell.cell_contents for cell in each.__closure__ or ()]
        todo += [one for one in found if callable(one)]
    return False


def _names(code: CodeType) -> set[str]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)


@contextmanager
def isolated() -> "Iterator[Registry]":
    """Empty the registry of everything but ch-wrappers and ch-ddp until the block ends."""
    from commhooks import GROUP, REGISTRY, Registry, discover, entries

    others = ",".join({entry.dist for entry in entries(GROUP)} - {"commhooks", "ch-wrappers", "ch-ddp"})

    kept = dict(REGISTRY.__dict__)
    REGISTRY.__dict__.update(Registry(lambda: discover({"COMMHOOKS_DISABLE": others})).__dict__)
    try:
        yield REGISTRY
    finally:
        REGISTRY.__dict__.update(kept)


@pytest.fixture
def isolated_registry() -> "Iterator[Registry]":
    """A registry that holds only ch-wrappers and ch-ddp; ``commhooks.register`` adds to it until the test ends."""
    with isolated() as registry:
        yield registry


@pytest.fixture
def spawn() -> Callable[..., list[Any]]:
    """Return :func:`ch_testing.spawn`, which runs a function on processes."""
    from ch_testing.processes import spawn as run

    return run
