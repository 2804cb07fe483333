"""Makes a SkyPilot task, and bash scripts that start a run over ssh or submit it to SLURM."""

import os
import shlex
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sft
from sft.commands.launch.job import Job, check_run_dir, mounts, variables
from sft.errors import ConfigError

_MARK = "END_OF_RECIPE"
# Waits for all hosts.  The exit code is that of the first host that failed, in the order of the hosts.
_WAIT = """\
result=0
for pid in "${started[@]}"; do
    while true; do
        wait "$pid"
        code=$?
        if ! kill -0 "$pid" 2>/dev/null; then break; fi
    done
    if [ "$result" -eq 0 ]; then result=$code; fi
done
exit "$result"
"""


def skypilot(job: Job, options: Namespace) -> dict[str, Any]:
    """A task for `sky jobs launch`, which starts the run again after exit code 75 and after a lost machine.

    options: gpu, image, volume, secret, env
    """
    if options.gpu is None and job.on_gpus:
        raise ConfigError("--gpu is missing: the name of the GPU at SkyPilot, such as H100 (`sky gpus list`).")
    if _MARK in job.text.split("\n"):
        raise ConfigError(f"{job.path} has a line {_MARK}, which ends the recipe in the script.  Remove it.")
    folders = mounts(options.volume)
    check_run_dir(job, folders, "machine")
    resources: dict[str, Any] = {"accelerators": f"{options.gpu}:{job.ranks}"} if job.on_gpus else {}
    resources |= {"image_id": f"docker:{options.image}"} if options.image else {}
    resources["job_recovery"] = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]}
    lines = [
        'export RECIPE="$HOME/recipe.yaml" NODE_RANK="$SKYPILOT_NODE_RANK"',
        "export MASTER_ADDR=\"${SKYPILOT_NODE_IPS%%$'\\n'*}\"  # the first line",
        f"cat > \"$RECIPE\" <<'{_MARK}'",
        *job.text.rstrip("\n").split("\n"),
        _MARK,
        *([f"cd {shlex.quote(next(iter(folders)))}"] if folders else []),
    ]
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "resources": resources}
    task |= {"volumes": dict(folders)} if folders else {}
    task |= {"envs": dict(named)} if (named := variables(options.env)) else {}
    task |= {"secrets": dict.fromkeys(options.secret)} if options.secret else {}
    return {**task, "run": "\n".join([*lines, job.node_script])}


def ssh(job: Job, options: Namespace) -> str:
    """A script that starts the run on each host, in the current folder, which all hosts must see.

    Ctrl-C makes the run save.  options: hosts, env
    """
    hosts = [host for host in (options.hosts or "").split(",") if host]
    if len(hosts) != job.nodes or len({*hosts}) < len(hosts):
        raise ConfigError(
            f"--hosts {options.hosts or ''} names {len({*hosts})} hosts, but the run needs {job.nodes} nodes of "
            f"{job.ranks} processes.  Name each host once: --hosts a,b."
        )
    settings = {"RECIPE": job.path, "MASTER_ADDR": hosts[0].rpartition("@")[2], "PATH": os.environ["PATH"]}
    lines = [
        f"# Starts {job.name} on {', '.join(hosts)}.  Run it where ssh reaches them without a password.",
        "started=()",
    ]
    lines.append("trap 'kill -TERM \"${started[@]}\" 2>/dev/null' TERM INT HUP")
    for rank, host in enumerate(hosts):
        exports = _exports({**settings, "NODE_RANK": str(rank), **variables(options.env)})
        remote = f"cd {shlex.quote(os.getcwd())} && {exports} && exec bash -c {shlex.quote(job.node_script)}"
        # -tt: when ssh ends here, the commands on the host get SIGHUP.
        lines += [f"ssh -tt {shlex.quote(host)} {shlex.quote(remote)} </dev/null &", "started+=($!)"]
    return "\n".join(["#!/usr/bin/env bash", *lines, _WAIT])


def slurm(job: Job, options: Namespace) -> str:
    """A script that submits launch/slurm.sbatch.  options: time, partition, account, env"""
    batch = Path(sft.__file__).resolve().parents[1] / "launch" / "slurm.sbatch"
    if not batch.is_file():
        raise ConfigError("launch/slurm.sbatch is in the repository of sft, and this installation has no copy of it.")
    settings = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.shutdown_s), **variables(options.env)}
    settings |= {} if job.on_gpus else {"NPROC": str(job.ranks)}
    words = [
        *("sbatch", "--job-name", job.name, "--nodes", str(job.nodes)),
        f"--gpus-per-node={job.ranks if job.on_gpus else 0}",
        f"--signal=B:USR1@{job.grace_s + 20}",
        *(f"--{name}={value}" for name in ("time", "partition", "account") if (value := getattr(options, name))),
        *(str(batch), job.path, *job.overrides),
    ]
    return f"#!/usr/bin/env bash\n{_exports(settings)}\nexec {shlex.join(words)}\n"


def _exports(settings: Mapping[str, str]) -> str:
    return f"export {' '.join(f'{name}={shlex.quote(value)}' for name, value in settings.items())}"
