"""Credentials that are valid as long as one job: the certificate of its processes, and the token of its dashboard.

Anyone who reaches a Dask port can run code as the user, and the networks of clusters are shared, so every connection uses
mutual TLS. The certificate authority is made for one job, and its private key is dropped as soon as it has signed the one
certificate that all processes of the job show. Nobody can make another certificate.
"""

from __future__ import annotations

import datetime
import re
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

#: Days that the certificate is valid if the end of the job is unknown, short enough to limit the use of a stolen one; and at
#: most.
VALID_DAYS, MOST_DAYS = 90, 3660
#: Seconds that it is valid after the end of the job, for clocks that are ahead and for a slow end.
MARGIN = 3600
#: Seconds by which its begin is dated back, since the clocks of the hosts may differ by some minutes.
BACKDATED = 3600
_USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign",
    "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip
#: Name of the job's authority.
_ISSUER = "dask-gpu-mpi job"
#: Name of the token in the link to the dashboard.
TOKEN = "token"
#: Dask's template of links to the dashboard, if the user has configured none (``distributed.dashboard.link``).
DASKS_TEMPLATE = "{scheme}://{host}:{port}/status"
#: A host name that is safe in a shell, and that ssh does not read as an option.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def clock_problem(error: str, *, host: str | None = None, now: float | None = None) -> str:
    """The problem and fix for the text of an error of OpenSSL that is caused by a clock; empty: it is not.

    >>> clock_problem("certificate verify failed: certificate is not yet valid (_ssl.c:1006)", host="h2", now=0.0)
    "the job's certificate is not valid yet by the clock of h2 (1970-01-01 00:00:00 UTC). Fix: set the clocks by NTP or chrony"
    """
    if "certificate is not yet valid" in error:
        state, fix = "is not valid yet", ""
    elif "certificate has expired" in error:
        state, fix = "has expired", ", or start the cluster again, if it has run for that long"
    else:
        return ""
    clock = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    return (
        f"the job's certificate {state} by the clock of {host or socket.gethostname()} ({clock}). "
        f"Fix: set the clocks by NTP or chrony{fix}"
    )


def make_credentials(*, job_end: float | None = None, now: float | None = None) -> dict[str, Any]:
    """Generate an authority, sign one certificate, and drop the authority's key.

    The result is the Dask configuration by which a plain ``Client()``, ``Nanny`` or ``Scheduler`` of distributed uses these:
    ``distributed.security.Security`` accepts PEM text (any text with a newline) in place of file names.

    `job_end` is when the batch system ends the job, in seconds since the epoch; None: unknown. Keys are on elliptic curves
    (P-256): one takes a millisecond, and with RSA a tenth of a second.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    begin = time.time() if now is None else now
    valid_from, valid_until = (
        datetime.datetime.fromtimestamp(moment, tz=datetime.UTC)
        for moment in (begin - BACKDATED, _end(begin, job_end))
    )

    def build(name: str, public: Any, signer: Any, *, authority: bool) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _ISSUER)]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(valid_from)
            .not_valid_after(valid_until)
        )
        used_for = ("key_cert_sign", "crl_sign") if authority else ("digital_signature",)
        # Strict verification requires these (RFC 5280; the default of Python 3.13).
        for extension, critical in (
            (x509.BasicConstraints(ca=authority, path_length=0 if authority else None), True),
            (x509.KeyUsage(**{usage: usage in used_for for usage in _USAGES}), True),
            (x509.SubjectKeyIdentifier.from_public_key(public), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
        ):
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(signer, hashes.SHA256())

    authority_key = ec.generate_private_key(ec.SECP256R1())
    member_key = ec.generate_private_key(ec.SECP256R1())
    authority = build(_ISSUER, authority_key.public_key(), authority_key, authority=True)
    member = build("dask-internal", member_key.public_key(), authority_key, authority=False)

    def pem(certificate: x509.Certificate) -> str:
        return certificate.public_bytes(serialization.Encoding.PEM).decode()

    key = member_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    pair = {"cert": pem(member), "key": key}
    return {
        "distributed.comm.require-encryption": True,
        "distributed.comm.tls.ca-file": pem(authority),
        "distributed.comm.tls.client": pair,
        "distributed.comm.tls.scheduler": pair,
        "distributed.comm.tls.worker": pair,
    }


def _end(now: float, job_end: float | None) -> float:
    """The end of a certificate that is made now. A past end of the job is ignored: it is in inherited variables of another job.

    >>> day = 86400.0
    >>> [(_end(0.0, job_end) - MARGIN) / day for job_end in (2 * day, 1e9 * day)], _end(0.0, -1.0) / day, _end(0.0, None) / day
    ([2.0, 3660.0], 90.0, 90.0)
    """
    if job_end is None or job_end <= now:
        return now + VALID_DAYS * 86400
    return min(job_end, now + MOST_DAYS * 86400) + MARGIN


# The link to the dashboard, with the token that opens it (`agent.dashboard_gate`), as in Jupyter.


def add_token(link: str, token: str) -> str:
    """Add the token to the query of a link, or of a template of one.

    >>> add_token("http://localhost:8787/status", "abc")
    'http://localhost:8787/status?token=abc'
    >>> add_token("/proxy/{port}/status?theme=dark#top", "abc")
    '/proxy/{port}/status?theme=dark&token=abc#top'
    """
    page, mark, fragment = link.partition("#")
    return f"{page}{'&' if '?' in page else '?'}{TOKEN}={token}{mark}{fragment}"


def link_template(link: str, template: str) -> str:
    """The template from which Dask makes ``Client.dashboard_link``, so that it leads to our link (empty: no dashboard).

    A template of the user, for a proxy for example, stays, with the token added.

    >>> link_template("http://localhost:8788/status?token=abc", "{scheme}://{host}:{port}/status")
    'http://localhost:8788/status?token=abc'
    >>> link_template("http://localhost:8788/status?token=abc", "{JUPYTERHUB_SERVICE_PREFIX}/proxy/{port}/status")
    '{JUPYTERHUB_SERVICE_PREFIX}/proxy/{port}/status?token=abc'
    >>> link_template("", "{scheme}://{host}:{port}/status")
    ''
    """
    if not link:
        return ""
    if template == DASKS_TEMPLATE:
        return link
    (token,) = parse_qs(urlsplit(link).query).get(TOKEN, [""])
    return add_token(template, token) if token else template


def ssh_line(link: str, node: str, environ: Mapping[str, str]) -> str:
    """The command by which a link to ``localhost`` of the scheduler's node opens on the user's computer.

    Empty outside of a batch system, and if the dashboard does not listen on the loopback interface. Of `node` a suffix such as
    ``#2``, by which a plan distinguishes nodes of one name, is ignored.

    >>> ssh_line("http://localhost:8787/status?token=abc", "n1", {"PBS_JOBID": "1", "PBS_O_HOST": "login2"})
    'ssh -N -L 8787:127.0.0.1:8787 -J login2 n1'
    """
    from dask_gpu_mpi.sites.batch import login_host  # only here: agents import this module, too

    target, name = urlsplit(link), node.partition("#")[0]
    login = login_host(environ)
    if login is None or target.hostname != "localhost" or not _HOST.fullmatch(name):
        return ""
    # A job that was submitted from within an allocation has the node itself, perhaps by its long name.
    is_other = _HOST.fullmatch(login) and login.partition(".")[0] != name.partition(".")[0]
    jump = f"-J {login} " if is_other else ""
    # not "localhost": another user may listen on ::1
    return f"ssh -N -L {target.port}:127.0.0.1:{target.port} {jump}{name}"
