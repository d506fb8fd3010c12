"""CuTe FlashAttention without CuTe: where it is taken from, why it is refused, and how its row calls it."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast.attention import cute, cute_load
from chitu_diffusion.parallel.cp.fast.attention.cute_source import (
    COMMIT,
    DSL,
    DSL_LIBRARIES,
    MODULES,
    PACKAGE,
    QUACK,
    ROOT_VARIABLE,
    TRIED,
    CuteSource,
    head_commit,
    look,
    untried,
)
from tests.support.fake_cute import INTERFACE, VERSIONS, write_cute, write_site

OTHER = "0" * 40


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No flash_attn in this process, nothing remembered, nobody's cache of kernels."""
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "flash_attn"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    for variable in (ROOT_VARIABLE, cute_load.KEEP, cute_load.KEEP_IN):
        monkeypatch.delenv(variable, raising=False)
    for remembered in (cute_load.source, cute_load._load):
        remembered.cache_clear()
    yield
    for remembered in (cute_load.source, cute_load._load):
        remembered.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]
    sys.modules.update(real)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of packages: what is installed here does not count."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *(entry for entry in sys.path if "site-packages" not in entry)])
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """FlashAttention at the pinned commit, whose own package would import FlashAttention 2."""
    root = tmp_path / "flash-attention"
    write_cute(root)
    (root / "flash_attn" / "__init__.py").write_text("raise ImportError('flash_attn_2_cuda')")
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text(f"{COMMIT}\n")
    return root


def test_the_installed_set_that_was_tried_is_taken(site: Path) -> None:
    write_site(site)
    found = look({})
    assert (found.problem, found.root, found.origin) == (None, site, "flash-attn-4 4.0.0b29")
    assert found.tried == TRIED[2]


def test_a_checkout_wins_over_the_installed_package(site: Path, checkout: Path) -> None:
    write_site(site)
    found = look({ROOT_VARIABLE: str(checkout)})
    assert (found.problem, found.root, found.tried) == (None, checkout, TRIED[1])
    assert look({ROOT_VARIABLE: ""}).root == site


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({PACKAGE: None}, "flash-attn-4 is not installed"),
        ({PACKAGE: "4.0.0b31"}, "flash-attn-4 4.0.0b31 found, 4.0.0b29 wanted"),
        ({DSL: "4.8.1", DSL_LIBRARIES: "4.8.1"}, "nvidia-cutlass-dsl 4.8.1 found, 4.6.2 wanted"),
        ({DSL: None}, "nvidia-cutlass-dsl is not installed, 4.6.2 wanted"),
        ({DSL_LIBRARIES: None}, "nvidia-cutlass-dsl-libs-cu13 is not installed, 4.6.2 wanted"),
        ({DSL_LIBRARIES: "4.6.1"}, "nvidia-cutlass-dsl-libs-cu13 4.6.1 found, 4.6.2 wanted"),
        ({QUACK: "0.6.5"}, "quack-kernels 0.6.5 found, 0.6.4 wanted"),
        ({QUACK: None}, "quack-kernels is not installed, 0.6.4 wanted"),
    ],
)
def test_every_version_that_was_not_tried_is_a_reason(site: Path, changes: dict[str, Any], reason: str) -> None:
    write_site(site, {name: text for name, text in {**VERSIONS, **changes}.items() if text is not None})
    found = look({})
    assert (found.problem, found.tried) == (reason, None)
    assert found.next_step == "uv sync --inexact --extra cute"


def test_a_checkout_says_which_versions_were_tried_with_it(site: Path, checkout: Path) -> None:
    write_site(site, {**VERSIONS, DSL: "4.8.1", DSL_LIBRARIES: "4.8.1"})
    assert look({ROOT_VARIABLE: str(checkout)}).problem == "nvidia-cutlass-dsl 4.8.1 found, 4.6.1 or 4.6.2 wanted"
    tried_apart = {DSL: "4.6.1", DSL_LIBRARIES: "4.6.1", QUACK: "0.6.4"}
    assert untried(COMMIT, tried_apart) == "quack-kernels 0.6.4 found, 0.6.2 wanted"


