"""Start of a cluster from a slow file system, with and without ``launch --stage``, and a model of 1,000 nodes.

    python benchmarks/staging.py --json benchmarks/results/staging.json
    python benchmarks/staging.py --model benchmarks/results/staging.json

Copies the environment to a file system in memory on which the kernel lets each ``open`` wait (fanotify), and packs it there.
Then starts clusters of one rank a node on hosts of the test bed (ci/testbed: network namespaces of this machine), in pairs: from
the slow file system, and with ``--stage``. The copies are in each host's /dev/shm. Needs root, zstd, and the Python of an
environment with an MPI. All hosts share the cores of this machine, so unpacking takes longer the more there are, unlike on nodes.

ready
    Seconds from the launch until the client sees all workers.
opened
    Files opened on the slow file system until then, by all nodes. Failed searches for a file are not delayed and not counted.

``--model`` renews the model, whose assumptions are the constants below. Exit code 1: a cluster did not come up.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import MARK, ROOT, Job, default_launcher, introduce, machine, parser_for, write

TESTBED = ROOT / "ci" / "testbed"
SCRIPT = """
from distributed import Client
with Client() as client:
    client.wait_for_workers(count)
    note("ready")
"""
#: Packages that a cluster of CPU workers does not import, to keep the copies of eight hosts in memory.
LEFT_OUT = (
    *(
        "llvmlite",
        "numba",
        "scipy",
        "scipy.libs",
        "sklearn",
        "cuda",
        "selenium",
        "jedi",
        "mypy",
        "mypyc",
        "debugpy",
    ),
    *(
        "pip",
        "pandas",
        "PIL",
        "pillow.libs",
        "pygments",
        "IPython",
        "hypothesis",
        "setuptools",
        "*mypyc*.so",
        "grimp",
    ),
)
FAN_CLASS_CONTENT, FAN_CLOEXEC, FAN_MARK_ADD, FAN_MARK_FILESYSTEM, FAN_OPEN_PERM, FAN_ALLOW = (
    4,
    1,
    1,
    0x100,
    0x10000,
    1,
)
AT_FDCWD = -100
EVENT = struct.Struct("=IBBHQii")

# The model: one rank a node, and the measured numbers of files.
NODES = (8, 64, 512, 1000)
#: Calls to the metadata server for each file that is opened: Python searches for it first (results/files-simulated-gpus.json).
CALLS_PER_OPEN = 4.8
#: Calls that the server carries out in a second, and seconds of one call if it is idle.
SERVER_RATE, LATENCY = 50_000.0, 0.001
#: Bytes/s at which `launch` hashes an archive, and at which the shared file system delivers it to all nodes together.
HASH_RATE, READ_RATE = 1.0e9, 20e9
#: Files that a node unpacks in a second: here 10,870 in 3.3 to 4.4 s, with the test of the copy.
UNPACK_RATE = 2500.0


class SlowFiles:
    """Lets each ``open`` on a file system wait, and counts them."""

    def __init__(self, folder: Path, delay: float, threads: int = 128) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._group = libc.fanotify_init(FAN_CLASS_CONTENT | FAN_CLOEXEC, os.O_RDONLY | os.O_CLOEXEC)
        mask = ctypes.c_uint64(FAN_OPEN_PERM)
        marked = libc.fanotify_mark(
            self._group, FAN_MARK_ADD | FAN_MARK_FILESYSTEM, mask, AT_FDCWD, os.fsencode(folder)
        )
        if self._group < 0 or marked < 0:
            raise OSError(ctypes.get_errno(), "fanotify: " + os.strerror(ctypes.get_errno()))
        self.opened = 0
        self._delay = delay
        for _ in range(threads):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            event = os.read(self._group, EVENT.size)
            *_, descriptor, _ = EVENT.unpack(event)
            self.opened += 1
            time.sleep(self._delay)
            os.write(self._group, struct.pack("=iI", descriptor, FAN_ALLOW))
            os.close(descriptor)


@contextlib.contextmanager
def slow_environment(delay: float) -> Iterator[tuple[Path, SlowFiles, int]]:
    """A copy of the environment on a slow file system, with its archive next to it; the number of its files."""
    with tempfile.TemporaryDirectory(prefix="bm-slow-") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", folder], check=True)
        try:
            place = Path(folder, "env")
            place.mkdir()
            left_out = [f"--exclude={name}" for name in (*LEFT_OUT, "__editable__*")]
            pack = subprocess.Popen(["tar", "-c", "-C", sys.prefix, *left_out, "."], stdout=subprocess.PIPE)
            subprocess.run(["tar", "-x", "-C", place], stdin=pack.stdout, check=True)
            pack.wait()
            (packages,) = place.glob("lib/python3*/site-packages")
            shutil.copytree(ROOT / "dask_gpu_mpi", packages / "dask_gpu_mpi", symlinks=False)
            subprocess.run(
                [place / "bin" / "python", "-m", "compileall", "-q", packages / "dask_gpu_mpi"], check=True
            )
            archive = f"tar -c -C {place} . | zstd -q -T0 > {folder}/env.tar.zst"
            subprocess.run(["bash", "-c", f"set -o pipefail; {archive}"], check=True)
            files = sum(len(names) for _, _, names in os.walk(place))
            yield place, SlowFiles(Path(folder), delay), files
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def start(
    nodes: int, place: Path, slow: SlowFiles, bed: Path, options: Any, *, stage: bool
) -> dict[str, Any]:
    """Start one cluster; seconds and opened files."""
    rsh = str(TESTBED / "on-rsh")
    variables = {
        "PYTHONPATH": "",
        "TESTBED_DIR": bed,
        "TESTBED_PASS": MARK,
        "PRTE_MCA_plm_ssh_agent": rsh,
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": rsh,
        "PATH": f"{place}/bin:/usr/bin:/bin",
    }
    words = [
        "--hosts",
        ",".join(f"h{number}" for number in range(1, nodes + 1)),
        "--local-directory",
        "/dev/shm",
    ]
    words += ["--nthreads", "1", "--startup-timeout", str(options.limit)]
    if stage:
        words += ["--stage", str(place.parent / "env.tar.zst")]
    with Job(SCRIPT, nodes, **variables) as job:
        before = slow.opened
        line = [str(place / "bin" / "python"), "-m", "dask_gpu_mpi", "launch", *words, str(job.script)]
        job.start([str(TESTBED / "on"), "h1", *line])
        ready = job.wait("ready", limit=options.limit)
        opened = slow.opened - before
        if ready is None or not job.wait_for_end(options.limit):
            raise RuntimeError(f"{nodes} nodes did not come up:\n{job.output()}")
        copied = re.search(r"each node has its copy after ([\d.]+) s", job.output(100_000))
        found = {"ready_s": round(ready["time"] - job.started, 3), "opened": opened}
        return {**found, "copied_s": float(copied[1])} if copied else found


def summary(nodes: int, pairs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The medians of pairs of starts, and of their ratios."""
    row: dict[str, Any] = {"nodes": nodes, "runs": pairs}
    for way in ("slow", "staged"):
        for key in ("ready_s", "opened"):
            row[f"{way}_{key}"] = round(statistics.median(pair[way][key] for pair in pairs), 3)
    row["copied_s"] = statistics.median(pair["staged"]["copied_s"] for pair in pairs)
    row["ready_ratio"] = round(
        statistics.median(pair["staged"]["ready_s"] / pair["slow"]["ready_s"] for pair in pairs), 3
    )
    return row


