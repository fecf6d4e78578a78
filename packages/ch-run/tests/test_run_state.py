"""``commhooks run --state`` resumes killed runs of an unchanged script."""

import io
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_run.found_model import HookedModel, LoneModel
from ch_run.saved_states import HookKept, StateFolder
from ch_testing import spawn

from .kit import run

HOOK = "powersgd(rank=2)"
pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return found


@pytest.mark.full
@pytest.mark.parametrize("script", ["ddp_loop", "fsdp2_loop"])
def test_killed_and_resumed_with_the_same_bits(tmp_path: Path, script: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert run(whole, script, "--save", 4, hook=HOOK).stats["compressed_steps"] == 8
    died = run(killed, script, "--save", 4, "--kill", 6, hook=HOOK, state="state", check=False)
    assert re.search(
        rf"^commhooks run: {re.escape(HOOK)} on .*; no earlier state was found in state/", died.err, re.MULTILINE
    )
    assert died.code != 0 and not (killed / "weights.pt").exists()
    resumed = run(killed, script, "--save", 4, "--resume", hook=HOOK, state="state")
    assert "; its state after step 4 is resumed from state/" in resumed.err
    assert resumed.stats["compressed_steps"] == 4
    assert [torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(killed).values(), strict=True)] == [
        True
    ] * 4


