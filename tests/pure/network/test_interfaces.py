"""Which interface the cluster uses."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.network.interfaces import Interface, choose_addresses, list_interfaces

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")
LO6 = Interface("lo", "::1", "::1/128")


def eth(host: int, **changes: object) -> Interface:
    return Interface(
        **{"name": "eth0", "address": f"10.0.0.{host}", "network": "10.0.0.0/24", "default": True, **changes}
    )  # type: ignore[arg-type]


def ib(host: int, name: str = "ib0") -> Interface:
    return Interface(name, f"10.1.0.{host}", "10.1.0.0/16")


def v6(host: int, name: str = "eth0", **changes: object) -> Interface:
    return eth(host, name=name, address=f"fd77::{host}", network="fd77::/64", **changes)


def cloud(host: int) -> Interface:
    return Interface("ens4", f"10.0.0.{host}", f"10.0.0.{host}/32", default=True)


HSN = [Interface("hsn0", f"10.2.0.{n}", "10.2.0.0/16") for n in (1, 2)]
DOCKER = Interface("docker0", "172.17.0.1", "172.17.0.0/16")
#: Its own address, and another one on every host's own network first.
TWO_NETWORKS = [[LO, eth(n, address=f"192.168.{n}.1", network=f"192.168.{n}.0/24"), eth(n)] for n in (1, 2)]
ETH, V6 = ["10.0.0.1", "10.0.0.2"], ["fd77::1", "fd77::2"]


@pytest.mark.parametrize(
    ("interfaces", "name", "addresses"),
    [
        ([[LO, eth(1)], [LO, eth(2)]], "eth0", ETH),
        ([[LO, eth(1), ib(1), HSN[0]], [LO, eth(2), ib(2), HSN[1]]], "hsn0", ["10.2.0.1", "10.2.0.2"]),
        ([[LO, eth(1), ib(1)], [LO, eth(2), ib(2)]], "ib0", ["10.1.0.1", "10.1.0.2"]),
        ([[LO, eth(1), ib(1)], [LO, eth(2)]], "eth0", ETH),
        ([[LO, DOCKER, eth(n, default=False)] for n in (1, 2)], "eth0", ETH),
        ([[LO, eth(1)], [LO, eth(2, name="ens3")]], None, ETH),
        ([[LO, cloud(1)], [LO, cloud(2)]], None, ETH),
        ([[LO, eth(1)], [LO, eth(2), eth(3)], [LO, eth(4, name="ens3")]], None, [*ETH, "10.0.0.4"]),
        ([[LO, v6(1)], [LO, v6(2)]], "eth0", V6),
        ([[LO, eth(n, name="eth1"), v6(n, "hsn0")] for n in (1, 2)], "eth1", ETH),
        ([[LO, v6(n, name), eth(n, name=name + "x")] for n, name in ((1, "a"), (2, "b"))], None, ETH),
        (TWO_NETWORKS, "eth0", ETH),
    ],
    ids=[
        "the default route", "a fast network first", "InfiniBand", "InfiniBand of one host alone", "a bridge",
        "one network, two names", "single addresses", "two addresses of one host", "IPv6 alone",
        "IPv4 before IPv6", "IPv4 before IPv6, two names", "the address is on the chosen network",
    ],
)  # fmt: skip
def test_what_connects_the_hosts(
    interfaces: list[list[Interface]], name: str | None, addresses: list[str]
) -> None:
    hosts = ["a", "b", "c"][: len(interfaces)]
    found = choose_addresses(hosts, dict(enumerate(interfaces)), [None] * len(hosts))
    assert found == (name, dict(enumerate(addresses)))
    alone = choose_addresses(["a"] * len(hosts), dict(enumerate(interfaces)), [None] * len(hosts))
    assert alone == (None, dict.fromkeys(range(len(hosts)), "127.0.0.1"))


def test_the_interface_asked_for_is_used() -> None:
    interfaces = {0: [LO, eth(1), ib(1)], 1: [LO, eth(2), ib(2)]}
    found = choose_addresses(["a", "b"], interfaces, ["eth0", "eth0"])
    assert found == ("eth0", {0: "10.0.0.1", 1: "10.0.0.2"})


@pytest.mark.parametrize(
    ("first", "second", "wanted", "says"),
    [
        ([LO, eth(1)], [LO, Interface("eth0", "192.168.1.2", "192.168.1.0/24")], None,
         "rank 0 on a: eth0 10.0.0.0/24; rank 1 on b: eth0 192.168.1.0/24"),
        ([LO, DOCKER], [LO, DOCKER], None, "share no network"),  # a bridge never connects hosts
        ([LO, ib(1)], [LO, eth(2)], "ib0", "rank 1 on b: no network interface 'ib0' with an address (it has: eth0, lo)."),
        ([LO], [LO], "lo", "'lo' is a loopback, but the job has 2 nodes. Fix: "),
        ([LO6], [LO6], "lo", "'lo' is a loopback, but the job has 2 nodes. Fix: "),
    ],
)  # fmt: skip
def test_what_does_not(
    first: list[Interface], second: list[Interface], wanted: str | None, says: str
) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        choose_addresses(["a", "b"], {0: first, 1: second}, [wanted] * 2)


@pytest.mark.parametrize(
    ("line", "default"),
    [
        ("lo 00000000 0100007F 0003 0 0 0 00000000 0 0 0", True),
        ("lo 00000000 0100007F 0003 0 0 0 000000FF 0 0 0", False),
        ("lo 0000007F 0100007F 0003 0 0 0 00000000 0 0 0", False),
        ("lo 00000000 0100007F 0003 0 0 0", False),
        ("eth9 00000000 0100007F 0003 0 0 0 00000000 0 0 0", False),
    ],
)
def test_default_route_as_the_kernel_lists_it(tmp_path: Path, line: str, default: bool) -> None:
    routes = tmp_path / "route"
    routes.write_text(f"Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n{line}\n")
    (loopback,) = [each for each in list_interfaces(str(routes)) if each.name == "lo"]
    assert loopback.default is default
    assert not any(each.default for each in list_interfaces(str(tmp_path / "none"), str(tmp_path / "none")))


def test_an_interface_without_an_ipv4_address_has_its_ipv6_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(address: str, netmask: str) -> SimpleNamespace:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return SimpleNamespace(family=family, address=address, netmask=netmask)

    half = "ffff:ffff:ffff:ffff::"
    entries = {
        "eth0": [entry("fd77::5", half), entry("fe80::1%eth0", half)],
        "eth1": [entry("10.0.0.5", "255.255.255.0"), entry("fd78::5", half)],
        "eth2": [entry("fd79::5", half)],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    zero = "0" * 32
    routes = tmp_path / "ipv6_route"
    other = f"{'0' * 31}1"  # no default route
    for name, net in (("eth0", zero), ("eth2", other)):
        with routes.open("a") as file:
            file.write(f"{net} 00 {zero} 00 fd77{'0' * 27}1 00000400 00000003 00000000 00000003     {name}\n")
    assert list_interfaces(str(tmp_path / "none"), str(routes)) == (
        Interface("eth0", "fd77::5", "fd77::/64", True),
        Interface("eth1", "10.0.0.5", "10.0.0.0/24", False),
        Interface("eth2", "fd79::5", "fd79::/64", False),
    )
