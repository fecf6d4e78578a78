"""`commhooks advise` follows its figures. The virtual network keeps its rules, and the command runs."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ch_bench.advise import predict
from ch_bench.advise.network import Curve, Message, Network, pair_link
from ch_bench.advise.predict import Prediction, recommend
from ch_bench.advise.replay import EmulatedTransport, Note, Recorder, Replay
from ch_bench.advise.workload import MODELS, WRAPPER, Workload, load, optimizer_of
from ch_bench.links import netns
from ch_bench.links.link import Link as LinkWords
from ch_core import Engine, Link
from ch_testing import spawn
from commhooks import Bucket, HookConfigError, Reduction, Topology, create, get, list_hooks

BENCH = Path(__file__).resolve().parents[2] / "plugins" / "ch-bench"  # its programs are not installed
SECOND = 1e6  # bytes
LINK = LinkWords.parse("100mbit,20ms")
CURVE = Curve((0.0, SECOND, 2 * SECOND), (0.5, 1.5, 2.5), (0.0, 0.0, 0.0))  # half a second, and one for a megabyte


def posts(*megabytes: float, after: float = 0.0) -> list[Note]:
    """Compute for a while, and post messages one after another."""
    times = (after, *([0.0] * (len(megabytes) - 1)))
    sent = [Message("all_reduce", "float32", int(size * SECOND)) for size in megabytes]
    return [Note(seconds, number, one) for number, (seconds, one) in enumerate(zip(times, sent, strict=True))]


def ends(*notes: Note, curve: Curve = CURVE, **options: float) -> float:
    """Return the time at which a step ends. Two ranks that did the same must agree."""
    network = Network({("all_reduce", "float32"): curve}, **{"spare": 8.0, **options})
    (first, _), (second, _) = Replay.of(network, [[*notes, Note(0.0, -1, None)]] * 2)
    assert first == second
    return first


def test_a_module_that_returns_no_loss_gets_a_wrapper():
    layers = torch.nn.Sequential(torch.nn.Linear(3, 2))
    work = Workload(
        layers, (torch.ones(1, 3), torch.ones(1)), torch.optim.SGD(layers.parameters()), torch.device("cpu")
    )
    with pytest.raises(HookConfigError, match=r"(?s)raised TypeError.*whose mean replaces it.*class WithLoss"):
        work.step()
    class_ = WRAPPER[WRAPPER.index("class WithLoss") : WRAPPER.index("return WithLoss")]
    names = {"torch": torch}
    exec(class_, names)
    assert names["WithLoss"](torch.nn.Linear(3, 2))(torch.ones(1, 3), torch.zeros(1, dtype=torch.long)).dim() == 0


def test_a_loss_behind_the_batch_needs_no_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x, y = torch.nn.Linear(3, 2), torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    loss, sgd = torch.nn.functional.cross_entropy, partial(torch.optim.SGD, lr=1.0)

    def loaded(*made: Any) -> Workload:
        monkeypatch.setitem(MODELS, "mine", lambda: made)
        return load("mine", torch.device("cpu"))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for functions in ((loss, sgd), (sgd, loss)):
            work = loaded(layers, (x, y), *functions)
            assert work.loss is loss and work.optimizer.defaults["lr"] == 1.0
            before = [p.clone() for p in layers.parameters()]
            work.step()
            assert all(not torch.equal(p, old) for p, old in zip(layers.parameters(), before, strict=True))
        work = loaded(layers, x, sgd)
        assert work.loss is None and work.batch == (x,)
        mse = torch.nn.MSELoss()
        for wrong in ((layers, x, mse), (layers, (x, y), mse, mse), (layers, x, 3), (layers, x, sgd, sgd)):
            with pytest.raises(HookConfigError, match="return"):
                loaded(*wrong)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "loss",
    [
        torch.nn.MSELoss(),
        torch.cosine_embedding_loss,
        lambda *both: (both[0] - both[1]).mean(),
        lambda x, y=None: x.sum(),
    ],
)
def test_a_loss_is_told_from_an_optimizer_by_what_it_returns(loss: Callable[..., Any]) -> None:
    """The second one is built in and has no signature. The others say little about the number of arguments that they need."""
    assert optimizer_of(loss, torch.nn.Linear(2, 2)) is None


def test_an_optimizer_may_need_two_arguments_or_none() -> None:
    class Grouped(torch.optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr)

    layer = torch.nn.Linear(2, 2)
    assert isinstance(optimizer_of(lambda *params: Grouped(*params, 0.1), layer), Grouped)
    with pytest.raises(HookConfigError, match=r"the optimizer .*Grouped.* raised TypeError: .*'lr'"):
        optimizer_of(Grouped, layer)  # a class cannot be a loss


def test_a_single_message_takes_the_measured_time():
    assert ends(*posts(1.0), wait(0)) == pytest.approx(1.5)
    assert ends(*posts(5.0), wait(0)) == pytest.approx(5.5)  # beyond the largest size that was tried


def wait(number: int, after: float = 0.0) -> Note:
    return Note(after, number, None)


def test_computing_hides_a_message():
    assert ends(*posts(2.0), wait(0, after=1.0)) == pytest.approx(2.5)
    assert ends(*posts(1.0), wait(0, after=10.0)) == pytest.approx(10.0)  # it arrived long ago


@pytest.mark.parametrize(("together", "end"), [(2.0, 2.5), (1.0, 1.5), (1.5, 2.0)])
def test_messages_share_the_network(together, end):
    both = posts(1.0, 1.0)
    assert ends(*both, wait(1), together=together) == pytest.approx(end)
    assert ends(*both, wait(1), wait(0), together=together) == pytest.approx(end)  # at the same time, or before


def test_far_ranks_wait_for_the_latency_once():
    assert ends(*posts(1.0, 1.0, 1.0), wait(0), wait(1), wait(2), lanes=1) == pytest.approx(3.5)


def pair_body(rank: int, world: int) -> tuple[float, float]:
    found = pair_link(torch.distributed.group.WORLD, torch.device("cpu"))
    assert found is not None
    return found.rate, found.round_trip


@pytest.mark.full
@pytest.mark.gloo
def test_the_ranks_agree_on_the_link_between_two_of_them():
    first, *others = spawn(pair_body, 3)
    assert all(one == first for one in others) and min(first) > 0


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(netns.why_not(LINK)), reason=netns.why_not(LINK) or "runs")
def test_hooks_of_far_ranks_are_predicted_with_the_measured_link(tmp_path: Path):
    (tmp_path / "mine.py").write_text(MODEL)
    command = [
        sys.executable,
        "-m",
        "commhooks",
        "advise",
        "--model",
        "mine:make",
        "--seconds",
        "10",
        "--link",
        LINK.text,
    ]
    run = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout[run.stdout.index("{") :])
    assert 0.018 < found["network"]["pair"]["round_trip"] < 0.04
    assert any("Every hook was attached with link='" in reason for reason in found["reasons"])
    rows = {row["hook"]: row for row in found["predictions"]}
    assert 0.009 < rows["quant8"]["waiting"] < 0.019  # half a round trip, and no second one for the status


def local_body(rank: int, world: int, local: bool) -> bool:
    predict.pair_link = lambda group, device: Link(1e9, 0.02)  # as on a machine that is busy
    MODELS["mine"] = lambda: (torch.nn.Linear(64, 64), torch.randn(4, 64))
    work = load("mine", torch.device("cpu"))
    advice = predict.advise(work, ["bf16_compress"], seconds=2.0, local=local)
    return any("Every hook was attached with link=" in reason for reason in advice.reasons)


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.parametrize("local", [True, False])
def test_ranks_of_one_machine_are_not_far_apart(local: bool) -> None:
    assert spawn(local_body, 2, local) == [not local] * 2


def test_other_messages_continue_while_one_is_in_flight():
    three = posts(1.0, 1.0, 0.3)
    assert ends(*three, wait(0), together=1.0) == pytest.approx(1.5)  # half a second of it in flight
    assert ends(*three, wait(0), wait(2), together=1.0) == pytest.approx(1.8)  # the third leaves in this time


def test_no_more_than_two_go_at_a_time():
    four = posts(1.0, 1.0, 1.0, 1.0)
    assert ends(*four, wait(3), together=1.0) == pytest.approx(2.5)  # two rounds of a second, and one latency


def test_an_idle_network_gives_a_burst_and_earns_it_again():
    once = [*posts(1.0), wait(0)]
    assert ends(*once, burst=0.4) == pytest.approx(0.6 + 0.5)
    later = Note(10.0, 1, Message("all_reduce", "float32", int(SECOND)))
    assert ends(*once, later, wait(1), burst=0.4) == pytest.approx(1.1 + 10.0 + 0.6 + 0.5)


def test_messages_take_the_core_that_the_rank_computes_on():
    busy = Curve((0.0, SECOND), (0.0, 1.0), (0.0, 1.0))  # keeps a core busy while it is in flight
    one = [*posts(1.0), wait(0, after=1.0)]
    assert ends(*one, curve=busy, spare=0.0) == pytest.approx(2.0)  # two ranks share a core and its work
    assert ends(*one, curve=busy, spare=1.0) == pytest.approx(1.0)


def test_a_message_begins_when_the_last_rank_has_posted_it():
    network = Network({("all_reduce", "float32"): CURVE}, spare=1.0)
    end = Note(1.0, -1, None)
    quick, slow = ([*posts(1.0, after=seconds), wait(0), end] for seconds in (1.0, 3.0))
    assert Replay.of(network, [quick, slow]) == [(pytest.approx(5.5), pytest.approx(waited)) for waited in (3.5, 1.5)]


def test_starting_a_message_takes_the_rank_time():
    slow = Curve(CURVE.sizes, CURVE.seconds, CURVE.cpu, start=0.25)
    assert ends(*posts(1.0, 1.0), curve=slow) == pytest.approx(0.5)


def hooks() -> list[str]:
    return [s.name for s in list_hooks(kind="reduction") if s.provider in ("ch-ddp", "ch-powersgd", "ch-quant")]


@pytest.mark.parametrize("world", [2, 4])
def test_a_hook_sends_its_plan_over_the_emulated_group(world):
    """The engine checks every request against the plan of the hook, and the result is finite."""
    for name in hooks():
        reduction = create(name).reduction
        assert isinstance(reduction, Reduction)
        recorder = Recorder()
        transport = EmulatedTransport(1, world, recorder)
        engine = Engine(reduction, transport)
        torch.manual_seed(0)
        for _ in range(2):
            recorder.begin()
            bucket = Bucket.from_tensors({"w": torch.randn(96, 80), "b": torch.randn(80)})
            engine.submit(bucket)
            assert engine.finish() is None, name
            assert bool(bucket.storage.isfinite().all()), name
            notes = recorder.end()
        counted = sum(stage[0] for stage in [(engine.counters.traffic.payload_bytes,)])
        assert (counted > 0) == (name != "noop")
        waited = [seconds for _, seconds in Replay.of(Network({("all_reduce", "float32"): CURVE}), [notes] * world)]
        assert (min(waited) > 0.4) == (name != "noop"), name  # at least one latency of half a second
    assert callable(get("allreduce"))


FAST = Curve((0.0, SECOND), (0.0, 0.01), (0.0, 0.0))  # a hundred megabytes a second
LEVELS = Topology.even(4, 2)


def network(*, between: Curve) -> Network:
    """Return two nodes of two ranks with a fast link inside nodes, and ``between`` for everything else."""
    slow, quick = ({("all_reduce", "float32"): curve} for curve in (between, FAST))
    levels = {"node": Network(quick, spare=8.0), "peers": Network(slow, spare=8.0)}
    return Network(slow, spare=8.0, levels=levels, topology=LEVELS)


def test_each_level_has_its_own_link_and_its_own_order() -> None:
    """A message inside a node waits for the ranks of this node, and not for messages between nodes."""
    size = int(SECOND)
    node, peers = (Message("all_reduce", "float32", size, scope) for scope in ("node", "peers"))
    both = [Note(0.0, 0, peers), Note(0.0, 1, node), wait(1), wait(0), Note(0.0, -1, None)]
    slow_link = network(between=CURVE)
    assert Replay.of(slow_link, [both] * 4) == [(pytest.approx(1.5), pytest.approx(1.5))] * 4
    late = [both[0]._replace(seconds=2.0), *both[1:]]
    ends_at = [seconds for seconds, _ in Replay.of(slow_link, [both, both, late, both])]
    # Rank 2 posts after two seconds. Its peer is rank 0. Rank 3 waits for it inside the node, rank 1 for nobody.
    assert ends_at == [pytest.approx(end) for end in (3.5, 1.5, 3.5, 2.01)]


def notes_of(hook: str) -> list[list[Note]]:
    """Return the notes of four ranks on two nodes in the second step of a hook, without their computation."""
    made = []
    for rank in range(4):
        recorder = Recorder()
        reduction = create(hook).reduction
        assert reduction is not None
        engine = Engine(reduction, EmulatedTransport(rank, 4, recorder, LEVELS))
        for _ in range(2):
            recorder.begin()
            torch.manual_seed(rank)
            bucket = Bucket.from_tensors(
                {"w": torch.randn(1024, 512), "v": torch.randn(256, 512), "b": torch.randn(512)}
            )
            engine.submit(bucket)
            assert engine.finish() is None
            assert bool(bucket.storage.isfinite().all())
            notes = recorder.end()
        made.append([note._replace(seconds=0.0) for note in notes])
    return made


def test_two_levels_are_advised_where_the_link_between_nodes_is_slow() -> None:
    """The figures of the links are given, so the order of the hooks follows from their messages."""

    def seconds(link: Network, hook: str) -> float:
        return max(end for end, _ in Replay.of(link, notes_of(hook)))

    slow = network(between=Curve((0.0, SECOND), (0.0, 1.0), (0.0, 0.0)))
    flat, two = seconds(slow, "quant4"), seconds(slow, "two_level(quant4)")
    assert 0.4 < two / flat < 0.7  # half of the parts that a rank sends, and gradients inside
    parts = {m.scope for notes in notes_of("two_level(powersgd(rank=4))") for note in notes if (m := note.sent)}
    assert parts == {"all", "node", "peers"}  # all: the status of the step
    equal = network(between=FAST)
    assert seconds(equal, "two_level(quant4)") > seconds(equal, "quant4")  # the level inside costs more than it saves
    given = [
        Prediction("allreduce", seconds(slow, "allreduce"), 0.0, 0.0, 4.0, False, 8.0),
        Prediction("quant4", flat, 0.0, 0.0, 2.0, True, 4.0),
        Prediction("two_level(quant4)", two, 0.0, 0.0, 3.0, True, 2.0),
    ]
    chosen, reasons = recommend(0.0, given)
    assert chosen == "two_level(quant4)"
    assert any("4.0 times fewer bytes from node to node" in reason for reason in reasons)


def predictions(**seconds: float) -> list[Prediction]:
    lossy = {"allreduce": (False, 100.0), "bf16_compress": (True, 50.0), "powersgd": (True, 1.0)}
    return [Prediction(hook, s, 0.0, 0.0, lossy[hook][1], lossy[hook][0]) for hook, s in seconds.items()]


def test_the_advice():
    chosen, reasons = recommend(1.0, predictions(allreduce=1.02, bf16_compress=1.01, powersgd=1.3))
    assert chosen == "allreduce"
    assert any("Do not compress" in reason for reason in reasons)
    chosen, reasons = recommend(1.0, predictions(allreduce=1.02, bf16_compress=0.985, powersgd=1.3))
    assert chosen == "allreduce"  # faster, but not by enough to justify changed gradients
    assert any("worth" in reason for reason in reasons)
    chosen, _ = recommend(1.0, predictions(allreduce=3.0, bf16_compress=2.0, powersgd=1.1))
    assert chosen == "powersgd"
    chosen, reasons = recommend(1.0, predictions(allreduce=3.0, bf16_compress=1.12, powersgd=1.1))
    assert chosen == "bf16_compress"  # equally fast, with a smaller loss
    assert any("powersgd is as fast" in reason for reason in reasons)
    two_level = Prediction("two_level(allreduce)", 0.99, 0.0, 0.0, 200.0, False)
    assert recommend(1.0, [*predictions(allreduce=1.0), two_level])[0] == "allreduce"  # exact, but no faster
    assert recommend(1.0, [*predictions(allreduce=1.2), two_level])[0] == "two_level(allreduce)"


def test_a_gain_within_the_noise_is_no_advice() -> None:
    """Other programs slowed one of the runs down. The model's own work is the same with every hook."""
    plain, lossy = predictions(allreduce=0.28, powersgd=0.16)
    assert recommend(0.16, [plain, lossy])[0] == "powersgd"
    chosen, reasons = recommend(0.16, [replace(plain, model=0.27), replace(lossy, model=0.14)])
    assert chosen == "allreduce"
    assert any("Too noisy to tell" in reason and "130.0 ms longer" in reason for reason in reasons)
    assert recommend(0.16, [replace(plain, model=0.15), replace(lossy, model=0.14)])[0] == "powersgd"


