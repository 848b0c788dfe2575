"""A certificate for a server of a test."""

import subprocess
from pathlib import Path


def certificate(folder: Path) -> Path:
    """`cert.pem` in `folder`, its own authority, for localhost; its key is `key.pem` beside it."""
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    argv += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"), "-subj", "/CN=localhost"]
    subprocess.run([*argv, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    return folder / "cert.pem"
