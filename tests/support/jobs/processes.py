"""Python in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

__all__ = ["run_python"]


def run_python(code: str, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run code with these arguments; `more`: of `subprocess.run`."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, **more}
    return subprocess.run([sys.executable, "-c", code, *words], **how)


def hear_signals() -> None:
    """What a shell's background jobs and nohup ignore, `launch` would as well."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
