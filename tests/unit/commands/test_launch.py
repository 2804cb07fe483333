"""What `sft launch` prints: manifests, a task and scripts.  tests/ranks/test_launch.py runs the commands in them."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sft.cli import main

TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
AWKWARD = "data.train=[my file.jsonl, $(HOME).jsonl, it's.jsonl]"  # must arrive unchanged


@pytest.fixture(autouse=True)
def recipe(recipe_folder: Path) -> None:
    """a.yaml for 16 GPUs."""
    path = recipe_folder / "a.yaml"
    path.write_text(path.read_text().replace("global_batch_size: 4", "global_batch_size: 16"))


def thing(required: str = "", **properties: Any) -> dict[str, Any]:
    """The schema of an object with these properties and no others; all are required but those in `required`."""
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": required.split() if required else sorted(properties),
    }


def several(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


# Written by hand from the CRDs of August 2026, with the fields that we use.
LABELS = {"type": "object", "additionalProperties": TEXT}
META = thing("name", name={**TEXT, "maxLength": 45}, namespace=TEXT, labels=LABELS)
CONTAINER = thing(
    "name image command env resources volumeMounts workingDir",
    name={"const": "node"},
    image=TEXT,
    command=several(TEXT),
    env=several(thing(name=TEXT, value=TEXT)),
    envFrom=several(thing(secretRef=thing(name=TEXT))),
    resources=thing(limits={"type": "object"}, requests={"type": "object"}),
    securityContext=thing(capabilities=thing(add={"const": ["IPC_LOCK"]})),
    volumeMounts=several(thing("name mountPath", name=TEXT, mountPath=TEXT, readOnly={"type": "boolean"})),
    workingDir=TEXT,
)
POD = thing(
    "restartPolicy terminationGracePeriodSeconds containers volumes",
    restartPolicy={"const": "Never"},  # a pod failure policy needs it
    terminationGracePeriodSeconds=COUNT,
    containers={"type": "array", "items": CONTAINER, "minItems": 1, "maxItems": 1},
    volumes=several(
        thing(
            "name",
            name=TEXT,
            persistentVolumeClaim=thing(claimName=TEXT),
            configMap=thing(name=TEXT),
            emptyDir={"anyOf": [thing(medium={"const": "Memory"}, sizeLimit=TEXT), {"const": {}}]},
        )
    ),
    tolerations=several(thing(key=TEXT, operator={"const": "Exists"}, effect={"const": "NoSchedule"})),
    nodeSelector=LABELS,
    imagePullSecrets=several(thing(name=TEXT)),
)
EXITS = thing(containerName={"const": "node"}, operator={"enum": ["In", "NotIn"]}, values=several(COUNT))
JOB = thing(
    completionMode={"enum": ["Indexed"]},
    completions=COUNT,
    parallelism=COUNT,
    backoffLimit={"const": 0},
    podFailurePolicy=thing(rules=several(thing(action={"enum": ["FailJob", "Ignore"]}, onExitCodes=EXITS))),
    template=thing(spec=POD),
)
ACTIONS = ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
REASONS = ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"]
RULE = thing(name=TEXT, action={"enum": ACTIONS}, onJobFailureReasons=several({"enum": REASONS}))
REPLICATED = thing(
    name=TEXT, replicas={"const": 1}, template=thing("spec", metadata=thing(labels=LABELS), spec=JOB)
)  # fmt: skip
JOB_SET = thing(
    network=thing(enableDNSHostnames={"const": True}, publishNotReadyAddresses={"const": True}),
    failurePolicy=thing(
        maxRestarts=COUNT, restartStrategy={"enum": ["Recreate", "BlockingRecreate"]}, rules=several(RULE)
    ),
    replicatedJobs=several(REPLICATED),
)
REFERENCE = thing(apiGroup={"const": "trainer.kubeflow.org"}, kind={"const": "TrainingRuntime"}, name=TEXT)


def document(version: str, kind: str, **fields: Any) -> dict[str, Any]:
    return thing(apiVersion={"const": version}, kind={"const": kind}, metadata=META, **fields)


KINDS = {
    "ConfigMap": document("v1", "ConfigMap", data=thing(**{"recipe.yaml": TEXT})),
    "JobSet": document("jobset.x-k8s.io/v1alpha2", "JobSet", spec=JOB_SET),
    "TrainingRuntime": document(
        "trainer.kubeflow.org/v1alpha1",
        "TrainingRuntime",
        spec=thing(mlPolicy=thing(numNodes=COUNT), template=thing(spec=JOB_SET)),
    ),
    "TrainJob": document(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        spec=thing(runtimeRef=REFERENCE, trainer=thing(numNodes=COUNT)),
    ),
}


def printed(capsys: pytest.CaptureFixture[str], target: str, *words: str) -> str:
    assert main(["launch", target, "a.yaml", "--gpus", "16", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def manifest(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The documents by kind, each checked with its schema."""
    text = printed(capsys, "kubernetes", "--image", "sft:1", "--volume", "shared:/data", *words)
    documents = {one["kind"]: one for one in yaml.safe_load_all(text)}
    for kind, one in documents.items():
        jsonschema.validate(one, KINDS[kind])
    return documents


