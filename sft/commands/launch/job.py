"""Describes a run for launchers: its recipe, its nodes, and the command of a node."""

import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sft.commands.arguments import read_recipe
from sft.config import Config
from sft.errors import ConfigError

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_MOST_LETTERS = 45  # names of pods are longer by 18 characters, and have at most 63
_RENDEZVOUS_S = 3600  # for which the nodes wait for the first one
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(^|_)KEY(_|$)|APIKEY|API_KEY", re.IGNORECASE)

# The command of a node.  The first node tokenises what is not tokenised; meanwhile the others wait for its torchrun.
# A stop signal goes to the launcher of the ranks, which saves.  torchrun turns every exit code into 1, so the exit code
# is that of `sft status`: 0 done, 75 start again, 2 find the cause first.
_NODE = """\
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}" PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={shutdown_s}  # seconds between a stop signal and SIGKILL
run=""
asked=""
trap 'asked=yes; if [ -n "$run" ]; then kill -TERM "$run" 2>/dev/null; fi' TERM INT HUP
if [ "${{NODE_RANK:-0}}" -eq 0 ]; then python -m sft data prepare {words} || exit $?; fi
{start} &
run=$!
if [ -n "$asked" ]; then kill -TERM "$run"; fi
while true; do
    wait "$run"
    code=$?
    if ! kill -0 "$run" 2>/dev/null; then break; fi
done
if [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then exit "$code"; fi
python -m sft status {words}
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on `nodes` machines with `ranks` processes each.

    text       the recipe file
    overrides  settings of the command line
    grace_s    run.grace_s: seconds from a stop signal to the end of the processes
    on_gpus    whether the run uses GPUs
    missing    what the recipe lacks for nodes that share no disk
    relative   a data file with a relative path, or None
    """

    name: str
    path: str
    text: str
    overrides: tuple[str, ...]
    nodes: int
    ranks: int
    grace_s: int
    on_gpus: bool
    run_dir: str
    missing: tuple[str, ...]
    relative: str | None

    @classmethod
    def of(cls, arguments: Namespace) -> "Job":
        """The job of a command line.  Raises ConfigError for a recipe that could not start on these GPUs."""
        from sft.recipe.layout import resolve_layout

        recipe = read_recipe(arguments)
        config = recipe.config
        run, per_node = config.run, arguments.gpus_per_node or config.parallel.gpus_per_node
        gpus: int = arguments.gpus
        if gpus < 1 or per_node < 1 or (gpus > per_node and gpus % per_node):
            raise ConfigError(
                f"--gpus {gpus} is not a number of whole nodes of {per_node} GPUs.  Give a multiple of {per_node}, a "
                "number below it for a part of one node, or --gpus-per-node."
            )
        resolve_layout(recipe, gpus)
        return cls(
            name=_checked_name(arguments.name or _slug(Path(arguments.recipe).stem)),
            path=arguments.recipe,
            text=Path(arguments.recipe).read_text(encoding="utf-8"),
            overrides=tuple(arguments.overrides),
            nodes=max(1, gpus // per_node),
            ranks=min(gpus, per_node),
            grace_s=run.grace_s,
            on_gpus=run.device != "cpu",
            run_dir=run.dir,
            missing=tuple(_missing(config)),
            relative=next((file for file in _files(config) if not file.startswith("/") and "://" not in file), None),
        )

    @property
    def shutdown_s(self) -> int:
        """Seconds that torchrun waits between a stop signal and SIGKILL: more than the ranks take."""
        return self.grace_s + 30

    @property
    def end_s(self) -> int:
        """Seconds that a cluster must wait between a stop signal and SIGKILL: more than torchrun takes."""
        return self.shutdown_s + 30

    @property
    def node_script(self) -> str:
        """The bash script of a node.  It needs RECIPE, the path of the recipe; with several nodes also NODE_RANK (from
        0) and MASTER_ADDR, the first node."""
        words = " ".join(['"$RECIPE"', *map(shlex.quote, self.overrides)])
        if self.nodes == 1:
            start = f"python -m sft train {words} --processes {self.ranks}"
        else:
            start = (
                f'torchrun --nnodes {self.nodes} --nproc-per-node {self.ranks} --node-rank "$NODE_RANK" \\\n'
                f'    --master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-29500}}" --rdzv-id {self.name} \\\n'
                "    --max-restarts 0 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \\\n"
                f"    --rdzv-conf timeout={_RENDEZVOUS_S} --tee 3 --local-ranks-filter 0 -m sft train {words}"
            )
        return _NODE.format(shutdown_s=self.shutdown_s, start=start, words=words)


def variables(settings: Sequence[str]) -> Mapping[str, str]:
    """The environment of --env NAME=VALUE.  Raises ConfigError for a value that looks like a secret."""
    named = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise ConfigError(f"--env {name} has no value.  Write --env NAME=VALUE, such as --env HF_HOME=/data/hf.")
        if _SECRET.search(name):
            raise ConfigError(
                f"--env {name} would write a secret into a file that is shown and kept.  Name it with --secret; its "
                "value then stays where secrets are kept."
            )
        named[name] = value
    return named


def mounts(volumes: Sequence[str]) -> Mapping[str, str]:
    """{folder: name of the volume} of --volume NAME:/FOLDER.  Raises ConfigError for anything else."""
    folders: dict[str, str] = {}
    for volume in volumes:
        name, _, folder = volume.partition(":")
        if not name or not folder.startswith("/") or folder == "/" or folder.rstrip("/") in folders:
            raise ConfigError(
                f"--volume {volume} is not NAME:/FOLDER with a folder of its own.  Write --volume shared:/data."
            )
        folders[folder.rstrip("/")] = name
    return folders


def check_run_dir(job: Job, folders: Mapping[str, str], where: str) -> None:
    """Raise ConfigError if a restart loses all checkpoints.  A relative run.dir is on the first volume."""
    kept = [*folders]
    is_kept = any(job.run_dir == folder or job.run_dir.startswith(f"{folder}/") for folder in kept)
    missing = [*job.missing, *([] if kept or job.relative is None else [f"a URL in place of {job.relative}"])]
    if not missing or is_kept or (kept and not job.run_dir.startswith("/")):
        return
    raise ConfigError(
        f"run.dir = {job.run_dir} is on the own disk of a {where}, which loses it at a restart, and other nodes do not "
        "see it.  Give a volume that all nodes mount, such as --volume shared:/data; relative paths of the recipe "
        f"begin in the folder of the first volume.  Volumes given: {', '.join(kept) or 'none'}.  Or keep everything in "
        f"an object store; the recipe lacks: {', '.join(missing)}."
    )


def _missing(config: Config) -> Iterator[str]:
    """Yields what a recipe lacks for a run whose nodes share no disk."""
    if config.checkpoint.remote is None:
        yield "checkpoint.remote"
    if config.data.cache_remote is None:
        yield "data.cache_remote"
    if config.checkpoint.export_hf != "none":
        yield "checkpoint.export_hf=none"


def _files(config: Config) -> list[str]:
    inputs = [config.data.train_files, *config.data.eval_sets.values()]
    return [entry for entries in inputs for entry in entries if isinstance(entry, str)]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_MOST_LETTERS].strip("-")


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > _MOST_LETTERS:
        raise ConfigError(
            f"--name {name} cannot name a job: use at most {_MOST_LETTERS} small letters, digits and hyphens, and "
            "begin with a letter."
        )
    return name
