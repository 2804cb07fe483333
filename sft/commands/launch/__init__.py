"""`sft launch`: prints what starts a run on several machines: a manifest, a task or a script.

It checks the recipe for the number of GPUs, and starts nothing itself.
"""

from argparse import ArgumentParser, Namespace
from typing import Any

from sft.commands.arguments import recipe_command

_ABOUT = {
    "kubernetes": "print a manifest for Kubernetes: a TrainJob of Kubeflow Trainer 2, or a JobSet",
    "skypilot": "print a task for `sky jobs launch`",
    "ssh": "print a script that starts torchrun on hosts over ssh",
    "slurm": "print a script that submits launch/slurm.sbatch",
}


def add(commands: Any) -> None:
    group = commands.add_parser("launch", help="print what starts a run on several machines")
    targets = group.add_subparsers(dest="launch_command", required=True, metavar="WHERE")
    for target, about in _ABOUT.items():
        command = recipe_command(targets, target, launch, about)
        command.set_defaults(target=target)
        command.add_argument("--gpus", metavar="N", type=int, required=True, help="processes of the run, one per GPU")
        about = "GPUs of a node; default: parallel.gpus_per_node"
        command.add_argument("--gpus-per-node", metavar="N", type=int, help=about)
        command.add_argument("--name", metavar="NAME", help="name of the job; default: that of the recipe file")
        about = "variable of the environment, no secret; may be given several times"
        command.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help=about)
        _OPTIONS[target](command)


def launch(arguments: Namespace) -> None:
    """Run `sft launch`.  Raises ConfigError for mistakes of the recipe and of the options."""
    import yaml

    from sft.commands.launch import kubernetes, scripts
    from sft.commands.launch.job import Job

    job = Job.of(arguments)
    if arguments.target == "ssh":
        print(scripts.ssh(job, arguments), end="")
    elif arguments.target == "slurm":
        print(scripts.slurm(job, arguments), end="")
    elif arguments.target == "skypilot":
        print(yaml.dump(scripts.skypilot(job, arguments), Dumper=_dumper(), sort_keys=False), end="")
    else:
        documents = kubernetes.manifests(job, arguments)
        print(yaml.dump_all(documents, Dumper=_dumper(), sort_keys=False), end="")


def _dumper() -> Any:
    """Writes texts of several lines as they are, and each list out, even if another one is the same object."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return Dumper


def _kubernetes(command: ArgumentParser) -> None:
    kinds = ("trainjob", "jobset")
    command.add_argument("--kind", choices=kinds, default="trainjob", help="kind of the job (default trainjob)")
    command.add_argument("--image", metavar="IMAGE", help="image of the pods, with sft and torchrun on its path")
    command.add_argument("--namespace", metavar="NAME", help="namespace of the job")
    command.add_argument("--queue", metavar="NAME", help="local queue of Kueue")
    command.add_argument("--priority", metavar="NAME", help="priority class of Kueue")
    _volumes(command, "persistent volume claim NAME, mounted at /FOLDER")
    about = "secret whose keys become variables of the environment; may be given several times"
    command.add_argument("--secret", metavar="NAME", action="append", default=[], help=about)
    command.add_argument("--pull-secret", metavar="NAME", help="secret of the registry of the image")
    about = "network device of a pod, such as rdma/hca=1; may be given several times"
    command.add_argument("--rdma", metavar="RESOURCE[=N]", action="append", default=[], help=about)
    command.add_argument("--shm", metavar="SIZE", default="16Gi", help="limit of /dev/shm (default 16Gi)")
    command.add_argument("--memory", metavar="SIZE", help="memory of a pod, such as 900Gi, with /dev/shm")
    about = "label of the nodes; may be given several times"
    command.add_argument("--node-selector", metavar="LABEL=VALUE", action="append", default=[], help=about)
    about = "starts after failures and stops (default 50); sft ends a run after three starts without a checkpoint"
    command.add_argument("--max-restarts", metavar="N", type=int, default=50, help=about)


def _skypilot(command: ArgumentParser) -> None:
    command.add_argument("--gpu", metavar="NAME", help="name of the GPU at SkyPilot, such as H100")
    command.add_argument("--image", metavar="IMAGE", help="image with sft and torchrun on its path")
    _volumes(command, "SkyPilot volume NAME, mounted at /FOLDER")
    about = "variable whose value SkyPilot takes from your environment; may be given several times"
    command.add_argument("--secret", metavar="NAME", action="append", default=[], help=about)


def _ssh(command: ArgumentParser) -> None:
    command.add_argument("--hosts", metavar="A,B", help="hosts, the first of which the others can reach on port 29500")


def _slurm(command: ArgumentParser) -> None:
    command.add_argument("--time", metavar="LIMIT", help="time limit of the job")
    command.add_argument("--partition", metavar="NAME", help="partition of the job")
    command.add_argument("--account", metavar="NAME", help="account of the job")


def _volumes(command: ArgumentParser, about: str) -> None:
    about = f"{about}; may be given several times"
    command.add_argument("--volume", metavar="NAME:/FOLDER", action="append", default=[], help=about)


_OPTIONS = {"kubernetes": _kubernetes, "skypilot": _skypilot, "ssh": _ssh, "slurm": _slurm}