def pod_of(job_set: dict[str, Any]) -> dict[str, Any]:
    return job_set["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_a_train_job(capsys: pytest.CaptureFixture[str]) -> None:
    documents = manifest(capsys, "run.grace_s=300", "--queue", "team", "--priority", "high", "--namespace", "ml")
    assert [*documents] == ["ConfigMap", "TrainingRuntime", "TrainJob"]
    job, runtime = documents["TrainJob"], documents["TrainingRuntime"]
    assert documents["ConfigMap"]["data"]["recipe.yaml"] == Path("a.yaml").read_text()
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "high"}
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "a"
    assert {one["metadata"]["namespace"] for one in documents.values()} == {"ml"}
    job_set = runtime["spec"]["template"]["spec"]
    (replicated,) = job_set["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["template"]["spec"]["completions"] == job["spec"]["trainer"]["numNodes"] == 2
    pod = pod_of(job_set)
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8} and container["workingDir"] == "/data"
    # Ranks end within grace_s, torchrun kills after that, and the kubelet after torchrun.
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=330" in container["command"][2]
    assert pod["terminationGracePeriodSeconds"] == 360
    assert {"name": "MASTER_ADDR", "value": "a-node-0-0.a"} in container["env"]


def test_a_job_set_with_everything(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--rdma",
        "rdma/hca=4",
        "--secret",
        "hub",
        "--secret",
        "wandb",
        "--env",
        "HF_HOME=/data/hf",
        "--shm",
        "8Gi",
    ]
    words += ["--memory", "900Gi", "--node-selector", "gpu=h100", "--pull-secret", "registry", "--max-restarts", "7"]
    spec = manifest(capsys, "--kind", "jobset", "--name", "mine", *words)["JobSet"]["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 7
    # Exit code 2 ends the run; every other failure restarts all pods.
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert [rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"]] == [[2]]
    rules = {rule["onJobFailureReasons"][0]: rule["action"] for rule in spec["failurePolicy"]["rules"]}
    assert rules == {"PodFailurePolicy": "FailJobSet", "BackoffLimitExceeded": "RestartJobSet"}
    pod = pod_of(spec)
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 4, "memory": "900Gi"}
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}, {"secretRef": {"name": "wandb"}}]
    assert {"name": "HF_HOME", "value": "/data/hf"} in container["env"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]
    assert pod["nodeSelector"] == {"gpu": "h100"} and pod["imagePullSecrets"] == [{"name": "registry"}]


