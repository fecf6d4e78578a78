"""The files of docs/launch.md start a training by Slurm and MPI, and the Kubernetes file fits its resource's schema."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .tools import slurm

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "launch.md").read_text()
FENCE = re.compile(r"^([^\n]*):\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILES = {names[-1]: body for caption, body in FENCE.findall(PAGE) if (names := re.findall(r"`(\w+\.\w+)`", caption))}
SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(256, 128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
HOOK = "two_level(quant4)"
STARTED = f"commhooks run: {HOOK} on DistributedDataParallel (Linear)"
ENDED = f"{HOOK} on rank 0 of 4: 3 steps, 3 of them compressed"  # on one node nothing is compressed
pytestmark = pytest.mark.timeout(640)


def line(begin: str) -> str:
    """Return the only line of a block of the page that begins so."""
    [found] = re.findall(rf"^{re.escape(begin)}[^\n]*$", PAGE, re.MULTILINE)
    return found


def small(text: str, port: int) -> str:
    """Return a file or command for two ranks of one CPU on each of two nodes, without GPUs."""
    text = re.sub(r" --gpus-per-node[ =]8", "", text).replace("--cpus-per-task=32", "--cpus-per-task=2")
    return text.replace("-node 8", "-node 2").replace("29500", str(port))


def written(folder: Path, *names: str) -> None:
    """Write files of the page and a script to train into a folder."""
    (folder / "train.py").write_text(SCRIPT)
    for name, port in zip(names, slurm.free_ports(len(names)), strict=True):
        (folder / name).write_text(small(FILES[name], port))
        (folder / name).chmod(0o755)


def trained(output: str) -> bool:
    flat = " ".join(output.split())
    return STARTED in flat and ENDED in flat


def test_the_page_has_its_files() -> None:
    assert set(FILES) == {"node.sh", "job.sbatch", "rank.sh", "rank_mpi.sh", "job.yaml", "job.py"}
    compile(FILES["job.py"], "job.py", "exec")


def test_the_variables_of_ray_are_those_of_run() -> None:
    from ch_run.settings import Settings

    assert f'"COMMHOOKS_HOOK": "{HOOK}"' in FILES["job.py"]
    names = re.findall(r"COMMHOOKS_\w+", PAGE.partition("## Ray\n")[2])
    settings = Settings.of(dict.fromkeys(names, "x"))
    assert (settings.hook, settings.state) == ("x", "x")


@pytest.mark.full
def test_slurm_starts_it_in_three_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := slurm.missing():
        pytest.skip(reason)
    written(tmp_path, "node.sh", "job.sbatch", "rank.sh")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{Path('/usr/bin')}:{Path('/usr/sbin')}:/bin:/sbin")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ways = [small(line("srun --nodes 2 --ntasks-per-node 1"), 0), "sbatch --wait -o job.txt job.sbatch; cat job.txt"]
    ways.append(small(line("srun --nodes 2 --ntasks-per-node 8"), 0))
    cluster = tmp_path / "cluster"
    cluster.mkdir()
    program = [sys.executable, slurm.__file__, str(cluster), *ways]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=630)
    assert done.returncode == 0, done.stderr
    for number, way in enumerate(ways):
        output = (cluster / f"{number}.txt").read_text()
        assert (cluster / f"{number}.rc").read_text() == "0" and trained(output), f"{way}:\n{output}"


@pytest.mark.full
def test_mpirun_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun not installed: apt-get install openmpi-bin")
    written(tmp_path, "rank_mpi.sh")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    [port] = slurm.free_ports(1)
    command = small(line("mpirun"), port).replace("node1:8,node2:8", "localhost:4").replace("node1", "localhost")
    *words, script = shlex.split(command)
    # All ranks have one host name, so torchrun's variables tell the nodes.
    node = f"GROUP_RANK=$((OMPI_COMM_WORLD_RANK / 2)) LOCAL_WORLD_SIZE=2 exec {script}"
    words += ["bash", "-c", node]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and trained(done.stderr), done.stdout + done.stderr


@pytest.mark.full  # it needs packages that no other test needs
def test_the_kubernetes_file_fits_the_schema() -> None:
    """A model of the resource drops fields that it does not have, so the file must come back whole, also with the volume."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    yaml = pytest.importorskip("yaml")
    alone, volume = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert alone == FILES["job.yaml"] and HOOK in yaml.safe_load(alone)["spec"]["trainer"]["command"]

    def whole(text: str) -> bool:
        job = yaml.safe_load(text)
        return bool(models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job)

    assert whole(alone) and whole(alone + volume)
    assert not whole((alone + volume).replace("replicatedJobs", "replicaJobs"))
