"""Run commands on a Slurm cluster of two nodes on this machine: `python tests/tools/slurm.py FOLDER COMMAND...`.

Each command's exit status and output go to `FOLDER/0.rc`, `FOLDER/0.txt`, and so on. The program starts itself again in mount,
process and host name namespaces of its own. There the nodes' names resolve to the loopback interface, and when it ends, the
kernel ends all its daemons and job steps. Each node has its own host name, by which `two_level` tells the nodes apart.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "srun")
NAMESPACES = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
NODES = ("n1", "n2")
LIMIT = 180  # seconds for a command
INSIDE = "--inside"

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""


def missing() -> str:
    """Return the reason why no cluster can start here, or an empty text."""
    lost = [name for name in DAEMONS if shutil.which(name) is None]
    if lost:
        return f"{', '.join(lost)} not installed: apt-get install slurm-wlm munge"
    if subprocess.run([*NAMESPACES, "true"], capture_output=True, timeout=10).returncode:
        return "this user may not make namespaces: unshare --mount --pid --uts failed"
    return ""


def free_ports(count: int) -> list[int]:
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in listening]
    for one in listening:
        one.close()
    return ports


def start(folder: Path) -> None:
    """Start the daemons, and wait until both nodes are idle."""
    hosts = folder / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {node}\n" for node in NODES))
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {name: str(folder / f"munge.{name}") for name in ("socket", "pid", "log", "seed")}
    subprocess.Popen(
        ["munged", "--force", "--foreground", f"--key-file={key}", f"--socket={files['socket']}"]
        + [f"--{name}-file={files[name]}" for name in ("pid", "log", "seed")],
        stderr=subprocess.DEVNULL,
    )
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=socket.gethostname().split(".")[0], folder=folder, ports=free_ports(3)))
    os.environ["SLURM_CONF"] = str(conf)
    end = time.monotonic() + 60
    while not Path(files["socket"]).exists() and time.monotonic() < end:
        time.sleep(0.05)
    subprocess.Popen(["slurmctld", "-D", "-i"], stderr=subprocess.DEVNULL)
    for node in NODES:
        daemon = f"hostname {node} && exec slurmd -D -N {node}"
        subprocess.Popen(["unshare", "--uts", "sh", "-c", daemon], stderr=subprocess.DEVNULL)
    states = ""
    while time.monotonic() < end:
        said = subprocess.run(["sinfo", "-h", "-N", "-o", "%t"], capture_output=True, text=True, timeout=30)
        states = said.stdout + said.stderr
        if said.stdout.split() == ["idle"] * len(NODES):
            return
        time.sleep(0.2)
    logs = "".join(f"\n{path}:\n{path.read_text()[-1500:]}" for path in sorted(folder.glob("*.log")))
    raise SystemExit(f"the nodes are not idle after 60 s: {states}{logs}")


def main(folder: Path, commands: list[str]) -> None:
    start(folder)
    for number, command in enumerate(commands):
        with (folder / f"{number}.txt").open("w") as output:
            status = subprocess.run(
                ["timeout", "-k", "5", str(LIMIT), "bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode
        (folder / f"{number}.rc").write_text(str(status))


def as_first_process(child: int) -> int:
    """Collect ended processes until the child ends, and return its exit status.

    The first process of a namespace inherits orphans. Slurm takes an orphan that nobody collects for a job that it cannot kill,
    and drains the node.
    """
    while True:
        ended, status = os.wait()
        if ended == child:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    if sys.argv[1] != INSIDE:
        os.execvp(NAMESPACES[0], [*NAMESPACES, sys.executable, __file__, INSIDE, *sys.argv[1:]])
    if child := os.fork():
        sys.exit(as_first_process(child))
    main(Path(sys.argv[2]).resolve(), sys.argv[3:])
