"""The overlay, on a small git repository that stands in for upstream's checkout."""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.test_install_build import git, make_checkout, write
from tools.install import install_fast_agkv, overlay, upstream
from tools.install.errors import InstallError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    home = tmp_path / "csrc"
    write(home / "CMakeLists.txt", "project(fast_cp)")
    write(home / "transfer/sm.cu", "// sm")
    write(home / "python/fast_ulysses/__init__.py", "__all__ = ['ours']\nours = 1\n")
    write(home / "python/fast_ulysses/__pycache__/x.pyc", "left behind")
    return home


@pytest.fixture
def checkout(tmp_path: Path, csrc: Path) -> Path:
    return make_checkout(tmp_path / "a checkout", csrc / "upstream.toml")


def run(checkout: Path, csrc: Path, *options: str) -> int:
    return install_fast_agkv.main([str(checkout), "--csrc", str(csrc), *options])


def digest(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and ".git" not in path.parts]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_it_adds_one_folder_and_one_line(checkout: Path, csrc: Path) -> None:
    assert run(checkout, csrc) == 0
    status = git(checkout, "status", "--porcelain").splitlines()
    assert [line.split()[-1] for line in status] == ["fast_ulysses/__init__.py", "fast_ulysses/fast_cp/"]
    assert git(checkout, "diff", "--numstat") == "1\t0\tfast_ulysses/__init__.py"
    files = {path.relative_to(checkout / "fast_ulysses/fast_cp").as_posix() for path in checkout.rglob("fast_cp/**/*")}
    expected = {"__init__.py", "csrc/CMakeLists.txt", "csrc/transfer/sm.cu", "csrc/upstream.toml"}
    assert files - {"csrc", "csrc/transfer"} == expected


def test_ours_is_importable_through_theirs(checkout: Path, csrc: Path) -> None:
    write(checkout / "fast_ulysses/__init__.py", "theirs = 2")  # its last line has no end
    assert run(checkout, csrc) == 0
    code = "import fast_ulysses as f; print(f.theirs, f.ours, f.fast_cp.ours)"
    said = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["2", "1", "1"]


def test_a_second_time_changes_nothing(checkout: Path, csrc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(checkout, csrc) == 0
    before, time = digest(checkout), (checkout / "fast_ulysses/__init__.py").stat().st_mtime_ns
    assert run(checkout, csrc) == 0
    assert digest(checkout) == before
    assert (checkout / "fast_ulysses/__init__.py").stat().st_mtime_ns == time
    assert "was already in place" in capsys.readouterr().out


def test_check_says_whether_it_is_in_place_and_changes_nothing(
    checkout: Path, csrc: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digest(checkout)
    assert run(checkout, csrc, "--check") == 1
    assert digest(checkout) == before
    run(checkout, csrc)
    assert run(checkout, csrc, "--check") == 0
    write(checkout / "fast_ulysses/fast_cp/libfast_cp.so", "a binary is not looked at")
    assert run(checkout, csrc, "--check") == 0
    assert capsys.readouterr().out.count("binaries were not looked at") == 4


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda p: write(p / "fast_cp/csrc/transfer/sm.cu", "// edited"), "csrc/transfer/sm.cu differs"),
        (lambda p: (p / "fast_cp/csrc/CMakeLists.txt").unlink(), "csrc/CMakeLists.txt is missing"),
        (lambda p: write(p / "fast_cp/stranger.py"), "stranger.py is not ours"),
        (lambda p: write(p / "__init__.py", "import torch\n"), "imports it 0 times"),
        (lambda p: write(p / "__init__.py", f"{overlay.LINE}\nimport torch\n{overlay.LINE}\n"), "imports it 2 times"),
    ],
)
def test_a_damaged_overlay_is_noticed_and_repaired(
    checkout: Path, csrc: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object], said: str
) -> None:
    run(checkout, csrc)
    whole = digest(checkout)
    spoil(checkout / "fast_ulysses")
    assert run(checkout, csrc, "--check") == 1
    assert said in capsys.readouterr().out
    assert run(checkout, csrc) == 0
    assert digest(checkout) == whole


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_a_folder_that_is_not_upstream_is_refused(
    tmp_path: Path, csrc: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    write(other / "setup.py", "setup(name='something_else')")
    write(other / "fast_ulysses/__init__.py", "")
    folders = (other, tmp_path / "nowhere", csrc)
    for folder in folders:
        before = digest(folder) if folder.exists() else {}
        assert run(folder, csrc, *options) == 2
        assert (digest(folder) if folder.exists() else {}) == before
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(folders)
    assert all(str(folder) in line for folder, line in zip(folders, said, strict=True))


@pytest.mark.parametrize(("present", "moves"), [(False, 1), (False, 2), (True, 1), (True, 2), (True, 3)])
def test_a_failure_at_any_move_leaves_the_checkout_as_it_was(
    checkout: Path, csrc: Path, monkeypatch: pytest.MonkeyPatch, moves: int, present: bool
) -> None:
    if present:
        run(checkout, csrc)
        write(csrc / "transfer/sm.cu", "// newer")
    before, left = digest(checkout), [moves]

    def failing(name: str) -> Callable[[Path, Path], Path]:
        real: Callable[[Path, Path], Path] = getattr(Path, name)

        def move(source: Path, target: Path) -> Path:
            left[0] -= 1
            if left[0] == 0:
                raise OSError("disk full")
            return real(source, target)

        return move

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing("rename"))
        patch.setattr(Path, "replace", failing("replace"))
        with pytest.raises(InstallError, match="is as it was: disk full"):
            overlay.apply(checkout, csrc)
    assert digest(checkout) == before
    assert run(checkout, csrc) == 0
    assert overlay.look(checkout, csrc).in_place


