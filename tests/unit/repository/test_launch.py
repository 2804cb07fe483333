"""The launch scripts, with replacements for torchrun, srun, scontrol, squeue and python that record their arguments.

tests/slurm runs them on a real SLURM.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rank_server import default_signals

ROOT = Path(__file__).resolve().parents[3]
AWKWARD = "data.train=[my file.jsonl, $HOME.jsonl]"  # spaces and a dollar must arrive unchanged

RECORD = """
import json, os, sys
keep = ("OMP_", "CUDA_DEVICE", "PYTHONFAULT", "PYTHONUNBUF", "TORCH_ELASTIC")
call = {"name": os.path.basename(sys.argv[0]), "args": sys.argv[1:], "pid": os.getpid()}
call["env"] = {name: value for name, value in os.environ.items() if name.startswith(keep)}
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(call) + "\\n")
"""
STAND_INS = {
    "torchrun": "",
    "python": """
import signal
verb = sys.argv[3]
if verb == "data" and "SIGNAL_EARLY" in os.environ:
    os.kill(os.getppid(), signal.SIGUSR1)
if verb == "status":
    print(os.environ.get("STATUS_TEXT", "as it is"))
sys.exit(int(os.environ.get(f"{verb.upper()}_EXIT", "0")))
""",
    # A requeue ends all processes of the job, also this one.
    "scontrol": """
import signal
if sys.argv[1] == "show":
    print("node07", "node08", "node11", sep="\\n")
elif os.environ.get("REQUEUE_EXIT"):
    sys.exit(int(os.environ["REQUEUE_EXIT"]))
else:
    os.kill(os.getppid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
""",
    "squeue": "print(os.environ['REASON'])",
    # Runs the task once per node, as srun does, but one after the other.  Meanwhile, the batch script gets SIGNALS.
    "srun": """
import signal, subprocess, time
forwarded = []
signal.signal(signal.SIGUSR1, lambda *_: forwarded.append("USR1"))
task = sys.argv[sys.argv.index("bash"):]
for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
    of_node = {"SLURM_NODEID": str(node), "SLURMD_NODENAME": ["node07", "node08", "node11"][node]}
    subprocess.run(task, env=os.environ | of_node, check=True)
for number, name in enumerate(os.environ.get("SIGNALS", "").split()):
    os.kill(os.getppid(), getattr(signal, "SIG" + name))
    deadline = time.monotonic() + 240
    while not (len(forwarded) > number if name == "USR1" else "squeue" in open(os.environ["CALLS"]).read()):
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
print("forwarded:", *forwarded)
sys.exit(1 if os.environ.get("SIGNALS") else 0)
""",
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The calls and the result of a launch script."""

    code: int
    pid: int  # process id of the script
    stdout: str
    stderr: str
    calls: list[dict]  # {"name", "args", "env", "pid"} of each call, in order

    def of(self, name: str) -> list[list[str]]:
        return [call["args"] for call in self.calls if call["name"] == name]


def launch(tmp_path: Path, script: str, *args: str, env: dict[str, str] | None = None) -> Launch:
    """Runs launch/`script` in an empty folder, with the replacements first on PATH; SLURM variables come from `env`
    only."""
    work, calls = tmp_path / "work", tmp_path / "calls.jsonl"
    work.mkdir(exist_ok=True)
    calls.unlink(missing_ok=True)
    for name, body in STAND_INS.items():
        path = tmp_path / name
        # without site-packages, so that it starts quickly
        path.write_text(f"#!{sys.executable} -IS\n{RECORD}\n{body}\n")
        path.chmod(0o755)
    ours = ("SLURM", "OMP", "CUDA", "NPROC", "PORT", "LOG_DIR", "TORCH", "SFT")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    clean |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)} | (env or {})
    command = [str(ROOT / "launch" / script), *args]
    # A shell cannot trap a signal that is ignored when the shell starts.
    with subprocess.Popen(
        command, cwd=work, env=clean, stdout=-1, stderr=-1, text=True, preexec_fn=default_signals
    ) as script_process:
        out, err = script_process.communicate(timeout=240)
    made = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
    return Launch(code=script_process.returncode, pid=script_process.pid, stdout=out, stderr=err, calls=made)


SLURM = {
    "SLURM_JOB_ID": "31234",
    "SLURM_JOB_NODELIST": "node[07-08,11]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_GPUS_ON_NODE": "4",
}
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@pytest.mark.parametrize("number", ["2", "auto"])
def test_local_checks_the_recipe_then_starts_the_processes(tmp_path: Path, number: str) -> None:
    run = launch(tmp_path, "local.sh", number, "recipes/demo.yaml", "parallel.cp=2", AWKWARD)
    assert run.code == 0, run.stderr
    recipe = ["recipes/demo.yaml", "parallel.cp=2", AWKWARD]
    check = ["-m", "sft", "check", *recipe, "--world-size", "2", "--no-data"]  # sft train checks for auto
    assert run.of("python") == [
        *([check] if number == "2" else []),
        ["-m", "sft", "data", "prepare", *recipe],
        ["-m", "sft", "train", *recipe, "--processes", number],
    ]