def opens(rows: list[dict[str, Any]], way: str) -> tuple[float, float]:
    """Files opened by one more node, and by `launch` alone, from the fewest and the most nodes."""
    few, many = rows[0], rows[-1]
    each = (many[f"{way}_opened"] - few[f"{way}_opened"]) / (many["nodes"] - few["nodes"])
    return each, few[f"{way}_opened"] - few["nodes"] * each


def model(document: dict[str, Any]) -> list[dict[str, float]]:
    """Seconds that a start waits for files: no less than one process for its calls, or the server for all; and for copies."""
    size = document["archive_bytes"]

    def copies(nodes: int) -> float:
        # a node unpacks what it has read while it reads on
        return size / HASH_RATE + max(nodes * size / READ_RATE, document["files"] / UNPACK_RATE)

    def waits(way: str, nodes: int) -> float:
        each, launch = (CALLS_PER_OPEN * count for count in opens(document["rows"], way))
        return launch * LATENCY + max(each * LATENCY, nodes * each / SERVER_RATE)

    return [
        {
            "nodes": nodes,
            "slow_s": round(waits("slow", nodes), 1),
            "staged_s": round(waits("staged", nodes) + copies(nodes), 1),
        }
        for nodes in NODES
    ]


def main() -> int:
    """Measure, print, write."""
    parser = parser_for(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0.005, help="seconds of an open")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a cluster to come up")
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="only renew the model in this file of results"
    )
    options = parser.parse_args()
    if options.model:
        document = json.loads(options.model.read_text())
        write(options.model, {**document, "model": model(document)})
        return 0
    where = machine(default_launcher())
    introduce(where)
    with contextlib.ExitStack() as stack:
        place, slow, files = stack.enter_context(slow_environment(options.delay))
        bed = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bm-bed-")), "bed")
        environ = {**os.environ, "TESTBED_DIR": str(bed), "TESTBED_OWNER": str(os.getpid())}
        stack.callback(subprocess.run, [TESTBED / "hosts-down"], env=environ, check=True)
        subprocess.run(
            [TESTBED / "hosts-up", str(max(options.nodes))],
            env=environ,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        size = (place.parent / "env.tar.zst").stat().st_size
        document = {
            "benchmark": "staging",
            **where,
            "delay_s": options.delay,
            "files": files,
            "archive_bytes": size,
        }
        pairs: dict[int, list[dict[str, dict[str, Any]]]] = {nodes: [] for nodes in options.nodes}
        for number in range(options.rounds):
            for nodes in options.nodes:
                pair = {}
                for way in ("slow", "staged") if number % 2 == 0 else ("staged", "slow"):
                    try:
                        pair[way] = start(nodes, place, slow, bed, options, stage=way == "staged")
                    except RuntimeError as error:
                        sys.stderr.write(f"{error}\n")
                        return 1
                    print(nodes, way, pair[way], flush=True)
                pairs[nodes].append(pair)
            document["rows"] = [summary(nodes, found) for nodes, found in pairs.items()]
            document["model"] = model(document) if len(options.nodes) > 1 else []
            write(options.json, document)
    for row in (*document["rows"], *document["model"]):
        print({key: value for key, value in row.items() if key != "runs"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
