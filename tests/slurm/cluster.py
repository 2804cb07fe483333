"""A real SLURM of two nodes on one machine: munged, slurmctld and two slurmd, all files in one folder.

The cluster does not read, start or change SLURM or munge of the machine: it has its own keys, sockets, ports and spool
folders.  Jobs run as the user who runs the tests, with the environment that `submit` gets.  `stop` ends all processes
that the daemons and their jobs leave running, and returns their command lines.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path

import pytest

from tests.builders import chats
from tests.launching import RECIPE, free_port, records

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
PATH = os.environ["PATH"] + ":/usr/local/sbin:/usr/sbin:/sbin"  # daemons are not on every user's PATH
KILL_WAIT_S = 20
ROOT = Path(__file__).resolve().parents[2]
STEPS = 200  # so many that a job gets its signal well before its end
ONE_NODE = ("--gpus-per-node=0",)  # the script requests eight
TWO_NODES = ("--gpus-per-node=0", "--nodes=2")
MEMORY_MB = 20_000  # memory of a node in SLURM's accounting; it reserves nothing on the machine


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of SLURM.  words: put before a command so that it runs on this node"""

    name: str
    hostname: str
    address: str
    words: Sequence[str] = ()

    def line(self, port: int) -> str:
        place = f"NodeHostname={self.hostname} NodeAddr={self.address} Port={port}"
        return f"NodeName={self.name} {place} CPUs=2 RealMemory={MEMORY_MB}"


# Nodes on loopback, with names that resolve on any machine; ranks meet at the first node.
HOST = socket.gethostname().split(".")[0]
LOOPBACK = tuple(Node(name=name, hostname=HOST, address="127.0.0.1") for name in ("127.0.0.1", "127.0.0.2"))

# Memory is consumable: a job that requests none gets 200 MB of a node, and is killed if it uses more.
CONFIG = """
ClusterName=test
SlurmctldHost={nodes[0].hostname}({nodes[0].address})
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{lines}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def skip_without_slurm() -> None:
    """Skips the test if the machine has no SLURM and `make test-slurm` could not install it."""
    if absent := [name for name in NEEDED if shutil.which(name, path=PATH) is None]:
        pytest.skip(f"no SLURM on this machine ({', '.join(absent)}): on Debian, as root, apt install slurm-wlm munge")


def until(condition: Callable[[], object], seconds: float, what: str, told: Callable[[], str] = str) -> None:
    """Waits for `condition`.  After `seconds` raises AssertionError with `what` and the output of `told`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{told()}"
        time.sleep(0.1)


class Cluster:
    """A running cluster; `stop` must be called."""

    def __init__(self, folder: Path, nodes: Sequence[Node] = LOOPBACK) -> None:
        self.folder, self._nodes = folder, nodes
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        self._daemons: list[subprocess.Popen] = []
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        ports = [free_port() for _ in range(1 + len(nodes))]
        lines = "\n".join(node.line(port) for node, port in zip(nodes, ports[1:]))
        settings = {"ports": ports, "nodes": nodes, "lines": lines, "user": getuser(), "kill_wait": KILL_WAIT_S}
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, **settings))
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{name}={self.folder / file}" for name, file in files.items()]
        self._daemon("munged", "--foreground", "--force", f"--log-file={self.folder}/munge.log", *options)
        until((self.folder / "munge.socket").exists, 30, "munged", self.told)
        self._daemon("slurmctld", "-D", node=self._nodes[0])
        for node in self._nodes:
            self._daemon("slurmd", "-D", "-N", node.name, node=node)
        until(self._idle, 60, "idle nodes", self.told)

    def _daemon(self, name: str, *options: str, node: Node = LOOPBACK[0]) -> None:
        with open(self.folder / f"{name}-{len(self._daemons)}.out", "w") as out:
            daemon = subprocess.Popen(
                [*node.words, name, *options],
                env=os.environ | self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._daemons.append(daemon)

    def _idle(self) -> bool:
        assert self._alive(), f"a daemon ended\n{self.told()}"
        states = self.call("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t", check=False)
        return states.split() == ["idle"] * len(self._nodes)

    def _alive(self) -> bool:
        return all(daemon.poll() is None for daemon in self._daemons)

    def told(self) -> str:
        """The last lines of every daemon."""
        return "\n".join(
            f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in sorted(self.folder.glob("*.out")) + sorted(self.folder.glob("munge.log"))
        )

    def call(self, *command: str, check: bool = True, **env: str) -> str:
        """The output of a SLURM command that runs on the first node."""
        words = [*self._nodes[0].words, *command]
        done = subprocess.run(words, env=os.environ | self.env | env, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.told()}"
        return done.stdout

    def stop(self) -> list[str]:
        """Ends all jobs and daemons, and all processes that they left.  Returns the command lines of processes that
        jobs left running."""
        if self._alive():
            self.call("scancel", f"--user={getuser()}", check=False)
            with contextlib.suppress(AssertionError):  # processes that do not end are killed below
                until(lambda: not self.call("squeue", "--noheader").strip(), KILL_WAIT_S + 30, "the end of all jobs")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=20)
            daemon.kill()  # if it still runs
            daemon.wait()
        left = dict(self._left())
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return list(left.values())

    def _left(self) -> Iterator[tuple[int, str]]:
        """Processes that were started with this cluster's configuration: (process id, command line)."""
        mark = f"SLURM_CONF={self.env['SLURM_CONF']}".encode()
        for pid, line in command_lines().items():
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    yield pid, line


