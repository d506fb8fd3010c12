"""Imports CuTe FlashAttention by path, so that neither FlashAttention 2 nor anything else of that name is imported."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from chitu_diffusion.parallel.cp.errors import UnavailableError, first_line
from chitu_diffusion.parallel.cp.fast.attention.cute_source import CuteSource, look

NAME, CUTE = "flash_attn", "flash_attn.cute"
KEEP, KEEP_IN = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"

Forward = Callable[..., Any]


@cache
def source() -> CuteSource:
    """Where this process takes CuTe from: decided once, as an import is."""
    return look(os.environ)


def load_cute_flash_attn_fwd() -> Forward:
    """FlashAttention CuTe's ``_flash_attn_fwd``; the first call takes 5 to 10 s and needs no GPU.

    Raises UnavailableError with the reason: not installed, an untried version, or what its import raised.
    """
    found = _load()
    if isinstance(found, str):
        raise UnavailableError(f"cute: {found}")
    return found


def load_problem() -> str | None:
    """Why it cannot be loaded, or None."""
    found = _load()
    return found if isinstance(found, str) else None


@cache
def _load() -> Forward | str:
    found = source()
    if found.problem is not None:
        return found.problem
    assert found.root is not None
    try:
        keep_compiled(os.environ)
        return import_forward(found.root)
    except Exception as error:  # imports raise anything
        return f"its import fails: {first_line(error)}"


@contextmanager
def with_cute() -> Iterator[None]:
    """While it lasts, imports from ``flash_attn.cute``, which must be loaded, find the one that was loaded."""
    root = source().root
    assert root is not None, "it is loaded"
    with _name_is(root / NAME):
        yield


def import_forward(root: Path) -> Forward:
    """``_flash_attn_fwd`` of ``root``/flash_attn/cute. Raises ImportError where another one is imported already."""
    folder, present = root / NAME, sys.modules.get(CUTE)
    if present is not None and not Path(str(present.__file__)).resolve().is_relative_to(folder.resolve()):
        raise ImportError(f"{CUTE} of {present.__file__} is imported already, and not the one of {root}")
    before = set(sys.modules)
    try:
        with _name_is(folder):
            forward: Forward = importlib.import_module(f"{CUTE}.interface")._flash_attn_fwd
    except BaseException:
        for name in set(sys.modules) - before:
            if name in (NAME, CUTE) or name.startswith(f"{CUTE}."):
                del sys.modules[name]  # a half of it would serve as the whole next time
        raise
    return forward


@contextmanager
def _name_is(folder: Path) -> Iterator[None]:
    """``flash_attn`` is a bare namespace of ``folder``; afterwards again what it was, or what is installed."""
    before = sys.modules.get(NAME)
    package = before is not None or _is_installed_package()
    spec = ModuleSpec(NAME, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        if before is not None:
            sys.modules[NAME] = before
        elif package:  # FlashAttention 2, whose own import is still to come; else the namespace stays
            del sys.modules[NAME]


def _is_installed_package() -> bool:
    spec = importlib.util.find_spec(NAME)
    return spec is not None and spec.origin is not None


def keep_compiled(environ: MutableMapping[str, str]) -> None:
    """Let FlashAttention keep compiled kernels on disk, unless the user said otherwise or the folder is read-only."""
    try:
        folder = compiled_folder(environ)
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # read-only, or a user without a home
        return
    if os.access(folder, os.W_OK):
        environ.setdefault(KEEP, "1")
        environ.setdefault(KEEP_IN, str(folder))


def compiled_folder(environ: Mapping[str, str]) -> Path:
    """Where compiled kernels are kept: FlashAttention's own variable, or the user's folder of caches."""
    if named := environ.get(KEEP_IN):
        return Path(named)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chitu" / "cute"
