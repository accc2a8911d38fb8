"""Read a host file, and find the local machine in it."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardformer.errors import LaunchError, suggest_similar_names

_HOST_LINE = re.compile(r"(?P<name>[^\s=]+)(?:\s+slots\s*=\s*(?P<slots>\d{1,9}))?")


@dataclass(frozen=True)
class HostEntry:
    """Line of a host file: the name of a machine and, optionally, the number of processes to start on it."""

    name: str
    slots: int | None = None


def read_hostfile(path: str | Path) -> list[HostEntry]:
    """Read a host file with one machine per line, such as ``node1`` or ``node1 slots=4``.

    Text after ``#`` is a comment.

    Raises:
        LaunchError: the file is missing or empty, a line is invalid, or a name occurs twice.
    """
    file_name = repr(str(path))
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"The host file {file_name} cannot be read: {error}.",
            remedy="Check the path passed to --hostfile, or omit --hostfile to run on this machine only.",
        ) from error
    hosts: list[HostEntry] = []
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _HOST_LINE.fullmatch(entry)
        if match is None or match["slots"] == "0":
            machine = entry.split()[0]
            raise LaunchError(
                f"Line {number} of the host file {file_name} is not valid: {entry!r}.",
                remedy=f"Write the name of a machine, optionally with its number of slots: '{machine} slots=4'.",
            )
        if any(host.name == match["name"] for host in hosts):
            raise LaunchError(
                f"Line {number} of the host file {file_name} repeats the name {match['name']!r}.",
                remedy="Merge the lines of this machine into one line, and add up their slots.",
            )
        hosts.append(HostEntry(match["name"], int(match["slots"]) if match["slots"] else None))
    if not hosts:
        raise LaunchError(f"The host file {file_name} lists no machines.", remedy="Add a line such as 'node1 slots=4'.")
    return hosts


def select_hosts_by_name(comma_separated_names: str, hostfile_entries: list[HostEntry] | None) -> list[HostEntry]:
    """Select the machines that ``--host`` lists, in the order of the host file if there is one."""
    wanted = [name.strip() for name in comma_separated_names.split(",") if name.strip()]
    if not wanted or len(set(wanted)) < len(wanted):
        raise LaunchError(
            f"--host must be a list of distinct names, but got {comma_separated_names!r}.",
            remedy="Pass a list such as node1,node2.",
        )
    if hostfile_entries is None:
        return [HostEntry(name) for name in wanted]
    known = [host.name for host in hostfile_entries]
    for name in wanted:
        if name not in known:
            suggestion = suggest_similar_names(name, known)
            raise LaunchError(
                f"--host contains the name {name!r}, which is not in the host file.",
                remedy=f"Add this machine to the host file, or correct the name. {suggestion}",
            )
    return [host for host in hostfile_entries if host.name in wanted]


def find_local_host_index(hosts: Sequence[HostEntry]) -> int:
    """Find the index of the local machine in a list of hosts by its host name or IP addresses."""
    full = {socket.gethostname().lower(), socket.getfqdn().lower()}
    short = {name.partition(".")[0] for name in full}
    names = [host.name.lower() for host in hosts]
    by_name = [i for i, name in enumerate(names) if name in full]
    by_short_name = [i for i, name in enumerate(names) if name.partition(".")[0] in short and not _is_ip_address(name)]
    for found in (by_name, by_short_name):
        if len(found) == 1:
            return found[0]
    by_address = [i for i, name in enumerate(names) if _is_local_address(name)]
    if len(by_address) == 1:
        return by_address[0]
    machine, host_names = socket.gethostname(), ", ".join(host.name for host in hosts)
    ranks = " or ".join(map(str, range(len(hosts))[:3])) + (" ..." if len(hosts) > 3 else "")
    raise LaunchError(
        f"This machine, {machine!r}, matches {len(by_address)} hosts of the list {host_names} instead of one.",
        remedy=f"Correct the host list, or pass the index of this machine in the list: --node_rank {ranks}.",
    )


def _is_ip_address(host_name: str) -> bool:
    return ":" in host_name or re.fullmatch(r"[\d.]+", host_name) is not None


def _is_local_address(host_name: str) -> bool:
    """Return whether a host name resolves to an address of this machine."""
    try:
        found = socket.getaddrinfo(host_name, 0, type=socket.SOCK_STREAM)
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
