"""Frames over a pipe or a socket arrive whole, in order, descriptors with them, and an end of file is seen."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.base.frames import FrameReader, identity, read_frame, wait_until_read, write_frame


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        with contextlib.suppress(OSError):  # where the test has closed it
            os.close(fd)


def test_frames_arrive_in_order_and_whole_until_the_end_of_the_file(pipe: tuple[int, int]) -> None:
    read, write = pipe
    reader = FrameReader(read)
    assert reader.read(timeout=0) == []
    for value in ("hello", {"a": 1}, None):
        write_frame(write, value)
    assert reader.read(timeout=5) == ["hello", {"a": 1}, None]
    data = pickle.dumps(("ready", 4))
    data = struct.pack("<Q", len(data)) + data
    os.write(write, data[:11])
    assert reader.read(timeout=0.1) == []  # half a frame is kept
    os.write(write, data[11:])
    assert (reader.read(timeout=5), reader.eof) == ([("ready", 4)], False)
    write_frame(write, 1)
    os.close(write)
    assert reader.read(timeout=5) == [1]
    assert (reader.eof, reader.taken) == (True, False)
    begun = time.monotonic()
    for seconds in (0.2, 0.0, -2.0):  # nothing more comes, but time passes
        assert reader.read(timeout=seconds) == []
    assert time.monotonic() - begun >= 0.2
    reader.close()
    assert (reader.fd, identity(read)) == (-1, None)
    reader.close()
    assert reader.read(timeout=0.0) == []


def test_nobody_reads(pipe: tuple[int, int], tmp_path: Path) -> None:
    """It is not waited for longer than that, and only for pipes: the rest of a file is nobody's to read."""
    read, write = pipe
    os.write(write, b"the report")
    begun = time.monotonic()
    wait_until_read((write,), 0.05)
    assert time.monotonic() - begun >= 0.05
    assert os.read(read, 100) == b"the report"
    os.close(write)
    (tmp_path / "file").write_text("more")
    with (tmp_path / "file").open() as file:
        wait_until_read((write, file.fileno()), 600)  # pytest gives a test two minutes


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


@pytest.mark.parametrize("blocking", [True, False], ids=["blocks", "socket.setdefaulttimeout()"])
@pytest.mark.parametrize("with_descriptor", [True, False])
def test_a_frame_that_is_larger_than_what_fits_in(
    blocking: bool, with_descriptor: bool, ends: tuple[socket.socket, socket.socket], pipe: tuple[int, int]
) -> None:
    """It is written as it is read, a descriptor comes with it as a copy, and one that nobody reads is given up."""
    ours, theirs = ends
    for end in ends:
        end.setblocking(blocking)
    fds, big = [pipe[1]] * with_descriptor, b"x" * 3_000_000
    writer = threading.Thread(target=write_frame, args=(ours.fileno(), big), kwargs={"fds": fds})
    writer.start()
    reader, frames = FrameReader(theirs.fileno()), list[object]()
    while not frames:
        frames += reader.read(timeout=5)
    writer.join()
    assert (frames, len(reader.fds)) == ([big], with_descriptor)
    for copy in reader.fds:
        os.close(pipe[1])
        write_frame(copy, "through the copy")
        os.close(copy)
        assert read_frame(pipe[0], 1.0) == "through the copy"
    with pytest.raises(TimeoutError, match=r"reads nothing for 0.1 s"):
        write_frame(ours.fileno(), big, fds=[0] * with_descriptor, patience=0.1)
    for _ in range(1000 * with_descriptor):  # it waits no longer the next time
        with pytest.raises(TimeoutError):
            write_frame(ours.fileno(), "more", fds=[0] * with_descriptor, patience=0.001)


def refuse() -> object:
    raise ValueError("no such class here")


class Broken:
    """A frame that can be written, and not read."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return refuse, ()


def test_frames_before_and_behind_one_that_can_not_be_read(pipe: tuple[int, int]) -> None:
    read, write = pipe
    for frame in (1, 2, Broken(), 3):
        write_frame(write, frame)
    reader = FrameReader(read)
    assert reader.read(timeout=60) == [1, 2]
    with pytest.raises(ValueError, match="no such class"):
        reader.read(timeout=60)
    assert reader.read(timeout=60) == [3]


def test_a_descriptor_that_now_belongs_to_another_file(pipe: tuple[int, int], tmp_path: Path) -> None:
    read, write = pipe
    reader = FrameReader(read)
    with (tmp_path / "file").open("w+") as other:
        os.dup2(other.fileno(), read)
        assert reader.read(timeout=60) == []
        assert (reader.eof, reader.taken) == (True, True)
        reader.close()
        assert identity(read) == identity(other.fileno()) != identity(write)
    os.close(read)
    assert identity(read) is None


def test_one_frame_and_no_byte_of_the_next(pipe: tuple[int, int]) -> None:
    """Or none: nothing comes in time, and the other side ends in the middle of one."""
    read, write = pipe
    assert read_frame(read, 0.01) is None
    write_frame(write, "first")
    write_frame(write, "second")
    assert read_frame(read, 1.0) == "first"
    reader = FrameReader(os.dup(read))
    assert reader.read(1.0) == ["second"]
    reader.close()
    os.write(write, struct.pack("<Q", 100) + b"cut")
    os.close(write)
    assert read_frame(read, 1.0) is None
    assert read_frame(read, 1.0) is None


@pytest.mark.parametrize("read_all", [True, False])
def test_the_other_side_of_a_socket_ends(read_all: bool, ends: tuple[socket.socket, socket.socket]) -> None:
    """It is the end of file too if what was sent to it is left there; and writing to it is a ConnectionError."""
    ours, other = ends
    reader = FrameReader(ours.fileno())
    write_frame(other.fileno(), "last words")
    if not read_all:
        write_frame(ours.fileno(), "not read")
    other.close()
    assert reader.read(timeout=5) == ["last words"]
    assert reader.read(timeout=5) == []
    assert (reader.eof, reader.taken) == (True, False)
    with pytest.raises(ConnectionError):
        write_frame(ours.fileno(), "too late", fds=[0])