def test_a_process_killed_between_two_moves_is_recovered_from(checkout: Path, csrc: Path) -> None:
    run(checkout, csrc)
    whole, package = digest(checkout), checkout / "fast_ulysses"
    (package / "fast_cp").rename(package / ".fast_cp.old")
    write(package / ".fast_cp.new/half", "written")
    assert run(checkout, csrc) == 0
    assert digest(checkout) == whole
    write(package / ".fast_cp.old/left", "after the last move")
    write(package / "fast_cp/csrc/transfer/sm.cu", "// edited")
    assert run(checkout, csrc) == 0
    assert digest(checkout) == whole


def test_another_commit_gets_the_overlay_and_a_note_that_names_both(
    checkout: Path, csrc: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned = git(checkout, "rev-parse", "HEAD")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "newer")
    assert run(checkout, csrc) == 0
    said = capsys.readouterr().err
    assert pinned in said
    assert git(checkout, "rev-parse", "HEAD") in said


def test_the_overlay_itself_is_no_change_of_the_pinned_commit(checkout: Path, csrc: Path) -> None:
    pin = upstream.read_pin(csrc / "upstream.toml")
    run(checkout, csrc)
    assert upstream.verify(checkout, pin, allow_unpinned=False) == (upstream.Checkout(checkout, pin.commit), None)
    with (checkout / "fast_ulysses/__init__.py").open("a") as init:
        init.write("more = 1\n")
    with pytest.raises(InstallError, match=r"with changes in fast_ulysses/__init__\.py"):
        upstream.verify(checkout, pin, allow_unpinned=False)


def test_a_folder_inside_another_repository_has_no_commit_of_its_own(checkout: Path, csrc: Path) -> None:
    inner = checkout / "vendored"
    write(inner / "setup.py", "fast_ulysses")
    write(inner / "fast_ulysses/__init__.py")
    with pytest.raises(InstallError, match="no git commit"):
        upstream.verify(inner, upstream.read_pin(csrc / "upstream.toml"), allow_unpinned=False)


@pytest.mark.parametrize("text", ["", "url = 'x'", "url = 'x'\ncommit = 'main'", "not toml"])
def test_a_pin_file_without_a_full_commit_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(InstallError, match=r"pin\.toml"):
        upstream.read_pin(write(tmp_path / "pin.toml", text))


def test_the_projects_pin_and_sources_make_an_overlay() -> None:
    assert len(upstream.read_pin(ROOT / "csrc/upstream.toml").commit) == 40
    files = overlay.overlay_files(ROOT / "csrc")
    assert {"__init__.py", "csrc/CMakeLists.txt", "csrc/include/fast_cp/copy_plan.hpp"} < set(files)
