"""The network interface over which gloo and NCCL connect the nodes of a run."""

import os
import resource
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from sft.errors import ConfigError, PeerError, StorageError
from sft.parallel import rendezvous
from tests.launching import environments

INTERFACES = {
    "lo": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "10.9.9.9"), (socket.AF_INET6, "::1")],
    "eth0": [(psutil.AF_LINK, "02:42:ac:11:00:02"), (socket.AF_INET, "10.0.0.7"), (socket.AF_INET6, "fd00::7")],
    "ib0": [(socket.AF_INET, "172.16.0.7")],
}
SENDER = {"head": "10.0.0.7", "10.0.0.8": "172.16.0.7", "six": "fd00::7", "self": "127.0.1.1", "anycast": "10.9.9.9"}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of rank 4 of 8, the first of the second node."""
    environ = {"RANK": "4", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "head"}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(rendezvous, "_address_towards", SENDER.get)
    found = {name: [SimpleNamespace(family=f, address=a) for f, a in listed] for name, listed in INTERFACES.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    return environ


def chosen(variables: dict[str, str]) -> dict[str, str]:
    return {name: variables[name] for name in rendezvous.INTERFACES if name in variables}


def test_the_second_node_takes_its_route_to_the_head(variables: dict[str, str]) -> None:
    store = dist.HashStore()
    rendezvous.choose_interface(store)
    assert chosen(variables) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert store.get(rendezvous._KEY) == b"10.0.0.7"


@pytest.mark.parametrize("rank", ["0", "3"])
def test_the_head_takes_its_route_to_the_second_node(variables: dict[str, str], rank: str) -> None:
    """The name of the head itself resolves to a loopback address, as on Debian."""
    variables |= {"RANK": rank, "MASTER_ADDR": "self"}
    store = dist.HashStore()
    store.set(rendezvous._KEY, "10.0.0.8")
    rendezvous.choose_interface(store)
    assert chosen(variables) == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}


@pytest.mark.parametrize("head, interface", [("six", "eth0"), ("self", None), ("anycast", None), ("unknown", None)])
def test_other_routes(variables: dict[str, str], head: str, interface: str | None) -> None:
    """Routes over IPv6; to this machine itself; from an address of the loopback interface; no route."""
    variables["MASTER_ADDR"] = head
    store = dist.HashStore()
    rendezvous.choose_interface(store)
    assert variables.get("GLOO_SOCKET_IFNAME") == interface
    assert store.check([rendezvous._KEY])  # the head waits for the key, whatever its value


@pytest.mark.parametrize("own", rendezvous.INTERFACES)
def test_the_users_own_interface_stays(variables: dict[str, str], own: str) -> None:
    variables[own] = "bond0"
    rendezvous.choose_interface(dist.HashStore())
    assert chosen(variables) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"} | {own: "bond0"}


@pytest.mark.parametrize("local", ["8", "9"])
def test_one_node_needs_none(variables: dict[str, str], local: str) -> None:
    variables |= {"LOCAL_WORLD_SIZE": local, "RANK": "0"}
    untouched: Any = None
    rendezvous.choose_interface(untouched)
    assert chosen(variables) == {}


def test_the_ranks_of_one_launcher_take_the_loopback_interface(variables: dict[str, str]) -> None:
    """`sft train --processes` sets these variables."""
    local = {"LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables |= local
    rendezvous.choose_interface(dist.HashStore())
    assert chosen(variables) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_the_address_of_the_sender() -> None:
    assert rendezvous._address_towards("127.0.0.1") == "127.0.0.1"
    assert rendezvous._address_towards("no.such.host.invalid") is None


def test_a_port_of_another_job_is_refused_in_a_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other_job:
        other_job.bind(("127.0.0.1", 0))
        other_job.listen()
        port = other_job.getsockname()[1]
        for name, value in {**environments(2)[0], "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError) as refused:
            rendezvous.shared_store(timeout_s=60)
    message = str(refused.value)
    assert message.startswith(f"the ranks cannot meet at MASTER_ADDR 127.0.0.1, MASTER_PORT {port}: ")
    assert "address already in use.  If another job" in message and "\n" not in message


def test_a_rank_that_never_comes_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has ended before it reached the store."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PeerError) as caught, rendezvous.meeting():
        rendezvous.join("gloo", timeout_s=1, store=dist.HashStore())
    assert str(caught.value).startswith("rank 1 waited in vain for another rank while the run started (")
    assert str(caught.value).endswith("Start the run again when this is mended.")
    assert not dist.is_initialized()


def test_too_many_open_files_are_no_traceback() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(StorageError) as caught, rendezvous.meeting():
        raise RuntimeError("[enforce fail at loop.cc:48] rv != -1. -1 vs -1. pipe: Too many open files")
    assert f"as many open files as it may have (ulimit -n {limit:,})" in str(caught.value)
    with pytest.raises(RuntimeError, match="a bug"), rendezvous.meeting():
        raise RuntimeError("a bug of ours")
