"""`Protocol`: what it knows, and that Dask, messages, JSON and pickles have its text."""

from __future__ import annotations

import json
import pickle

import pytest

from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import Protocol
from dask_gpu_mpi.options.resolve import resolve


@pytest.mark.parametrize(
    ("name", "encrypts", "moves_device_memory", "allows_plain_probe"),
    [("tls", True, False, False), ("tcp", False, False, True), ("ucx", False, True, False)],
)
def test_what_it_knows(
    name: str, encrypts: bool, moves_device_memory: bool, allows_plain_probe: bool
) -> None:
    protocol = Protocol(name)
    assert protocol.encrypts is encrypts
    assert protocol.moves_device_memory is moves_device_memory
    assert protocol.allows_plain_probe is allows_plain_probe


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        resolve({}, source="keyword"),
        resolve({"protocol": "ucx", "security": False}, source="keyword"),
        resolve({"protocol": "TCP"}, source="command line"),
        resolve({"security": False}, source="keyword"),
        resolve({"scheduler": False, "scheduler_address": "tcp://h:1"}, source="keyword"),
    ],
)
def test_options_hold_one(options: Options) -> None:
    assert isinstance(options.protocol, Protocol)
    assert options.security is options.protocol.encrypts


@pytest.mark.parametrize("protocol", Protocol)
def test_it_is_written_as_its_text(protocol: Protocol) -> None:
    text = protocol.value
    assert (str(protocol), f"{protocol}", f"{protocol!r}") == (text, text, f"'{text}'")
    assert type(str(protocol)) is str
    assert json.dumps({"protocol": protocol}) == json.dumps({"protocol": text})
    assert pickle.loads(pickle.dumps(protocol)) is protocol
    assert {protocol: 1} == {text: 1}


@pytest.mark.parametrize(
    ("address", "protocol"),
    [
        ("tls://h:1", Protocol.TLS),
        ("ucx://[::1]:1", Protocol.UCX),
        ("ws://h:1", None),
        ("TLS://h:1", None),  # distributed would not know it either
        ("h:1", None),
        ("tcp", None),
        ("", None),
    ],
)
def test_the_protocol_of_an_address(address: str, protocol: Protocol | None) -> None:
    assert Protocol.of(address) is protocol
