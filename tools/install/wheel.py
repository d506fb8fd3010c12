"""Writes wheels: the same bytes for the same files, with a RECORD that is right."""

import base64
import csv
import hashlib
import io
import os
import re
import stat
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.install.errors import InstallError

STANDALONE_TAG = "py3-none-linux_x86_64"
DISTRIBUTION = "fast_ulysses"
_TIME = (1980, 1, 1, 0, 0, 0)
_GENERATOR = "fast-cp-installer"

Files = dict[str, bytes]


@dataclass(frozen=True)
class Wheel:
    """A wheel's contents; ``files`` has no RECORD, which is made when it is written."""

    version: str
    tag: str
    files: Files

    @property
    def name(self) -> str:
        """Its file name."""
        return f"{DISTRIBUTION}-{self.version}-{self.tag}.whl"

    @property
    def info(self) -> str:
        """The folder of its metadata."""
        return f"{DISTRIBUTION}-{self.version}.dist-info"


def standalone(version: str, package: Mapping[str, bytes], extra_info: Mapping[str, bytes], licence: bytes) -> Wheel:
    """The wheel of our package alone; ``package`` maps names below ``fast_ulysses/`` to bytes."""
    wheel = Wheel(version, STANDALONE_TAG, {f"{DISTRIBUTION}/{name}": data for name, data in package.items()})
    metadata = (
        f"Metadata-Version: 2.4\nName: fast-ulysses\nVersion: {version}\n"
        "Summary: Context-parallel transfers over symmetric memory for diffusion transformers\n"
        "License-Expression: Apache-2.0\nLicense-File: LICENSE\n"
        "Requires-Python: >=3.12\nRequires-Dist: torch>=2.10\n"
    )
    wheel.files.update(
        {
            f"{wheel.info}/METADATA": metadata.encode(),
            f"{wheel.info}/WHEEL": _wheel_file(wheel.tag),
            f"{wheel.info}/licenses/LICENSE": licence,
            **{f"{wheel.info}/{name}": data for name, data in extra_info.items()},
        }
    )
    return wheel


def beside_upstream(upstream: Wheel, version: str, package: Mapping[str, bytes], extra: Mapping[str, bytes]) -> Wheel:
    """Upstream's wheel with our package in ``fast_ulysses/fast_cp/``, under a version that says so."""
    ours = f"{DISTRIBUTION}/fast_cp/"
    local = re.sub(r"[^A-Za-z0-9]+", ".", f"fastcp.{version}")
    wheel = Wheel(f"{upstream.version.split('+')[0]}+{local}", upstream.tag, {})
    for name, data in upstream.files.items():
        if not name.startswith(ours):
            wheel.files[name.replace(upstream.info, wheel.info, 1)] = data
    metadata = wheel.files[f"{wheel.info}/METADATA"].decode()
    wheel.files[f"{wheel.info}/METADATA"] = re.sub(
        r"^Version: .*$", f"Version: {wheel.version}", metadata, count=1, flags=re.MULTILINE
    ).encode()
    wheel.files.update({ours + name: data for name, data in package.items()})
    wheel.files.update({f"{wheel.info}/{name}": data for name, data in extra.items()})
    return wheel


def read_wheel(path: Path) -> Wheel:
    """A wheel of this distribution from disk."""
    parts = path.name.removesuffix(".whl").split("-", 2)
    if len(parts) != 3 or parts[0].lower().replace("-", "_") != DISTRIBUTION:
        raise InstallError(f"{path.name} is no wheel of {DISTRIBUTION}; the checkout's setup.py should build one")
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    wheel = Wheel(parts[1], parts[2], files)
    if f"{wheel.info}/METADATA" not in files:
        raise InstallError(f"{path} holds no {wheel.info}/METADATA; build the checkout anew")
    for name in (f"{wheel.info}/RECORD", f"{wheel.info}/RECORD.jws"):
        files.pop(name, None)
    return wheel


def write_wheel(wheel: Wheel, folder: Path) -> Path:
    """Write it into ``folder``, whole or not at all; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    files = dict(wheel.files) | {f"{wheel.info}/RECORD": record(wheel)}
    path = folder / wheel.name
    temporary = folder / f".{wheel.name}.{os.getpid()}"
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            for name in sorted(files, key=lambda name: (".dist-info/" in name, name.endswith("/RECORD"), name)):
                archive.writestr(_entry(name), files[name], compresslevel=9)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def record(wheel: Wheel) -> bytes:
    """The RECORD: name, digest and size of every other file, and its own name."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, data in sorted(wheel.files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(data)))
    rows.writerow((f"{wheel.info}/RECORD", "", ""))
    return text.getvalue().encode()


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date_time=_TIME)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.create_system = 3  # Unix, whatever this runs on, so that the mode bits count
    mode = 0o755 if name.endswith(".so") or ".so." in name else 0o644
    entry.external_attr = (stat.S_IFREG | mode) << 16
    return entry


def _wheel_file(tag: str) -> bytes:
    return f"Wheel-Version: 1.0\nGenerator: {_GENERATOR}\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
