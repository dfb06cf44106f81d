"""Writes the messages that need an explanation into docs/troubleshooting.md, from the messages in the code.

    python docs/make_messages.py [--check]

With ``--check`` nothing is written; the exit code is 1 when the page is not up to date, or when a cause below fits no message.

A message itself has its fix; only those whose cause is not in their words are on the page.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

# the checkout's package, whatever is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from messages_in_code import Message, collect

from dask_gpu_mpi import errors

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- messages: made by docs/make_messages.py -->\n", "<!-- end of messages -->"
#: Their texts stand on a page, among its figures.
PAGES = ("view/report_figures",)
#: Why a message comes, where its own words do not say so: by words of it.
CAUSES = {
    "agent ended before it was ready": "the process next to the rank was killed (out of memory?) or could not import Dask",
    "CUDA contexts were made before the cluster started": "the script, or what it imports, uses CUDA at import: CuPy, PyTorch, "
    "a GPU-aware MPI",
    "could not remove all of": "many small files, or a shared file system",
    "did not finish its imports before": "Dask is imported from a slow file system, or without its .pyc files",
    "ended before MPI came together": "a rank ended, whatever its exit code, before it called initialize(): all have to call it",
    "is left out, NVML can't read it": "the GPU is lost, or in an error state",
    "mpi4py finds no MPI library": "mpi4py's wheel has none: it searches its own environment and the library path",
    "no connection between nodes": "a firewall, or a network that only some nodes have",
    "no response from {missing}": "a node is down or slow, a rank is stopped or still imports from a shared file system, or the "
    "script ended there",
    "no scheduler file": "the cluster is not up yet, or has ended and removed its file",
    "NVML did not respond": "nvidia-smi hangs there as well",
    "over TLS, not UCX": "UCX does not start on one of the two nodes, or does not connect them; the data arrives all the same",
    "process died": "out of memory, most often. Over UCX others may keep memory of a worker that was killed, so the next "
    "one has too little",
    "processes that the script starts can't connect": "no file can be made in /dev/shm or TMPDIR, or /proc is not there",
    "ranks see overlapping but different GPUs": "CUDA_VISIBLE_DEVICES, or the batch system's binding, differs from rank to rank",
    "script still running": "it has not ended by itself, though what it computes on the cluster fails",
    "that no rank of this job has sent": "another program connects to the ports of the MPI library: a port scan, another job",
    "the clock of this node": "the node's clock is not set; the job's certificate begins an hour before the start",
    "the scheduler's process ended": "killed, most often out of memory: large results, or a graph of many tasks",
    "this dashboard opens": "the link was shortened, or is another job's",
    "too many connections": "the limit of open files is low for so many workers, or somebody opens connections and sends nothing",
    "two different keys came from rank": "a process that does not belong to this job sends MPI messages",
    "two names of one machine": "a node, or a container on it, has several host names",
    "called in a child process of rank": "multiprocessing (spawn, forkserver) runs an unguarded script again in each child",
}  # fmt: skip


def all_messages() -> list[Message]:
    """The messages of the package."""
    classes = inspect.getmembers(errors, inspect.isclass)
    found = collect(ROOT / "dask_gpu_mpi", {name: each.exit_code for name, each in classes})
    return [message for message in found if message.module not in PAGES]


def cause_of(message: Message) -> str:
    """Why it comes, where that is known; else empty."""
    return next((cause for words, cause in CAUSES.items() if words in message.text), "")


def unused_causes(messages: list[Message]) -> list[str]:
    """The keys of `CAUSES` that are in no message."""
    return [words for words in CAUSES if not any(words in message.text for message in messages)]


def code(text: str) -> str:
    """A message as code: it is to be found as it is printed."""
    ticks = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{ticks}{space}{' '.join(text.split())}{space}{ticks}"


def plain(text: str) -> str:
    """A text whose marks of Markdown are shown as they are, but for its code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(
        re.sub(r"([<*\[\]])", r"\\\1", part) if i % 2 == 0 else part for i, part in enumerate(parts)
    )


def entry(message: Message) -> str:
    """Its lines; the fix is in the message that the reader has."""
    return f"- {code(message.text)}\\\n  {plain(cause_of(message))}.\n"


def sort_key(text: str) -> str:
    """By the first words of a message that are always the same."""
    return re.sub(r"\{[^{}]*\}|[^a-z ]", "", text.lower()).strip()


def page(messages: list[Message]) -> str:
    """The whole page, with its part of messages as they are now."""
    with_cause = {message.text: message for message in messages if cause_of(message)}
    made = "".join(
        entry(with_cause[text]) for text in sorted(with_cause, key=lambda text: (sort_key(text), text))
    )
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}"


def main() -> int:
    """Write the page, or compare it."""
    messages = all_messages()
    if unused := unused_causes(messages):
        print(f"CAUSES of docs/make_messages.py: in no message: {unused}", file=sys.stderr)
        return 1
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") == page(messages):
            return 0
        print(f"{PAGE} is not up to date: run python docs/make_messages.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(messages), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