@pytest.mark.full
def test_snapshots_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A snapshot lacks a rank. The run refuses it, and does not continue as if it had no state."""
    run(tmp_path, "ddp_loop", "--save", 4, "--kill", 4, hook=HOOK, state="state", check=False)
    [one] = (tmp_path / "state").glob("*/step-000000000004-*/rank-1-of-2-*.pt")
    one.unlink()
    done = run(tmp_path, "ddp_loop", "--resume", hook=HOOK, state="state", check=False)
    assert done.code != 0 and "StateError" in done.err and "parameters are those of none of them" in done.err


@pytest.mark.full
def test_a_save_between_snapshots_is_logged_at_once(tmp_path: Path) -> None:
    done = run(tmp_path, "ddp_loop", "--save", 4, hook=HOOK, state="state", state_every=3)
    assert "the script saves after step 4, and the hook's state was saved after step 3" in done.err
    steps = {int(path.name.split("-")[1]) for path in (tmp_path / "state").glob("*/step-*")}
    assert steps == {0, 6, 8}  # the first, every third step, and the end


@pytest.mark.full
def test_a_script_that_imports_save_by_name_is_seen(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "scripts" / "ddp_loop.py").read_text()
    by_name = "from torch import save\n" + text.replace("torch.save(", "save(")
    done = run(tmp_path, by_name, "--save", 4, hook=HOOK, state="state", state_every=3)
    assert "the script saves after step 4, and the hook's state was saved after step 3" in done.err


def trained(rank: int, world: int, folder: str, steps: int, begin: int) -> tuple[float, float, list[str]]:
    """Train some steps with snapshots. Return the sum over ranks of the mean residual before and after the resume."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Linear(48, 48)), bucket_cap_mb=0.005
    )
    if begin:
        model.module.load_state_dict(torch.load(f"{folder}/weights", weights_only=True))
    handle = commhooks.attach(model, HOOK, single_process=True)
    snapshots = StateFolder(Path(folder), HookKept(handle), 1)
    snapshots.resume()
    resumed = _residual(handle)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(begin, begin + steps):
        data = torch.randn(8, 48, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    snapshots.end()
    if rank == 0:
        torch.save(model.module.state_dict(), f"{folder}/weights")
    dist.barrier()
    return resumed, _residual(handle), sorted(path.name for path in Path(folder).glob("step-*"))


def _residual(handle: commhooks.CommHook) -> float:
    """Return the mean over ranks of one number that depends on all residuals."""
    state = handle.state_dict()["entries"]
    total = torch.zeros((), dtype=torch.float64)
    for row in state.values():
        if "residual" in row:
            total += (row["residual"].double() * torch.arange(row["residual"].numel()).view_as(row["residual"])).sum()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


@pytest.mark.full
def test_another_number_of_ranks_continues_with_the_mean_residual(tmp_path: Path) -> None:
    (_, before, _), _ = spawn(trained, 2, str(tmp_path), 3, 0, timeout=120)
    [(resumed, _, _)] = spawn(trained, 1, str(tmp_path), 0, 3, timeout=120)
    assert before != 0.0 and resumed == pytest.approx(before, rel=1e-6)
    for resumed, _, _ in spawn(trained, 3, str(tmp_path), 1, 3, timeout=120):
        assert resumed == pytest.approx(before, rel=1e-6)


def job(folder: str, begin: int, end: int, saves: tuple[int, ...]) -> set[str]:
    """Train in one process, also from the checkpoint of a step. Return the steps and runs of all snapshots."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(48, 48))
    if begin:
        model.module.load_state_dict(torch.load(f"{folder}/at-{begin}", weights_only=True))
    handle = commhooks.attach(model, HOOK, single_process=True)
    snapshots = StateFolder(Path(folder), HookKept(handle), 1)
    snapshots.resume()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(begin, end):
        optimizer.zero_grad()
        model(torch.randn(8, 48, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        if step + 1 in saves:
            torch.save(model.module.state_dict(), f"{folder}/at-{step + 1}")
    snapshots.end()
    handle.detach()
    return {path.parent.name.removeprefix("step-0000000000") for path in Path(folder).glob("step-*/rank-*.pt")}


def jobs_in_one_folder(rank: int, world: int, folder: str) -> list[set[str]]:
    return [
        job(folder, 0, 5, (2,)),
        job(folder, 0, 7, (3,)),  # the same seed begins once more
        job(folder, 2, 4, (4,)),  # resumes the first job
        job(folder, 2, 3, ()),  # does so once more
        job(folder, 4, 7, ()),  # resumes the third job
    ]


def test_a_run_removes_only_files_of_its_own_lineage(tmp_path: Path) -> None:
    [[first, second, third, fourth, fifth]] = spawn(jobs_in_one_folder, 1, str(tmp_path), timeout=120)
    steps = [
        sorted(int(name[:2]) for name in found) for found in (first, second - first, third - second, fourth - third)
    ]
    assert steps == [[0, 2, 4, 5], [3, 6, 7], [3, 4], [3]]
    assert first < second  # another job's
    assert sorted(int(name[:2]) for name in second - third) == [
        4,
        5,
    ]  # later than the resumed step, and without checkpoint
    assert third < fourth
    assert {int(name[:2]) for name in fourth - fifth} == {3} and len(fifth - fourth) == 2  # the fourth job's files stay
    assert (fourth - third) <= fifth


def refused(rank: int, world: int, folder: str) -> str:
    """Resume parameters of which there is no state, by the model of a run."""
    torch.manual_seed(1)
    handle = commhooks.attach(DistributedDataParallel(torch.nn.Linear(48, 48)), HOOK, single_process=True)
    found = HookedModel("a model", handle)
    try:
        found.keep_state(Path(folder), 1)
    except commhooks.StateError as error:
        found.write_last_state()
        return str(error)
    return "resumed"


def test_a_refused_resume_changes_no_file(tmp_path: Path) -> None:
    spawn(resumed_or_refused, 1, str(tmp_path), timeout=120)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*/*")}
    names = sorted(path.name for path in tmp_path.iterdir())
    for _ in range(2):
        [said] = spawn(refused, 1, str(tmp_path), timeout=120)
        assert "parameters are those of none of them" in said
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*/*")} == before
        assert sorted(path.name for path in tmp_path.iterdir()) == names


def damaged(rank: int, world: int, folder: str) -> list[str]:
    said = []
    job(folder, 0, 0, ())
    [path] = Path(folder).glob("step-*/rank-0-of-1-*.pt")
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for data in (b"", whole[: len(whole) // 2], bytes(flipped), b"text"):
        path.write_bytes(data)
        try:
            job(folder, 0, 0, ())
        except commhooks.StateError as error:
            said.append(str(error).replace(str(path), "FILE").replace(str(path.parent), "FOLDER"))
    path.write_bytes(whole)
    job(folder, 0, 0, ())
    return said


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    [said] = spawn(damaged, 1, str(tmp_path), timeout=120)
    assert len(said) == 4
    assert {one.partition(".")[0] for one in said} == {
        "--state: FILE is damaged (its bytes do not have the checksum in its name)"
    }
    assert all("Remove the folder FOLDER, and resume the script from another checkpoint" in one for one in said)


def alone(rank: int, world: int, folder: str) -> set[str]:
    """Train two steps in one process without the hook, from the checkpoint of two ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Linear(48, 48))
    model.load_state_dict(torch.load(f"{folder}/weights", weights_only=True))
    found = LoneModel("a model", HOOK, list(model.parameters()))
    found.keep_state(Path(folder), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(8, 48)).square().mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), f"{folder}/weights")
    found.drop()
    return {path.parent.name[-19:-17] for path in Path(folder).glob("step-*/rank-0-of-1-*-none.pt")}


