"""Runs ``triton_cases.py`` in Triton's interpreter or on a GPU, and tests the refusals without either."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ch_quant
import commhooks
from ch_quant import Codec, TwoStageExchange
from commhooks import BucketLayout, HookConfigError, StepContext

CASES = Path(__file__).with_name("triton_cases.py")
HERE = importlib.util.find_spec("triton") is not None
installed = pytest.mark.skipif(not HERE, reason="Triton is not installed: pip install 'ch-quant[triton]'")


def run_cases(config: pytest.Config, **environment: str) -> None:
    """Run the cases in a separate process, because the interpreter is on or off from the import of Triton on."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    where = ["-c", str(config.inipath), "--rootdir", str(config.rootpath)] if config.inipath else []
    words = [sys.executable, "-m", "pytest", *where, "-q", "-x", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(words, env=inherited | environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@installed
@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.gloo
def test_in_the_interpreter_it_is_torchs_bit_for_bit(pytestconfig: pytest.Config) -> None:
    run_cases(pytestconfig, TRITON_INTERPRET="1")


@installed
@pytest.mark.nccl
@pytest.mark.timeout(300)
def test_on_a_gpu_it_is_torchs_bit_for_bit(pytestconfig: pytest.Config) -> None:
    run_cases(pytestconfig)


@pytest.mark.full
@installed
@pytest.mark.parametrize(
    ("expr", "said"),
    [
        ("quant(bits=2, kernel='triton')", "bits=2.*8 and 4"),
        ("quant2(kernel='triton')", "bits=2.*leave kernel out"),
        ("sign(kernel='triton')", "bits=1"),
        ("quant4(rounding='stochastic', kernel='triton')", "stochastic"),
        ("quant4(block=8192, kernel='triton')", "4096 at most"),
        ("quant4(kernel='cuda')", "one of 'torch', 'triton'"),
    ],
)
def test_options_without_a_kernel_are_refused(expr: str, said: str) -> None:
    with pytest.raises(HookConfigError, match=said):
        commhooks.create(expr)


@pytest.mark.full
@installed
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes CPU tensors")
def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    reduction = commhooks.create("quant4(kernel='triton')").reduction
    assert reduction is not None
    layout = BucketLayout.of_shapes({"w": (64, 64)})
    with pytest.raises(HookConfigError, match=r"tensors of 'cpu'.*TRITON_INTERPRET=1"):
        reduction.check(layout)
    with pytest.raises(HookConfigError, match="tensors of 'cpu'"):
        TwoStageExchange(Codec(4, 128), [256], StepContext(), torch.device("cpu"), parts=1, kernel="triton")
    plain = commhooks.create("quant4").reduction
    assert plain is not None
    plain.check(layout)
    assert reduction.plan(layout, StepContext(world_size=4)) == plain.plan(layout, StepContext(world_size=4))


def test_without_triton_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton_codec", "triton_kernels"):
        monkeypatch.delitem(sys.modules, f"ch_quant.{name}", raising=False)
        monkeypatch.delattr(ch_quant, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(HookConfigError, match=r"ch-quant\[triton\].*the same bytes"):
        commhooks.create("quant4(kernel='triton')")
    assert commhooks.create("quant4(kernel='torch')").reduction is not None


@pytest.mark.full
@installed
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="what is interpreted is not compiled")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles for GPUs on Linux")
@pytest.mark.parametrize("bits", [8, 4])
def test_code_for_a_gpu_rounds_as_torch_does(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile for an absent GPU. The code fuses no product with a sum, flushes none to zero, and divides exactly."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ch_quant import triton_kernels
    from ch_quant.triton_codec import TritonWorkspace

    shape = TritonWorkspace(Codec(bits, 128), StepContext(), torch.device("cpu"), 64).shape
    kinds = {"rows": "i32", "scales": "*i16", "packed": "*i8"}
    kinds |= dict.fromkeys(("share", "share_of_other", "most", "factor"), "fp32")
    switches = {"KEEP": True, "LOPSIDED": bits == 4}
    for kernel, switch in ((triton_kernels.encode, switches), (triton_kernels.decode, {"ADD": True})):
        fixed = shape | switch
        signature = {name: "constexpr" if name in fixed else kinds.get(name, "*fp32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature=signature, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False})
        text = made.asm["ptx"]
        assert "mul.f32" in text or "mul.rn.f32" in text
        assert "fma." not in text
        assert ".ftz" not in text
        assert ("div.rn.f32" in text or "rcp.rn.f32" in text) == (kernel is triton_kernels.encode)
