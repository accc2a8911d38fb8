"""Reads host files, and finds which host of one this machine is."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardformer.errors import LaunchError, did_you_mean

_HOST_LINE = re.compile(r"(?P<name>[^\s=]+)(?:\s+slots\s*=\s*(?P<slots>\d{1,9}))?")


# ---------------------------------------------------------------------------------------------------------------- hosts


@dataclass(frozen=True)
class HostEntry:
    """A machine of a host file; ``slots`` is the number of processes on it, None where the file does not say."""

    name: str
    slots: int | None = None


def read_hostfile(path: str | Path) -> list[HostEntry]:
    """The machines of a host file: a line each, ``name`` or ``name slots=4``; ``#`` begins a comment.

    Raises LaunchError for a file that is missing or empty, a line of another form and a name that comes twice.
    """
    rule = "A host file has a line for each machine: its name, and if wanted 'slots=' and its number of processes"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"The host file {str(path)!r} cannot be read: {error}",
            rule=rule,
            remedy="Correct the path after --hostfile, or leave the option out to run on this machine alone",
        ) from error
    hosts: list[HostEntry] = []
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _HOST_LINE.fullmatch(entry)
        if match is None or match["slots"] == "0":
            raise LaunchError(
                f"Line {number} of the host file {str(path)!r} is {entry!r}",
                rule=rule,
                remedy=f"Write it as '{entry.split()[0]} slots=4', or the name alone",
            )
        if any(host.name == match["name"] for host in hosts):
            raise LaunchError(
                f"Line {number} of the host file {str(path)!r} names {match['name']!r} a second time",
                rule="Each machine stands in the host file once",
                remedy="Join its lines into one, with the sum of their slots",
            )
        hosts.append(HostEntry(match["name"], int(match["slots"]) if match["slots"] else None))
    if not hosts:
        raise LaunchError(
            f"The host file {str(path)!r} names no machine", rule=rule, remedy="Add a line such as 'node1 slots=4'"
        )
    return hosts


def select_hosts(names: str, hosts: list[HostEntry] | None) -> list[HostEntry]:
    """The machines of ``--host a,b``: out of the host file where there is one, in the order of the file."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted or len(set(wanted)) < len(wanted):
        raise LaunchError(
            f"--host is {names!r}",
            rule="--host lists machines by name, each once, with commas between them",
            remedy="Write --host node1,node2",
        )
    if hosts is None:
        return [HostEntry(name) for name in wanted]
    known = [host.name for host in hosts]
    for name in wanted:
        if name not in known:
            raise LaunchError(
                f"--host names {name!r}, which the host file lacks",
                rule="Beside --hostfile, --host chooses among the machines of the file",
                remedy=f"Add it to the file or correct the name. {did_you_mean(name, known)}",
            )
    return [host for host in hosts if host.name in wanted]


def find_this_host(hosts: Sequence[HostEntry]) -> int:
    """The place of this machine in the list: by host name, else by an address that belongs to it."""
    full = {socket.gethostname().lower(), socket.getfqdn().lower()}
    short = {name.partition(".")[0] for name in full}
    names = [host.name.lower() for host in hosts]
    by_name = [i for i, name in enumerate(names) if name in full]
    by_short_name = [i for i, name in enumerate(names) if name.partition(".")[0] in short and not _is_address(name)]
    for found in (by_name, by_short_name):
        if len(found) == 1:
            return found[0]
    by_address = [i for i, name in enumerate(names) if _is_local(name)]
    if len(by_address) == 1:
        return by_address[0]
    which = "none" if not by_address else "more than one"
    raise LaunchError(
        f"This machine is {socket.gethostname()!r}, and {which} of {', '.join(host.name for host in hosts)} is it",
        rule="The place of a machine in the list of hosts is its node rank; it is found by host name or by address",
        remedy=f"Correct the list, or say the place: --node_rank {' or '.join(map(str, range(len(hosts))[:3]))}"
        + (" ..." if len(hosts) > 3 else ""),
    )


def _is_address(name: str) -> bool:
    return ":" in name or re.fullmatch(r"[\d.]+", name) is not None


def _is_local(name: str) -> bool:
    """Whether an address of that name belongs to this machine: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
            return True
        except OSError:
            continue
    return False