@pytest.mark.full
def test_a_job_that_was_alone_for_a_while_grows_again(tmp_path: Path) -> None:
    spawn(trained, 2, str(tmp_path), 3, 0, timeout=120)
    assert spawn(alone, 1, str(tmp_path), timeout=120) == [{"04", "05"}]
    (resumed, after, names), _ = spawn(trained, 2, str(tmp_path), 1, 5, timeout=120)
    assert resumed == 0.0 != after
    assert "06" in {name[15:17] for name in names}


@pytest.mark.full
def test_a_script_that_was_alone_for_a_while_grows_again(tmp_path: Path) -> None:
    run(tmp_path, "ddp_loop", "--save", 2, "--kill", 3, hook=HOOK, state="state", check=False)
    lone = run(
        tmp_path, "ddp_loop", "--resume", "--save", 4, "--kill", 5, ranks=1, hook=HOOK, state="state", check=False
    )
    assert "the state of 2 ranks after step 2 ends here" in lone.err
    grown = run(tmp_path, "ddp_loop", "--resume", hook=HOOK, state="state")
    assert "begins without a state after step 4" in grown.err and grown.stats["compressed_steps"] == 4


def resumed_or_refused(rank: int, world: int, folder: str) -> str:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(48, 48))
    handle = commhooks.attach(model, HOOK, timeout=20.0)
    try:
        StateFolder(Path(folder), HookKept(handle), 1).resume()
    except Exception as error:
        return type(error).__name__
    return "resumed"


def test_a_damaged_file_of_one_rank_is_refused_on_all_ranks(tmp_path: Path) -> None:
    assert spawn(resumed_or_refused, 2, str(tmp_path), timeout=120) == ["resumed", "resumed"]
    [one] = tmp_path.glob("step-*/rank-1-of-2-*.pt")
    one.write_bytes(one.read_bytes()[:100])
    first, second = spawn(resumed_or_refused, 2, str(tmp_path), timeout=120)
    assert (first, second) == ("RankMismatchError", "StateError")


def test_a_new_start_in_an_old_folder_is_new(tmp_path: Path) -> None:
    (_, before, _), _ = spawn(trained, 2, str(tmp_path), 2, 0, timeout=120)
    shutil.copy(tmp_path / "weights", tmp_path / "old")
    (resumed, again, names), _ = spawn(trained, 2, str(tmp_path), 2, 0, timeout=120)
    assert resumed == 0.0 and again == before
    assert {int(name.split("-")[1]) for name in names} == {0, 1, 2}


def clamped(rank: int, world: int, folder: str) -> list[float]:
    """Train two steps, clamp the parameters, and save them. Return the residual, and that of a resume from this checkpoint."""
    found = []
    torch.manual_seed(0)
    for begins in (True, False):
        model = DistributedDataParallel(torch.nn.Linear(48, 48))
        if not begins:
            model.module.load_state_dict(torch.load(f"{folder}/clamped", weights_only=True))
        handle = commhooks.attach(model, HOOK)
        snapshots = StateFolder(Path(folder, "1-Linear"), HookKept(handle), 1)
        snapshots.resume()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2 * begins):
            optimizer.zero_grad()
            model(torch.randn(8, 48)).square().mean().backward()
            optimizer.step()
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)
        if begins and rank == 0:
            torch.save(model.module.state_dict(), f"{folder}/clamped")
        dist.barrier()
        found.append(_residual(handle))
        snapshots.end()
    return found


def test_a_checkpoint_of_clamped_parameters_finds_the_state_of_its_step(tmp_path: Path) -> None:
    for trained_, resumed in spawn(clamped, 2, str(tmp_path), timeout=120):
        assert trained_ == resumed != 0.0