MODEL = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32)), torch.randn(4, 64)

def wrong():
    return 3
"""


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_the_command_on_a_custom_model(tmp_path: Path):
    (tmp_path / "mine.py").write_text(MODEL)

    def advise(model: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "commhooks", "advise", "--model", model, "--seconds", "6", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)

    run = advise("mine:make", "--hooks", "bf16_compress", "powersgd(rank=1)", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout[run.stdout.index("{") :])  # torch 2.10 prints gloo's connections
    rows = {row["hook"]: row for row in found["predictions"]}
    assert list(rows) == ["allreduce", "bf16_compress", "powersgd(rank=1)"]
    assert found["recommended"] in rows
    assert found["world_size"] == 2
    assert rows["allreduce"]["sent"] == 4 * found["parameters"] == 2 * rows["bf16_compress"]["sent"]
    assert all(row["seconds"] >= row["waiting"] >= 0 for row in rows.values())
    assert {row["collective"] for row in found["network"]["collectives"]} >= {"all_reduce", "all_to_all"}


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_the_command_measures_both_links_of_nodes_with_several_ranks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    command = [sys.executable, "-m", "commhooks", "advise", "--model", "mine:make", "--seconds", "8", "--nodes", "2x2"]
    run = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout[run.stdout.index("{") :])
    rows = {row["hook"]: row for row in found["predictions"]}
    assert (found["world_size"], found["ranks_per_node"]) == (4, 2)
    assert {row["scope"] for row in found["network"]["collectives"]} == {"all", "node", "peers"}
    pairs = [(hook, f"two_level({hook})") for hook in ("bf16_compress", "quant8", "quant4", "powersgd(rank=4)")]
    assert list(rows) == ["allreduce", *(hook for pair in pairs for hook in pair)]
    assert all(rows[two]["leaving"] < rows[flat]["leaving"] for flat, two in pairs)
    assert found["recommended"] in rows


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 64, bias=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in model:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh), torch.randn(4, 64)
"""


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_the_steps_of_fsdp2_have_all_collectives(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SHARDED)
    hooks = ["quant8(block=32) / quant4(block=32)", "quant4(block=32) / quant4(block=32)"]
    command = [sys.executable, "-m", "commhooks", "advise", "--model", "mine:make", "--seconds", "6", "--json"]
    run = subprocess.run([*command, "--hooks", *hooks], capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout[run.stdout.index("{") :])
    rows = {row["hook"]: row["sent"] for row in found["predictions"]}
    numel = found["parameters"]
    eight, four = numel + 2 * numel // 32, numel // 2 + 2 * numel // 32
    # Two gathers and a reduce-scatter, of which a rank sends half.
    assert 2 * rows["allreduce"] == 3 * 4 * numel
    assert 2 * rows[hooks[0]] == 2 * eight + four
    assert 2 * rows[hooks[1]] == 2 * four + four


