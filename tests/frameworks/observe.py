"""Runs a script of these tests unchanged and keeps, per rank, what its hook held: `observe.py OUT KILL_AFTER script ...`.

The hook is the script's own, or that of `python -m commhooks run ... observe.py OUT KILL_AFTER script ...`.

KILL_AFTER is the optimizer step after which the process kills itself with SIGKILL, 0 for never. Written to OUT:
`saved-R.pt` and `loaded-R.pt`, the hook's state when the framework saved and after it loaded, and `end-R.pt`, weights,
statistics and the hook's state at the end.
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import commhooks
from ch_ddp.frameworks import HeldHook
from commhooks.checkpoint import dcp

out, kill_after, script, *arguments = sys.argv[1:]
rank = int(os.environ.get("RANK", "0"))
attached: list[tuple[torch.nn.Module, commhooks.CommHook]] = []
steps = 0


def keep(when: str, **more: Any) -> None:
    state = attached[-1][1].state_dict() if attached else None
    torch.save({"state": state, **more}, Path(out, f"{when}-{rank}.pt"))


def local(parameter: torch.nn.Parameter) -> torch.Tensor:
    whole: Any = parameter.detach()
    return whole.to_local() if hasattr(whole, "to_local") else whole


def noting(function: Any) -> Any:
    def attach(model: torch.nn.Module, *given: Any, **options: Any) -> commhooks.CommHook:
        attached.append((model, function(model, *given, **options)))
        return attached[-1][1]

    return attach


def around(owner: Any, name: str, when: str) -> None:
    function = getattr(owner, name)

    def noted(*given: Any, **options: Any) -> Any:
        result = function(*given, **options)
        keep(when)
        return result

    setattr(owner, name, noted)


def count(optimizer: torch.optim.Optimizer, given: Any, options: Any) -> None:
    global steps
    steps += not hasattr(optimizer, "optimizers")  # a container of others, which have counted
    if steps == int(kill_after):
        os.kill(os.getpid(), signal.SIGKILL)


commhooks.attach = noting(commhooks.attach)
launcher = sys.modules.get("commhooks.launch.session")
if launcher is not None:
    setattr(launcher, "attach", commhooks.attach)  # noqa: B010
    around(commhooks.CommHook, "load_state_dict", "loaded")
around(dcp, "sharded", "saved")
around(dcp, "load", "loaded")
around(HeldHook, "gather", "saved")
around(HeldHook, "load_gathered", "loaded")
register_optimizer_step_post_hook(count)
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
if attached:
    model, handle = attached[-1]
    handle.assert_active()
    keep(
        "end",
        weights=[local(p).clone() for p in model.parameters()],
        stats={**handle.stats(), "calls": handle.binding.calls},
    )
else:
    keep("end", weights=None, stats=None)
