"""Writes the state of a hook or outer optimizer while a script trains, and resumes it (`commhooks run --state DIR`).

The script's own checkpoints know nothing of the hook. After every Nth optimizer step each rank writes its state to a file
whose name has a checksum of the parameters. At resume the script chooses its checkpoint, and the checksum of the loaded
parameters finds the snapshot of that step. A script may mask or clamp its parameters after the step and then save. So a save
marks the snapshot with a checksum of that moment, which finds it, too. Each file is written under a temporary name, synchronised
and renamed. A snapshot counts only if every rank's file exists, so a process may be killed at any time.

    DIR/1-DistributedDataParallel/step-000000000010-3f9c2a71d0b4e865/rank-0-of-2-09aa1bc3f2d1e7c4-5c1d22aa.pt

The last word of a name is a checksum of the file. Each process group that trains is a run with its own number, which stands
after the step. `run-B-after-step-S-A` says that run B has resumed step S of run A.

Of its own steps, and of those that it has resumed, a run keeps the first snapshot, the last two, and the five newest after which
the script saved something. Other runs may go on from the same folder, so their snapshots stay.
"""

import functools
import logging
import os
import re
import secrets
import threading
import time
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ch_core import StoreExchange, checksum, group_timeout, log
from commhooks import CommHook, HookState, StateError, load_obtained, merge

LATEST, MARKED = 2, 5  # numbers of snapshots that stay
_MODEL = re.compile(r"\d+-")  # folder of a model
_SET = re.compile(r"step-(\d{12})-([0-9a-f]{16})\Z")
_RANK = re.compile(r"rank-(\d+)-of-(\d+)-([0-9a-f]{16})-([0-9a-f]{8}|none)\.pt\Z")
_SAVED = re.compile(r"saved-([0-9a-f]{16})\Z")  # mark of a snapshot after which the script saved something
_RUN = re.compile(r"run-([0-9a-f]{16})-after-step-(\d{12})-([0-9a-f]{16})\Z")
Key = tuple[int, str]
_NONE: Key = (-1, "0" * 16)


@dataclass(slots=True)
class Snapshot:
    """The files of one step, by rank. The snapshot is whole if no rank's file is missing.

    Attributes:
        stateless: True if one process trained alone, without the hook. Its file is empty.
        saved: checksums of the parameters when the script saved something after this step.
    """

    folder: Path
    step: int
    run: str
    world: int = 0
    files: dict[int, Path] = field(default_factory=dict)
    checksums: dict[int, str] = field(default_factory=dict)
    stateless: bool = False
    saved: set[str] = field(default_factory=set)

    @property
    def key(self) -> Key:
        return self.step, self.run

    @property
    def whole(self) -> bool:
        return 0 < self.world == len(self.files)

    def read(self, rank: int) -> dict[str, Any]:
        """Return the state in the file of a rank.

        Raises:
            StateError: the file is damaged.
        """
        path = self.files[rank]
        problem = "its bytes do not have the checksum in its name"
        try:
            with open(path, "rb") as file:
                if path.stem.endswith(f"-{_crc(file)}"):
                    state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
                    return state
        except Exception as error:  # torch.load raises anything
            problem = f"{type(error).__name__}: {error}"
        raise StateError(
            f"--state: {path} is damaged ({problem}). Remove the folder {path.parent}, and resume the script from another "
            "checkpoint"
        )


def _crc(file: BinaryIO) -> str:
    """Return a checksum of a file as 8 hexadecimal digits, and go back to its begin. torch.load does not check its own."""
    total = 0
    file.seek(0)
    while block := file.read(1 << 20):
        total = zlib.crc32(block, total)
    file.seek(0)
    return f"{total:08x}"


