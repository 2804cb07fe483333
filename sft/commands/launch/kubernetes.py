"""Makes Kubernetes manifests: a JobSet, or a TrainJob of Kubeflow Trainer 2 with its runtime, which is a JobSet, too.

The runtime has all settings of the pods, because fields of TrainJob that change pods differ between releases of
Trainer.  The fields are those of the CRDs of August 2026: trainer.kubeflow.org/v1alpha1, jobset.x-k8s.io/v1alpha2.

A pod has no probe: a hang ends by run.progress_timeout_s with the stacks of all ranks, which a liveness probe would
prevent, and no service waits for a ready pod.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from sft.commands.launch.job import Job, check_run_dir, mounts, variables
from sft.errors import ConfigError

_RECIPE = "/etc/sft"
_SCRATCH = "/scratch"  # on the disk of the node, without a volume
_GPU = "nvidia.com/gpu"
_TRAINER = "trainer.kubeflow.org"


def manifests(job: Job, options: Namespace) -> list[dict[str, Any]]:
    """The documents of the manifest: a config map with the recipe, and the job.  Raises ConfigError for wrong options.

    options: kind, image, namespace, queue, priority, volume, secret, env, rdma, shm, memory, node_selector,
    pull_secret, max_restarts
    """
    if options.image is None:
        raise ConfigError("--image is missing: the image in which the pods run, with sft and torchrun on its path.")
    if options.max_restarts < 0:
        raise ConfigError(f"--max-restarts {options.max_restarts} is negative.  Give 0 or more.")
    check_run_dir(job, mounts(options.volume), "pod")
    meta = {"name": job.name, **({"namespace": options.namespace} if options.namespace else {})}
    labels = {"kueue.x-k8s.io/queue-name": options.queue, "kueue.x-k8s.io/priority-class": options.priority}
    queued = {"labels": chosen} if (chosen := {name: value for name, value in labels.items() if value}) else {}
    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**meta, "name": f"{job.name}-recipe"},
        "data": {"recipe.yaml": job.text},
    }
    spec = _job_set(job, options)
    if options.kind == "jobset":
        kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
        return [recipe, {**kind, "metadata": {**meta, **queued}, "spec": spec}]
    version = f"{_TRAINER}/v1alpha1"
    spec["replicatedJobs"][0]["template"]["metadata"] = {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}}
    runtime = {"mlPolicy": {"numNodes": job.nodes}, "template": {"spec": spec}}
    named = {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": job.name}
    return [
        recipe,
        {"apiVersion": version, "kind": "TrainingRuntime", "metadata": meta, "spec": runtime},
        {
            "apiVersion": version,
            "kind": "TrainJob",
            "metadata": {**meta, **queued},
            "spec": {"runtimeRef": named, "trainer": {"numNodes": job.nodes}},
        },
    ]


def _job_set(job: Job, options: Namespace) -> dict[str, Any]:
    """One job with a pod for each node.  Exit code 2 ends the run; all other failures start all pods again."""
    mistake = {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [2]}}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": options.max_restarts,
            # The new pods wait for the end of the old ones, which may still save, and hold the lock of the run folder.
            "restartStrategy": "BlockingRecreate",
            "rules": [
                {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                {"name": "restart", "action": "RestartJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]},
            ],
        },
        "replicatedJobs": [
            {
                "name": "node",
                "replicas": 1,
                "template": {
                    "spec": {
                        "completionMode": "Indexed",
                        "completions": job.nodes,
                        "parallelism": job.nodes,
                        "backoffLimit": 0,
                        "podFailurePolicy": {"rules": [mistake]},
                        "template": {"spec": _pod(job, options)},
                    }
                },
            }
        ],
    }


def _pod(job: Job, options: Namespace) -> dict[str, Any]:
    folders = mounts(options.volume)
    scratch = [] if folders else [_SCRATCH]
    names = {name: f"volume-{number}" for number, name in enumerate(dict.fromkeys(folders.values()))}
    resources: dict[str, Any] = {_GPU: job.ranks} if job.on_gpus else {}
    resources |= dict(_counted(device) for device in options.rdma)
    resources |= {"memory": options.memory} if options.memory else {}
    env = {
        "RECIPE": f"{_RECIPE}/recipe.yaml",
        "MASTER_ADDR": f"{job.name}-node-0-0.{job.name}",  # the pod of the first node
        **variables(options.env),
    }
    container: dict[str, Any] = {
        "name": "node",
        "image": options.image,
        "command": ["bash", "-c", _verbatim(f'export NODE_RANK="$JOB_COMPLETION_INDEX"\n{job.node_script}')],
        "env": [{"name": name, "value": _verbatim(value)} for name, value in env.items()],
        "resources": {"limits": resources, "requests": resources},
        "volumeMounts": [
            *({"name": names[name], "mountPath": folder} for folder, name in folders.items()),
            *({"name": "scratch", "mountPath": folder} for folder in scratch),
            {"name": "recipe", "mountPath": _RECIPE, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    container["workingDir"] = next(iter(folders), _SCRATCH)
    if options.secret:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in options.secret]
    if options.rdma:  # registers memory with the network card
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.end_s,
        "containers": [container],
        "volumes": [
            *({"name": label, "persistentVolumeClaim": {"claimName": name}} for name, label in names.items()),
            *({"name": "scratch", "emptyDir": {}} for _ in scratch),
            {"name": "recipe", "configMap": {"name": f"{job.name}-recipe"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
        ],
    }
    if job.on_gpus:
        pod["tolerations"] = [{"key": _GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if options.node_selector:
        pod["nodeSelector"] = _selectors(options.node_selector)
    if options.pull_secret:
        pod["imagePullSecrets"] = [{"name": options.pull_secret}]
    return pod


def _verbatim(text: str) -> str:
    """A text in which Kubernetes replaces no $(NAME) by a variable."""
    return text.replace("$(", "$$(")


def _counted(device: str) -> tuple[str, int]:
    """A resource of --rdma and its number: rdma/hca=4 -> ("rdma/hca", 4)"""
    name, _, number = device.partition("=")
    if "/" not in name or (number and not number.isdecimal()):
        raise ConfigError(
            f"--rdma {device} is not a resource of a node.  Write NAME/NAME or NAME/NAME=NUMBER, such as rdma/hca=1 or "
            "vpc.amazonaws.com/efa=32; `kubectl describe node` lists them."
        )
    return name, int(number or 1)


def _selectors(settings: list[str]) -> Mapping[str, str]:
    if wrong := [setting for setting in settings if not setting.partition("=")[2]]:
        raise ConfigError(
            f"--node-selector {wrong[0]} is not LABEL=VALUE.  `kubectl get nodes --show-labels` lists them."
        )
    return dict(setting.split("=", 1) for setting in settings)