WRONG_NAMES = [
    (
        ("advise", "--model", "nothing:make"),
        "HookConfigError: unknown model 'nothing:make' (No module named 'nothing')",
    ),
    (("advise", "--model", "mine:nothing"), "HookConfigError: unknown model 'mine:nothing' (module 'mine' has no"),
    (("advise", "--model", "mine:torch"), "HookConfigError: model 'mine:torch' is a module, not a function"),
    (
        ("advise", "--model", "mine:wrong"),
        "HookConfigError: model 'mine:wrong' returned int: return (module, batch)",
    ),
    (("advise", "--hooks", "nothing"), "UnknownHookError: unknown hook 'nothing'"),
    (("bench", "--model", "nothing"), "HookConfigError: unknown model 'nothing'"),
    (("bench", "--model", "mine:wrong"), "HookConfigError: model 'mine:wrong' returned int"),
    (("bench", "--hooks", "nothing"), "UnknownHookError: unknown hook 'nothing'"),
]


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("advise", "--model", "nothing"),
            "HookConfigError: unknown model 'nothing': write module:callable, or one of gpt",
        ),
        *(pytest.param(words, message, marks=pytest.mark.full) for words, message in WRONG_NAMES),
    ],
)
def test_a_wrong_name_is_one_error_with_the_remedy(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    command = [sys.executable, "-m", "commhooks", *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("programs.cost.kernel_launches", "post_local_sgd"),
            "HookNotSupportedError: post_local_sgd is a foreign hook",
        ),
        (("programs.links.wire_bytes", "--hooks", "nothing"), "UnknownHookError: unknown hook 'nothing'"),
    ],
)
def test_programs_refuse_a_wrong_hook_with_one_error(words: tuple[str, ...], message: str) -> None:
    run = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=100, cwd=BENCH)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr
