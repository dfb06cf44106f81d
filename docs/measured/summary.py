"""The tables of docs/performance.md: each cell is one figure, taken from one field of a file of results."""

from __future__ import annotations

from dataclasses import dataclass

from measured.results import OURS, known, load, machine, number, ratio, ratios, table, value

#: The CPU rows are of this shape: two ranks with two workers each.
SHAPE = "2x2"
LOCAL, GPU_LOCAL = "LocalCluster", "LocalCUDACluster"


@dataclass(frozen=True)
class Field:
    """A figure: the file and the names on the way to it."""

    file: str
    path: tuple[str | int, ...]
    scale: float = 1.0
    #: Another figure of the file, which is added.
    other: tuple[str | int, ...] = ()

    def figure(self) -> float:
        """Its value."""
        added = value(self.file, *self.other) if self.other else 0.0
        return (value(self.file, *self.path) + added) * self.scale

    def text(self) -> str:
        """Its value as a reader sees it."""
        return number(self.figure())


def start(file: str, shape: str, way: str, column: str) -> Field:
    """A median of startup.py."""
    return Field(file, ("results", shape, way, column))


@dataclass(frozen=True)
class Row:
    """A line of the first table; the best figure is bold."""

    figure: str
    unit: str
    own: Field
    dask_mpi: Field | None
    other: Field
    other_name: str
    more_is_better: bool = False

    def cells(self) -> list[str]:
        """The cells of the line."""
        fields = [self.own, self.dask_mpi, self.other]
        figures = [field.figure() for field in fields if field is not None]
        best = max(figures) if self.more_is_better else min(figures)
        texts = [
            "not measured"
            if field is None
            else f"**{field.text()}**"
            if field.figure() == best
            else field.text()
            for field in fields
        ]
        return [self.figure, self.unit, machine(self.own.file), *texts[:2], f"{texts[2]} ({self.other_name})"]


def from_start(figure: str, unit: str, column: str, *, gpus: bool = False) -> Row:
    """A row of startup.py: CPU workers on two cores, or a GPU worker on each of two H100s."""
    file, shape, other = ("startup-2xH100", "1x2", GPU_LOCAL) if gpus else ("startup-openmpi", SHAPE, LOCAL)
    own, dask_mpi, best = (start(file, shape, way, column) for way in (OURS, "dask-mpi", other))
    return Row(figure, unit, own, dask_mpi, best, other)


def around_script(way: str) -> Field:
    """GPU-seconds of a job on two GPUs before its script and after it."""
    results = ("results", "1x2", way)
    return Field("startup-2xH100", (*results, "ready_s"), 2.0, (*results, "end_s"))


def between_gpus(file: str, run: int, way: str) -> Field:
    """GB/s of one configuration of transfer.py."""
    return Field(file, ("runs", run, "median_GB_s", way))


def of_rapids(benchmark: str, scale: float) -> tuple[Field, Field]:
    """Ours and the other's medians of rapids.py."""
    ours, other = (Field("rapids-2xH100", ("medians", benchmark, who), scale) for who in ("ours", "other"))
    return ours, other


def tasks(way: str, key: str = "tasks_per_s") -> Field:
    """A median of overhead.py."""
    return Field("overhead", ("tasks", "medians", way, key))


def idle(file: str, *path: str | int) -> Field:
    """The CPU time of an idle cluster, per rank."""
    return Field(file, (*path, "cpu_percent_per_rank_all"))