@pytest.mark.parametrize("row", TRIED, ids=lambda row: f"{row.revision[:8]} {row.dsl}")
def test_every_row_of_the_table_is_taken(row: Any) -> None:
    assert untried(row.revision, {DSL: row.dsl, DSL_LIBRARIES: row.dsl, QUACK: row.quack}) is None


@pytest.mark.parametrize("module", [name for name in MODULES if name != "typing_extensions"])
def test_a_missing_dependency_is_a_reason(site: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module.split(".")[0]]:
        monkeypatch.delitem(sys.modules, name)
    write_site(site, without=module)
    assert look({}).problem == f"{MODULES[module]} has no module {module} here"


def test_another_commit_is_a_reason_that_names_both(site: Path, checkout: Path) -> None:
    write_site(site)
    (checkout / ".git" / "HEAD").write_text(OTHER)
    found = look({ROOT_VARIABLE: str(checkout)})
    assert found.problem == f"{ROOT_VARIABLE}={checkout} is at {OTHER}, {COMMIT} wanted"
    assert found.next_step == f"check {COMMIT} out there, or unset {ROOT_VARIABLE}"


def test_a_root_without_cute_is_a_reason_and_not_a_silent_fallback(site: Path, tmp_path: Path) -> None:
    write_site(site)
    found = look({ROOT_VARIABLE: str(tmp_path)})
    assert (found.root, found.problem) == (None, f"{ROOT_VARIABLE}={tmp_path} holds no flash_attn/cute")


def test_a_root_that_is_not_there_leaves_the_installed_package(site: Path, tmp_path: Path) -> None:
    nowhere = {ROOT_VARIABLE: str(tmp_path / "nowhere")}  # fast_cp_env.sh names one on every machine
    gone = f"{ROOT_VARIABLE}={tmp_path}/nowhere is not there"
    assert look(nowhere).problem == f"flash-attn-4 is not installed, and {gone}"
    write_site(site)
    found = look(nowhere)
    assert (found.problem, found.root, found.tried) == (None, site, TRIED[2])
    assert found.origin == f"flash-attn-4 4.0.0b29 ({gone})"


def test_a_folder_without_history_is_taken_for_the_commit_and_said_to_be(site: Path, tmp_path: Path) -> None:
    write_site(site)
    write_cute(tmp_path / "archive")
    found = look({ROOT_VARIABLE: str(tmp_path / "archive")})
    assert (found.problem, found.revision) == (None, COMMIT)
    assert found.origin.endswith(f"(without git history, taken for {COMMIT[:12]})")


