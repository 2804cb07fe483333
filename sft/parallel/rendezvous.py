"""Joins the processes of a run, and chooses the network interface over which gloo and NCCL connect its nodes.

By default, gloo takes the address to which the node's own hostname resolves.  On Debian and Ubuntu, this address is
often 127.0.1.1, which no other node can reach.  With this module, a node takes the interface of its route to another
node of the run.
"""

import datetime
import ipaddress
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from sft.errors import ConfigError, PeerError, StorageError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
INTERFACES = (NCCL, GLOO)
LOOPBACK = "127.0.0.1"
_OF_RANKS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_KEY = "sft/address of the second node"
_ANY_PORT = 9  # any port would do: connecting a UDP socket sends nothing


def join(backend: str, *, timeout_s: int, store: dist.Store | None = None) -> None:
    """Join the process group that torchrun describes in the environment.  Without torchrun, the group has one process.

    store  connects all ranks; a process that joins a second time needs a new store
    """
    if store is None:
        check_environment()
    timeout, rank, world_size = datetime.timedelta(seconds=timeout_s), 0, 1
    if "RANK" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = shared_store(timeout_s) if store is None else store
        choose_interface(store)
    store = dist.HashStore() if store is None else store
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)


def check_environment() -> None:
    """Raise ConfigError if the environment has some, but not all, of the variables that torchrun sets for a rank."""
    present = [name for name in _OF_RANKS if name in os.environ]
    if present and len(present) < len(_OF_RANKS):
        missing = [name for name in _OF_RANKS if name not in os.environ]
        raise ConfigError(
            f"the environment has {', '.join(present)}, but not {', '.join(missing)}; torchrun sets all of them.  "
            "Start ranks with sft train RECIPE --processes N on one machine, or with torchrun; for one process alone, "
            f"unset {', '.join(present)}."
        )


@contextmanager
def meeting() -> Iterator[None]:
    """A context that turns torch's errors about ranks that cannot connect into PeerError.

    It raises StorageError instead if this process may not open more files.
    """
    try:
        yield
    except dist.DistStoreError as error:
        raise PeerError(
            f"rank {os.environ.get('RANK', '0')} waited in vain for another rank while the run started "
            f"({str(error).splitlines()[0]}).  Either the other rank has ended, and its own output says why, or its "
            "machine cannot be reached.  Start the run again when this is mended."
        ) from error
    except RuntimeError as error:  # the error of gloo
        if "Too many open files" not in str(error):
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise StorageError(
            f"the ranks cannot connect: this process has as many open files as it may have (ulimit -n {limit:,}).  "
            "Raise the limit, for example with ulimit -n 65536, and start the run again."
        ) from error


def shared_store(timeout_s: int) -> dist.Store:
    """The store through which torchrun's processes find each other.

    Raises ConfigError if there is no store at MASTER_ADDR and MASTER_PORT.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    store: dist.Store
    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    except dist.DistNetworkError as error:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        first_line = str(error).splitlines()[0].rstrip(". ")  # a stack of C++ functions may follow
        raise ConfigError(
            f"the ranks cannot meet at MASTER_ADDR {host}, MASTER_PORT {port}: {first_line}.  If another job of this "
            f"node has the port, start with another MASTER_PORT, or with torchrun --standalone on a single node."
        ) from error
    store.set_timeout(timeout)
    return store


def choose_interface(store: dist.Store) -> None:
    """Set the environment variables GLOO and NCCL of this process, unless the user has set them.

    If the run has several nodes, the value is the interface of the route to another node.  Nothing is set if the route
    leads over the loopback interface, as in a test where all nodes are one machine.  The ranks that `sft train
    --processes` starts take the loopback interface, so no other machine reaches their ports.

    Reads RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_ADDR, as torchrun sets them.  `store` connects all ranks.
    """
    if os.environ["MASTER_ADDR"] == LOOPBACK and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if name := _interface_with(LOOPBACK):
            os.environ.setdefault(GLOO, name)
            os.environ.setdefault(NCCL, f"={name}")
        return
    rank, ranks_per_node = int(os.environ["RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if int(os.environ["WORLD_SIZE"]) <= ranks_per_node:
        return
    # On the first node, MASTER_ADDR may be a loopback address.  So the first node takes the route to the second node.
    other = store.get(_KEY).decode() if rank < ranks_per_node else os.environ["MASTER_ADDR"]
    address = _address_towards(other)
    if rank == ranks_per_node:
        store.set(_KEY, address or "")
    if interface := _interface_of(address):
        os.environ.setdefault(GLOO, interface)
        os.environ.setdefault(NCCL, f"={interface}")  # = because NCCL otherwise takes a name as a prefix


def _interface_with(address: str) -> str | None:
    """The name of the interface with this address."""
    entries = ((name, entry.address) for name, listed in psutil.net_if_addrs().items() for entry in listed)
    return next((str(name) for name, text in entries if text == address), None)


def _address_towards(host: str) -> str | None:
    """The address that this machine gives as sender in messages to `host`; None if it has no route."""
    with suppress(OSError):  # an unknown name
        for family, kind, protocol, _, target in socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:  # no route to this address
                probe.connect(target)
                return str(probe.getsockname()[0])
    return None


def _interface_of(address: str | None) -> str | None:
    """The name of the interface with this address; None for the loopback interface."""
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if address in addresses and not any(ipaddress.ip_address(text).is_loopback for text in addresses):
            return str(name)
    return None
