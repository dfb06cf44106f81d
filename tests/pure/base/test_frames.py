"""Frames over a pipe arrive whole, in order, and an end of file is seen."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.base.frames import FrameReader, wait_until_read, write_frame


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


def test_what_was_written_has_been_read(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.write(write, b"the report")
    reader = threading.Timer(0.2, os.read, (read, 100))
    reader.start()
    wait_until_read((write,), 60)
    assert not select.select([read], [], [], 0)[0]
    reader.join()


def test_nobody_reads(pipe: tuple[int, int], tmp_path: Path) -> None:
    """It is not waited for longer than that, and only for pipes: the rest of a file is nobody's to read."""
    read, write = pipe
    os.write(write, b"the report")
    wait_until_read((write,), 0.05)
    assert os.read(read, 100) == b"the report"
    os.close(write)
    (tmp_path / "file").write_text("more")
    with (tmp_path / "file").open() as file:
        wait_until_read((write, file.fileno()), 600)  # pytest gives a test two minutes
