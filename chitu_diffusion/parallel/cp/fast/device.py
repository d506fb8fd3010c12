"""Facts about the GPUs of this machine and the links between them, read through NVML; imports no torch.

Probing never raises and decides nothing; the functions below it turn facts into sentences. NVML counts every GPU of
the machine in PCI bus order, whatever ``CUDA_VISIBLE_DEVICES`` says.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

# NVML's own numbers. pynvml's NVML_P2P_CAPS_INDEX_READ is a tuple, by a stray comma.
_P2P_READ, _P2P_WRITE, _P2P_NVLINK, _P2P_OK = 0, 1, 2, 0
_NVLINK_MAX_LINKS = 36
_NVLINK_TO_SWITCH = 2
_FIELD_NVLINK_SPEED_MBS = 164
_WHY_NO_PEER_ACCESS = {
    1: "the chipset does not support it",
    2: "the GPUs do not support it",
    3: "the PCIe topology does not support it",
    4: "the driver's settings disable it",
    5: "it is not supported between them",
}


@dataclass(frozen=True)
class GpuFacts:
    """One GPU; ``capability`` is (major, minor), and ``mig`` says whether it is cut into instances (no peer access)."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    uuid: str = ""
    mig: bool = False

    @property
    def sm(self) -> int:
        """The architecture as the build names it: 90 for capability (9, 0)."""
        return self.capability[0] * 10 + self.capability[1]


