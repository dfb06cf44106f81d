"""Jobs under attack: a script that computes all the while, an intruder beside it (`attacks`), and what both showed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.bed.hosts import TestBed
from support.intruders.listeners import Census, Listener, open_memory
from support.jobs.clusters import Partner, facts, until
from support.jobs.mpi import Job, Mpi
from support.jobs.scripts import script

#: Seconds for the intruder to end, for the job to come up, and for a round of its script.
GROUP, START, ROUND = 60.0, 60.0, 15.0
#: Seconds after the start of the cluster at which what belongs to the start must be closed.
SETTLED = 1.0
#: The end of what the script tells before it computes.
LAST_TOLD = r'"recorder": [0-9]+\}'

#: The script. It computes, with a new client for each round, until the file "go-end" is there.
SCRIPT = script("support/intruders/scripts/computes.py")

#: Variables of the script.
OWN_MPI, HOLD_MEETING = {"INTRUDERS_OWN_MPI": "1"}, {"INTRUDERS_HOLD_MEETING": "1"}

#: Kinds of listeners, by the name of the `Listener`. UCX has sockets of its own beside those that Dask asks of it ("uct").
KINDS = {
    "scheduler comm": "comm",
    "worker comm": "comm",
    "nanny comm": "comm",
    "hub comm": "comm",
    "scheduler http": "http",
    "worker http": "http",
    "scheduler": "uct",
    "worker": "uct",
    "agent": "uct",
    "mpi start": "meeting",
    "rank": "mpi",
    "launcher": "launcher",
}
#: What needs no credentials, and what holds connections.
RAW = ("plain TCP", "pickle and msgpack bombs", "garbage of every length", "closed at once")
HOLDING = ("a byte a second", "half-open connections")
#: With certificates that are none of the job's, or with what a process of the job has sent.
BY_TLS = (
    "TLS without a certificate",
    "a self-made authority",
    "another job's certificate",
    "a process of Dask",
    "replayed",
)
#: Groups of attacks by the kind of listener: one group after the other, all of a group at once.
ATTACKS: dict[str, tuple[tuple[str, ...], ...]] = {
    "comm": (BY_TLS, RAW, HOLDING),
    "http": (("routes without the token",), RAW, HOLDING),
    "mpi": ((), (*RAW, "a rank's handshake", "memory by UCX"), HOLDING),
    "uct": ((), ("garbage of every length", "closed at once", "memory by UCX")),
    "launcher": (("any connection",),),
}
#: Of MPI's processes while the ranks meet, and of a script that is an MPI process itself.
IN_MEETING = (("memory by UCX",), ("a rank's handshake",))


@dataclass(frozen=True)
class Target:
    """What an intruder is sent at."""

    name: str
    #: Of `KINDS`.
    kind: str
    role: str
    host: str
    port: int
    #: The process, and the address in it that the intruder is told. 0: it is none that should listen there at all.
    pid: int = 0
    memory: int = 0


@dataclass
class Attacked:
    """A job that was attacked."""

    #: ``{attack: {target: outcome}}`` (see `attacks`).
    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)
    #: Of the whole job, from its start on.
    listeners: list[Listener] = field(default_factory=list)
    #: Those of no known kind.
    unexpected: list[Listener] = field(default_factory=list)
    #: By target what became of its process: ``"written"``, its memory was changed, or ``"gone"``.
    harmed: dict[str, str] = field(default_factory=dict)
    #: By target what an intruder should not read of its process's memory, as hexadecimal digits.
    hidden: dict[str, str] = field(default_factory=dict)
    #: Shared memory of its processes that others may use (see `listeners.open_memory`).
    open_memory: list[str] = field(default_factory=list)
    #: Rounds of the script during each group of attacks, its start not counted.
    rounds: list[int] = field(default_factory=list)
    #: Whether somebody has unpickled what the intruder sent.
    exploded: bool = False
    #: How often the operation that the intruder replays has run.
    notes: int = 0
    #: The `CompletedJob`.
    done: Any = None


def let_in(outcomes: Mapping[str, str]) -> dict[str, str]:
    """By target the outcomes of an attack that got in."""
    return {target: outcome for target, outcome in outcomes.items() if not outcome.startswith("out")}


def start(
    mpirun: Mpi,
    ranks: int,
    *,
    bed: TestBed | None = None,
    hosts: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    chosen: Mapping[str, str] | None = None,
) -> Job:
    """Start the job whose script computes until `attacked` ends it.

    `chosen`: the user's variables; or with `OWN_MPI` the script imports mpi4py.MPI first, and with `HOLD_MEETING` MPI's processes
    wait for `attack_meeting`, but not that of rank 0.
    """
    env: dict[str, str | None] = {
        "INTRUDERS_OPTIONS": json.dumps(options or {}),
        "INTRUDERS_WORKERS": str(ranks),
        # the components of Open MPI that users have
        "OMPI_MCA_btl": None,
        "OMPI_MCA_pml": None,
        **(chosen or {}),
    }
    return mpirun.start(SCRIPT, ranks, env=env, bed=bed, hosts=hosts)


def attack_meeting(
    job: Job, ranks: int, places: Mapping[str, Sequence[str]], hosts: Mapping[str, str], user: str
) -> dict[str, Attacked]:
    """Attack MPI's processes while the ranks meet, from each place, and then let them meet; the job is left to the caller.

    `places`: what the intruder's command line begins with, by the name of the place. The rest is as in `attacked`.
    """
    results = {}
    with Census(job) as census:
        until(lambda: len(_memory(job)) == 2 * ranks, START, "MPI's processes")
        told = facts(job)
        # MPI opens its ports after its process has told of its memory
        until(
            lambda: len({each.place.network for each in _of_mpi(census)}) == len(hosts), START, "MPI's ports"
        )
        found = _of_mpi(census)
        attacks = {"meeting": IN_MEETING}
        targets = _targets(found, hosts, attacks, told, started=True)
        for name, command in places.items():
            results[name] = result = Attacked(listeners=found)
            result.hidden = {each.name: told[f"memory-{each.pid}"][1] for each in targets}
            for _ in _intrusion(job, command, user, targets, attacks, result):
                result.harmed |= _harmed(targets, result.hidden)
            if result.harmed:
                break
    (job.directory / "go-meet").touch()
    (job.directory / "go-end").touch()
    return results


def _of_mpi(census: Census) -> list[Listener]:
    """The ports of MPI's processes that other hosts can reach, but for those that they have inherited of a launcher."""
    found = [Listener(census.roles[place], "start", place) for place in census.look()]
    launchers = {each.place.socket for each in found if each.role == "launcher"}
    ours = [each for each in found if each.role == "mpi" and not each.place.on_loopback]
    return [each for each in ours if each.place.socket not in launchers]


