"""Credentials that live as long as one job.

Whoever reaches a Dask port can run code as the user, and the networks of clusters are shared, so every connection is
mutual TLS. The certificate authority is made for one job and its private key is dropped as soon as it has signed the one
certificate that all processes of the job show: nobody can make another, neither later nor elsewhere.
"""

from __future__ import annotations

import datetime
import socket
import time
from dataclasses import dataclass, field
from typing import Any

# When the job's certificate is valid: as long as the job may run, by the clock of each node.

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


#: Days that the certificate is valid where the end of the job is unknown: short enough that a stolen one goes stale.
VALID_DAYS = 90
#: Days that it is valid at most, whatever the batch system says.
MOST_DAYS = 3660
#: Seconds that it is valid after the end of the job, for clocks that are ahead and for what takes long to end.
MARGIN = 3600
#: Seconds by which its begin is dated back, since the hosts of one job may disagree about the time by some minutes.
BACKDATED = 3600
_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


@dataclass(frozen=True)
class Credentials:
    """What each process of the cluster shows the others."""

    #: Certificate of the job's authority, PEM.
    ca: str
    #: Certificate that every process shows, PEM.
    certificate: str
    #: Its private key, PEM. Not in the repr, so that it can't end in a log.
    key: str = field(repr=False)

    def dask_config(self) -> dict[str, Any]:
        """The settings that make a plain ``Client()``, ``Nanny`` or ``Scheduler`` of distributed use these.

        Source: ``distributed.security.Security`` takes PEM text where it takes file names (any text with a newline).
        """
        pair = {"cert": self.certificate, "key": self.key}
        return {
            "distributed.comm.require-encryption": True,
            "distributed.comm.tls.ca-file": self.ca,
            "distributed.comm.tls.client": pair,
            "distributed.comm.tls.scheduler": pair,
            "distributed.comm.tls.worker": pair,
        }

    def security(self) -> Any:
        """The same as a ``distributed.Security``, for code that takes one."""
        from distributed import Security

        return Security(
            require_encryption=True,
            tls_ca_file=self.ca,
            tls_client_cert=self.certificate,
            tls_client_key=self.key,
            tls_scheduler_cert=self.certificate,
            tls_scheduler_key=self.key,
            tls_worker_cert=self.certificate,
            tls_worker_key=self.key,
        )


def make_credentials(*, job_end: float | None = None, now: float | None = None) -> Credentials:
    """Generate a new authority, let it sign one certificate, and forget its key.

    Elliptic curves (P-256) instead of RSA: a key takes a millisecond instead of a tenth of a second.

    Parameters
    ----------
    job_end : float, optional
        When the batch system ends the job, in seconds since the epoch; None: unknown.
    now : float, optional
        The time, in seconds since the epoch; None: this node's.
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

    def build(name: str, public: Any, issuer: str, signer: Any, *, authority: bool) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(valid_from)
            .not_valid_after(valid_until)
            .add_extension(
                x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True
            )
        )
        # What strict verification asks for (RFC 5280; the default of Python 3.13).
        usage = dict.fromkeys(_USAGES, False) | (
            {"key_cert_sign": True, "crl_sign": True} if authority else {"digital_signature": True}
        )
        builder = (
            builder.add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
            )
        )
        return builder.sign(signer, hashes.SHA256())

    authority_key = ec.generate_private_key(ec.SECP256R1())
    member_key = ec.generate_private_key(ec.SECP256R1())
    authority = build(
        "dask-gpu-mpi job", authority_key.public_key(), "dask-gpu-mpi job", authority_key, authority=True
    )
    member = build(
        "dask-internal", member_key.public_key(), "dask-gpu-mpi job", authority_key, authority=False
    )

    def pem(certificate: x509.Certificate) -> str:
        return certificate.public_bytes(serialization.Encoding.PEM).decode()

    key = member_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return Credentials(ca=pem(authority), certificate=pem(member), key=key)


def _end(now: float, job_end: float | None) -> float:
    """Until when a certificate is valid that is made now.

    An end that is past is none: variables of another job, which this process has inherited.

    >>> day = 86400.0
    >>> [(_end(0.0, job_end) - MARGIN) / day for job_end in (2 * day, 1e9 * day)], _end(0.0, -1.0) / day, _end(0.0, None) / day
    ([2.0, 3660.0], 90.0, 90.0)
    """
    if job_end is None or job_end <= now:
        return now + VALID_DAYS * 86400
    return min(job_end, now + MOST_DAYS * 86400) + MARGIN
