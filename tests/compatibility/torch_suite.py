"""Run the tests of hooks and averagers that torch's wheel contains: on CPU, with PyTorch's names or with ours in their place.

    python tests/compatibility/torch_suite.py theirs                             # all 17, as JSON: test -> outcome
    python tests/compatibility/torch_suite.py ours test_ddp_hook_parity_powerSGD

The tests are methods of ``torch.testing._internal.distributed.distributed_test``, imported and never copied. They expect a
GPU for each of four ranks. This program changes what they use, in its own process only:

- Every device is the CPU, and DDP gets no ``device_ids``. Groups use gloo, also if a test asks for NCCL.
- Nothing is skipped, neither for missing GPUs nor as flaky.
- ``torch.load`` loads hooks and states, as it did when the test of pickling was written.
- ``test_ddp_uneven_inputs`` runs its cases with a hook. Its other cases need a gigabyte for each activation.
- A test fails if any rank ends with an error. The original looks at the exit code of rank 0 only.
"""

import functools
import importlib
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

SIDES = ("theirs", "ours")
RANKS = 4  # of the averagers over three levels of groups
LIMIT = 90  # seconds of one test
CHOSEN = re.compile(r"default\.\w+_hook|powerSGD|post_localSGD|averager|average_parameters")
DIFFERENT = {  # tests that fail with our names on purpose -> the reason
    "test_3_level_hierarchical_model_averager": "It counts the groups of the process: ours makes those of its rank only. Ours "
    "also counts periods from the end of the warm-up, as both averagers of one level do.",
    "test_ddp_hook_pickling_powerSGD": "It expects log lines and attributes of PyTorch's class.",
}


def run(side: str, *tests: str, seconds: int = 550) -> dict[str, str]:
    """Run tests in another process, all if none is named. Return test -> ``"passed"``, or what happened."""
    with tempfile.TemporaryDirectory() as folder:  # the test of pickling writes to a fixed name in TMPDIR
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, side, *tests],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{Path(__file__).name} {side} ended with {done.returncode}: {done.stderr[-3000:]}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def use_our_names() -> None:
    """Put our counterparts in the place of torch's public names."""
    from rows import ROWS

    # All of ours are imported before any of torch's names changes, because some of ours extend torch's classes.
    pairs = [
        (importlib.import_module(row.module), row.name, getattr(importlib.import_module(home), name))
        for row in ROWS
        if row.module.startswith("torch.") and not row.name.startswith("DDP._")
        for home, _, name in [row.ours.partition(":")]
        if home
    ]
    for module, name, counterpart in pairs:
        assert hasattr(module, name), f"{module.__name__} has no {name}: correct rows.py"
        setattr(module, name, counterpart)


def suite() -> type[unittest.TestCase]:
    """Return torch's test class, changed as the module's docstring says."""
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(RANKS),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT),
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    }
    import torch
    import torch.distributed as dist
    from torch.overrides import TorchFunctionMode
    from torch.testing._internal import common_distributed, common_utils

    def always(*_: Any, **__: Any) -> Any:
        return lambda test: test

    # The test module copies these names when it is imported.
    common_distributed.skip_if_lt_x_gpu = always
    common_utils.skip_but_pass_in_sandcastle_if = always
    common_distributed.init_multigpu_helper = lambda ranks, backend: {rank: [rank] for rank in range(ranks)}
    common_distributed.TIMEOUT_OVERRIDE.clear()

    from torch.testing._internal.distributed import distributed_test

    class OnCPU(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if isinstance(kwargs.get("device"), int) or "cuda" in str(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    ddp, module = torch.nn.parallel.DistributedDataParallel, torch.nn.Module
    build, move, new_group = ddp.__init__, module.to, dist.new_group

    @functools.wraps(build)
    def build_on_cpu(self: Any, module: Any, device_ids: Any = None, **options: Any) -> None:
        build(self, module, **options)

    @functools.wraps(move)
    def stay(self: Any, *args: Any, **options: Any) -> Any:
        return self if args and isinstance(args[0], int) else move(self, *args, **options)

    @functools.wraps(new_group)
    def gloo_group(*args: Any, backend: Any = None, **options: Any) -> Any:
        return new_group(*args, **options)

    ddp.__init__, module.to, dist.new_group = build_on_cpu, stay, gloo_group
    module.cuda = torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: 0

    class OnGloo(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)  # spawned ranks would not be changed

        def run_test(self, *args: Any) -> None:
            with OnCPU():
                super().run_test(*args)

        def _run_uneven_inputs_test(self, test_case: Any, *args: Any, **options: Any) -> None:
            if test_case.hook is not None:
                super()._run_uneven_inputs_test(test_case, *args, **options)

        def _check_return_codes(self, *args: Any) -> None:
            super()._check_return_codes(*args)
            codes = [process.exitcode for process in self.processes]
            assert not any(codes), f"exit codes of the ranks: {codes}"

    return OnGloo


def chosen(case: type[unittest.TestCase]) -> list[str]:
    """Return the tests that use a hook, a state of a hook or an averager."""
    tests = unittest.defaultTestLoader.getTestCaseNames(case)
    return [name for name in tests if CHOSEN.search(inspect.getsource(inspect.unwrap(getattr(case, name))))]


def outcome(result: unittest.TestResult) -> str:
    """Describe the outcome of one test in a line."""
    if result.skipped:
        return f"skipped: {result.skipped[0][1]}"
    if result.wasSuccessful():
        return "passed"
    text = (result.errors + result.failures)[0][1]
    if "terminated or timed out" in text:
        return "hangs"
    causes = re.findall(r"^(?:[\w.]+\.)?(\w+Error): (?!Process \d)(.*)(?:\n\n(Expected .*))?", text, re.MULTILINE)
    # Other ranks lose their connection to the rank that failed.
    first = [it for it in causes if "losed by peer" not in it[1]]
    kind, message, values = (first or causes or [("error", text.splitlines()[-1], "")])[0]
    return f"{kind}: {message} {values}".rstrip()


def main() -> int:
    side, *tests = sys.argv[1:]
    assert side in SIDES, f"name a side: {SIDES}"
    case = suite()
    if side == "ours":
        use_our_names()
    found = {}
    said = os.dup(1)
    os.dup2(2, 1)  # tests print; only the outcomes go to stdout
    for name in tests or chosen(case):
        result = unittest.TestResult()
        unittest.TestSuite([case(name)]).run(result)  # a suite calls setUpClass
        found[name] = outcome(result)
        for _, text in result.errors + result.failures:
            print(text, file=sys.stderr)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    os.write(said, f"{json.dumps(found)}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
