"""The results of the benchmarks: reading them, their names for a reader, ratios, intervals and tables."""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
OURS = "dask_gpu_mpi"
#: Repetitions at the beginning of a trial of transfer.py that do not count: the workers connect.
WARM_UP = 3
#: An interval needs so many trials.
ENOUGH = 3
#: 97.5 % quantiles of Student's t, by degrees of freedom.
STUDENT = {
    2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201,
    12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093, 20: 2.086,
    21: 2.080, 22: 2.074, 23: 2.069, 24: 2.064, 25: 2.060, 26: 2.056, 27: 2.052, 28: 2.048, 29: 2.045,
}  # fmt: skip

#: Names on the pages for configurations of the result files, if they differ.
NAMES = {
    OURS: "dask-gpu-mpi",
    "ours, tcp": "dask-gpu-mpi, TCP",
    "ours, tls": "dask-gpu-mpi, TLS",
    "ours, TCP": "dask-gpu-mpi, TCP",
    "ours, TLS": "dask-gpu-mpi, TLS",
    "ours, UCX beside TLS": "dask-gpu-mpi, UCX beside TLS (default)",
    "LocalCluster, tcp": "LocalCluster, TCP",
    "TLS and UCX": "UCX beside TLS (default)",
    "UCX, open": "UCX alone",
    "ours": "dask-gpu-mpi (encrypted)",
    "ours, --no-data-encryption": "dask-gpu-mpi, --no-data-encryption",
    "ours, --protocol tcp": "dask-gpu-mpi, --protocol tcp",
    "Dask's workers, tcp": "Dask's own workers, TCP",
    "before": "dask-gpu-mpi before, TLS",
    "SLURMRunner": "SLURMRunner, no nannies",
    "SLURMRunner, nannies": "SLURMRunner with nannies",
    "limit": "baseline",
    "limit, quick MPI": "baseline, quick MPI",
    "empty MPI": "empty MPI program",
}
#: Names of single runs that differ from those of the results, if workers have GPUs.
OF_RUNS = {"LocalCUDACluster": "LocalCluster"}


@functools.cache
def load(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def known(way: str) -> str:
    """The name of a configuration for a reader."""
    return NAMES.get(way, way)


def number(figure: float | None) -> str:
    """A count as it is, else three significant digits or all before the point; a dash for None."""
    if figure is None:
        return "–"
    if isinstance(figure, int):
        return f"{figure:,}"
    digits = max(0, 2 - math.floor(math.log10(abs(figure)))) if figure else 0
    return f"{figure:,.{digits}f}"


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean (Student's t), of three values or more."""
    if len(values) < ENOUGH:
        return None
    freedom = min(len(values) - 1, max(STUDENT))
    half = STUDENT[freedom] * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.mean(values)
    return mean - half, mean + half


def ratio(values: Sequence[float]) -> str:
    """The mean of ratios within trials, and its interval if there are enough."""
    if not values:
        return ""
    bounds = interval(values)
    return f"{statistics.mean(values):.2f}" + (f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else "")


def ratios(runs: Sequence[Mapping[str, Any]], way: str, column: str = "ready_s") -> list[float]:
    """dask-gpu-mpi's value over this configuration's, trial by trial; none for dask-gpu-mpi."""
    if way == OURS:
        return []
    of_run = {way, OF_RUNS.get(way, way)}
    own = {run["round"]: run[column] for run in runs if run["way"] == OURS and run.get(column)}
    others = {run["round"]: run[column] for run in runs if run["way"] in of_run and run.get(column)}
    return [own[trial] / others[trial] for trial in others if trial in own]


def rates(run: Mapping[str, Any], way: str) -> list[float]:
    """GB/s of each trial of transfer.py: of its median repetition, without the first three."""
    return [
        run["bytes"] / statistics.median(trial[WARM_UP:]) / 1e9
        for trial in run["seconds"][way]
        if len(trial) > WARM_UP
    ]


def parts(document: Any) -> list[dict[str, Any]]:
    """The runs of a benchmark that a file holds, each with its machine, versions and command."""
    return [document] if "mpi" in document else document["runs"]


def machine(name: str) -> str:
    """The GPUs and cores of a file's machine."""
    gpus = re.search(r"(\d+)x([A-Z]\d+)", name)
    cores = f"{parts(load(name))[0]['cores']} cores"
    return f"{gpus[1]}×{gpus[2]}, {cores}" if gpus else cores


def versions(name: str) -> str:
    """MPI, Python and packages of a file."""
    first = parts(load(name))[0]
    mpi = first["mpi"].replace("mpirun (Open MPI)", "Open MPI").replace("slurm-wlm", "Slurm")
    packages = [
        f"{package} {version}"
        for package, version in first["versions"].items()
        if package in ("distributed", "dask-mpi", "dask-jobqueue", "dask-cuda")
    ]
    return ", ".join([mpi, f"Python {first['python']}", *packages])


def command(text: str) -> str:
    """The command line without folders and files of results, which belong to one machine."""
    words = shlex.split(text)
    kept = [
        re.sub(r"^(\w+)=\S*/\S*$", r"\1=FOLDER", word)
        for before, word in zip(["", *words], words, strict=False)
        if not {"--json", "--plot"} & {before, word}
    ]
    return f"python benchmarks/{Path(kept[0]).name} {shlex.join(kept[1:])}".rstrip()


def caption(name: str, about: str) -> str:
    """The lines above a table: its file, the machine, versions and commands."""
    text = f"**{about}** ({machine(name)}; {versions(name)}). `{name}.json`\n\n"
    texts = "; ".join(part["command"] for part in parts(load(name)) if "command" in part)
    commands = dict.fromkeys(command(each) for each in texts.split("; ") if each)
    return text + ("```bash\n" + "\n".join(commands) + "\n```\n\n" if commands else "")


def table(rows: Iterable[Mapping[str, str | float | None]]) -> str:
    """A table of Markdown; the keys of a row are the titles of the columns."""
    titles, *_ = rows = list(rows)
    cells = [[each if isinstance(each, str) else number(each) for each in row.values()] for row in rows]
    lines = [titles, ["---"] * len(titles), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
