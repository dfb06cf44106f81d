from __future__ import annotations

import io

from dask_gpu_mpi.startup.exchange import IN_FILE, NAMED, ON_TERMINAL, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("nobody listens")


def test_a_line_every_ten_seconds_in_a_file() -> None:
    out = io.StringIO()
    progress = Progress(100.0, out)
    for tenth in range(350):
        progress.show(100.0 + tenth / 10, 42, 64, ["h17", "h18"])
    assert out.getvalue().splitlines() == ["dask_gpu_mpi: 42 of 64 workers, waiting for h[17-18]"] * 3
    assert IN_FILE == 10.0


def test_nothing_when_the_start_is_quick() -> None:
    out = io.StringIO()
    progress = Progress(0.0, out)
    progress.show(IN_FILE - 0.1, 0, 2, ["h1"])
    progress.clear()
    assert out.getvalue() == ""


def test_one_line_that_changes_on_a_terminal() -> None:
    out = Terminal()
    progress = Progress(0.0, out)
    progress.show(0.1, 0, 4, ["h1"])
    assert out.getvalue() == ""
    progress.show(ON_TERMINAL, 1, 4, ["h1"])
    progress.show(ON_TERMINAL + 0.1, 1, 4, ["h1"])
    progress.show(2 * ON_TERMINAL, 3, 4, ["h1"])
    first, second = out.getvalue().split("\r\x1b[K")[1:]
    assert first == "dask_gpu_mpi: 1 of 4 workers, waiting for h1"
    assert second == "dask_gpu_mpi: 3 of 4 workers, waiting for h1"
    progress.clear()
    assert out.getvalue().endswith("\r\x1b[K")
    before = out.getvalue()
    progress.clear()
    assert out.getvalue() == before


def told(ready: int, planned: int | None, hosts: list[str]) -> str:
    out = io.StringIO()
    Progress(0.0, out).show(IN_FILE, ready, planned, hosts)
    return out.getvalue()


def test_words() -> None:
    assert told(0, None, []) == "dask_gpu_mpi: starting, waiting for the scheduler\n"
    assert told(0, None, [""]) == "dask_gpu_mpi: starting, waiting for 1 rank that has not responded\n"
    assert told(0, None, ["", ""]) == "dask_gpu_mpi: starting, waiting for 2 ranks that have not responded\n"
    assert told(1, 3, ["h2", "", "h2"]).endswith(
        "1 of 3 workers, waiting for h2 and 1 rank that has not responded\n"
    )


def test_not_a_line_per_host() -> None:
    text = told(0, 99, [f"n{i}x{i % 7}" for i in range(99)])
    assert " and others" in text
    assert text.count(",") <= NAMED


def test_a_stream_that_is_closed_is_no_error() -> None:
    Progress(0.0, Broken()).show(99.0, 0, 1, ["h1"])
    closed = io.StringIO()
    progress = Progress(0.0, closed)
    closed.close()
    progress.show(99.0, 0, 1, ["h1"])
