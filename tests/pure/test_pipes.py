"""Frames over a pipe arrive whole, in order, and an end of file is seen."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest

from dask_gpu_mpi.pipes import FrameReader, write_frame


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        with contextlib.suppress(OSError):  # where the test has closed it
            os.close(fd)


def test_frames_arrive_in_order(pipe: tuple[int, int]) -> None:
    read, write = pipe
    for value in ("hello", {"a": 1}, None):
        write_frame(write, value)
    assert FrameReader(read).read(timeout=5) == ["hello", {"a": 1}, None]


def test_a_frame_larger_than_the_pipe_is_put_together(pipe: tuple[int, int]) -> None:
    read, write = pipe
    big = b"x" * 3_000_000
    writer = threading.Thread(target=write_frame, args=(write, big))
    writer.start()
    reader, frames = FrameReader(read), []
    while not frames:
        frames = reader.read(timeout=5)
    writer.join()
    assert frames == [big]


def test_half_a_frame_is_kept_until_the_rest_comes(pipe: tuple[int, int]) -> None:
    read, write = pipe
    side_r, side_w = os.pipe()
    write_frame(side_w, ("ready", 4))
    data = os.read(side_r, 1000)
    os.close(side_r)
    os.close(side_w)
    reader = FrameReader(read)
    os.write(write, data[:11])
    assert reader.read(timeout=1) == []
    os.write(write, data[11:])
    assert reader.read(timeout=5) == [("ready", 4)]


def test_end_of_file_is_seen_after_the_last_frame(pipe: tuple[int, int]) -> None:
    read, write = pipe
    write_frame(write, 1)
    os.close(write)
    reader = FrameReader(read)
    assert reader.read(timeout=5) == [1]
    assert reader.eof
    assert reader.read(timeout=0) == []


def test_no_frame_no_wait(pipe: tuple[int, int]) -> None:
    reader = FrameReader(pipe[0])
    assert reader.read(timeout=0) == []
    assert not reader.eof
