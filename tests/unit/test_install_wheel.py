"""Wheels: the same bytes for the same files, a right RECORD, and upstream's with ours beside it."""

import base64
import csv
import hashlib
import zipfile
from pathlib import Path

import pytest

from tools.install.errors import InstallError
from tools.install.wheel import Wheel, beside_upstream, read_wheel, standalone, write_wheel

PACKAGE = {"__init__.py": b"import torch\n", "libfast_cp.so": b"\x7fELF" + bytes(1000)}


def ours() -> Wheel:
    return standalone("0.3.0", PACKAGE, {"fast_cp_build.json": b"{}"}, b"a licence")


def theirs(version: str = "0.0.1") -> Wheel:
    info = f"fast_ulysses-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: fast_ulysses\nVersion: {version}\n\nVersion: x\n"
    return Wheel(
        version,
        "cp312-cp312-linux_x86_64",
        {
            "fast_ulysses/__init__.py": b"theirs",
            "fast_ulysses/fast_cp/csrc/sm.cu": b"a source that their build took along",
            f"{info}/METADATA": metadata.encode(),
            f"{info}/WHEEL": b"Tag: cp312-cp312-linux_x86_64\n",
        },
    )


def test_the_record_names_every_file_with_its_digest(tmp_path: Path) -> None:
    path = write_wheel(ours(), tmp_path)
    with zipfile.ZipFile(path) as archive:
        rows = list(csv.reader(archive.read("fast_ulysses-0.3.0.dist-info/RECORD").decode().splitlines()))
        assert sorted(row[0] for row in rows) == sorted(archive.namelist())
        for name, digest, size in rows:
            if not name.endswith("/RECORD"):
                data = archive.read(name)
                wanted = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
                assert (digest, size) == (f"sha256={wanted}", str(len(data)))
            else:
                assert (digest, size) == ("", "")


def test_it_is_for_any_python_3_on_linux_and_wants_torch(tmp_path: Path) -> None:
    path = write_wheel(ours(), tmp_path)
    assert path.name == "fast_ulysses-0.3.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(path) as archive:
        info = "fast_ulysses-0.3.0.dist-info"
        assert "Tag: py3-none-linux_x86_64" in archive.read(f"{info}/WHEEL").decode()
        assert "Root-Is-Purelib: false" in archive.read(f"{info}/WHEEL").decode()
        assert "Requires-Dist: torch>=2.10" in archive.read(f"{info}/METADATA").decode()
        assert archive.namelist()[-1] == f"{info}/RECORD"
        assert archive.getinfo("fast_ulysses/libfast_cp.so").external_attr >> 16 == 0o100755


def test_the_bytes_depend_on_nothing_but_the_files(tmp_path: Path) -> None:
    first = write_wheel(ours(), tmp_path / "a").read_bytes()
    turned = standalone("0.3.0", dict(reversed(PACKAGE.items())), {"fast_cp_build.json": b"{}"}, b"a licence")
    path = write_wheel(turned, tmp_path / "b")
    assert path.read_bytes() == first
    with zipfile.ZipFile(path) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_a_wheel_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(OSError, match="disk full"):
        write_wheel(ours(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    assert read_wheel(write_wheel(theirs(), tmp_path)) == theirs()


@pytest.mark.parametrize("version", ["0.0.1", "0.0.1+cu130"])
def test_beside_upstream_both_are_there_under_a_version_that_says_so(version: str) -> None:
    wheel = beside_upstream(theirs(version), "0.3.0", PACKAGE, {"fast_cp_build.json": b"{}"})
    assert wheel.name == "fast_ulysses-0.0.1+fastcp.0.3.0-cp312-cp312-linux_x86_64.whl"
    info = "fast_ulysses-0.0.1+fastcp.0.3.0.dist-info"
    assert set(wheel.files) == {
        "fast_ulysses/__init__.py",
        "fast_ulysses/fast_cp/__init__.py",
        "fast_ulysses/fast_cp/libfast_cp.so",
        f"{info}/METADATA",
        f"{info}/WHEEL",
        f"{info}/fast_cp_build.json",
    }
    assert wheel.files["fast_ulysses/__init__.py"] == b"theirs"
    assert b"\nVersion: 0.0.1+fastcp.0.3.0\n\nVersion: x\n" in wheel.files[f"{info}/METADATA"]


def test_another_distribution_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="no wheel of fast_ulysses"):
        read_wheel(tmp_path / "torch-2.11.0-cp312-cp312-linux_x86_64.whl")
