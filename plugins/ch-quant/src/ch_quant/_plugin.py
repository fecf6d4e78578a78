"""What ch-quant provides, as data; importing this loads no torch."""

from collections.abc import Iterable

from commhooks import HookSpec, Needs, Param, hookimpl

_FLOATS = Needs(dtypes=("float32", "float16", "bfloat16", "float64"))


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """The two-stage hook and PyTorch's two."""
    return (
        HookSpec(
            "quant8",
            "reduction",
            "ch_quant:BlockQuantized",
            "sends int8 blocks, sums them in fp32, sends the sum as int8: volume independent of world size",
            hook="ch_quant:quant8_hook",
            params={
                "block": Param(256, "elements that share a scale, a multiple of 4", at_least=16, at_most=65536),
                "error_feedback": Param(
                    False,
                    "keep what both roundings lost for the next step, in fp32",
                    brings=frozenset({"stateful", "error_feedback", "checkpointable"}),
                ),
                "exempt": Param(True, "average norms, biases and what is smaller than a block exactly"),
            },
            capabilities=frozenset({"lossy", "changes_dtype"}),
            needs=_FLOATS,
            example="quant8(error_feedback=True)",
            paper="https://arxiv.org/abs/2306.10209",
        ),
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
