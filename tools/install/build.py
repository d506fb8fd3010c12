"""One build, from the facts to a checked wheel; read `build` first."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.install import checks, overlay, upstream, wheel
from tools.install.compile import (
    LIBRARY,
    REPRODUCIBLE,
    Recipe,
    compile_library,
    locked,
    package_version,
    recipe,
    toolkit_for,
)
from tools.install.environment import REPOSITORY, Environment, dotted, read
from tools.install.facts import Asked, Facts, probe
from tools.install.nvshmem import Nvshmem, bridge, nvshmem_at, nvshmem_beside_torch
from tools.install.process import environ, surroundings
from tools.install.progress import Progress
from tools.install.requirements import OLDEST_TORCH, choose_architectures, require
from tools.install.summary import Summary, build_info
from tools.install.toolchain import Tool, Toolkit


@dataclass(frozen=True)
class Request:
    """What the user asked for, with every default filled in."""

    checkout: Path | None
    architectures: tuple[int, ...]
    cuda_home: Path | None
    nvshmem_home: Path | None
    wheel_dir: Path
    build_dir: Path
    jobs: int
    allow_unpinned: bool
    csrc: Path
    pin: Path


@dataclass(frozen=True)
class Made:
    """A wheel before it is checked, and the library in it."""

    wheel: wheel.Wheel
    library: Path
    images: tuple[str, ...]
    toolkit: Toolkit


def build(request: Request, environment: Environment, progress: Progress | None = None) -> Summary:
    """Look, decide, compile, pack, check, and only then put the wheel where it was asked for."""
    begun, progress = time.monotonic(), progress or Progress()
    checkout, note = _checkout(request)
    facts = probe(
        Asked(request.cuda_home, request.nvshmem_home, (request.build_dir, request.wheel_dir)), environment, environ()
    )
    architectures, reason = choose_architectures(request.architectures, facts.gpus)
    require(facts, architectures)
    plan = recipe(request.csrc, facts, architectures, request.jobs)
    folder = request.build_dir / plan.key
    with locked(folder, progress):
        made = _make(request, checkout, plan, facts, folder, progress)
        progress.step("checking the wheel")
        torch_tried = _check(made, plan, facts)
        path = wheel.write_wheel(made.wheel, request.wheel_dir)
    assert isinstance(facts.nvshmem, Nvshmem)
    return Summary(
        wheel=str(path),
        wheel_bytes=path.stat().st_size,
        version=made.wheel.version,
        sources=str(request.csrc),
        upstream=str(checkout) if checkout else None,
        architectures=architectures,
        architectures_reason=reason,
        images=made.images,
        flags=tuple(plan.flags(made.toolkit)),
        cxx=str(plan.cxx),
        nvcc=str(plan.nvcc),
        torch_range=f">={dotted(OLDEST_TORCH)} (stable ABI)",
        torch_tried=torch_tried,
        nvshmem_built_against=str(facts.nvshmem),
        python=f"{environment.python} ({dotted(environment.version)})",
        build_folder=str(folder),
        checks=("images", "stable symbols", "import in a fresh process", "size"),
        notes=(*([note] if note else []), *_nvshmem_notes(facts.nvshmem, environment)),
        seconds=round(time.monotonic() - begun, 1),
    )


def _checkout(request: Request) -> tuple[upstream.Checkout | None, str | None]:
    if request.checkout is None:
        return None, None
    overlay.require_upstream(request.checkout)
    return upstream.verify(request.checkout, upstream.read_pin(request.pin), allow_unpinned=request.allow_unpinned)


def _make(
    request: Request,
    checkout: upstream.Checkout | None,
    plan: Recipe,
    facts: Facts,
    folder: Path,
    progress: Progress,
) -> Made:
    version, toolkit = package_version(request.csrc), toolkit_for(plan, folder)
    if checkout is not None and overlay.apply(checkout.path, request.csrc):
        progress.step(f"overlay put in place in {checkout.path}")
    library = compile_library(plan, folder, toolkit, progress)
    assert isinstance(facts.cuobjdump, Tool)
    images = checks.read_images(facts.cuobjdump.path, library)
    package = overlay.package_files(request.csrc) | {LIBRARY: library.read_bytes()}
    info = build_info(plan.architectures, images, dotted(plan.nvcc.version), dotted(plan.nvshmem.version))
    extra = {"fast_cp_build.json": info}
    if checkout is None:
        licence = read(REPOSITORY / "LICENSE").encode()
        return Made(wheel.standalone(version, package, extra, licence), library, images, toolkit)
    environment = _upstream_environment(plan, toolkit, folder)
    theirs = upstream.build_wheel(checkout, facts.environment, environment, folder / "upstream", progress)
    return Made(wheel.beside_upstream(theirs, version, package, extra), library, images, toolkit)


def _upstream_environment(plan: Recipe, toolkit: Toolkit, folder: Path) -> dict[str, str]:
    """What upstream's own build reads; CMake, ninja and nvcc of the recipe come first on its PATH."""
    programs = [plan.cmake.path.parent, plan.ninja.path.parent, toolkit.nvcc.parent]
    # nvshmem.h includes cuda/std, and the host compiler does not know where CUDA 13 put it
    headers = [toolkit.cccl] if toolkit.cccl else []
    changes = {
        **REPRODUCIBLE,
        "CUSTOM_ULYSSES_CUDA_ARCH": plan.architecture_list,
        "CMAKE_BUILD_PARALLEL_LEVEL": str(plan.jobs),
        "MAX_JOBS": str(plan.jobs),
        "NVSHMEM_HOME": str(bridge(plan.nvshmem, folder)),
        "CUDA_HOME": str(toolkit.home),
        "CUDAToolkit_ROOT": str(toolkit.home),
        "CUDACXX": str(toolkit.nvcc),
        "CXX": str(plan.cxx.path),
        "CUDAHOSTCXX": str(plan.cxx.path),
    }
    return surroundings(changes, prepend={"PATH": programs, "CPLUS_INCLUDE_PATH": headers})