def test_the_commit_is_read_as_git_keeps_it(tmp_path: Path) -> None:
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert head_commit(tmp_path) == "an unknown commit"
    (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{OTHER} refs/heads/mainly\n{COMMIT} refs/heads/main\n")
    assert head_commit(tmp_path) == COMMIT
    (git / "refs" / "heads" / "main").write_text(f"{OTHER}\n")
    assert head_commit(tmp_path) == OTHER
    private, tree = git / "worktrees" / "w", tmp_path / "tree"
    private.mkdir(parents=True)
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {private}\n")
    assert head_commit(tree) == "an unknown commit"
    (private / "HEAD").write_text("ref: refs/heads/main\n")
    (private / "commondir").write_text("../..\n")
    assert head_commit(tree) == OTHER


def test_a_checkout_is_imported_without_its_package(
    site: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_site(site, {name: text for name, text in VERSIONS.items() if name != PACKAGE})
    monkeypatch.setenv(ROOT_VARIABLE, str(checkout))
    forward = cute.load_cute_flash_attn_fwd()
    assert forward() is True
    assert cute.load_cute_flash_attn_fwd() is forward
    assert sys.modules["flash_attn.cute"].__file__ == str(checkout / "flash_attn/cute/__init__.py")


def test_flash_attention_2_beside_it_is_neither_imported_nor_hidden(site: Path) -> None:
    write_site(site)
    (site / "flash_attn" / "__init__.py").write_text("two = 2")
    cute.load_cute_flash_attn_fwd()
    assert "flash_attn" not in sys.modules
    import flash_attn

    assert flash_attn.two == 2


def test_an_imported_flash_attention_2_stays_what_it_is(
    site: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_site(site)
    (site / "flash_attn" / "__init__.py").write_text("two = 2")
    import flash_attn

    monkeypatch.setenv(ROOT_VARIABLE, str(checkout))
    assert cute.load_cute_flash_attn_fwd()() is True
    assert sys.modules["flash_attn"] is flash_attn


def test_another_cute_that_is_imported_already_is_a_reason(
    site: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_site(site)
    import flash_attn.cute

    monkeypatch.setenv(ROOT_VARIABLE, str(checkout))
    assert "is imported already, and not the one of" in str(cute_load.load_problem())
    assert sys.modules["flash_attn.cute"] is flash_attn.cute


def test_a_failing_import_is_a_reason_and_leaves_no_half_of_it(site: Path) -> None:
    write_site(site)
    write_cute(site, "from flash_attn.cute import part\nraise OSError('libcuda.so.1: cannot open\\nlong story')")
    reason = "its import fails: OSError: libcuda.so.1: cannot open"
    assert cute_load.load_problem() == reason
    with pytest.raises(UnavailableError, match=f"^cute: {reason}$"):
        cute.load_cute_flash_attn_fwd()
    assert not [name for name in sys.modules if name.startswith("flash_attn")]


def test_nothing_is_imported_where_a_version_stands_in_the_way(site: Path, tmp_path: Path) -> None:
    write_site(site, {**VERSIONS, QUACK: "0.6.5"})
    write_cute(site, f"open({str(tmp_path / 'imported')!r}, 'w')\n{INTERFACE}")
    assert cute_load.load_problem() == "quack-kernels 0.6.5 found, 0.6.4 wanted"
    assert not (tmp_path / "imported").exists()


def test_compiled_kernels_are_kept_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    cute_load.keep_compiled(environ)
    assert (environ[cute_load.KEEP], environ[cute_load.KEEP_IN]) == ("1", str(tmp_path / "chitu" / "cute"))
    theirs = {cute_load.KEEP: "0", cute_load.KEEP_IN: str(tmp_path / "theirs")}
    cute_load.keep_compiled(environ := dict(theirs))
    assert environ == theirs
    (tmp_path / "file").touch()
    cute_load.keep_compiled(environ := {"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert cute_load.KEEP not in environ
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cute_load.compiled_folder({}) == tmp_path / "home" / ".cache" / "chitu" / "cute"


def test_the_folder_of_kernels_is_named_before_the_import(site: Path) -> None:
    write_site(site)
    write_cute(site, f"import os\nseen = os.environ[{cute_load.KEEP_IN!r}]\n{INTERFACE}")
    cute.load_cute_flash_attn_fwd()
    assert sys.modules["flash_attn.cute.interface"].seen == os.environ[cute_load.KEEP_IN]
    os.environ.pop(cute_load.KEEP), os.environ.pop(cute_load.KEEP_IN)


def test_a_source_is_asked_for_once(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_load, "look", lambda environ: replace(CuteSource("here"), problem="first"))
    assert cute_load.source().problem == "first"
    monkeypatch.setattr(cute_load, "look", lambda environ: pytest.fail("asked again"))
    assert cute_load.load_problem() == "first"


def test_importing_the_row_imports_none_of_it() -> None:
    assert not torch.cuda.is_initialized()
    assert not [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "quack", "cutlass")]
