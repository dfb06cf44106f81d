"""Which interface the cluster uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.network.interfaces import Interface, choose_addresses, list_interfaces

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")


def eth(host: int, **changes: object) -> Interface:
    return Interface(
        **{"name": "eth0", "address": f"10.0.0.{host}", "network": "10.0.0.0/24", "default": True, **changes}
    )  # type: ignore[arg-type]


def ib(host: int, name: str = "ib0") -> Interface:
    return Interface(name, f"10.1.0.{host}", "10.1.0.0/16")


def test_one_host_stays_on_loopback() -> None:
    assert choose_addresses(["a", "a"], {0: [LO, eth(1)], 1: [LO, eth(1)]}, [None, None]) == (
        None,
        {0: "127.0.0.1", 1: "127.0.0.1"},
    )


def test_the_default_route_connects_hosts() -> None:
    interfaces = {0: [LO, eth(1)], 1: [LO, eth(2)]}
    assert choose_addresses(["a", "b"], interfaces, [None, None]) == ("eth0", {0: "10.0.0.1", 1: "10.0.0.2"})


def test_the_fast_network_goes_before_the_default_route() -> None:
    hsn = [Interface("hsn0", f"10.2.0.{n}", "10.2.0.0/16") for n in (1, 2)]
    interfaces = {0: [LO, eth(1), ib(1), hsn[0]], 1: [LO, eth(2), ib(2), hsn[1]]}
    assert choose_addresses(["a", "b"], interfaces, [None, None])[0] == "hsn0"
    without = {rank: [i for i in own if i.name != "hsn0"] for rank, own in interfaces.items()}
    assert choose_addresses(["a", "b"], without, [None, None])[0] == "ib0"


def test_a_fast_network_that_one_host_lacks_is_not_used() -> None:
    assert choose_addresses(["a", "b"], {0: [LO, eth(1), ib(1)], 1: [LO, eth(2)]}, [None, None])[0] == "eth0"


def test_a_bridge_with_the_same_address_everywhere_comes_last() -> None:
    docker = Interface("docker0", "172.17.0.1", "172.17.0.0/16")
    interfaces = {rank: [LO, docker, eth(rank + 1, default=False)] for rank in (0, 1)}
    assert choose_addresses(["a", "b"], interfaces, [None, None])[0] == "eth0"


def test_a_network_under_two_names_is_found() -> None:
    interfaces = {0: [LO, eth(1)], 1: [LO, eth(2, name="ens3")]}
    assert choose_addresses(["a", "b"], interfaces, [None, None]) == (None, {0: "10.0.0.1", 1: "10.0.0.2"})


def test_hosts_without_a_common_network_are_told_so() -> None:
    other = Interface("eth0", "192.168.1.2", "192.168.1.0/24")
    with pytest.raises(
        InputError, match=r"rank 0 on a: eth0 10\.0\.0\.0/24; rank 1 on b: eth0 192\.168\.1\.0/24"
    ):
        choose_addresses(["a", "b"], {0: [LO, eth(1)], 1: [LO, other]}, [None, None])


def test_of_many_nodes_without_a_common_network_eight_are_told() -> None:
    apart = {rank: [LO, Interface("eth0", f"10.{rank}.0.1", f"10.{rank}.0.0/24")] for rank in range(9)}
    with pytest.raises(InputError, match="share no network") as caught:
        choose_addresses([f"h{rank}" for rank in apart], apart, [None] * 9)
    assert str(caught.value).count(" on h") == 8


def test_the_interface_asked_for_is_used() -> None:
    interfaces = {0: [LO, eth(1), ib(1)], 1: [LO, eth(2), ib(2)]}
    assert choose_addresses(["a", "b"], interfaces, ["eth0", "eth0"]) == (
        "eth0",
        {0: "10.0.0.1", 1: "10.0.0.2"},
    )


def test_an_interface_that_one_rank_lacks_names_the_rank() -> None:
    message = re.escape(
        "rank 1 on b has no network interface 'ib0' with an IPv4 address (it has: eth0, lo). Fix: "
    )
    with pytest.raises(InputError, match=message):
        choose_addresses(["a", "b"], {0: [LO, ib(1)], 1: [LO, eth(2)]}, ["ib0", "ib0"])


def test_loopback_does_not_connect_hosts() -> None:
    with pytest.raises(InputError, match="'lo' is a loopback, but the job has 2 nodes. Fix: "):
        choose_addresses(["a", "b"], {0: [LO], 1: [LO]}, ["lo", "lo"])


def test_this_machine_has_a_loopback() -> None:
    assert any(i.address.startswith("127.") for i in list_interfaces())


def test_hosts_with_single_addresses_use_their_default_routes() -> None:
    interfaces = {
        n: [LO, Interface("ens4", f"10.128.0.{n}", f"10.128.0.{n}/32", default=True)] for n in (0, 1)
    }
    assert choose_addresses(["a", "b"], interfaces, [None, None]) == (
        None,
        {0: "10.128.0.0", 1: "10.128.0.1"},
    )


def test_a_bridge_never_connects_hosts() -> None:
    docker = Interface("docker0", "172.17.0.1", "172.17.0.0/16")
    with pytest.raises(InputError, match="share no network"):
        choose_addresses(["a", "b"], {0: [LO, docker], 1: [LO, docker]}, [None, None])


def test_two_addresses_on_one_host_do_not_stand_for_two_hosts() -> None:
    interfaces = {0: [LO, eth(1)], 1: [LO, eth(2), eth(3)], 2: [LO, eth(4, name="ens3")]}
    assert choose_addresses(["a", "b", "c"], interfaces, [None] * 3) == (
        None,
        {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.4"},
    )
    interfaces[2] = [LO, eth(4)]
    assert choose_addresses(["a", "b", "c"], interfaces, [None] * 3)[0] == "eth0"


def test_the_address_is_on_the_network_that_was_chosen() -> None:
    interfaces = {
        n: [LO, eth(n, address=f"192.168.{n}.1", network=f"192.168.{n}.0/24"), eth(n)] for n in (1, 2)
    }
    assert choose_addresses(["a", "b"], {0: interfaces[1], 1: interfaces[2]}, [None, None]) == (
        "eth0",
        {0: "10.0.0.1", 1: "10.0.0.2"},
    )


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
    assert not any(each.default for each in list_interfaces(str(tmp_path / "none")))
