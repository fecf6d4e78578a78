"""Compare members before their gradients travel.

If two members disagree on a tensor's size, gloo raises no error. It ends the process, and the healthy ones too. So
each step begins with one small all-reduce of fixed size: a 1, one number per field, and a weight. The ones add up to the number
of contributors. A field is equal on all members if its sum is this number times the member's own value. A healing member
receives the sum but adds nothing. It compares too, and leaves before it does harm.

The count is also the divisor of means. It equals the manager's number of participants, except when torchft synchronises
new members at step 0. Then torchft counts all of them, although one contributes and the others heal.
"""

import hashlib
from collections.abc import Mapping

import torch

from ch_ft.torchft_support import installed
from ch_ft.transport import ManagerTransport
from commhooks import CommHook, RankMismatchError

Fingerprint = Mapping[str, str]
"""Facts that must be equal on all members: field -> text. All members have the same fields."""


def of_handle(handle: CommHook) -> dict[str, str]:
    """Return the fields of a hook: its expression, options, and the versions that run it."""
    return {
        "hook": handle.expr,
        "options and providers": short_hash(repr(handle.identity)),
        "commhooks": installed("commhooks") or "",
        "torch": torch.__version__.split("+")[0],
    }


def agree(transport: ManagerTransport, fingerprint: Fingerprint, weight: float = 0.0) -> float:
    """Compare fingerprints over the quorum, and tell the transport the number of contributors.

    Args:
        transport: of the quorum.
        fingerprint: of this member.
        weight: of this member.

    Returns:
        The mean weight of the contributors.

    Raises:
        RankMismatchError: a member differs. The message names the fields.
        TransportError: a peer was lost.

    The numbers have 24 bits, so sums over up to 2**29 members are exact in float64.
    """
    mine = torch.tensor([1, *map(_number, fingerprint.values()), weight], dtype=torch.float64, device="cpu")
    total = mine.clone()  # (1 + fields + 1,)
    transport.all_reduce(total, "sum").wait(None)
    contributors = int(total[0])
    same = (total == mine * contributors).tolist()[1:-1]
    if not all(same):
        differing = [name for name, ok in zip(fingerprint, same, strict=True) if not ok]
        raise _mismatch({name: f"here {fingerprint[name]}" for name in differing})
    transport.contributors(contributors)
    return float(total[-1]) / max(contributors, 1)


def compare(mine: Fingerprint, peer: Fingerprint) -> None:
    """Refuse a state of another hook or model.

    Raises:
        RankMismatchError: names the fields and both values.
    """
    names = [name for name in {**mine, **peer} if mine.get(name) != peer.get(name)]
    if names:
        raise _mismatch({name: f"here {mine.get(name)}, there {peer.get(name)}" for name in names})


def short_hash(text: str) -> str:
    """Return a text of fixed length that differs if ``text`` does."""
    return f"sha {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _mismatch(fields: Mapping[str, str]) -> RankMismatchError:
    listed = "; ".join(f"{name}: {values}" for name, values in fields.items())
    return RankMismatchError(
        f"this member and its peers run different code, models or hooks. {listed}. Start every replica with the same code, "
        "model and hook expression"
    )


def _number(text: str) -> int:
    """Return 24 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "big")
