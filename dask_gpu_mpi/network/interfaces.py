"""The choice of the network interface for the cluster, from the interfaces of all ranks.

Sites have similar names for fast networks: ``hsn0`` (Slingshot), ``ib0`` (IP over InfiniBand). Otherwise the interface of the
default route is used. A job on one host uses the loopback interface, which no other host can reach.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dask_gpu_mpi.errors import InputError

_FAST = (re.compile(r"hsn\d+$"), re.compile(r"ib\w*\d$"))
#: Bridges and tunnels that exist on many hosts with the same, unreachable address.
_VIRTUAL = re.compile(r"(docker|virbr|veth|cni|flannel|tun|tap|br-)")


@dataclass(frozen=True)
class Interface:
    """An interface with an IPv4 address, or, if it has none, with an IPv6 address."""

    name: str
    address: str
    #: With prefix length.
    network: str
    #: Whether it has the default route.
    default: bool = False


def choose_addresses(
    hosts: Sequence[str], interfaces: Mapping[int, Sequence[Interface]], wanted: Sequence[str | None]
) -> tuple[str | None, dict[int, str]]:
    """The name of the interface (None if the hosts differ in it), and by rank the address to listen on.

    `wanted` has the interface that each rank is configured to use, or None. Raises an InputError if a rank lacks it, or if the
    hosts share no network.
    """
    ranks = range(len(hosts))
    asked = {rank: name for rank, name in enumerate(wanted) if name is not None}
    if asked:
        addresses = {rank: _asked(rank, hosts[rank], interfaces[rank], asked.get(rank)) for rank in ranks}
        if len(set(hosts)) > 1 and any(map(_is_loopback, addresses.values())):
            raise InputError(
                f"interface {next(iter(asked.values()))!r} is a loopback, but the job has {len(set(hosts))} nodes",
                fix="choose one that reaches them with interface (--interface), or leave it out",
                what="network",
            )
        return next(iter(asked.values())), addresses
    if len(set(hosts)) == 1:
        return None, dict.fromkeys(ranks, "127.0.0.1")
    usable = {rank: _usable(interfaces[rank]) for rank in ranks}
    if (shared := _shared([*usable.values()])) is not None:
        name, network = shared
        return name or None, {
            rank: next(i.address for i in own if i.network == network and name in ("", i.name))
            for rank, own in usable.items()
        }
    routed = {rank: [i.address for i in own if i.default] for rank, own in usable.items()}
    if all(routed.values()):
        # Hosts on different subnets, or with single addresses (clouds), reach each other by their default routes.
        return None, {rank: addresses[0] for rank, addresses in routed.items()}
    seen = "; ".join(
        f"rank {rank} on {hosts[rank]}: {', '.join(f'{i.name} {i.network}' for i in usable[rank]) or 'none'}"
        for rank in ranks[:8]
    )
    raise InputError(
        f"the nodes share no network: {seen}",
        fix="set the interface to use with interface (--interface)",
        what="network",
    )


def _asked(rank: int, host: str, interfaces: Sequence[Interface], name: str | None) -> str:
    found = next((i.address for i in interfaces if i.name == name), None)
    if found is None:
        have = ", ".join(sorted({i.name for i in interfaces})) or "none"
        problem = "no interface option, although other ranks have one"
        if name:
            problem = f"no network interface {name!r} with an address"
        raise InputError(
            f"{problem} (it has: {have})",
            where=f"rank {rank} on {host}",
            fix="choose one that every node has with interface (--interface), or leave it out everywhere",
            what="network",
        )
    return found


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _usable(interfaces: Sequence[Interface]) -> list[Interface]:
    """The interfaces that may lead to other hosts, those with IPv4 addresses first."""
    usable = [i for i in interfaces if not _is_loopback(i.address) and not _VIRTUAL.match(i.name)]
    return sorted(usable, key=lambda i: ":" in i.address)


def _shared(usable: Sequence[Sequence[Interface]]) -> tuple[str, str] | None:
    """Name and network of the best interface that every rank has, else a network that every rank is on, without a name."""
    named = set.intersection(*({(i.name, i.network) for i in own} for own in usable))
    networks = set.intersection(*({i.network for i in own} for own in usable))
    candidates = [(True, ":" in network, 0, "", network) for network in networks]
    for interface in usable[0]:
        if (interface.name, interface.network) in named:
            fast = next((k for k, pattern in enumerate(_FAST) if pattern.match(interface.name)), None)
            order = fast if fast is not None else 2 if interface.default else 3
            candidates.append((False, ":" in interface.network, order, interface.name, interface.network))
    return min(candidates)[3:] if candidates else None


def list_interfaces(
    routes: str = "/proc/net/route", routes6: str = "/proc/net/ipv6_route"
) -> tuple[Interface, ...]:
    """The interfaces of this host that have an address, loopback included; with IPv6 addresses only if they have no others."""
    import psutil

    states = psutil.net_if_stats()
    default = {line[0] for line in _lines(routes)[1:] if len(line) > 7 and line[1] == line[7] == "00000000"}
    default6 = {line[9] for line in _lines(routes6) if len(line) > 9 and set(line[0] + line[1]) == {"0"}}
    found = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        if name in states and not states[name].isup:
            continue
        own = [entry for entry in entries if entry.family == socket.AF_INET]
        # an address of the link alone needs its interface with it, which Dask's addresses have no place for
        own = own or [
            entry for entry in entries if entry.family == socket.AF_INET6 and "%" not in entry.address
        ]
        for entry in own:
            is_default = name in (default if entry.family == socket.AF_INET else default6)
            found.append(Interface(name, entry.address, _network(entry.address, entry.netmask), is_default))
    return tuple(found)


def _lines(file: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(file).read_text(errors="replace").splitlines()]
    except OSError:
        return []


def _network(address: str, mask: str | None) -> str:
    """The network of an address, with prefix length.

    >>> _network("10.0.0.1", "255.255.0.0"), _network("fd77::1", "ffff:ffff:ffff:ffff::"), _network("10.0.0.1", None)
    ('10.0.0.0/16', 'fd77::/64', '10.0.0.1/32')
    """
    own = ipaddress.ip_address(address)
    prefix = own.max_prefixlen if mask is None else int(ipaddress.ip_address(mask)).bit_count()
    return str(ipaddress.ip_network((address, prefix), strict=False))


def as_host(address: str | None) -> str | None:
    """An address as the host of a URL, and as distributed requires it.

    >>> as_host("10.0.0.1"), as_host("fd77::1"), as_host(None)
    ('10.0.0.1', '[fd77::1]', None)
    """
    return f"[{address}]" if address and ":" in address else address


def host_and_port(text: str) -> tuple[str, int]:
    """The address and the port of ``HOST:PORT``.

    >>> host_and_port("10.0.0.1:8786"), host_and_port("[fd77::1]:8786")
    (('10.0.0.1', 8786), ('fd77::1', 8786))
    """
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """An id of this boot of this machine (random(4)); empty if unknown.

    Ranks share a node if their host names and boot ids are the same.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