def attacked(
    job: Job,
    command: Sequence[str],
    hosts: Mapping[str, str],
    user: str,
    attacks: Mapping[str, Sequence[Sequence[str]]],
) -> Attacked:
    """Attack a job from its start to its end.

    `job`: see `start`.
    `command`: what the intruder's command line begins with: it leads to its host.
    `hosts`: address of each of the job's networks, as `listeners.Place.network` names it.
    `user`: whom the intruder is.
    `attacks`: groups of attacks, by the kind of listener: `ATTACKS`, or some of them. None: nobody attacks it.
    """
    result = Attacked()
    with Census(job) as census:
        job.wait_for(LAST_TOLD, START)
        told = facts(job)
        time.sleep(SETTLED)  # what is open then is open as long as the job runs
        found = census.listeners(told["servers"])
        recorders = {told["recorder"], told.get("hub_recorder")}
        result.listeners = [each for each in found if each.place.port not in recorders]
        result.unexpected = [each for each in result.listeners if each.name not in KINDS]
        result.open_memory = open_memory(job.processes())
        before = _rounds(job)
        targets = _targets(result.listeners, hosts, attacks, told)
        result.hidden = {each.name: told[f"memory-{each.pid}"][1] for each in targets if each.memory}
        # what an agent has sent to the hub; nothing in a job of one rank
        at_hub = [data.hex()] if (data := _read(job, "hub-recorded")) else []
        more = {"recorded": told["recorded"], "recorded_at_hub": at_hub, "routes": told["routes"]}
        for _ in _intrusion(job, command, user, targets, attacks, result, **more) if targets else ():
            with contextlib.suppress(AssertionError):  # the test says so
                until(lambda before=before: _rounds(job) > before, ROUND)
            result.rounds.append(_rounds(job) - before)
            before = _rounds(job)
            result.harmed |= _harmed(targets, result.hidden)
        (job.directory / "go-end").touch()
        result.exploded = (job.directory / "marker").exists()
        result.notes = _read(job, "notes").count(b"done")
        result.done = job.wait(60)
    return result


