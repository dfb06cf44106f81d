"""The results of the benchmarks: reading them, their names for a reader, ratios and intervals."""

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
#: Trials from which on an interval says something.
ENOUGH = 3
#: 97.5 % quantiles of Student's t, by degrees of freedom.
STUDENT = {
    2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201,
    12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093, 20: 2.086,
    21: 2.080, 22: 2.074, 23: 2.069, 24: 2.064, 25: 2.060, 26: 2.056, 27: 2.052, 28: 2.048, 29: 2.045,
}  # fmt: skip

#: What a configuration of the result files is called in the pages.
NAMES = {
    OURS: "dask-gpu-mpi",
    "ours, tcp": "dask-gpu-mpi, TCP",
    "ours, tls": "dask-gpu-mpi, TLS",
    "ours, TCP": "dask-gpu-mpi, TCP",
    "ours, TLS": "dask-gpu-mpi, TLS",
    "ours, UCX": "dask-gpu-mpi, UCX alone",
    "ours, UCX beside TLS": "dask-gpu-mpi, UCX beside TLS (default)",
    "LocalCluster, tcp": "LocalCluster, TCP",
    "TLS": "TLS",
    "TLS and UCX": "UCX beside TLS (default)",
    "UCX, open": "UCX alone",
    "SLURMRunner": "SLURMRunner, no nannies",
    "SLURMRunner, nannies": "SLURMRunner with nannies",
    "limit": "baseline",
    "limit, quick MPI": "baseline, quick MPI",
    "empty MPI": "empty MPI program",
}
#: Names of single runs that differ from those of the results, where workers have GPUs.
OF_RUNS = {"LocalCUDACluster": "LocalCluster"}


@functools.cache
def load(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def value(name: str, *path: str | int) -> float:
    """One figure of a file, by the names on the way to it."""
    found = load(name)
    for step in path:
        found = found[step]
    return float(found)


def known(way: str) -> str:
    """The name of a configuration for a reader."""
    return NAMES.get(way, way)


def number(figure: float | None) -> str:
    """Three significant digits or all before the point, without an exponent; a dash for what is missing."""
    if figure is None:
        return "–"
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
    """The mean of ratios within trials, with its interval where there are enough."""
    if not values:
        return ""
    text = f"{statistics.mean(values):.2f}"
    bounds = interval(values)
    return f"{text} ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else text


def ratios(runs: Sequence[Mapping[str, Any]], way: str, column: str = "ready_s") -> list[float]:
    """dask-gpu-mpi's value over this configuration's, trial by trial."""
    of_run = {way, OF_RUNS.get(way, way)}
    own = {run["round"]: run[column] for run in runs if run["way"] == OURS and run.get(column)}
    others = {run["round"]: run[column] for run in runs if run["way"] in of_run and run.get(column)}
    return [own[trial] / others[trial] for trial in others if trial in own]


def rates(run: Mapping[str, Any], way: str) -> list[float]:
    """GB/s of each trial of a configuration of transfer.py: of its median repetition, without the first three."""
    return [
        run["bytes"] / statistics.median(trial[WARM_UP:]) / 1e9
        for trial in run["seconds"][way]
        if len(trial) > WARM_UP
    ]


def machine(name: str) -> str:
    """The GPUs and cores of a file's machine."""
    document = load(name)
    first = (
        document["runs"][0]
        if "cores" not in document and isinstance(document.get("runs"), list)
        else document
    )
    cores = first.get("cores") or int(re.findall(r"(\d+) cores", document["hardware"])[0])
    gpus = re.search(r"(\d+)x([A-Z]\d+)", name)
    return f"{gpus[1]}×{gpus[2]}, {cores} cores" if gpus else f"{cores} cores"


def versions(name: str) -> str:
    """MPI, Python and packages of a file."""
    document = load(name)
    first = document["runs"][0] if "mpi" not in document else document
    mpi = first["mpi"].replace("mpirun (Open MPI)", "Open MPI").replace("slurm-wlm", "Slurm")
    packages = [
        f"{package} {version}"
        for package, version in first["versions"].items()
        if package in ("distributed", "dask-mpi", "dask-jobqueue", "dask-cuda")
    ]
    return ", ".join([mpi, f"Python {first['python']}", *packages])


def command(text: str) -> str:
    """The command line without what belongs to one machine: folders, and where the results went."""
    words = shlex.split(text)
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not {"--json", "--plot"} & {before, word}
    ]
    kept = [re.sub(r"^(\w+)=\S*/\S*$", r"\1=FOLDER", word) for word in kept]
    program = Path(kept[0]).name
    return f"python benchmarks/{program} {shlex.join(kept[1:])}".rstrip()


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def caption(name: str, about: str, runs: Iterable[Mapping[str, Any]] | None = None) -> str:
    """What a table is of: the file, the machine, versions, the commands."""
    parts = list(runs or [load(name)])
    commands = dict.fromkeys(command(part["command"]) for part in parts if "command" in part)
    lines = [f"\n**{about}** ({machine(name)}; {versions(name)}). `{name}.json`"]
    if commands:
        lines.append("\n```bash\n" + "\n".join(commands) + "\n```")
    return "\n".join(lines) + "\n\n"
