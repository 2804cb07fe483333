"""Jobs of launch/slurm.sbatch: a small run on the CPU, submitted, and the steps it has done."""

import sys
from pathlib import Path

from tests.builders import chats
from tests.launching import RECIPE, records
from tests.slurm.cluster import Cluster, Job

ROOT = Path(__file__).resolve().parents[2]
STEPS = 200  # long enough that a job is signalled well before its end
ONE_NODE = ("--gpus-per-node=0",)  # the script asks for eight
TWO_NODES = ("--gpus-per-node=0", "--nodes=2")


def submit(cluster: Cluster, folder: Path, options: tuple[str, ...] = ONE_NODE, *overrides: str, **env: str) -> Job:
    """A run of two processes over the given nodes, which saves when it is told to and at its end, not between."""
    chats(folder, 60)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    settings = [f"train.num_steps={STEPS}", "train.global_batch_size=2", f"checkpoint.save_every={10 * STEPS}"]
    command = [str(ROOT / "launch/slurm.sbatch"), str(folder / "recipe.yaml"), *settings, *overrides]
    path = f"{Path(sys.executable).parent}:{cluster.env['PATH']}"
    env = {"NPROC": "1" if options is TWO_NODES else "2", "PATH": path, "PYTHONPATH": str(ROOT)} | env
    return Job(cluster, folder, "--time=10", *options, *command, **env)


def trained(job: Job) -> list[int]:
    """Steps that the run has told."""
    if not (job.folder / "run/metrics.jsonl").exists():
        return []
    return [record["step"] for record in records(job.folder, "train")]
