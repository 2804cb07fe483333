"""The steps of the first hour on a GPU machine, in their order.  docs/numbers/gpu-hour.md describes them.

A new step is declared here with its command (commands.py) and its limit, and its bars in bars.py.
"""

from collections.abc import Sequence

from tools.gpu_hour.commands import TE, bench, curves, gpu_tests, probe, probe_data, probe_parity, speed
from tools.gpu_hour.step import Step, module

STEP_S = 480  # longest limit of a step
TOTAL_S = {1: 2400, 8: 3600}  # most that all limits add up to, by --gpus

MACHINE = Step(
    name="machine",
    question="which hardware, which versions",
    commands=lambda setting: [module("tools.gpu_hour.machine", "--json", setting.rows("machine"))],
    limit_s=60,
)
STEPS: Sequence[Step] = (
    Step(
        name="probe-data",
        question="do all ranks read the documents, masks and positions that they should",
        commands=probe_data,
        limit_s=90,
    ),
    Step(
        name="probe-leak",
        question="does a document change another one of its pack",
        commands=lambda setting: [probe("leak", setting)],
        limit_s=120,
    ),
    Step(
        name="probe-parity",
        question="do two layouts or backends compute the same losses and gradients",
        commands=probe_parity,
        limit_s=120,
    ),
    Step(name="tests", question="do the tests of GPUs pass", commands=gpu_tests, limit_s=270, cuda=True),
    Step(
        name="layouts",
        question="do layouts, recompute and bf16 give one curve",
        commands=curves("layouts"),
        limit_s=150,
    ),
    Step(
        name="backends",
        question="does Transformer Engine give the curve of portable, with every cp_comm",
        commands=curves("backends"),
        limit_s=150,
        packages=(TE,),
        cuda=True,
    ),
    Step(
        name="deterministic",
        question="is a run with run.deterministic bitwise repeatable",
        commands=curves("deterministic"),
        limit_s=90,
    ),
    Step(
        name="memory",
        question="is the allocator's peak that of the estimate",
        commands=bench(
            "memory",
            "step",
            *["--steps", "1", "--kernels", "flash", "--minutes", "0.8"],
            *["--cases", "1.7b:64k:one:selective,1.7b:32k:chat:selective,1.7b:84k:longmix:selective"],
        ),
        limit_s=150,
    ),
    Step(
        name="loss-head",
        question="time and memory of the loss head at 262,144 tokens",
        commands=bench(
            "loss-head",
            "loss_head",
            *["--cases", "1", "--dtype", "bf16", "--tokens", "262144", "--hidden", "2048", "--vocab", "62080"],
            *["--chunks", "4096", "--ways", "fused"],
            tiny=["--no-peak"],  # its bar holds for chunks that are larger than the rest
        ),
        limit_s=120,
    ),
    Step(
        name="attention",
        question="time of each attention kernel, and of the ranks of cp 8",
        commands=bench(
            "attention", "attention", "--cases", "64k:one,64k:chat,128k:one", "--cp", "1,8", "--minutes", "0.8"
        ),
        limit_s=150,
    ),
    Step(
        name="steps",
        question="tokens per second, MFU and share of the roofline of whole training steps",
        commands=bench(
            "steps",
            "step",
            *["--minutes", "4", "--cases"],
            "1.7b:64k:one:selective,1.7b:128k:one:selective+offload,1.7b:32k:chat,1.7b:32k:padded,"
            "4b:64k:one:selective+offload",
        ),
        limit_s=360,
    ),
    Step(
        name="offload",
        question="time of a step with activations, and with half of the optimizer, in host memory",
        commands=bench(
            "offload",
            "step",
            *["--minutes", "0.8", "--cases", "1.7b:64k:one:selective+offload,1.7b:64k:one:full+optim0.5"],
            tiny=["--cases", "tiny:512:one:selective+offload"],
        ),
        limit_s=150,
    ),
    Step(
        name="longest",
        question="is the longest context that fits the one of the estimate",
        commands=bench("longest", "longest", "--minutes", "2", "--cases", "1.7b"),
        limit_s=240,
    ),
    Step(
        name="checkpoint",
        question="how long a save stalls training, and how long a load takes",
        commands=bench(
            "checkpoint", "checkpoint", "--ranks", "1", "--mib", "4096", "--repeats", "2", tiny=["--ranks", "1"]
        ),
        limit_s=180,
    ),
    Step(
        name="speed-dp8",
        question="speed and memory of Qwen3-1.7B on chats, dp 8",
        commands=speed("speed-dp8", "1.7b:32k:chat:selective", "train.global_batch_size=16"),
        limit_s=240,
        gpus=8,
    ),
    Step(
        name="speed-tp2-cp4",
        question="speed and memory of Qwen3-8B at 64K, tp 2 x cp 4",
        commands=speed("speed-tp2-cp4", "8b:64k:one:selective", "parallel.tp=2", "parallel.cp=4"),
        limit_s=240,
        gpus=8,
    ),
    Step(
        name="speed-cp8",
        question="speed and memory of Qwen3-8B at 64K, cp 8",
        commands=speed("speed-cp8", "8b:64k:one:selective+offload", "parallel.cp=8"),
        limit_s=240,
        gpus=8,
    ),
    Step(
        name="speed-cp8-a2a-p2p",
        question="speed and memory of Qwen3-8B at 64K, cp 8 in two levels",
        commands=speed(
            "speed-cp8-a2a-p2p",
            "8b:64k:one:selective+offload",
            *["parallel.cp=8", "parallel.cp_comm=a2a+p2p", "parallel.cp_a2a=2", "attention.backend=te"],
        ),
        limit_s=240,
        gpus=8,
        packages=(TE,),
        cuda=True,
    ),
)