def test_settings_arrive_as_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Through YAML, the expansion of Kubernetes ($$ is one dollar) and bash."""
    pod = pod_of(manifest(capsys, "--kind", "jobset", AWKWARD)["JobSet"]["spec"])
    command = pod["containers"][0]["command"][2].replace("$$(", "$(")
    done = run(command, tmp_path, torchrun='printf "%s\\n" "${@: -1}"')
    assert done == (0, AWKWARD + "\n")


def run(script: str, tmp_path: Path, **programs: str) -> tuple[int, str]:
    """The exit code and the output of a script, with stand-ins for programs."""
    done = subprocess.run(["bash", "-c", script], env=environment(tmp_path, programs), capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout


def environment(tmp_path: Path, programs: dict[str, str]) -> dict[str, str]:
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, body in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    own = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RECIPE": "r.yaml",
        "MASTER_ADDR": "m",
        "JOB_COMPLETION_INDEX": "1",
    }
    return {**os.environ, **own}


@pytest.mark.parametrize("torchrun, status, code", [(0, 9, 0), (1, 75, 75), (1, 2, 2), (137, 75, 75), (1, 0, 0)])
def test_the_exit_code_of_a_pod(
    torchrun: int, status: int, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (container,) = pod_of(manifest(capsys, "--kind", "jobset")["JobSet"]["spec"])["containers"]
    programs = {"torchrun": f"exit {torchrun}", "python": f"exit {status}"}
    assert run(container["command"][2], tmp_path, **programs) == (code, "")


def test_a_stop_signal_reaches_the_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (container,) = pod_of(manifest(capsys, "--kind", "jobset")["JobSet"]["spec"])["containers"]
    torchrun = "trap 'echo saved; exit 1' TERM\ntouch ready\nwhile true; do sleep 0.05; done"
    env = environment(tmp_path, {"torchrun": torchrun, "python": "exit 75"})
    pod = subprocess.Popen(container["command"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    pod.send_signal(signal.SIGTERM)
    assert pod.communicate(timeout=60)[0] == "saved\n" and pod.returncode == 75


def test_one_node_needs_no_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "skypilot", "--gpu", "H100", "--gpus-per-node", "16", "--volume", "shared:/data")
    task = yaml.safe_load(text)
    assert task["num_nodes"] == 1 and task["resources"]["accelerators"] == "H100:16"
    assert "torchrun" not in task["run"] and '-m sft train "$RECIPE" --processes 16 &' in task["run"]


def test_a_sky_task(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--gpu", "H100", "--volume", "shared:/data", "--secret", "HF_TOKEN", "--env", "HF_HOME=/data/hf", AWKWARD]
    task = yaml.safe_load(printed(capsys, "skypilot", *words))
    assert task["secrets"] == {"HF_TOKEN": None} and task["envs"] == {"HF_HOME": "/data/hf"}
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75] and task["num_nodes"] == 2
    sky = f"export HOME={tmp_path} SKYPILOT_NODE_RANK=1 SKYPILOT_NODE_IPS=$'10.0.0.1\\n10.0.0.2'\n"
    script = sky + task["run"].replace("cd /data", "true")
    code, said = run(script, tmp_path, torchrun='echo "$MASTER_ADDR $NODE_RANK"; printf "%s\\n" "${@: -1}"')
    assert (code, said) == (0, f"10.0.0.1 1\n{AWKWARD}\n")
    assert (tmp_path / "recipe.yaml").read_text() == Path("a.yaml").read_text()


def test_ssh_starts_every_host(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "ssh": 'host=$2; shift 2; exec bash -c "$*" > "$host"',  # joins its words, for a shell of the host
        "torchrun": 'echo "$MASTER_ADDR $NODE_RANK"; printf "%s\\n" "${@: -1}"; exit "$NODE_RANK"',
        "python": '[ "$3" = data ] || exit 75',
    }
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert run(printed(capsys, "ssh", "--hosts", "me@one,two", AWKWARD), tmp_path, **programs) == (75, "")
    assert [Path(host).read_text() for host in ("me@one", "two")] == [f"one 0\n{AWKWARD}\n", f"one 1\n{AWKWARD}\n"]


def test_slurm_submits_the_script_of_the_repository(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = printed(capsys, "slurm", "--time", "24:00:00", "--partition", "gpu", "run.grace_s=300", AWKWARD)
    code, said = run(script, tmp_path, sbatch='echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"; printf "%s\\n" "$@"')
    timeout, *words = said.splitlines()
    assert code == 0 and timeout == "330"
    options = "--job-name a --nodes 2 --gpus-per-node=8 --signal=B:USR1@320 --time=24:00:00 --partition=gpu"
    assert words[:-4] == shlex.split(options)
    assert Path(words[-4]).read_text().startswith("#!") and words[-3:] == ["a.yaml", "run.grace_s=300", AWKWARD]


@pytest.mark.parametrize(
    "target, words, expected",
    [
        ("slurm", "--gpus 12", "--gpus 12 is not a number of whole nodes of 8 GPUs"),
        ("slurm", "--gpus 0", "--gpus 0 is not a number"),
        ("slurm", "--name UPPER", "--name UPPER cannot name a job"),
        ("ssh", "", "names 0 hosts, but the run needs 2 nodes of 8 processes"),
        ("ssh", "--hosts a,a", "names 1 hosts"),
        ("skypilot", "", "--gpu is missing"),
        ("skypilot", "--gpu H100", "run.dir = runs/a is on the own disk of a machine"),
        ("kubernetes", "", "--image is missing"),
        ("kubernetes", "--image i", "run.dir = runs/a is on the own disk of a pod"),
        ("kubernetes", "--image i --volume s:/data run.dir=/other/a", "Volumes given: /data"),
        (
            "kubernetes",
            "--image i checkpoint.remote=s3://bucket/a",
            "the recipe lacks: data.cache_remote, a URL in place of a",
        ),
        ("kubernetes", "--image i --volume shared", "--volume shared is not NAME:/FOLDER"),
        ("kubernetes", "--image i --volume a:/d --volume b:/d", "--volume b:/d is not NAME:/FOLDER"),
        ("kubernetes", "--image i --volume s:/d --env HF_TOKEN=hf_abc", "Name it with --secret"),
        ("kubernetes", "--image i --volume s:/d --env HF_HOME", "--env HF_HOME has no value"),
        ("kubernetes", "--image i --volume s:/d --rdma hca", "--rdma hca is not a resource"),
        ("kubernetes", "--image i --volume s:/d --node-selector gpu", "--node-selector gpu is not LABEL=VALUE"),
        ("kubernetes", "--image i --volume s:/d --max-restarts -1", "--max-restarts -1 is negative"),
    ],
)
def test_mistakes(target: str, words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = [] if "--gpus" in words else ["--gpus", "16"]
    assert main(["launch", target, "a.yaml", *gpus, *shlex.split(words)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and expected in said.err and said.err.count("\n") == 1 and "hf_abc" not in said.err


def test_no_volume_is_needed_if_everything_is_in_an_object_store(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "data.train=s3://bucket/a.jsonl",
        "data.cache_remote=s3://bucket/cache",
        "checkpoint.remote=s3://bucket/runs/a",
    ]
    documents = {
        one["kind"]: one
        for one in yaml.safe_load_all(printed(capsys, "kubernetes", "--image", "sft:1", "--kind", "jobset", *words))
    }
    jsonschema.validate(documents["JobSet"], KINDS["JobSet"])
    pod = pod_of(documents["JobSet"]["spec"])
    (container,), volumes = pod["containers"], {volume["name"]: volume for volume in pod["volumes"]}
    assert container["workingDir"] == "/scratch" and volumes["scratch"] == {"name": "scratch", "emptyDir": {}}
    assert {"name": "scratch", "mountPath": "/scratch"} in container["volumeMounts"]
    task = yaml.safe_load(printed(capsys, "skypilot", "--gpu", "H100", *words))
    assert "volumes" not in task and "\ncd " not in task["run"]


def test_a_recipe_that_does_not_fit_the_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", "a.yaml", "--gpus", "16", "parallel.cp=7"]) == 2
    assert "parallel.cp = 7 does not fit 16 GPUs" in capsys.readouterr().err


def test_the_first_node_prepares_the_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (container,) = pod_of(manifest(capsys, "--kind", "jobset")["JobSet"]["spec"])["containers"]
    first = f"JOB_COMPLETION_INDEX=0\n{container['command'][2]}"
    programs = {"torchrun": "echo trained", "python": 'echo "$@"; exit "${PREPARES:-0}"'}
    assert run(first, tmp_path, **programs) == (0, "-m sft data prepare r.yaml\ntrained\n")
    assert run(f"export PREPARES=2\n{first}", tmp_path, **programs) == (2, "-m sft data prepare r.yaml\n")
