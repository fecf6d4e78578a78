"""Do all members run the same thing? Asked before the first collective of every step that depends on the answer.

Two members that disagree on a tensor's size do not get an error from gloo: it ends the process, the healthy ones
included. So each step begins with one small all-reduce of fixed size: a one, and one number per field. The ones add
up to the number of members that contribute, and a field is the same on all of them exactly if its sum is that many
times one's own. A member that is healing receives the sum but is not aggregated; it leaves by itself, before it can do
harm.

The count is also the right divisor. It is the manager's number of participants but for one case: when torchft
synchronises new members at step 0, one contributes, the others heal, and all are counted.
"""

import hashlib
from collections.abc import Mapping

import torch

from ch_ft.transport import ManagerTransport
from commhooks import RankMismatchError

Fingerprint = Mapping[str, str]
"""What must be equal on all members: field -> text. The fields are the same everywhere."""


def agree(transport: ManagerTransport, fingerprint: Fingerprint) -> None:
    """Compare fingerprints over the quorum, and take over the number of contributors.

    Raises:
        RankMismatchError: some member differs; names the fields.
        TransportError: a peer was lost.

    The numbers are 24-bit, so sums over up to 2**29 members are exact in float64.
    """
    mine = torch.tensor([1, *map(digest, fingerprint.values())], dtype=torch.float64, device="cpu")
    total = mine.clone()  # (1 + fields,)
    transport.all_reduce(total, "sum").wait(None)
    contributors = int(total[0])
    same = (total == mine * contributors).tolist()[1:]
    if not all(same):
        differing = [name for name, ok in zip(fingerprint, same, strict=True) if not ok]
        raise mismatch({name: f"here {fingerprint[name]}" for name in differing})
    transport.contributors(contributors)


def compare(mine: Fingerprint, theirs: Fingerprint) -> None:
    """Refuse a state that was made by something else.

    Raises:
        RankMismatchError: names the fields and both values.
    """
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if names:
        raise mismatch({name: f"here {mine.get(name)}, there {theirs.get(name)}" for name in names})


def mismatch(fields: Mapping[str, str]) -> RankMismatchError:
    """The error that lists fields and their values."""
    listed = "; ".join(f"{name}: {values}" for name, values in fields.items())
    return RankMismatchError(
        f"this member and the others do not run the same thing. {listed}. Start every replica with the same code, "
        "model and hook expression"
    )


def digest(text: str) -> int:
    """24 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "big")
