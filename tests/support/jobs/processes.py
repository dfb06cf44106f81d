"""Python in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

__all__ = ["run_python"]


def run_python(code: str, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run code with these arguments; `more`: of `subprocess.run`."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, **more}
    return subprocess.run([sys.executable, "-c", code, *words], **how)
