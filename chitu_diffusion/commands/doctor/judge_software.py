"""Judges Python, torch and the libraries and programs around it; pure."""

from collections.abc import Iterator

from chitu_diffusion.commands.doctor.checks import ALL, BOTH, FAST, Check, dotted
from chitu_diffusion.commands.doctor.facts import DoctorFacts, HomeFacts, NvshmemFacts, Seen, ToolFacts, Version
from chitu_diffusion.parallel.cp.fast.extension import fits

# Oldest version that builds the extension, and why.
OLDEST_TOOL: dict[str, tuple[Version, str]] = {
    "nvcc": ((12, 8), "SM120 needs it"),
    "cuobjdump": ((12, 8), "older ones do not know SM120"),
    "g++": ((9,), "torch's headers are C++17"),
}
GET_TOOL = {
    "nvcc": "uv sync --inexact --group cuda-build, or set CUDA_HOME to a toolkit",
    "cuobjdump": "uv sync --inexact --group cuda-build, or set CUDA_HOME to a toolkit",
    "g++": "install g++ with the system's package manager",
}


def judge_python(facts: DoctorFacts) -> Check:
    """The interpreter that runs this."""
    needed, found = "Python 3.12 or 3.13", dotted(facts.python)
    if (3, 12) <= facts.python[:2] <= (3, 13):
        return Check("python", "ok", found, required_by=ALL)
    return Check("python", "wrong", found, needed, "make the environment anew: uv sync --python 3.12", ALL)


def judge_torch(facts: DoctorFacts) -> Check:
    """Whether torch imports, and is new enough for the stable ABI."""
    name, needed = "torch", "torch 2.10 or newer, built for CUDA"
    if facts.torch.broken:
        found = f"installed, but it does not import: {facts.torch.broken}"
        return Check(name, "wrong", found, needed, "install it anew: uv sync --reinstall-package torch", ALL)
    torch = facts.torch.value
    if torch is None:
        return Check(name, "missing", facts.torch.absent or "not found", needed, "install it: uv sync", ALL)
    found = f"{torch.version}, built for {f'CUDA {dotted(torch.cuda)}' if torch.cuda else 'CPU only'}"
    release = tuple(int(part) for part in torch.version.split("+")[0].split(".")[:2] if part.isdigit())
    if release < (2, 10):
        return Check(name, "wrong", found, needed, "install the locked version: uv sync", ALL)
    return Check(name, "ok", found, required_by=ALL)


def judge_libraries(facts: DoctorFacts) -> Iterator[Check]:
    """NCCL and NVSHMEM of torch, and the kernels."""
    yield _nccl(facts)
    yield _nvshmem(facts.nvshmem, facts.nvshmem_home)
    yield _kernels(facts)


def judge_tools(facts: DoctorFacts) -> Iterator[Check]:
    """What building needs and running does not: no requirement depends on it."""
    for name, seen in facts.tools.items():
        yield _tool(name, seen)


def _nccl(facts: DoctorFacts) -> Check:
    torch = facts.torch.value
    if torch is None or torch.nccl is None:
        found = "torch does not import" if torch is None else f"torch {torch.version} is built without it"
        return Check("nccl", "missing", found, "NCCL in torch", "install the CUDA build of torch: uv sync", BOTH)
    return Check("nccl", "ok", f"{dotted(torch.nccl)}, in torch", required_by=BOTH)


def _nvshmem(seen: Seen[NvshmemFacts], home: HomeFacts | None) -> Check:
    name, needed = "nvshmem", "the NVSHMEM host library that torch brings along"
    if seen.broken:
        return Check(name, "wrong", f"loading fails: {seen.broken}", needed, "install torch anew: uv sync", FAST)
    if seen.value is None:
        step = "install the CUDA build of torch: uv sync"
        return Check(name, "missing", seen.absent or "not found", needed, step, FAST)
    found = f"{dotted(seen.value.version)}, the one that torch loads: {seen.value.path}"
    if home is None or home.library == seen.value.path:
        return Check(name, "ok", found, required_by=FAST)
    return _nvshmem_beside_home(found, seen.value, home)


def _nvshmem_beside_home(found: str, loaded: NvshmemFacts, home: HomeFacts) -> Check:
    """The RPATH of torch decides what is loaded; NVSHMEM_HOME only what is built against, and may not be newer."""
    if home.library is None and home.version is None:
        found += f"; NVSHMEM_HOME names {home.path}, which holds neither headers nor library"
        step = "unset NVSHMEM_HOME, or point it to a folder with include and lib"
        return Check("nvshmem", "wrong", found, "an NVSHMEM_HOME that exists", step, FAST)
    found += f"; NVSHMEM_HOME names another ({dotted(home.version)}, {home.path}), which is not loaded"
    if home.version and loaded.version and not fits(home.version, loaded.version):
        needed = f"headers of NVSHMEM {loaded.version[0]}.{loaded.version[1]} or an older {loaded.version[0]}.x"
        step = "unset NVSHMEM_HOME, so that the build takes the headers beside the library that is loaded"
        return Check("nvshmem", "wrong", found, needed, step, FAST)
    return Check("nvshmem", "ok", found, required_by=FAST)


def _kernels(facts: DoctorFacts) -> Check:
    name, needed = "kernels", "one attention kernel that serves this machine"
    if facts.kernels.broken:
        found = f"the kernel table does not import: {facts.kernels.broken}"
        return Check(name, "wrong", found, needed, "install the project anew: uv sync --reinstall", BOTH)
    if facts.kernels.value is None:
        return Check(name, "missing", facts.kernels.absent or "not found", needed, "install it: uv sync", BOTH)
    why_not, device = facts.kernels.value.why_not, facts.kernels.value.device
    serving = [kernel for kernel, reason in why_not.items() if reason is None]
    reasons = {
        reason: [kernel for kernel in why_not if why_not[kernel] == reason] for reason in why_not.values() if reason
    }
    others = "; ".join(f"not {', '.join(kernels)}: {reason}" for reason, kernels in reasons.items())
    found = f"on {device}: {', '.join(serving) or 'none'}" + (f" ({others})" if others else "")
    if not serving:
        return Check(name, "wrong", found, needed, "install the locked torch and triton: uv sync", BOTH)
    return Check(name, "ok", found, required_by=BOTH)


def _tool(name: str, seen: Seen[ToolFacts]) -> Check:
    oldest, why = OLDEST_TOOL[name]
    needed = f"{name} {dotted(oldest)} or newer ({why}), to build the extension"
    if seen.broken:
        return Check(name, "wrong", seen.broken, needed, GET_TOOL[name])
    if seen.value is None:
        return Check(name, "missing", seen.absent or "not found", needed, GET_TOOL[name])
    found = f"{dotted(seen.value.version)}, from {seen.value.origin}: {seen.value.path}"
    if seen.value.version is not None and seen.value.version < oldest:
        return Check(name, "wrong", found, needed, GET_TOOL[name])
    return Check(name, "ok", found)