class Kept(ABC):
    """State of one model that a folder keeps.

    Args:
        expr: expression of the hook or outer optimizer, for errors.
        params: parameters whose optimizer makes the steps that count.
        group: the ranks that write, by default all.

    Attributes:
        remedy: sentence for a user who saves a checkpoint that has no snapshot.
    """

    remedy = "Let --state-every divide the steps between checkpoints"

    def __init__(self, expr: str, params: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
        everyone: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
        self.expr, self.params, self.group = expr, list(params), group if group is not None else everyone

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits of the parameters, by which a checkpoint of the script finds its snapshot."""
        return checksum(*self.params)

    def whole(self) -> bool:
        """Return True if all ranks hold one model now, so that a checkpoint of one rank can be resumed on all."""
        return True

    def progress(self) -> float:
        """Return a number that grows when a step has begun since the last one ended."""
        return 0.0

    def model(self) -> torch.nn.Module | None:
        """Return the model whose forwards begin steps; None if nothing is loaded."""
        return None

    def state_dict(self) -> dict[str, Any] | None:
        """Return this rank's state, on all ranks; None if one process trains alone, without the hook."""
        return None

    @abstractmethod
    def load(self, one: "Snapshot", rank: int, world: int) -> None:
        """Load a snapshot, on all ranks.

        Raises:
            StateError: on all ranks, if the file of one rank is damaged.
        """


class HookKept(Kept):
    """State of an attached hook.

    Raises:
        StateError: the hook is a foreign function with its own state, or its ranks belong to a manager.
    """

    def __init__(self, handle: CommHook) -> None:
        binding = handle.binding
        if binding is None or not isinstance(handle.state, HookState):
            raise StateError(f"--state: {handle.expr} has its own state; save and load it in the script")
        if binding.group is None:
            raise StateError(
                f"--state: a manager adds and removes ranks of {handle.expr}; save its state in the script"
            )
        # With a mesh, all ranks write.
        super().__init__(handle.expr, binding.params, None if binding.other_axes else binding.group)
        self.handle = handle

    def progress(self) -> float:
        """Return the number of backwards that the engine has finished."""
        return self.handle.stats().get("steps", 0.0)

    def model(self) -> torch.nn.Module | None:
        return self.handle.model()

    def state_dict(self) -> dict[str, Any]:
        return self.handle.state_dict()

    def load(self, one: "Snapshot", rank: int, world: int) -> None:
        # The file of one rank may be damaged. Raised outside of the load, its error would leave the peers in the agreement.
        if one.world == world:
            load_obtained(self.handle, lambda: one.read(rank))
        else:
            load_obtained(self.handle, lambda: merge([one.read(r) for r in range(one.world)]), world_change="mean")


class LoneKept(Kept):
    """Trainable parameters of a model that one process trains alone. More ranks find the hook's earlier checkpoints by them."""

    def load(self, one: "Snapshot", rank: int, world: int) -> None:
        log.warning(
            "--state: one process trains without %s, so the state of %d ranks after step %d ends here",
            *(self.expr, one.world, one.step),
        )


class StateFolder:
    """The snapshots of one model's state, in a folder that all ranks share.

    Args:
        folder: of this model only.
        kept: the state.
        every: optimizer steps between two snapshots.
        taken: folders of the other models of this process.

    Attributes:
        folder: the given one, or that of a model of an earlier process with the same parameters.
    """

    def __init__(self, folder: Path, kept: Kept, every: int, taken: Collection[Path] = ()) -> None:
        self.folder, self.kept, self.every, self.taken = folder, kept, every, taken
        self._ids = {id(p) for p in kept.params}
        self.group = kept.group
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.step = 0
        self.run = _NONE[1]
        self._written = self._warned = -1
        self._marked: tuple[int, list[int]] = (-1, [])  # step and versions of the parameters at the last mark
        self._failed: int | None = None  # step of the last written snapshot when a write failed
        self._current = folder  # of the newest snapshot, written or resumed
        self._ended_steps = 0.0
        self._due = False  # True from the Nth step until its snapshot
        self._own = ""  # checksum of the parameters when `resume` looked last
        self._looks = True  # True until the first step, because the script may still load a checkpoint
        self._latest: list[Key] = []
        self._lineage: dict[str, int] = {}  # last step of each run that this one goes on from, itself included
        self._abandoned: set[Key] = set()
        self.resumed = ""  # where the state comes from, once `resume` has looked
        self._stops: list[Callable[[], None]] = []

    # -- at the first forward

    def resume(self) -> None:
        """Load the snapshot of the current parameters, and start writing.

        Raises:
            StateError: on all ranks, if there are snapshots but none has these parameters. No file has changed.
        """
        self._own = own = self.kept.fingerprint()
        exchange = StoreExchange(self.group, group_timeout(self.group))
        self.run = _agree_on_run(exchange)
        self._see_one_folder(exchange)
        found, chosen = self._fitting(exchange, own)
        mine = self.folder
        others = exchange("\0".join(sorted(_names(mine.parent))).encode())[0].decode().split("\0")
        for name in [one for one in others if mine.parent / one not in (mine, *self.taken) and _MODEL.match(one)]:
            if chosen is None:  # a script that resumes may wrap its models in another order, or only the last ones
                self.folder = mine.parent / name
                _, chosen = self._fitting(exchange, own, after=0)  # a new run has its own first snapshot
        if chosen is not None:
            self._load(chosen)
            return self._watch()
        self.folder = mine
        if not isinstance(self.kept, LoneKept) and any(row != b"0" for row in exchange(b"1" if found else b"0")):
            raise StateError(self._none_fits(found))
        self.resumed = f"no earlier state was found in {mine}"
        self.write()
        self._watch()

    def _fitting(self, exchange: StoreExchange, own: str, after: int = -1) -> tuple[list[Snapshot], Snapshot | None]:
        """Return the whole snapshots in the folder, and the one after this step that all ranks resume."""
        found = [one for one in self.listed() if one.whole]
        fitting = {one.key: one for one in found if one.step > after and self._fits(one, own)}
        chosen = _newest_common(exchange, list(fitting))
        return found, fitting[chosen] if chosen is not None else None

    def _fits(self, one: Snapshot, own: str) -> bool:
        """Compare this rank's parameters. With another world size, compare the parameters of all saved ranks."""
        if own in one.saved:
            return True
        if one.world == self.world:
            return one.checksums[self.rank] == own
        return set(one.checksums.values()) == {own}

    def listed(self) -> list[Snapshot]:
        """Return the snapshots in the folder, by step."""
        found = []
        for folder in self.folder.iterdir():
            match = _SET.match(folder.name)
            if match:
                found.append(_read_folder(Snapshot(folder, int(match[1]), match[2])))
        return sorted(found, key=lambda one: one.key)

    def _load(self, one: Snapshot) -> None:
        if not one.stateless:
            self.kept.load(one, self.rank, self.world)
            self.resumed = f"its state after step {one.step} is resumed from {one.folder}"
        elif self.world > 1:
            self.resumed = f"no state after step {one.step}"
            log.warning(
                "--state: %s begins without a state after step %d, because one process has trained alone without it",
                *(self.kept.expr, one.step),
            )
        self.step, self._written, self._current = one.step, one.step, one.folder
        self._latest = [one.key]
        self._ended_steps = self.kept.progress()
        self._lineage = self._lineage_of(one)
        if one.step:  # a new start is no heir of the run whose first snapshot it shares
            later = [other for other in self.listed() if other.run == one.run and other.step > one.step]
            self._abandoned = {other.key for other in later if not other.saved}
        if self.rank == 0:
            with suppress(OSError):  # a later run then removes less
                (self.folder / f"run-{self.run}-after-{one.folder.name}").touch()

    def _lineage_of(self, one: Snapshot) -> dict[str, int]:
        """Return the runs that led to a snapshot, each with the last step that the next one has resumed."""
        parents = {m[1]: (int(m[2]), m[3]) for name in _names(self.folder) if (m := _RUN.match(name))}
        found: dict[str, int] = {}
        step, run = one.key
        while run not in found:
            found[run] = step
            step, run = parents.get(run, (step, run))
        return found

    def _none_fits(self, found: list[Snapshot]) -> str:
        steps = ", ".join(sorted({str(one.step) for one in found}, key=int)[-8:])
        worlds = sorted({one.world for one in found} - {self.world})
        other = (
            f" Those of {worlds} ranks are of a sharded model, which only torch.distributed.checkpoint can recut."
            * bool(worlds)
        )
        return (
            f"--state: {self.folder} has the hook's state after the steps {steps or '(on other ranks)'}, and the model's "
            f"parameters are those of none of them, nor of the beginning.{other} Resume the script from a checkpoint that was "
            f"saved after one of these steps (the last is {found[-1].step if found else 'elsewhere'}), or give another "
            f"folder for a new run. {self.kept.remedy}"
        )

    def _see_one_folder(self, exchange: StoreExchange) -> None:
        """Check that every rank sees the files of the others. Otherwise no snapshot would ever be whole.

        Raises:
            StateError: on all ranks. A rank that raised alone would leave its peers in the exchange.
        """
        mark = self.folder / f"run-{self.run}"
        if self.rank == 0:
            with suppress(OSError):  # no rank then sees it
                self.folder.mkdir(parents=True, exist_ok=True)
                mark.touch()
        exchange(b"made")  # no rank looks sooner
        sees = exchange(b"1" if mark.exists() else b"0")
        if self.rank == 0:
            with suppress(OSError):
                mark.unlink(missing_ok=True)
        blind = [rank for rank, row in enumerate(sees) if row != b"1"]
        if blind:
            raise StateError(
                f"--state: ranks {blind} do not see a new file of rank 0 in {self.folder}: give a folder on a shared file "
                "system where rank 0 may write"
            )

    # -- after steps

    def _watch(self) -> None:
        if self._stops:
            return
        this = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            folder = this()
            if folder is not None:
                folder.after_step(optimizer)

        def forward(*_: object) -> None:
            folder = None if torch.compiler.is_compiling() else this()
            if folder is not None and folder._looks and torch.is_grad_enabled():
                folder.look_again()

        self._stops.append(register_optimizer_step_post_hook(torch.compiler.disable(after_step)).remove)
        model = self.kept.model()
        if model is not None:
            self._stops.append(model.register_forward_pre_hook(forward, prepend=True).remove)
        watch_saves(self.script_saved)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Write a snapshot after each Nth step of an optimizer of these parameters, once all ranks hold one model."""
        if not any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
            return
        self.step += 1
        self._looks, self._ended_steps = False, self.kept.progress()
        self._due |= self.step % self.every == 0
        if self._due and self.kept.whole():
            self._due = False
            self.write()

    def look_again(self) -> None:
        """Resume the snapshot of parameters that the script has loaded after its first forward, which may have been a dry run."""
        self._looks = not self._trained()
        own = self.kept.fingerprint()
        if not self._looks or own == self._own:
            return
        self._own = own
        if any(one.whole and one.step and self._fits(one, own) for one in self.listed()):
            self.resume()
            log.log(logging.WARNING if self.rank == 0 else logging.DEBUG, "--state: %s", self.resumed)

    def _trained(self) -> bool:
        """Return True if the model has trained since its last step, more than a dry run does."""
        return self.kept.progress() > self._ended_steps + 1

    def script_saved(self) -> None:
        """Mark the snapshot of this step with the present parameters: the script saves a checkpoint."""
        if self._written == self.step:
            now = (self.step, [p._version for p in self.kept.params])  # this is called for each tensor that is saved
            if self._marked == now:
                return
            self._marked, own = now, self.kept.fingerprint()
            if not self.step and own != self._own and self._trained():
                log.warning(
                    "--state: the parameters have changed, and no torch.optim optimizer holds them, so no step was counted: this "
                    "checkpoint cannot be resumed with --state. Attach in the script, and save handle.state_dict() there"
                )
                return
            with suppress(OSError):  # the script's own save must not fail by this
                (self._current / f"saved-{own}").touch()
        elif self._warned < 0:
            self._warned = self.step
            log.warning(
                "--state: the script saves after step %d, and the hook's state was saved after step %d: this checkpoint "
                "cannot be resumed with --state. %s",
                self.step,
                self._written,
                self.kept.remedy,
            )

    def end(self) -> None:
        """Stop watching, and write the state of the last step unless a backward has started another."""
        for stop in self._stops:
            stop()
        self._stops.clear()
        if self._written != self.step and self._ended_steps == self.kept.progress() and self.kept.whole():
            self.write()

    def write(self) -> None:
        """Write this rank's file of the current step. If that fails, training continues without this snapshot."""
        try:
            self._write()
        except Exception as error:  # a full disk is an OSError of ours, or a RuntimeError of torch.save
            if self._failed != self._written:  # log once until a snapshot succeeds
                self._failed = self._written
                log.error(
                    "--state: the state after step %d cannot be written to %s (%s: %s). The script continues. A run "
                    "can only resume from the checkpoint of a step whose state was written",
                    self.step,
                    self.folder,
                    type(error).__name__,
                    error,
                )

    def _write(self) -> None:
        begun = time.perf_counter()
        folder = self.folder / f"step-{self.step:012d}-{self.run}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self.rank}-of-{self.world}-{self.kept.fingerprint()}"
        aside = folder / f"rank-{self.rank}-of-{self.world}.tmp"
        state = self.kept.state_dict()
        try:
            with open(aside, "w+b") as file, _own_save():
                if state is not None:
                    torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
                path = path.with_name(f"{path.name}-{'none' if state is None else _crc(file)}.pt")
            os.replace(aside, path)
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
        self._written, self._current = self.step, folder
        self._latest = [*self._latest, (self.step, self.run)][-LATEST:]
        self._prune()
        log.debug("%s: %d bytes in %.1f ms", path, path.stat().st_size, 1000 * (time.perf_counter() - begun))

    def _prune(self) -> None:
        """Remove this rank's old files of this run and its lineage. Rank 0 also removes files of ranks beyond the world size.

        A resumed run also removes what its parent wrote later, if no checkpoint of the script followed. All other files may be
        those of another job.
        """
        mine = {**self._lineage, self.run: self.step}  # a faster rank writes the next step now
        there = [one for one in self.listed() if one.key in self._abandoned or one.step <= mine.get(one.run, -1)]
        marked = [one for one in there if one.saved][-MARKED:]
        kept = {*self._latest, *(one.key for one in marked), *(one.key for one in there if one.step == 0)}
        for one in there:
            if one.key in kept:
                continue
            for rank, path in one.files.items():
                if rank == self.rank or (self.rank == 0 and rank >= self.world):
                    path.unlink(missing_ok=True)
            _remove_if_empty(one.folder)


def _read_folder(one: Snapshot) -> Snapshot:
    for name in _names(one.folder):
        match = _RANK.match(name)
        if match:
            rank, one.world, one.stateless = int(match[1]), int(match[2]), match[4] == "none"
            one.files[rank], one.checksums[rank] = one.folder / name, match[3]
        elif match := _SAVED.match(name):
            one.saved.add(match[1])
    return one


def _names(folder: Path) -> list[str]:
    """Return the names in a folder, or none if another rank has removed it."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder without any rank's file."""
    names = _names(folder)
    if not any(_RANK.match(name) for name in names):
        for name in names:
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # another rank was faster
            folder.rmdir()


def _agree_on_run(exchange: StoreExchange) -> str:
    """Return a name for this run, the same on all ranks. Files of two runs must not make one snapshot."""
    return exchange(secrets.token_hex(8).encode())[0].decode()


def _newest_common(exchange: StoreExchange, keys: list[Key]) -> Key | None:
    """Return the newest snapshot that fits on every rank. The first snapshot wins over all others.

    A first step with a learning rate of zero does not change the parameters. A new run must not resume that step.
    """
    rest = sorted(keys, key=lambda key: (key[0] != 0, key[0], key[1]))
    rest = [key for key in rest if key[0] == 0] or rest
    while True:
        proposed = rest[-1] if rest else _NONE
        rows = exchange(f"{proposed[0]:020d}{proposed[1]}".encode())
        everyones = [(int(row[:20]), row[20:].decode()) for row in rows]
        if len(set(everyones)) == 1:
            return None if proposed == _NONE else proposed
        lowest = min(everyones)
        rest = [key for key in rest if key <= lowest]


_on_save: "list[weakref.WeakMethod[Callable[[], None]]]" = []
os.register_at_fork(after_in_child=_on_save.clear)  # what a data worker saves is no checkpoint
_saving = threading.local()  # .own: a snapshot is being written by this thread


@contextmanager
def _own_save() -> Iterator[None]:
    _saving.own = True
    try:
        yield
    finally:
        _saving.own = False


def watch_saves(saved: Callable[[], None]) -> None:
    """Call a method, of which no object is kept, whenever the script saves."""
    _on_save.append(weakref.WeakMethod(saved))
    _watch_saves()


@functools.cache
def _watch_saves() -> None:
    """Learn when the script saves. torch asks each registered tagger for the location of every storage that it saves.

    Frameworks and distributed checkpoints save through torch.save, too. A tagger needs no replacement of torch.save, and
    sees a script that has imported ``save`` by name. Safetensors files have no storages, so snapshots of scripts that
    write them stay by age only.
    """

    def tag(storage: object) -> None:
        if not getattr(_saving, "own", False):
            for one in _on_save:
                saved = one()
                if saved is not None:
                    saved()

    # Priority 0 comes before torch's own taggers (10 and more). None means that the next one is asked.
    torch.serialization.register_package(0, tag, lambda storage, location: None)
