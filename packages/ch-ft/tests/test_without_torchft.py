"""ch-ft without torchft. The simulator works, and other parts name the package to install."""

import subprocess
import sys
import textwrap
import types

import pytest

import ch_ft
from commhooks import HookNotSupportedError


@pytest.mark.full
@pytest.mark.timeout(60)
def test_the_error_names_the_extra_and_the_simulator_works() -> None:
    code = """
        import sys
        sys.modules["torchft"] = None  # import torchft raises ImportError
        import torch
        import ch_ft, ch_testing
        from commhooks import HookNotSupportedError
        for call in (ch_ft.local, ch_ft.start_lighthouse):
            try:
                call()
            except HookNotSupportedError as error:
                assert "pip install 'torchft>=0.2.0'" in str(error), error
                assert "SimulatedCluster" in str(error), error
            else:
                raise SystemExit("no error")
        with ch_testing.SimulatedCluster() as cluster:
            manager = cluster.join("a")
            model = ch_ft.DistributedDataParallel(manager, torch.nn.Linear(2, 1))
            optimizer = ch_ft.OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.1))
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            assert optimizer.step()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr


def test_a_torchft_without_a_needed_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later torchft may rename a method. The error comes at the start, not in the middle of a step."""

    class Manager:
        def allreduce(self) -> None: ...
        def errored(self) -> None: ...

    found = types.ModuleType("torchft")
    coordination = types.ModuleType("torchft.coordination")
    found.Manager, found.ProcessGroupGloo = Manager, type("Gloo", (), {"abort": print})  # type: ignore[attr-defined]
    found.coordination = coordination  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchft", found)
    monkeypatch.setitem(sys.modules, "torchft.coordination", coordination)
    missing = r"has no Manager\.current_step, .*Manager\.should_commit.*coordination\.LighthouseServer\."
    with pytest.raises(HookNotSupportedError, match=missing + r".*tried with torchft 0\.2\.0 and torchft-nightly 20"):
        ch_ft.local()


@pytest.mark.timeout(60)
def test_listing_and_importing_load_no_torch() -> None:
    code = "import sys, ch_ft, ch_ft._plugin; assert 'torch' not in sys.modules and 'torchft' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
