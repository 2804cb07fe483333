"""Two nodes resolve their own hostnames to 127.0.1.1; their ranks find each other nevertheless."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machines import CABLES, NAMES, NotPermitted, two_machines

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import json, os, socket
import torch.distributed as dist
from sft.parallel import rendezvous

rendezvous.join("gloo", timeout_s=200)
of_rank = [socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")]
gathered = [None, None]
dist.all_gather_object(gathered, of_rank)
print(json.dumps(gathered))
dist.destroy_process_group()
"""


def test_nodes_whose_hostnames_are_loopback_addresses(tmp_path: Path) -> None:
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": NAMES[0]}
    command = [sys.executable, "-c", RANK]
    try:
        with two_machines(tmp_path) as machines:
            ranks = [
                subprocess.Popen(
                    [*machine, "env", f"RANK={rank}", "MASTER_PORT=29500", *map("=".join, common.items()), *command],
                    cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
                for rank, machine in enumerate(machines)
            ]  # fmt: skip
            printed = [rank.communicate(timeout=240) for rank in ranks]
    except NotPermitted as error:
        pytest.skip(f"two network namespaces cannot be made here: {error}")
    expected = [[name, cable, f"={cable}"] for name, cable in zip(NAMES, CABLES)]
    for out, err in printed:
        assert out and json.loads(out) == expected, err[-4000:]
