"""Simulates two machines on this one: two network namespaces joined by a cable, each with a hostname and a hosts file.

As on Debian and Ubuntu, each machine resolves its own hostname to 127.0.1.1, and the other's to an address.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

NAMES, ADDRESSES, CABLES = ("alpha", "beta"), ("10.77.0.1", "10.77.0.2"), ("cable0", "cable1")
NEEDED = ("unshare", "nsenter", "ip", "mount", "hostname")
# A namespace lasts until the test closes the input of this process, or ends.
MACHINE = 'hostname "$0" && mount --bind "$1" /etc/hosts && ip link set lo up && echo ready && exec cat'


class NotPermitted(RuntimeError):
    """This process may not create namespaces; the message says why."""


@contextmanager
def two_machines(folder: Path) -> Iterator[list[list[str]]]:
    """For each machine, the words to put before a command so that it runs on that machine.  Raises NotPermitted."""
    if absent := [name for name in NEEDED if shutil.which(name) is None]:
        raise NotPermitted(f"without {', '.join(absent)}")
    with ExitStack() as stack:
        pids = []
        for name, other, address in zip(NAMES, reversed(NAMES), reversed(ADDRESSES)):
            hosts = folder / f"hosts-{name}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}.localdomain {name}\n{address} {other}\n")
            command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", MACHINE, name, str(hosts)]
            machine = stack.enter_context(subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True))
            assert machine.stdin and machine.stdout and machine.stderr
            stack.callback(machine.stdin.close)
            if machine.stdout.readline() != "ready\n":
                raise NotPermitted(machine.stderr.read().strip())
            pids.append(str(machine.pid))
        machines = [["nsenter", f"--target={pid}", "--net", "--mount", "--uts", "--"] for pid in pids]
        cable = ["ip", "link", "add", CABLES[0], "type", "veth", "peer", "name", CABLES[1], "netns", pids[1]]
        subprocess.run([*machines[0], *cable], check=True)
        for machine_words, interface, address in zip(machines, CABLES, ADDRESSES):
            subprocess.run([*machine_words, "ip", "addr", "add", f"{address}/24", "dev", interface], check=True)
            subprocess.run([*machine_words, "ip", "link", "set", interface, "up"], check=True)
        yield machines
