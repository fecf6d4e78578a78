"""Texts are generated between training steps with coded weights, and training does not notice it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

import commhooks
from ch_testing import spawn

from .fsdp_kit import CONTEXT, TinyGPT, batch, distance, gpt, grads, line, shard2, whole
from .test_gather_axis import HOOK, decoded, reference, same_everywhere

pytest.importorskip("ch_quant")
pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]

COUNT = 6  # symbols of a generated text
STEPS = 4


def by_calls(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Continue a text with a call of the model for each symbol."""
    for _ in range(COUNT):
        text = torch.cat([text, model(text[:, -CONTEXT:])[:, -1:].argmax(-1)], 1)
    return text


def by_method(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Continue a text in a method of the model that torch treats as a forward."""
    found: torch.Tensor = model.generate(text, COUNT)  # type: ignore[operator]
    return found


def plainly(weights: dict[str, torch.Tensor], text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text of an unsharded model with these weights, and its last logits."""
    plain = gpt()
    plain.load_state_dict(weights)
    with torch.no_grad():
        text = plain.generate(text, COUNT)
        return text, plain(text[:, -CONTEXT:])


def made(world: int, **options: Any) -> tuple[TinyGPT, Any, torch.optim.Optimizer]:
    model = shard2(gpt(), line(world), **options)
    register_fsdp_forward_method(model, "generate")
    handle = commhooks.attach(model, HOOK, axis="gather")
    return model, handle, torch.optim.AdamW(model.parameters(), lr=0.01)  # type: ignore[return-value]


def payload(handle: Any) -> float:
    sent: float = handle.stats()["gather_payload_bytes"]
    return sent


def generates(rank: int, world: int, after: bool) -> None:
    model, handle, optimizer = made(world, reshard_after_forward=after)
    quiet, quiet_handle, quiet_optimizer = made(world, reshard_after_forward=after)
    for step in range(STEPS):
        weights = decoded(model)
        same_everywhere(weights)
        prompt, _ = batch(90 + step, rank)  # another one on each rank
        generate = (by_calls, by_method)[step % 2]
        wanted, logits = plainly(weights, prompt)
        before = payload(handle)
        model.eval()
        with torch.inference_mode() if step % 3 else torch.no_grad():
            text = generate(model, prompt)
            sent = payload(handle) - before
            assert distance({"": model(text[:, -CONTEXT:])}, {"": logits}) < 1e-5
        model.train()
        assert torch.equal(text, wanted)
        assert text.shape == (len(prompt), CONTEXT + COUNT)
        assert sent > 0

        decoded(quiet)  # takes part in the same gathers, but for the text
        for one, steps in ((model, optimizer), (quiet, quiet_optimizer)):
            steps.zero_grad()
            one(*batch(step, rank)).backward()
        assert distance(grads(model), reference(gpt(), weights, world, step)) < 1e-5
        optimizer.step()
        quiet_optimizer.step()
    for (name, p), other in zip(model.named_parameters(), quiet.parameters(), strict=True):
        assert torch.equal(whole(p.detach()), whole(other.detach())), f"{name}: a text has changed the training"
    for one in (handle, quiet_handle):
        one.assert_active()
        assert one.stats()["steps"] == STEPS


@pytest.mark.full
@pytest.mark.parametrize("after", [True, False])
def test_texts_between_steps(after: bool) -> None:
    spawn(generates, 2, after, timeout=90)