@dataclass(frozen=True)
class LinkFacts:
    """The connection of GPUs ``a`` < ``b``: direct loads and stores both ways, and the NVLinks that carry them.

    ``nvlink_gbs`` is the sum of the links, in 1e9 bytes per second and direction; None where there is no NVLink or
    its speed is not reported. ``reason`` is why peer access is absent, where the driver says so.
    """

    a: int
    b: int
    peer_access: bool
    nvlink_links: int = 0
    nvlink_gbs: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class MachineFacts:
    """All GPUs and one link per pair; ``reason`` says why facts are missing.

    ``driver`` is its version; ``driver_cuda`` the newest CUDA (major, minor) that it runs. ``asked`` is False where
    the Python module that asks the driver is missing, so that nothing is known.
    """

    gpus: tuple[GpuFacts, ...] = ()
    links: tuple[LinkFacts, ...] = ()
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    reason: str | None = None
    asked: bool = True

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "MachineFacts":
        """The inverse of ``dataclasses.asdict`` and JSON, which knows no tuples."""
        gpus = tuple(GpuFacts(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in data["gpus"])
        links = tuple(LinkFacts(**link) for link in data["links"])
        driver_cuda = tuple(data["driver_cuda"]) if data["driver_cuda"] else None
        return cls(**{**data, "gpus": gpus, "links": links, "driver_cuda": driver_cuda})


def probe_machine(load_nvml: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> MachineFacts:
    """What NVML says. Never raises: without a driver or NVML's Python module the facts are empty, with the reason."""
    try:
        nvml = load_nvml()
    except ImportError as error:
        return MachineFacts(reason=f"the Python package nvidia-ml-py does not import ({error})", asked=False)
    try:
        nvml.nvmlInit()
    except Exception as error:  # NVMLError has a class per cause, and a damaged driver raises others
        return MachineFacts(reason=f"the NVIDIA driver does not answer ({error})")
    try:
        return _probe_initialised(nvml)
    finally:
        _ask(None, nvml, "nvmlShutdown")


def _probe_initialised(nvml: Any) -> MachineFacts:
    driver, cuda = _ask(None, nvml, "nvmlSystemGetDriverVersion"), _ask(None, nvml, "nvmlSystemGetCudaDriverVersion")
    facts = MachineFacts(
        driver=None if driver is None else _text(driver),
        driver_cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
    )
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(nvml, index, handle) for index, handle in enumerate(handles))
        links = tuple(_link(nvml, handles, a, b) for a, b in combinations(range(len(handles)), 2))
    except Exception as error:
        return replace(facts, reason=f"the NVIDIA driver does not describe its GPUs ({error})")
    return replace(facts, gpus=gpus, links=links, reason=None if gpus else "the driver finds no GPU")


def _gpu(nvml: Any, index: int, handle: Any) -> GpuFacts:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return GpuFacts(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=(int(major), int(minor)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        uuid=_text(_ask("", nvml, "nvmlDeviceGetUUID", handle)),
        mig=bool(_ask([0], nvml, "nvmlDeviceGetMigMode", handle)[0]),
    )


def _link(nvml: Any, handles: list[Any], a: int, b: int) -> LinkFacts:
    both_ways = [(handles[a], handles[b]), (handles[b], handles[a])]

    def statuses(kind: int) -> list[int]:
        return [_ask(-1, nvml, "nvmlDeviceGetP2PStatus", source, target, kind) for source, target in both_ways]

    refused = [status for status in statuses(_P2P_READ) + statuses(_P2P_WRITE) if status != _P2P_OK]
    if refused:
        return LinkFacts(a, b, peer_access=False, reason=_WHY_NO_PEER_ACCESS.get(refused[0]))
    if any(status != _P2P_OK for status in statuses(_P2P_NVLINK)):
        return LinkFacts(a, b, peer_access=True)
    speeds = min((_link_speeds_mbs(nvml, source, target) for source, target in both_ways), key=len)
    return LinkFacts(a, b, True, len(speeds), sum(speeds) / 1000 if speeds and all(speeds) else None)


def _link_speeds_mbs(nvml: Any, source: Any, target: Any) -> list[int]:
    """One entry, in MB/s (0 if unknown), for each active link of ``source`` that leads to ``target`` or to a switch.

    Behind an NVSwitch every link reaches every peer.
    """
    target_bus = _bus(_ask(None, nvml, "nvmlDeviceGetPciInfo", target))
    speeds = []
    for link in range(_NVLINK_MAX_LINKS):
        if not _ask(0, nvml, "nvmlDeviceGetNvLinkState", source, link):
            continue
        to_switch = _ask(None, nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", source, link) == _NVLINK_TO_SWITCH
        bus = _bus(_ask(None, nvml, "nvmlDeviceGetNvLinkRemotePciInfo", source, link))
        if to_switch or (bus is not None and bus == target_bus):
            speeds.append(_speed_mbs(nvml, source, link))
    return speeds


def _speed_mbs(nvml: Any, handle: Any, link: int) -> int:
    answers = _ask((), nvml, "nvmlDeviceGetFieldValues", handle, [(_FIELD_NVLINK_SPEED_MBS, link)])
    return int(answers[0].value.uiVal) if answers and answers[0].nvmlReturn == 0 else 0


def _bus(pci: Any) -> str | None:
    return None if pci is None else _text(pci.busId)


def _ask(otherwise: Any, nvml: Any, question: str, *arguments: Any) -> Any:
    """One question that older drivers or modules, other boards and containers may refuse."""
    try:
        return getattr(nvml, question)(*arguments)
    except Exception:
        return otherwise


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def peer_gaps(facts: MachineFacts) -> list[str]:
    """One sentence per pair of GPUs without peer access; empty where every pair has it."""
    return [
        f"GPU {link.a} and {link.b} have no peer access" + (f": {link.reason}" if link.reason else "")
        for link in facts.links
        if not link.peer_access
    ]


def driver_problem(facts: MachineFacts, cuda: tuple[int, int] | None) -> str | None:
    """Why the driver cannot run programs built for ``cuda`` (major, minor), or None where it can or is not known.

    Within one major version the driver may be older than the toolkit (CUDA's minor version compatibility).
    """
    if cuda is None or facts.driver_cuda is None or facts.driver_cuda[0] >= cuda[0]:
        return None
    newest = ".".join(map(str, facts.driver_cuda))
    return f"driver {facts.driver} runs CUDA up to {newest}, too old for CUDA {cuda[0]}.{cuda[1]}"


def describe_link(link: LinkFacts) -> str:
    """The link in a few words: ``peer access, 18 NVLinks (478 GB/s each way)``."""
    if not link.peer_access:
        return "no peer access" + (f": {link.reason}" if link.reason else "")
    if not link.nvlink_links:
        return "peer access over PCIe, no NVLink"
    speed = f" ({link.nvlink_gbs:.0f} GB/s each way)" if link.nvlink_gbs else ""
    return f"peer access, {link.nvlink_links} NVLink{'s' if link.nvlink_links > 1 else ''}{speed}"