def test_local_gives_its_own_process_to_the_run(tmp_path: Path) -> None:
    """So the run gets each signal once, and its exit code is the exit code of the script."""
    run = launch(tmp_path, "local.sh", "2", "r.yaml", env={"TRAIN_EXIT": "75"})
    assert run.code == 75 and [call["pid"] for call in run.calls][-1] == run.pid


def test_a_job_of_one_node_opens_no_port(tmp_path: Path) -> None:
    run = launch(tmp_path, "slurm.sbatch", "recipes/demo.yaml", AWKWARD, env=SLURM | {"SLURM_JOB_NUM_NODES": "1"})
    assert run.code == 0, run.stderr
    assert not run.of("torchrun")
    options = ["--processes", "4", "--log-dir", "logs/31234/start-0/node-0"]
    assert run.of("python")[2] == ["-m", "sft", "train", "recipes/demo.yaml", AWKWARD, *options]


@pytest.mark.parametrize("script, args", [("local.sh", ["2", "r.yaml"]), ("slurm.sbatch", ["r.yaml"])])
def test_a_wrong_recipe_starts_nothing(tmp_path: Path, script: str, args: list[str]) -> None:
    run = launch(tmp_path, script, *args, env=SLURM | {"CHECK_EXIT": "2"})
    assert run.code == 2
    assert not run.of("torchrun") and not run.of("srun") and len(run.calls) <= 2  # scontrol show, and the check


@pytest.mark.parametrize("script, args", [("local.sh", []), ("local.sh", ["2"]), ("slurm.sbatch", [])])
def test_too_few_arguments_are_answered_with_the_usage(tmp_path: Path, script: str, args: list[str]) -> None:
    run = launch(tmp_path, script, *args, env=SLURM)
    assert run.code == 2
    assert run.stderr.startswith("usage: ") and "RECIPE [section.key=value ...]" in run.stderr
    assert run.calls == []


