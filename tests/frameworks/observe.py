"""Run a script of these tests unchanged and keep each rank's hook state: `observe.py script ...`.

The hook is the script's own, or that of `python -m commhooks run ... observe.py script ...`. If Ray starts the ranks,
this file watches the function that Ray runs on them. The workers find this file by `PYTHONPATH`.

Variables: `OBSERVED_BY` is `torchrun` or `ray`, `OBSERVED_OUT` is the folder, and `OBSERVED_KILL` is the optimizer step
after which a rank kills itself with SIGKILL (0 for never). The files `saved-R.pt` and `loaded-R.pt` hold the hook's
state at the framework's save and after its load. `end-R.pt` holds weights, statistics and the hook's state at the end.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import commhooks
from ch_ddp import TrainerHook
from ch_run import auto_attach
from ch_run.outer_state import OuterKept
from commhooks.checkpoint import dcp

attached: list[tuple[torch.nn.Module, commhooks.CommHook]] = []
steps = 0


def keep(when: str, **more: Any) -> None:
    state = attached[-1][1].state_dict() if attached else None
    if os.environ.get("COMMHOOKS_OUTER"):
        [found] = auto_attach.auto_attach().models
        more["outer"] = {"count": found.outer.count, "landed": found.outer.landed}
        more["weights"] = [local(p).clone() for p in found.outer.rounds.shared.model.parameters()]
    rank = os.environ.get("RANK", "0")  # a worker of Ray's learns its rank late
    torch.save({"state": state, **more}, Path(os.environ["OBSERVED_OUT"], f"{when}-{rank}.pt"))


def keep_end() -> None:
    if os.environ.get("COMMHOOKS_OUTER"):
        return keep("end")
    if not attached:
        return keep("end", weights=None, stats=None)
    model, handle = attached[-1]
    handle.assert_active()
    weights = [local(p).clone() for p in model.parameters()]
    return keep("end", weights=weights, stats={**handle.stats(), "calls": handle.binding.calls})


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
    steps += not hasattr(optimizer, "optimizers")  # a container's optimizers have counted already
    if steps == int(os.environ["OBSERVED_KILL"]):
        if os.environ["OBSERVED_BY"] == "ray":
            time.sleep(20)  # Ray's controller asks workers for their reports every few seconds
        os.kill(os.getpid(), signal.SIGKILL)


def watch() -> None:
    commhooks.attach = noting(commhooks.attach)
    if os.environ.get("COMMHOOKS_OUTER"):
        around(OuterKept, "load", "loaded")
    if os.environ.get("COMMHOOKS_HOOK"):
        setattr(auto_attach, "attach", commhooks.attach)  # noqa: B010
        around(commhooks.CommHook, "load_state_dict", "loaded")
    around(dcp, "sharded", "saved")
    around(dcp, "load", "loaded")
    around(TrainerHook, "gather", "saved")
    around(TrainerHook, "load_gathered", "loaded")
    register_optimizer_step_post_hook(count)


def watch_ray() -> None:
    from ray.train.torch import TorchTrainer

    begin = TorchTrainer.__init__

    def init(self: Any, train: Any, **options: Any) -> None:
        def watched(config: dict[str, Any]) -> None:
            import observe  # the worker's module, not this one sent by value

            observe.watch()
            train(config)
            observe.keep_end()

        begin(self, watched, **options)

    TorchTrainer.__init__ = init


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    if os.environ["OBSERVED_BY"] == "ray":
        watch_ray()
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        watch()
        runpy.run_path(sys.argv[0], run_name="__main__")
        keep_end()