class Job:
    """`Job(cluster, folder, "--nodes=2", "launch/slurm.sbatch", ...)` is submitted at once."""

    def __init__(self, cluster: Cluster, folder: Path, *command: str, **env: str) -> None:
        self.cluster, self.folder = cluster, folder
        self.output = folder / "job.out"
        options = ["--parsable", f"--chdir={folder}", f"--output={self.output}"]
        self.id = cluster.call("sbatch", *options, *command, **env).strip()

    def field(self, name: str) -> str:
        """A field of `scontrol show job`, such as JobState, Restarts or ExitCode."""
        words = self.cluster.call("scontrol", "show", "job", self.id).split()
        return dict(word.partition("=")[::2] for word in words)[name]

    def told(self) -> str:
        """The output of the job so far, from all its starts."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait(self, state: str, *, restarts: int = 0, seconds: float = 150) -> None:
        """Waits until the job stays in `state`.  Raises AssertionError with the job's output if the job ends in another
        state."""
        others = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"} - {state}

        def reached() -> bool:
            now, started_again = self.field("JobState"), int(self.field("Restarts"))
            is_other = now in others or started_again > restarts
            assert not is_other, f"job {self.id} is {now} ({started_again} restarts), not {state}\n{self.told()}"
            return now == state and started_again == restarts

        until(reached, seconds, f"job {self.id} {state} with {restarts} restarts", self.told)

    def start_now(self) -> None:
        """Starts a requeued job at once; SLURM would wait two minutes.

        First waits for the end of the previous start; otherwise a late report of it could be taken for one of the new
        start.
        """
        until(lambda: not any(f"[{self.id}." in line for line in command_lines().values()), 60, "the end of the start")
        self.cluster.call("scontrol", "update", f"JobId={self.id}", "StartTime=now")


def command_lines() -> dict[int, str]:
    """The command lines of all processes of this machine, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def submit(cluster: Cluster, folder: Path, options: tuple[str, ...] = ONE_NODE, *overrides: str, **env: str) -> Job:
    """Submits a run of two processes over the given nodes.  It saves only if it is told to, and at its end."""
    chats(folder, 60)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    settings = [f"train.num_steps={STEPS}", "train.global_batch_size=2", f"checkpoint.save_every={10 * STEPS}"]
    command = [str(ROOT / "launch/slurm.sbatch"), str(folder / "recipe.yaml"), *settings, *overrides]
    path = f"{Path(sys.executable).parent}:{cluster.env['PATH']}"
    env = {"NPROC": "1" if options is TWO_NODES else "2", "PATH": path, "PYTHONPATH": str(ROOT)} | env
    return Job(cluster, folder, "--time=10", *options, *command, **env)


def trained(job: Job) -> list[int]:
    """The steps that the run has printed."""
    if not (job.folder / "run/metrics.jsonl").exists():
        return []
    return [record["step"] for record in records(job.folder, "train")]
