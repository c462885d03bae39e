"""Makes the certificates of a server that is reached as `https://api.DOMAIN` and `https://PORT-ID.DOMAIN`.

The authority and the certificate are made once, with the program `openssl`, and kept in the server's folder. The
authority's key is deleted when the certificate is signed, so that whoever trusts the authority trusts this one
certificate. `bundle.pem` holds this machine's authorities and the server's own, for `SSL_CERT_FILE`.
"""

from __future__ import annotations

import shutil
import ssl
import tempfile
import time
from pathlib import Path

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.host_process import check_process

_DAYS = 365
_RENEW_S = 30 * 86400
_OPENSSL_S = 60.0


async def certificate(folder: Path, domain: str) -> tuple[Path, Path]:
    """Return the files of the certificate chain with its key, and of the bundle of authorities; make them if they do
    not exist, are for another domain, or end soon. Raises `ConfigError` without `openssl`."""
    chain, bundle, about = folder / "server.pem", folder / "bundle.pem", folder / "domain"
    fresh = chain.exists() and bundle.exists() and time.time() - chain.stat().st_mtime < _DAYS * 86400 - _RENEW_S
    if fresh and about.exists() and about.read_text(encoding="utf-8") == domain:
        return chain, bundle
    if shutil.which("openssl") is None:
        raise ConfigError(
            "a local domain needs a certificate, which the program openssl makes: apt-get install openssl"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        await _make_certificate(Path(temporary), domain)
        made = Path(temporary)
        key_and_chain = (made / "server.key").read_text() + (made / "server.crt").read_text()
        authority = (made / "ca.crt").read_text()
        _write_private(chain, key_and_chain + authority)
        _write_private(folder / "ca.pem", authority)
        _write_private(bundle, _system_authorities() + authority)
        _write_private(about, domain)
    return chain, bundle


def context(chain: Path) -> ssl.SSLContext:
    """Return the server's TLS settings."""
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.minimum_version = ssl.TLSVersion.TLSv1_2
    found.load_cert_chain(chain)
    found.set_alpn_protocols(["http/1.1"])
    return found


async def _make_certificate(folder: Path, domain: str) -> None:
    host = domain.partition(":")[0]
    extensions = folder / "extensions"
    extensions.write_text(
        f"subjectAltName=DNS:{host},DNS:*.{host}\nbasicConstraints=critical,CA:FALSE\n"
        "extendedKeyUsage=serverAuth\nkeyUsage=critical,digitalSignature\n",
        encoding="utf-8",
    )
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    commands = (
        ["openssl", "req", "-x509", *curve, "-days", str(_DAYS), "-subj", f"/CN=Palaestra for {host}"[:64],
         "-addext", f"nameConstraints=critical,permitted;DNS:{host}", "-addext", "keyUsage=critical,keyCertSign",
         "-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.crt"],
        ["openssl", "req", *curve, "-subj", f"/CN={host}"[:64], "-keyout", f"{folder}/server.key",
         "-out", f"{folder}/server.csr"],
        ["openssl", "x509", "-req", "-in", f"{folder}/server.csr", "-CA", f"{folder}/ca.crt", "-CAkey",
         f"{folder}/ca.key", "-CAcreateserial", "-days", str(_DAYS), "-extfile", str(extensions), "-out",
         f"{folder}/server.crt"],
    )  # fmt: skip
    for command in commands:
        await check_process(command, "making the certificate failed", timeout_s=_OPENSSL_S, error=ConfigError)


def _system_authorities() -> str:
    paths = ssl.get_default_verify_paths()
    for file in (paths.cafile, paths.openssl_cafile, "/etc/ssl/certs/ca-certificates.crt"):
        if file and Path(file).is_file():
            return Path(file).read_text(encoding="utf-8", errors="replace").rstrip() + "\n"
    return ""


def _write_private(file: Path, text: str) -> None:
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")
