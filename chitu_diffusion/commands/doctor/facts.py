"""What the doctor saw, as plain values: no decision here, and nothing imported."""

from dataclasses import dataclass, field
from typing import Any

from chitu_diffusion.parallel.cp.fast.device import MachineFacts

Version = tuple[int, ...]


@dataclass(frozen=True)
class Seen[T]:
    """One thing looked for: it is there (``value``), not there (``absent``: why), or there and ``broken`` (how)."""

    value: T | None = None
    absent: str | None = None
    broken: str | None = None


@dataclass(frozen=True)
class TorchFacts:
    """torch as imported; ``cuda`` is the CUDA that it was built for, None for a CPU build.

    ``gpu_count`` are the GPUs it can use, ``gpu_uuids`` their names in NVML's form; ``cuda_problem`` is what torch
    says when it cannot use any. ``nccl`` is None in a build without it.
    """

    version: str
    cuda: Version | None
    gpu_count: int
    gpu_uuids: tuple[str, ...]
    cuda_problem: str | None
    nccl: Version | None


@dataclass(frozen=True)
class NvshmemFacts:
    """The host library in a process that imported torch; ``version`` is what the library itself reports."""

    path: str
    version: Version | None


@dataclass(frozen=True)
class KernelFacts:
    """Per kernel of the table None, or why it does not serve the usual call (H40 D128, no mask) on ``device``.

    CuTe is not among them, see ``CuteFacts``. The device is ``cuda`` with BF16 where torch can use a GPU, else ``cpu``
    with FP32.
    """

    why_not: dict[str, str | None]
    device: str


@dataclass(frozen=True)
class CuteFacts:
    """CuTe FlashAttention: where it comes from, the versions around it, and where this combination was tried.

    ``problem`` is why it cannot be used at all, and ``next_step`` what to do; ``no_gpu`` why it was only imported
    here, where no GPU would run it. All None: it was compiled and gave a right result.
    """

    origin: str
    versions: dict[str, str]
    tried: str | None
    problem: str | None = None
    next_step: str | None = None
    no_gpu: str | None = None


@dataclass(frozen=True)
class ExtensionFacts:
    """``fast_ulysses`` as imported, and those of Fast CP's operators that it does not register.

    Where none is missing, ``library`` is the native library and ``info`` what it says of itself and of GPU 0
    (``fast_cp_device_info``). ``build`` is what the wheel says about its build; empty where it says nothing.
    """

    path: str
    version: str | None
    missing_operators: tuple[str, ...]
    library: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WheelFacts:
    """A wheel of the extension that was built for this project, and the command that installs it here.

    ``installed``: setup_fast_cp.sh has installed it into this environment, whatever became of it since.
    """

    path: str
    install: str
    installed: bool = False


@dataclass(frozen=True)
class SelfTestFacts:
    """Two processes that used the extension on ``gpus`` (torch's numbers; twice the same where there is one).

    ``problems`` has the steps that were reached, in order, each with what went wrong or None.
    """

    gpus: tuple[int, ...]
    problems: dict[str, str | None]


@dataclass(frozen=True)
class ToolFacts:
    """A program that building needs, where it was found (``CUDA_HOME``, ``package index``, ``PATH``), its version."""

    path: str
    origin: str
    version: Version | None


@dataclass(frozen=True)
class HomeFacts:
    """The folder that ``NVSHMEM_HOME`` names, its host library with links resolved, and its headers' version."""

    path: str
    library: str | None
    version: Version | None


@dataclass(frozen=True)
class DoctorFacts:
    """Everything that is judged."""

    python: Version
    machine: Seen[MachineFacts]
    torch: Seen[TorchFacts]
    nvshmem: Seen[NvshmemFacts]
    kernels: Seen[KernelFacts]
    cute: Seen[CuteFacts]
    extension: Seen[ExtensionFacts]
    tools: dict[str, Seen[ToolFacts]] = field(default_factory=dict)
    nvshmem_home: HomeFacts | None = None
    visible_devices: str | None = None
    wheel: WheelFacts | None = None
    named_library: str | None = None  # FAST_CP_LIBRARY
    self_test: Seen[SelfTestFacts] | None = None  # None: it was not asked for