def test_slurm_starts_one_torchrun_per_node(tmp_path: Path) -> None:
    run = launch(tmp_path, "slurm.sbatch", "recipes/demo.yaml", AWKWARD, env=SLURM)
    assert run.code == 0, run.stderr
    recipe = ["recipes/demo.yaml", AWKWARD]
    assert run.of("scontrol") == [["show", "hostnames", "node[07-08,11]"]]
    assert run.of("python") == [
        ["-m", "sft", "check", *recipe, "--world-size", "12", "--no-data"],
        ["-m", "sft", "data", "prepare", *recipe],
        ["-m", "sft", "status", *recipe],
    ]
    (srun,) = run.of("srun")
    options = ["--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1", "--wait=60"]
    assert srun[: srun.index("bash")] == options
    assert run.of("torchrun") == [
        [
            *["--nnodes", "3", "--nproc-per-node", "4"],
            *["--node-rank", str(node), "--master-addr", "node07", "--master-port", "21234", "--rdzv-id", "31234.0"],
            *["--local-addr", name, "--max-restarts", "0", "--signals-to-handle", SIGNALS],
            *["--log-dir", f"logs/31234/start-0/node-{node}"],
            *["--tee", "3", "--local-ranks-filter", "0", "-m", "sft", "train", *recipe],
        ]
        for node, name in enumerate(["node07", "node08", "node11"])
    ]
    environment = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "180"}
    environment |= {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    assert [call["env"] for call in run.calls if call["name"] == "torchrun"] == 3 * [environment]
    assert (tmp_path / "work/logs/31234/start-0/status.txt").read_text() == "as it is\n"
    assert "3 nodes x 4 processes" in run.stdout


def test_what_slurm_reads_of_the_script() -> None:
    lines = (ROOT / "launch/slurm.sbatch").read_text().splitlines()
    for option in "ntasks-per-node=1 exclusive mem=0 requeue open-mode=append signal=B:USR1@120".split():
        assert f"#SBATCH --{option}" in lines


def test_a_prefix_stands_before_all_four_commands(tmp_path: Path) -> None:
    """The script does not call Python of the host, which may lack sft."""
    image = tmp_path / "image"
    image.write_text(f"#!{sys.executable} -IS\n{RECORD}\nos.execvp(sys.argv[3], sys.argv[3:])\n")
    image.chmod(0o755)
    env = SLURM | {"SFT_RUN_PREFIX": f"{image} --bind /data:/data"}
    run = launch(tmp_path, "slurm.sbatch", "r.yaml", AWKWARD, env=env)
    assert run.code == 0, run.stderr
    started = [call["name"] for call in run.calls if call["name"] in ("image", "python", "torchrun")]
    assert started == ["image", "python"] * 2 + ["image", "torchrun"] * 3 + ["image", "python"]
    commands = [["python", "-m", "sft", verb] for verb in ("check", "data", "status")]
    words = [*commands[:2], *3 * [["torchrun", "--nnodes", "3", "--nproc-per-node"]], commands[2]]
    assert [args[:6] for args in run.of("image")] == [["--bind", "/data:/data", *four] for four in words]
    assert all(args[-2:] == ["r.yaml", AWKWARD] for args in run.of("torchrun"))


def test_slurm_takes_processes_port_and_log_folder_from_the_environment(tmp_path: Path) -> None:
    run = launch(tmp_path, "slurm.sbatch", "r.yaml", env=SLURM | {"NPROC": "2", "PORT": "4000", "LOG_DIR": "my logs"})
    first = run.of("torchrun")[0]
    assert first[first.index("--nproc-per-node") + 1] == "2"
    assert first[first.index("--master-port") + 1] == "4000"
    assert first[first.index("--log-dir") + 1] == "my logs/start-0/node-0"
    assert "6" in run.of("python")[0]  # 3 nodes x 2


def test_slurm_without_gpus_says_what_to_set(tmp_path: Path) -> None:
    env = {name: value for name, value in SLURM.items() if name != "SLURM_GPUS_ON_NODE"}
    run = launch(tmp_path, "slurm.sbatch", "r.yaml", env=env)
    assert run.code != 0
    assert "ask for --gpus-per-node, or set NPROC" in run.stderr
    assert run.calls == []


@pytest.mark.parametrize(
    "status, signals, reason, code, requeues",
    [
        (0, "", "", 0, False),
        (75, "", "", 0, True),  # a crash
        (75, "USR1 USR1", "", 0, True),
        (75, "TERM", "None", 75, False),  # scancel, or a preemption after which SLURM itself requeues
        (75, "USR1 TERM", "None", 75, False),
        (75, "TERM", "", 75, False),  # SLURM does not answer
        (75, "USR1 TERM", "TimeLimit", 0, True),
        (2, "TERM", "TimeLimit", 2, False),
        (1, "", "", 1, False),  # `sft status` itself failed
    ],
)
def test_whether_a_job_comes_back(
    tmp_path: Path, status: int, signals: str, reason: str, code: int, requeues: bool
) -> None:
    env = {"STATUS_EXIT": str(status), "SIGNALS": signals, "REASON": reason, "SLURM_JOB_NUM_NODES": "1"}
    run = launch(tmp_path, "slurm.sbatch", "r.yaml", env=SLURM | env)
    assert run.code == code, run.stderr
    assert run.of("scontrol")[1:] == ([["requeue", "31234"]] if requeues else [])
    assert ("requeued" in run.stdout) == requeues
    assert ("this script does not requeue it" in run.stdout) == (code == 75)
    if "USR1" in signals:
        assert "forwarded: USR1" in run.stdout


def test_a_refused_requeue_is_told(tmp_path: Path) -> None:
    run = launch(tmp_path, "slurm.sbatch", "r.yaml", env=SLURM | {"STATUS_EXIT": "75", "REQUEUE_EXIT": "1"})
    assert run.code == 75
    assert "SLURM refuses to requeue it; submit it again to continue" in run.stderr


def test_a_signal_before_the_start_comes_back_without_one(tmp_path: Path) -> None:
    run = launch(tmp_path, "slurm.sbatch", "r.yaml", env=SLURM | {"STATUS_EXIT": "75", "SIGNAL_EARLY": "1"})
    assert run.code == 0, run.stderr
    assert not run.of("srun") and run.of("scontrol")[1:] == [["requeue", "31234"]]


def started(tmp_path: Path, restarts: int, text: str, **env: str) -> bool:
    """Whether start number `restarts` of a job is requeued if `sft status` prints `text`."""
    env |= {"STATUS_EXIT": "75", "STATUS_TEXT": text, "SLURM_RESTART_COUNT": str(restarts)}
    run = launch(tmp_path, "slurm.sbatch", "r.yaml", env=SLURM | {"SLURM_JOB_NUM_NODES": "1"} | env)
    assert f"SLURM_RESTART_COUNT {restarts}, " in run.stdout
    assert run.code in (0, 1) and (run.code == 0) == (len(run.of("scontrol")) == 2)
    assert (run.code == 1) == ("three starts in a row ended before the run began" in run.stderr)
    return run.code == 0


def test_three_starts_that_never_begin_are_enough(tmp_path: Path) -> None:
    texts = ["at 12:00", "at 12:00", "at 12:00", "at 12:03", "at 12:03"]
    assert [started(tmp_path, n, text) for n, text in enumerate(texts)] == [True, True, False, True, True]
    assert started(tmp_path, 5, "at 12:03", SIGNALS="USR1")  # a signal asked the run to end


def test_the_script_of_ci_is_executable_and_parses() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci/run")], capture_output=True).stderr == b""