def _read(job: Job, name: str) -> bytes:
    """A file of the script's; empty: it is not there yet."""
    with contextlib.suppress(OSError):
        return (job.directory / name).read_bytes()
    return b""


def _memory(job: Job) -> list[str]:
    """Processes that have hidden something; empty in the middle of a line."""
    with contextlib.suppress(ValueError):
        return [name for name in facts(job) if name.startswith("memory-")]
    return []


def _harmed(targets: Sequence[Target], hidden: Mapping[str, str]) -> dict[str, str]:
    """Processes that are gone, or whose memory is no longer what it was."""
    harmed = {}
    for each in targets:
        try:
            with open(f"/proc/{each.pid}/mem", "rb", buffering=0) as file:
                if each.memory and os.pread(file.fileno(), 64, each.memory).hex() != hidden[each.name]:
                    harmed[each.name] = "written"
        except (FileNotFoundError, ProcessLookupError):
            harmed[each.name] = "gone"
    return harmed


def _targets(
    listeners: Sequence[Listener],
    hosts: Mapping[str, str],
    attacks: Mapping[str, Any],
    told: Mapping[str, Any],
    *,
    started: bool = False,
) -> list[Target]:
    """What is attacked at all, each once.

    `started`: of what is open only until the cluster is up, else of what is open now.
    """
    targets = {}
    for each in listeners:
        kind, place = KINDS.get(each.name, ""), each.place
        if kind in attacks and (each.what == "start") is started:
            host = hosts[place.network] if place.address in ("0.0.0.0", "::") else place.address
            if place.address == "::" and host == "127.0.0.1":  # a socket of IPv6 may refuse IPv4
                host = "::1"
            name = f"{each.name} {host}:{place.port}"
            memory, _ = told.get(f"memory-{place.pid}", (0, ""))
            targets[name] = Target(name, kind, each.role, host, place.port, place.pid, memory)
    return list(targets.values())


def _intrusion(
    job: Job,
    command: Sequence[str],
    user: str,
    targets: Sequence[Target],
    attacks: Mapping[str, Sequence[Sequence[str]]],
    result: Attacked,
    **more: Any,
) -> Iterator[None]:
    """Run the intruder, and yield after each group of attacks."""
    groups: list[dict[str, list[str]]] = []
    for number in range(max(len(attacks[target.kind]) for target in targets)):
        group: dict[str, list[str]] = {}
        for target in targets:
            for attack in attacks[target.kind][number] if number < len(attacks[target.kind]) else ():
                group.setdefault(attack, []).append(target.name)
        groups.append(group)
    order = {
        "user": user,
        "marker": str(job.directory / "marker"),
        "targets": [vars(target) for target in targets],
        "groups": groups,
        **more,
    }
    with Partner(*command, sys.executable, str(Path(__file__).with_name("attacks.py"))) as intruder:
        intruder.say(json.dumps(order))
        for _ in groups:
            for attack, name, outcome in intruder.answer():
                result.outcomes.setdefault(attack, {})[name] = outcome
            yield
            intruder.say("")
        intruder.end(GROUP)


def _rounds(job: Job) -> int:
    return int(_read(job, "rounds") or 0)
