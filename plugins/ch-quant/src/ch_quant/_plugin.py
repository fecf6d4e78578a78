"""Hook specs of ch-quant. This module imports no torch."""

from collections.abc import Iterable

from ch_quant.options import FED, QuantOptions, preset_params
from commhooks import HookSpec, Needs, Option, hookimpl

_FLOATS = Needs(dtypes=("float32", "float16", "bfloat16", "float64"))
_LOSSY = frozenset({"lossy", "changes_dtype"})
_PAPERS = {  # preset: summary, paper
    "quant8": ("sends int8 blocks, sums them in fp32, sends the sum as int8", "https://arxiv.org/abs/2306.10209"),
    "quant4": (
        "sends blocks of 4 bits, sums them in fp32, sends the sum in 4 bits",
        "https://arxiv.org/abs/2410.15526",
    ),
    "quant2": ("sends blocks of 2 bits, with error feedback", "https://arxiv.org/abs/1610.02132"),
    "sign": ("sends signs and the mean magnitude of a block, with error feedback", "https://arxiv.org/abs/1901.09847"),
}
_TASK = "held-out on the text GPT (AdamW, 1200 steps)"
_USES = {  # preset: when to use it, what it costs in loss
    "quant8": ("a slow link, and no loss is acceptable: a quarter of fp32's bytes", f"none: -0.001 nats {_TASK}"),
    "quant4": (
        "a slow link between ranks: an eighth of fp32's bytes; on nodes of several ranks inside two_level",
        f"+0.001 to +0.011 nats {_TASK}, within the noise of 3 seeds",
    ),
    "quant2": ("quant4 is not small enough, or between the nodes of an outer optimizer", f"+0.13 nats {_TASK}"),
    "sign": ("only bytes count", f"+0.61 nats {_TASK}"),
}


def _blocks() -> Iterable[HookSpec]:
    yield HookSpec(
        "quant",
        "reduction",
        "ch_quant:Quantized",
        "sends blocks of few bits, sums in fp32, sends the sum in few bits; bytes do not grow with the ranks",
        options=QuantOptions.options(),
        capabilities=_LOSSY,
        needs=_FLOATS,
        example="quant(rotation='hadamard')",
        paper="https://arxiv.org/abs/2306.10209",
        group="low-bit",
        when="bits are an option of a sweep; otherwise take a preset, which is the same",
        loss="that of the preset of these bits",
    )
    for name, (summary, paper) in _PAPERS.items():
        yield HookSpec(
            name,
            "reduction",
            f"ch_quant:{name}",
            summary,
            hook="ch_quant:quant8_hook" if name == "quant8" else None,
            options=preset_params(name),
            capabilities=_LOSSY,
            needs=_FLOATS,
            example=name if name in FED else f"{name}(error_feedback=True)",
            paper=paper,
            group="low-bit",
            recommended=name in ("quant4", "quant8"),
            when=_USES[name][0],
            loss=_USES[name][1],
        )


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """Return ``quant`` and its presets, and PyTorch's two hooks."""
    return (
        *_blocks(),
        HookSpec(
            "quantize_per_tensor",
            "reduction",
            "ch_quant:quantize_per_tensor",
            "PyTorch's: all-gathers uint8 with one affine scale a parameter; volume grows with world size",
            hook="ch_quant:quantization_pertensor_hook",
            options={},
            capabilities=_LOSSY,
            needs=_FLOATS,
            group="low-bit",
            when="to reproduce PyTorch's hook; quant8 sends less from 3 ranks on",
            loss="a quarter of a point of accuracy at equal bytes, on a CNN with sorted shards",
        ),
        HookSpec(
            "quantize_per_channel",
            "reduction",
            "ch_quant:quantize_per_channel",
            "PyTorch's: all-gathers uint8 with an affine scale for every 512 elements; grows with world size",
            hook="ch_quant:quantization_perchannel_hook",
            options={"bucket_size": Option(512, "elements that share a scale", at_least=1)},
            capabilities=_LOSSY,
            needs=_FLOATS,
            group="low-bit",
            when="to reproduce PyTorch's hook; quant8 sends less from 3 ranks on",
            loss="+0.02 nats on the text GPT (Adam, 200 steps)",
        ),
    )