def loaded_late(rank: int, world: int, folder: str) -> tuple[float, list[float]]:
    """Train two steps and save. Then resume from it, after a dry run with a backward, and after a step. Return the residuals."""
    found = []
    for begins in (True, False):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(48, 48))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = commhooks.attach(model, HOOK, optimizer=optimizer)
        snapshots = StateFolder(Path(folder, "1-Linear"), HookKept(handle), 1)
        snapshots.resume()
        for _ in range(1 + begins):
            optimizer.zero_grad()
            model(torch.randn(8, 48)).square().mean().backward()
            if begins:
                optimizer.step()
        if begins and rank == 0:
            torch.save(model.module.state_dict(), f"{folder}/weights")
        dist.barrier()
        if begins:
            found.append(_residual(handle))
            snapshots.end()
    saved = torch.load(f"{folder}/weights", weights_only=True)
    for _ in range(2):
        model.module.load_state_dict(saved)
        optimizer.zero_grad()
        output = model(torch.randn(8, 48))
        found.append(_residual(handle))
        output.square().mean().backward()
        optimizer.step()
    return found[0], found[1:]


def test_a_checkpoint_that_is_loaded_after_a_dry_run_finds_its_state(tmp_path: Path) -> None:
    """After the first step the script goes on with the state that it has."""
    for wanted, (resumed, kept) in spawn(loaded_late, 2, str(tmp_path), timeout=120):
        assert wanted == resumed != kept


def stepped_by_hand(rank: int, world: int, folder: str) -> None:
    """Train without an optimizer of torch, and save. Then resume."""
    for begins in (True, False):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(48, 48))
        if not begins:
            model.module.load_state_dict(torch.load(f"{folder}/weights", weights_only=True))
        handle = commhooks.attach(model, "warmup(quant8, steps=3)")
        snapshots = StateFolder(Path(folder, "1-Linear"), HookKept(handle), 1)
        if not begins:
            with pytest.raises(commhooks.StateError, match="those of none of them"):
                snapshots.resume()
            return
        snapshots.resume()
        for _ in range(3):
            model(torch.randn(8, 48)).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        if rank == 0:
            torch.save(model.module.state_dict(), f"{folder}/weights")
        dist.barrier()


def test_a_checkpoint_after_steps_that_nothing_has_counted_is_refused(tmp_path: Path) -> None:
    """The hook would begin at its first step."""
    spawn(stepped_by_hand, 2, str(tmp_path), timeout=120)


class Saving(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that the data worker saves, as a cache does."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.ones(48)
        torch.save(sample, io.BytesIO())
        return sample


def cached(rank: int, world: int, folder: str) -> list[str]:
    """Train three epochs of one step. Return the marks."""
    model = DistributedDataParallel(torch.nn.Linear(48, 48))
    snapshots = StateFolder(Path(folder, "1-Linear"), HookKept(commhooks.attach(model, HOOK)), 1)
    snapshots.resume()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for sample in torch.utils.data.DataLoader(Saving(), num_workers=1, multiprocessing_context="fork"):
            optimizer.zero_grad()
            model(sample).square().mean().backward()
            optimizer.step()
    dist.barrier()
    return [path.parent.name for path in Path(folder).glob("*/step-*/saved-*")]


def test_what_a_data_worker_saves_is_no_checkpoint(tmp_path: Path) -> None:
    assert spawn(cached, 2, str(tmp_path), timeout=120) == [[], []]


def thawed(rank: int, world: int, folder: str) -> list[tuple[float, str]]:
    """Train a head, then the whole model in a new wrapper, and resume the whole model alone, as a script after a kill does."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Linear(48, 48))
    found, taken = [], list[Path]()
    for number, frozen in ((1, True), (2, False), (1, False)):
        net[0].requires_grad_(not frozen)
        model = DistributedDataParallel(net)
        handle = commhooks.attach(model, HOOK)
        kept = StateFolder(Path(folder, f"{number}-Sequential"), HookKept(handle), 1, [] if len(taken) > 1 else taken)
        kept.resume()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2 if len(taken) < 2 else 0):
            optimizer.zero_grad()
            model(torch.randn(8, 48)).square().mean().backward()
            optimizer.step()
        found.append((_residual(handle), kept.folder.name))
        taken.append(kept.folder)
        kept.end()
        handle.detach()
    return found


def test_a_model_that_is_wrapped_in_another_order_finds_its_state(tmp_path: Path) -> None:
    for head, whole, resumed in spawn(thawed, 2, str(tmp_path), timeout=120):
        assert head[1] == "1-Sequential" and whole[1] == "2-Sequential"
        assert resumed == whole != head
