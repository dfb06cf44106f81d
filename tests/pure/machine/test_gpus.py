"""The network devices near a GPU, in an emulated /sys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dask_gpu_mpi.machine import nearest_ports

#: A GPU and a port under one switch, a port under the same root, one of the same NUMA node, and one of the other.
GPU = "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0/0000:1b:00.0"
SWITCH = "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:01.0/0000:1c:00.0"
ROOT = "pci0000:17/0000:17:02.0/0000:20:00.0"
SOCKET = "pci0000:37/0000:37:01.0/0000:38:00.0"
OTHER = "pci0000:97/0000:97:01.0/0000:98:00.0"
PREFIX = "fe80:0000:0000:0000"
Sysfs = Callable[..., Path]


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    """Make the GPU and, by name, InfiniBand devices: path, NUMA node, and what differs of their port 1."""

    def make(node: int = 0, **nics: tuple[str, int, dict[str, str]]) -> Path:
        for path, numa in ((GPU, node), *(nic[:2] for nic in nics.values())):
            device = tmp_path / "devices" / path
            device.mkdir(parents=True)
            (device / "numa_node").write_text(f"{numa}\n")
        (tmp_path / "bus/pci/devices").mkdir(parents=True)
        (tmp_path / "bus/pci/devices/0000:1b:00.0").symlink_to(tmp_path / "devices" / GPU)
        for name, (path, _, differs) in nics.items():
            port = {
                "link_layer": "InfiniBand",
                "state": "4: ACTIVE",
                "gids/0": f"{PREFIX}:0002:c903:0000:1491",
            }
            for file, text in (port | differs).items():
                place = tmp_path / f"class/infiniband/{name}/ports/1/{file}"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(f"{text}\n")
            (tmp_path / f"class/infiniband/{name}/device").symlink_to(tmp_path / "devices" / path)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("nics", "found"),
    [
        ({"mlx5_0": (SWITCH, 0, {}), "mlx5_1": (ROOT, 0, {}), "mlx5_2": (OTHER, 1, {})}, "mlx5_0:1"),
        ({"mlx5_1": (ROOT, 0, {}), "mlx5_2": (SOCKET, 0, {})}, "mlx5_1:1"),
        ({"mlx5_2": (SOCKET, 0, {}), "mlx5_3": (OTHER, 1, {})}, "mlx5_2:1"),
        # two functions of one device
        (
            {"mlx5_0": (SWITCH, 0, {}), "mlx5_1": (SWITCH[:-1] + "1", 0, {}), "x": (OTHER, 1, {})},
            "mlx5_0:1,mlx5_1:1",
        ),
        # a cable that is not there, and Ethernet, over which InfiniBand reaches nobody
        (
            {"a": (SWITCH, 0, {"state": "1: DOWN"}), "b": (ROOT, 0, {}), "c": (OTHER, 1, {})},
            "b:1",
        ),
        # nothing to choose, or not for us
        ({}, ""),
        ({"mlx5_0": (OTHER, 1, {})}, ""),
        ({"a": (SOCKET, 0, {}), "b": (SOCKET[:-1] + "1", 0, {})}, ""),
        ({"a": (SWITCH, 0, {"link_layer": "Ethernet"}), "b": (OTHER, 1, {"link_layer": "Ethernet"})}, ""),
        ({"a": (SWITCH, 0, {}), "b": (OTHER, 1, {"gids/0": "fe80:0000:0000:0001:0002:c903:0000:1491"})}, ""),
    ],
)
def test_the_ports_nearest_to_a_gpu(
    nics: dict[str, tuple[str, int, dict[str, str]]], found: str, sysfs: Sysfs
) -> None:
    assert nearest_ports("00000000:1B:00.0", sysfs(**nics)) == found


def test_without_numa_nodes_the_root_alone_is_no_choice(sysfs: Sysfs) -> None:
    assert nearest_ports("00000000:1B:00.0", sysfs(-1, a=(SOCKET, -1, {}), b=(OTHER, -1, {}))) == ""


def test_a_gpu_that_is_not_in_sys(sysfs: Sysfs) -> None:
    sys = sysfs(a=(SWITCH, 0, {}), b=(OTHER, 1, {}))
    assert nearest_ports("00000000:77:00.0", sys) == ""
    assert nearest_ports("00000000:1B:00.0", sys / "nothing") == ""
