"""The probe against invented NVMLs: machines that are not here, drivers that refuse, drivers that are not there."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from chitu_diffusion.parallel.cp.fast.device import (
    GpuFacts,
    LinkFacts,
    MachineFacts,
    describe_link,
    driver_problem,
    peer_gaps,
    probe_machine,
)

GIB = 2**30


@dataclass
class FakeNvml:
    """Answers like pynvml. ``gaps`` are ordered pairs without peer access; ``wires`` is the number of links that lead
    from a GPU to each neighbour (to the switch where ``switched``). What is named in ``refused`` raises when asked;
    ``unknown`` is not there at all, as in an older pynvml.
    """

    count: int = 2
    wires: int = 18
    switched: bool = True
    nvlink_status: int = 0
    gaps: dict[tuple[int, int], int] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()
    bytes_answers: bool = False

    def _text(self, text: str) -> str | bytes:
        return text.encode() if self.bytes_answers else text

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: self._text("580.159.04"),
            "nvmlSystemGetCudaDriverVersion": lambda: 13000,
            "nvmlDeviceGetCount": lambda: self.count,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: (9, 0),
            "nvmlDeviceGetName": lambda gpu: self._text("NVIDIA H200"),
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=140 * GIB),
            "nvmlDeviceGetUUID": lambda gpu: self._text(f"GPU-{gpu}"),
            "nvmlDeviceGetMigMode": lambda gpu: [0, 0],
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=self._text(f"bus{gpu}")),
            "nvmlDeviceGetP2PStatus": lambda a, b, kind: self.gaps.get((a, b), 0) if kind != 2 else self.nvlink_status,
            "nvmlDeviceGetNvLinkState": lambda gpu, link: int(link < self.wires * (1 if self.switched else self.count)),
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda gpu, link: 2 if self.switched else 0,
            "nvmlDeviceGetNvLinkRemotePciInfo": lambda gpu, link: SimpleNamespace(
                busId=self._text("switch" if self.switched else f"bus{link // self.wires}")
            ),
            "nvmlDeviceGetFieldValues": lambda gpu, ids: [
                SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=26562)) for _ in ids
            ],
        }
        if name not in answers or name in self.unknown:
            raise AttributeError(name)
        return refuse if name in self.refused else answers[name]


def refuse(*_: Any) -> Any:
    raise RuntimeError("Not Supported")


def probe(**how: Any) -> MachineFacts:
    return probe_machine(lambda: FakeNvml(**how))


def test_two_h200_behind_a_switch_are_described() -> None:
    facts = probe()
    assert facts.driver == "580.159.04"
    assert facts.driver_cuda == (13, 0)
    assert facts.reason is None
    assert facts.gpus[1] == GpuFacts(1, "NVIDIA H200", (9, 0), 140 * GIB, "GPU-1", mig=False)
    assert facts.gpus[1].sm == 90
    assert facts.links == (LinkFacts(0, 1, peer_access=True, nvlink_links=18, nvlink_gbs=478.116),)
    assert peer_gaps(facts) == []
    assert describe_link(facts.links[0]) == "peer access, 18 NVLinks (478 GB/s each way)"


def test_answers_in_bytes_are_read_like_text() -> None:
    assert probe(bytes_answers=True) == probe()


def test_links_wired_from_gpu_to_gpu_are_counted_per_neighbour() -> None:
    facts = probe(count=4, wires=4, switched=False)
    assert [link.nvlink_links for link in facts.links] == [4] * 6


@pytest.mark.parametrize("how", [{"wires": 0}, {"nvlink_status": 5}])
def test_peer_access_without_nvlink_between_the_two_is_pcie(how: dict[str, int]) -> None:
    (link,) = probe(**how).links
    assert (link.peer_access, link.nvlink_links, link.nvlink_gbs) == (True, 0, None)
    assert describe_link(link) == "peer access over PCIe, no NVLink"


@pytest.mark.parametrize("direction", [(2, 5), (5, 2)])
def test_a_pair_that_reaches_one_way_only_is_a_gap(direction: tuple[int, int]) -> None:
    facts = probe(count=8, gaps={direction: 3})
    assert len(facts.links) == 28
    assert peer_gaps(facts) == ["GPU 2 and 5 have no peer access: the PCIe topology does not support it"]


@pytest.mark.parametrize("how", ["refused", "unknown"])
@pytest.mark.parametrize("optional", ["FieldValues", "MigMode", "UUID", "NvLinkRemotePciInfo"])
def test_one_refused_question_leaves_the_other_facts(how: str, optional: str) -> None:
    facts = probe(**{how: frozenset({f"nvmlDeviceGet{optional}", "nvmlSystemGetCudaDriverVersion"})})
    assert len(facts.gpus) == 2
    assert facts.links[0].nvlink_links == 18
    assert facts.driver_cuda is None


def test_a_refused_peer_question_counts_as_no_peer_access() -> None:
    assert peer_gaps(probe(refused=frozenset({"nvmlDeviceGetP2PStatus"}))) == ["GPU 0 and 1 have no peer access"]


def test_no_driver_gives_empty_facts_with_the_reason() -> None:
    facts = probe(refused=frozenset({"nvmlInit"}))
    assert facts == MachineFacts(reason="the NVIDIA driver does not answer (Not Supported)")


def test_no_nvml_module_is_told_apart_from_no_driver() -> None:
    def load() -> Any:
        raise ModuleNotFoundError("No module named 'pynvml'")

    facts = probe_machine(load)
    assert not facts.asked
    assert "nvidia-ml-py" in (facts.reason or "")


def test_a_gpu_that_does_not_answer_keeps_the_driver_and_the_reason() -> None:
    facts = probe(refused=frozenset({"nvmlDeviceGetName"}))
    assert facts.driver == "580.159.04"
    assert facts.gpus == ()
    assert facts.reason == "the NVIDIA driver does not describe its GPUs (Not Supported)"


def test_this_machine_can_be_probed() -> None:
    facts = probe_machine()
    assert bool(facts.gpus) != bool(facts.reason)


@pytest.mark.parametrize("facts", [MachineFacts(reason="none"), probe(count=3, gaps={(0, 2): 4})])
def test_facts_survive_json(facts: MachineFacts) -> None:
    assert MachineFacts.from_json(json.loads(json.dumps(asdict(facts)))) == facts


@pytest.mark.parametrize(
    ("driver_cuda", "cuda", "fits"),
    [((12, 4), (13, 0), False), ((13, 0), (13, 2), True), ((13, 2), (12, 8), True), (None, (13, 0), True)],
)
def test_a_driver_is_too_old_by_its_major_version(driver_cuda: Any, cuda: tuple[int, int], fits: bool) -> None:
    problem = driver_problem(MachineFacts(driver="550.54", driver_cuda=driver_cuda), cuda)
    assert problem == (None if fits else "driver 550.54 runs CUDA up to 12.4, too old for CUDA 13.0")


def test_importing_the_module_imports_neither_torch_nor_nvml() -> None:
    code = "import sys, chitu_diffusion.parallel.cp.fast.device; print({'torch', 'pynvml'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