ROWS = (
    from_start("ready, one worker on each of 2 GPUs", "s", "ready_s", gpus=True),
    from_start("CPU time of that start", "s", "cpu_ready_s", gpus=True),
    from_start("memory when ready, one worker on each of 2 GPUs", "MiB", "pss_total", gpus=True),
    Row(
        "GPU time that each job costs besides its script, 2 GPUs",
        "GPU-seconds",
        around_script(OURS),
        around_script("dask-mpi"),
        around_script(GPU_LOCAL),
        GPU_LOCAL,
    ),
    from_start("ready, 2 ranks × 2 CPU workers", "s", "ready_s"),
    from_start("CPU time of that start", "s", "cpu_ready_s"),
    from_start("memory when ready, 2 ranks × 2 CPU workers", "MiB", "pss_total"),
    Row(
        "an array of 12.8 GB from rows to columns, 2 GPUs",
        "GB/s",
        between_gpus("transfer-all-to-all-2xH100", 0, "ours, UCX beside TLS"),
        None,
        between_gpus("transfer-all-to-all-2xH100", 0, "LocalCUDACluster, UCX"),
        "LocalCUDACluster, UCX",
        more_is_better=True,
    ),
    *(
        Row(
            f"dask-cuda's {name} benchmark, 2 GPUs",
            "GB/s",
            own,
            None,
            other,
            "LocalCUDACluster, UCX",
            more_is_better=True,
        )
        for name in ("merge", "shuffle", "transpose-sum")
        for own, other in (of_rapids(name, 1e-9),)
    ),
    Row(
        "empty tasks, 2 CPU workers",
        "tasks/s",
        tasks("ours, tls"),
        None,
        tasks("LocalCluster, tcp"),
        "LocalCluster, TCP",
        more_is_better=True,
    ),
    from_start("from the script's last line to the job's end, 2 ranks × 2 CPU workers", "s", "end_s"),
    Row(
        "an idle cluster of 2 CPU workers, per worker",
        "% of a core",
        idle("overhead", "idle", 1),
        None,
        idle("overhead", "idle", 2),
        "LocalCluster, TCP",
    ),
)


@dataclass(frozen=True)
class Slower:
    """A line of the second table: where another program or transport is better."""

    figure: str
    unit: str
    own: Field
    other: Field
    other_name: str

    def cells(self) -> list[str]:
        """The cells of the line."""
        return [
            self.figure,
            self.unit,
            machine(self.own.file),
            self.own.text(),
            f"**{self.other.text()}** ({self.other_name})",
        ]


SLOWER = (
    Slower(
        "ready under Slurm, 2 ranks × 1 worker",
        "s",
        start("startup-slurm", "2x1", OURS, "ready_s"),
        start("startup-slurm", "2x1", "SLURMRunner", "ready_s"),
        "SLURMRunner without nannies",
    ),
    Slower(
        "ready, 4 ranks × 1 worker",
        "s",
        start("startup-openmpi", "4x1", OURS, "ready_s"),
        start("startup-openmpi", "4x1", LOCAL, "ready_s"),
        LOCAL,
    ),
    Slower(
        "CPU time of that start",
        "s",
        start("startup-openmpi", "4x1", OURS, "cpu_ready_s"),
        start("startup-openmpi", "4x1", LOCAL, "cpu_ready_s"),
        LOCAL,
    ),
    Slower(
        "from the script's last line to the job's end, 2 GPU workers",
        "s",
        start("startup-2xH100", "1x2", OURS, "end_s"),
        start("startup-2xH100", "1x2", GPU_LOCAL, "end_s"),
        GPU_LOCAL,
    ),
    Slower(
        "a query of Polars on 2 GPUs", "queries/s", *of_rapids("polars", 1.0), "the cluster of its DaskEngine"
    ),
    Slower(
        "an idle cluster of 2 GPU workers, per worker",
        "% of a core",
        idle("overhead-2xH100", "runs", 0, "idle", 1),
        idle("overhead-2xH100", "runs", 0, "idle", 2),
        "LocalCluster, TCP, of CPU workers",
    ),
)


def main_table() -> str:
    """The figures that most users ask for."""
    head = ["figure", "unit", "machine", "dask-gpu-mpi", "dask-mpi", "best other"]
    return table(head, [row.cells() for row in ROWS])


def slower_table() -> str:
    """Where another is better."""
    return table(["figure", "unit", "machine", "dask-gpu-mpi", "better"], [row.cells() for row in SLOWER])


def gpus_table() -> str:
    """Start, end and memory against the number of GPUs, and the ratios within trials."""
    rows = []
    for gpus, file in ((1, "startup-2xH100"), (2, "startup-2xH100"), (4, "startup-4xH100")):
        document = load(file)
        found, runs = document["results"][f"1x{gpus}"], document["runs"][f"1x{gpus}"]
        for way in (OURS, "dask-mpi", GPU_LOCAL):
            compared = ["", ""]
            if way != OURS:
                memory = found[OURS]["pss_total"] / found[way]["pss_total"]
                compared = [ratio(ratios(runs, way)), f"{memory:.2f}"]
            figures = [number(found[way][column]) for column in ("ready_s", "end_s", "pss_total")]
            rows.append([gpus, known(way), *figures, *compared])
    head = [
        "GPUs",
        "cluster",
        "ready, s",
        "end, s",
        "memory, MiB",
        "ready, dask-gpu-mpi ÷ this",
        "memory, dask-gpu-mpi ÷ this",
    ]
    return table(head, rows)
