"""Do all members run the same thing? Asked before the first collective of every step that depends on the answer.

Two members that disagree on a tensor's size do not get an error from gloo: it ends the process, the healthy ones
included. So each step begins with one small all-reduce of fixed size: one number per field, the same on all members
exactly if its sum is n times one's own. A member that is healing hears the others but is not heard; it leaves by
itself, before it can do harm.
"""

import hashlib
from collections.abc import Mapping

import torch

from ch_ft.transport import ManagerTransport
from commhooks.errors import RankMismatchError

Fingerprint = Mapping[str, str]
"""What must be equal on all members: field -> text. The fields are the same everywhere."""


def agree(transport: ManagerTransport, fingerprint: Fingerprint) -> None:
    """Compare fingerprints over the quorum.

    Raises:
        RankMismatchError: some member differs; names the fields.
        TransportError: a peer was lost.

    The numbers are 24-bit, so sums over up to 2**29 members are exact in float64.
    """
    mine = torch.tensor([digest(text) for text in fingerprint.values()], dtype=torch.float64)
    total = mine.clone()  # (fields,)
    transport.all_reduce(total, "sum").wait(None)
    differing = [name for name, same in zip(fingerprint, (total == mine * transport.world_size).tolist(), strict=True) if not same]
    if differing:
        raise mismatch({name: f"here {fingerprint[name]}" for name in differing})


def compare(mine: Fingerprint, theirs: Fingerprint) -> None:
    """Refuse a state that was made by something else.

    Raises:
        RankMismatchError: names the fields and both values.
    """
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if names:
        raise mismatch({name: f"here {mine.get(name)}, there {theirs.get(name)}" for name in names})


def mismatch(fields: Mapping[str, str]) -> RankMismatchError:
    listed = "; ".join(f"{name}: {values}" for name, values in fields.items())
    return RankMismatchError(
        f"this member and the others do not run the same thing. {listed}. Start every replica with the same code, "
        "model and hook expression"
    )


def digest(text: str) -> int:
    """24 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "big")