def _check(made: Made, plan: Recipe, facts: Facts) -> str:
    """Every check of the wheel; returns the torch that it was imported beside."""
    assert isinstance(facts.cuobjdump, Tool)
    assert isinstance(facts.readelf, Tool)
    checks.check_images(made.images, plan.architectures, LIBRARY)
    for name, images in _other_images(made.wheel, facts.cuobjdump.path):
        checks.check_images(images, plan.architectures, name)
    checks.check_linkage(checks.read_linkage(facts.readelf.path, made.library))
    with tempfile.TemporaryDirectory(prefix="fast-cp-wheel-") as folder:
        checks.check_size(wheel.write_wheel(made.wheel, Path(folder)).stat().st_size, made.wheel.name)
    return checks.check_import(facts.environment, made.wheel.files)


def _other_images(made: wheel.Wheel, cuobjdump: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The native images of upstream's libraries in the wheel."""
    with tempfile.TemporaryDirectory(prefix="fast-cp-images-") as folder:
        for name, data in made.files.items():
            if name.endswith(".so") and not name.endswith(f"/{LIBRARY}"):
                path = Path(folder, Path(name).name)
                path.write_bytes(data)
                yield name, checks.read_images(cuobjdump, path)


def _nvshmem_notes(built: Nvshmem, environment: Environment) -> Iterator[str]:
    """The copy of torch is the one that runs, whatever was built against."""
    beside = nvshmem_beside_torch(environment)
    loaded = nvshmem_at(beside, "") if beside else None
    if isinstance(loaded, Nvshmem) and loaded.home.resolve() != built.home.resolve():
        yield (
            f"built against NVSHMEM {dotted(built.version)} of {built.home}, but torch loads its own, "
            f"{dotted(loaded.version)} of {loaded.home}"
        )
