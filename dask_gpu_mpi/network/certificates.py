"""When the job's certificate is valid: as long as the job may run, by the clock of each node."""

from __future__ import annotations

import socket
import time
from typing import Any

from .credentials import MARGIN, VALID_DAYS

__all__ = ["certificate_validity", "clock_problem", "ending_soon", "time_of_warning"]

#: Seconds before its end at which a cluster without a known walltime is warned.
NOTICE = 86400.0


def certificate_validity(config: dict[str, Any]) -> tuple[float, float] | None:
    """From when until when the certificate in this Dask configuration is valid, seconds since the epoch; None: it has none."""
    text = config.get("distributed.comm.tls.ca-file")
    if not text or "\n" not in str(text):
        return None
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(str(text).encode())
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def time_of_warning(begin: float, end: float) -> float:
    """When to warn that a certificate ends: a day before, but not before the walltime of a job that has one.

    >>> day = 86400.0
    >>> time_of_warning(0.0, 90 * day) / day, time_of_warning(0.0, 2 * day) - 2 * day
    (89.0, -1800.0)
    """
    return end - (NOTICE if end - begin >= VALID_DAYS * 86400 else MARGIN / 2)


def ending_soon(end: float) -> str:
    """The warning."""
    return (
        f"the certificate of this cluster ends at {_text(end)} (expected: after the job); no connection can be made "
        "after that, and no worker restarted. Fix: save what you need and start the cluster again before"
    )


def clock_problem(error: str, *, host: str | None = None, now: float | None = None) -> str:
    """What to say of an error of OpenSSL's that has to do with the time; empty: it has not.

    Parameters
    ----------
    error : str
        Its text.
    host, now : str and float, optional
        Of this process.

    Examples
    --------
    >>> clock_problem("certificate verify failed: certificate is not yet valid (_ssl.c:1006)", host="h2", now=0.0)
    "the job's certificate is not valid yet by the clock of h2 (1970-01-01 00:00:00 UTC). Fix: set the clocks by NTP or chrony"
    """
    if "certificate is not yet valid" in error:
        state, fix = "is not valid yet", ""
    elif "certificate has expired" in error:
        state, fix = "has expired", ", or start the cluster again, if it has run for that long"
    else:
        return ""
    clock = f"{host or socket.gethostname()} ({_text(time.time() if now is None else now)})"
    return f"the job's certificate {state} by the clock of {clock}. Fix: set the clocks by NTP or chrony{fix}"


def _text(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))
