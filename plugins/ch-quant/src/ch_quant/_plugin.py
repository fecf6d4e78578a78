"""What ch-quant provides, as data; importing this loads no torch."""

from collections.abc import Iterable

from commhooks import HookSpec, Needs, Param, hookimpl

_FLOATS = Needs(dtypes=("float32", "float16", "bfloat16", "float64"))


_PAPERS = {  # preset: summary, paper
    "quant8": ("sends int8 blocks, sums them in fp32, sends the sum as int8", "https://arxiv.org/abs/2306.10209"),
    "quant4": (
        "sends blocks of 4 bits, sums them in fp32, sends the sum in 4 bits",
        "https://arxiv.org/abs/2410.15526",
    ),
    "quant2": ("sends blocks of 2 bits, with error feedback", "https://arxiv.org/abs/1610.02132"),
    "sign": ("sends signs and the mean magnitude of a block, with error feedback", "https://arxiv.org/abs/1901.09847"),
}
_FED = ("quant2", "sign")  # presets that lose too much to do without error feedback


def _options(feedback: bool) -> dict[str, Param]:
    return {
        "block": Param(128, "elements that share a scale, a multiple of 16", at_least=16, at_most=65536),
        "rounding": Param(
            "nearest",
            "stochastic is without bias, and noisier",
            choices=("nearest", "stochastic"),
            brings=frozenset({"stateful", "checkpointable"}),
            off=("nearest",),
        ),
        "rotation": Param(None, "hadamard spreads what is large over its block", choices=(None, "hadamard")),
        "error_feedback": Param(
            feedback,
            "keep what both roundings lost, and send it in later steps",
            brings=frozenset({"stateful", "error_feedback", "checkpointable"}),
        ),
        "residual": Param("fp32", "in what that is kept; int8 takes a quarter", choices=("fp32", "int8")),
        "exempt": Param(True, "average norms, biases and what is smaller than a block exactly"),
        "kernel": Param(
            "torch",
            "what does the arithmetic; triton: on CUDA, 8 and 4 bits, rounding='nearest'",
            choices=("torch", "triton"),
            local=True,
        ),
    }


def _family() -> Iterable[HookSpec]:
    bits = Param(4, "bits of a number on the wire", choices=(8, 4, 3, 2, 1))
    yield HookSpec(
        "quant",
        "reduction",
        "ch_quant:Quantized",
        "sends blocks of few bits, sums them in fp32, sends the sum likewise: volume independent of ranks",
        params={"bits": bits} | _options(False),
        capabilities=frozenset({"lossy", "changes_dtype"}),
        needs=_FLOATS,
        example="quant(bits=3, rotation='hadamard')",
        paper="https://arxiv.org/abs/2306.10209",
    )
    for name, (summary, paper) in _PAPERS.items():
        yield HookSpec(
            name,
            "reduction",
            f"ch_quant:{name}",
            summary,
            hook="ch_quant:quant8_hook" if name == "quant8" else None,
            params=_options(name in _FED),
            capabilities=frozenset({"lossy", "changes_dtype"}),
            needs=_FLOATS,
            example=name if name in _FED else f"{name}(error_feedback=True)",
            paper=paper,
        )


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """The family and its presets, and PyTorch's two."""
    return (
        *_family(),
        HookSpec(
            "quantize_per_tensor",
            "reduction",
            "ch_quant:quantize_per_tensor",
            "PyTorch's: all-gathers uint8 with one affine scale a parameter; volume grows with world size",
            hook="ch_quant:quantization_pertensor_hook",
            params={},
            capabilities=frozenset({"lossy", "changes_dtype"}),
            needs=_FLOATS,
        ),
        HookSpec(
            "quantize_per_channel",
            "reduction",
            "ch_quant:quantize_per_channel",
            "PyTorch's: all-gathers uint8 with an affine scale for every 512 elements; grows with world size",
            hook="ch_quant:quantization_perchannel_hook",
            params={"bucket_size": Param(512, "elements that share a scale", at_least=1)},
            capabilities=frozenset({"lossy", "changes_dtype"}),
            needs=_FLOATS,
        ),
    )
