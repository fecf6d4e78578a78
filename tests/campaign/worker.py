"""The function that each rank of a case runs. The server that forks the ranks imports it once."""

import traceback
import warnings

from tests.campaign import ddp, fsdp, join, members, outer, simulated
from tests.campaign.checks import TorchRefuses, Wrong
from tests.campaign.draw import Case
from tests.campaign.notes import Notes

KINDS = {
    "ddp": ddp.run,
    "fsdp2": fsdp.run2,
    "simulated": simulated.run,
    "outer": outer.run,
    "members": members.run,
    "levels": ddp.run,
    "levels_simulated": simulated.run,
    "gather": fsdp.run2,
}


def main(rank: int, world: int, case: Case, folder: str, deadline: float) -> None:
    """Run a case and write its outcome. Raise if it failed, so that all ranks end."""
    warnings.filterwarnings("ignore")
    notes = Notes(folder, rank, world, deadline)
    try:
        body = join.run if case.join else KINDS[case.kind]
        notes.outcome(status="ok", stats=body(rank, world, case, notes))
    except BaseException as error:
        status = "torch" if isinstance(error, TorchRefuses) else "wrong" if isinstance(error, Wrong) else "error"
        check = error.check if isinstance(error, Wrong) else type(error).__name__
        notes.outcome(status=status, check=check, message=str(error), trace=traceback.format_exc())
        notes.wait_for_others()
        raise
