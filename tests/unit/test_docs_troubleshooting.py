"""docs/troubleshooting.md quotes our tools word for word: every sentence in its first column is produced here by the
code that prints it, and every sentence that is produced here is in it.
"""

import importlib.util
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from chitu_diffusion.commands.doctor.facts import CuteFacts, HomeFacts, Seen, SelfTestFacts
from chitu_diffusion.commands.doctor.judge import judge
from chitu_diffusion.commands.doctor.self_test import STEPS
from chitu_diffusion.models.weights import check_weights
from chitu_diffusion.parallel.cp import config, signature, transport
from chitu_diffusion.parallel.cp.errors import first_line
from chitu_diffusion.parallel.cp.fast import extension, profiles
from chitu_diffusion.parallel.cp.fast.adapters import block_guard
from chitu_diffusion.parallel.cp.fast.adapters.paths import Paths
from chitu_diffusion.parallel.cp.fast.attention import planner
from chitu_diffusion.parallel.cp.fast.device import LinkFacts
from chitu_diffusion.parallel.cp.plan_cache import PlanCache
from chitu_diffusion.parallel.selection import Setting, choose_backend
from chitu_diffusion.serving import port
from chitu_diffusion.serving.stage import ServiceTable
from tests.support.fake_recorder import FakeRecorder
from tests.unit.test_adapters import Stub, some_call
from tests.unit.test_block_graphs import Model
from tests.unit.test_docs_native import NATIVE
from tests.unit.test_docs_ranks import of_ranks, raised
from tests.unit.test_doctor import CUTE, EXTENSION, INFO, facts, machine
from tests.unit.test_doctor import torch as torch_facts
from tests.unit.test_doctor_extension import HOST_MISSING, INSTALLED, MAJOR_DIFFERS, NOT_THERE, nvshmem
from tools.install import requirements

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
LIBRARY = ROOT / "csrc/python/fast_ulysses/library.py"
OLD_UNDEFINED = "/env/fast_ulysses/libfast_cp.so: undefined symbol: torch_new_string_handle"


def found(name: str, **changes: Any) -> str:
    """What doctor says that it found, in its line ``name``, with these facts."""
    (line,) = [check for check in judge(facts(**changes)).checks if check.name == name]
    assert line.state != "ok"
    return line.found


def with_info(**changes: Any) -> Seen[Any]:
    return Seen(value=replace(EXTENSION, info={**INFO, **changes}))


def library() -> ModuleType:
    """The loader of the native library, without the package around it, which loads it."""
    spec = importlib.util.spec_from_file_location("fast_cp_library", LIBRARY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_doctor() -> Iterator[str]:
    """What the lines of doctor say."""
    yield found("extension", extension=NOT_THERE)
    yield found("extension", extension=NOT_THERE, wheel=INSTALLED)
    other = replace(EXTENSION, version="0.2.0", missing_operators=("all_gather_kv_4d",), info={})
    yield found("extension", extension=Seen(value=other))
    yield found("extension", extension=Seen(broken=first_line(does_not_load())))
    yield found("extension nvshmem", extension=with_info(**nvshmem(loaded=None, problem=HOST_MISSING)))
    yield found("extension nvshmem", extension=with_info(**nvshmem(loaded=None, problem=MAJOR_DIFFERS)))
    yield found("extension nvshmem", extension=with_info(**nvshmem(built="3.7.2")))
    yield found("nvshmem", nvshmem_home=HomeFacts("/opt/nvshmem", "/opt/nvshmem/lib/libnvshmem_host.so.3", (3, 7, 2)))
    yield found("nvshmem", nvshmem_home=HomeFacts("/opt/nvshmem", None, None))
    yield found("extension images", extension=with_info(images=["sm_120"]))
    yield found("extension cuda", extension=with_info(cuda_driver="12.8"))
    a100 = replace(machine().value.gpus[0], name="NVIDIA A100-SXM4-80GB", capability=(8, 0), memory_bytes=80 * 2**30)  # type: ignore[union-attr]
    yield found("gpu 0", machine=machine(1, gpus=(a100,)), torch=torch_facts(1))
    yield found("gpu 0", machine=machine(1, gpus=(replace(a100, name="NVIDIA H200", capability=(9, 0), mig=True),)))
    yield found("link 0-1", machine=machine(links=(LinkFacts(0, 1, False, reason="the chipset does not support it"),)))
    yield found("driver", machine=machine(driver="550.54", driver_cuda=(12, 4)), torch=torch_facts(0))
    yield found("cute", cute=Seen(absent="flash-attn-4 is not installed"))
    skewed = CuteFacts(CUTE.origin, {}, None, problem="nvidia-cutlass-dsl 4.8.1 found, 4.6.2 wanted")
    yield found("cute", cute=Seen(value=skewed))
    broken = "its import fails: ModuleNotFoundError: No module named 'cutlass'"
    yield found("cute", cute=Seen(value=replace(CUTE, tried=None, versions={}, problem=broken)))
    waited = {"start": None, "copy": "rank 0: it was stopped at the time limit"}
    assert list(STEPS)[:2] == list(waited)
    yield found("self-test copy", self_test=Seen(value=SelfTestFacts((0, 1), waited)))


def does_not_load() -> Exception:
    """The ImportError of a library that torch cannot load; the reason within is the dynamic linker's."""
    loader: Any = library()
    loader.library_path = lambda: Path("/env/fast_ulysses/libfast_cp.so")

    def load_library(_path: str) -> None:
        raise OSError(OLD_UNDEFINED)

    loader.torch = SimpleNamespace(__version__="2.9.1", ops=SimpleNamespace(load_library=load_library))
    return ImportError(raised(loader.load, ImportError))


def of_extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Why a session cannot use it: the reason behind ``backend fast was asked for, but on rank 0 …``."""
    for what, missing in ((None, ()), (ModuleType("fast_ulysses"), ("all_gather_kv_4d",))):
        if what is not None:
            what.__file__ = "/env/fast_ulysses/__init__.py"
        monkeypatch.setattr(extension, "look", lambda what=what: what)
        monkeypatch.setattr(extension, "missing_operators", lambda missing=missing: missing)
        yield extension.why_not(torch.device("cuda", 0)) or ""
    yield str(extension.image_problem({"images": ["sm_90a"]}, 120))
    yield str(extension.image_problem({"images": ["sm_90a", "sm_120"]}, 80))
    yield str(profiles.find({"name": "NVIDIA GH200 480GB", "sm": 90}))
    wanted = Setting("fast", "--cp-backend")
    yield raised(lambda: choose_backend(wanted, ["the extension fast_ulysses is not installed"]))


def of_plans(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    """Kernels, the wrapper's paths, graphs, and plans on disk."""
    reasons = {"cute": "nvidia-cutlass-dsl 4.8.1 found, 4.6.2 wanted", "cudnn": None}
    yield raised(lambda: planner.choose_kernel("cute", [reasons, reasons]))
    paths = Paths([Stub("overlapped", "one rank sends nothing"), Stub("fast", None)])
    served = Paths([Stub("fast", "heads of 24 bytes are no multiple of 16 bytes"), Stub("nccl", None)], strict=True)
    yield raised(lambda: served(some_call()))
    model = Model(FakeRecorder(fails=True))
    with caplog.at_level(logging.WARNING):
        paths(some_call())
        for seed in range(3):
            assert model.run(seed)
        (tmp_path / "plans").mkdir()
        cache = PlanCache(Path("plans"))
        cache.keep({}, "a", {"a": 1.0})
        for path in cache.folder.iterdir():
            path.write_text("")
        PlanCache(cache.folder).find({}, ["a"])  # as the next process does
    yield from (re.sub(r"[0-9a-f]{32}", "44136fa3", record.message) for record in caplog.records)
    yield from model.graphs.told
    long = Model(FakeRecorder(blocks_ms=(9.0,)))
    assert all(long.run(seed) for seed in range(3))
    yield from long.graphs.told
    hooked = Model(FakeRecorder()).blocks[0]
    hooked.inner.register_forward_hook(lambda *_: None)
    yield block_guard.why_not([hooked]) or ""


def of_inputs(tmp_path: Path) -> Iterator[str]:
    """A call, a port, weights, a build."""
    q = torch.zeros(1, 3000, 24, 128)
    given = transport.Inputs(q, q, q)
    yield raised(lambda: signature.of(given, 6889, None, None, q.device, 2, 0))
    with port.bind(ServiceTable(port=0)) as taken:
        number = taken.getsockname()[1]
        yield raised(lambda: port.bind(ServiceTable(port=number))).replace(str(number), "8000")
    folder = Path("transformer")
    folder.mkdir()
    yield raised(lambda: check_weights(folder))
    (folder / "model.safetensors").write_bytes(b"cut")
    yield raised(lambda: check_weights(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00003.safetensors"}}')
    yield raised(lambda: check_weights(folder))
    full = SimpleNamespace(free_bytes={Path("/deps/build"): 2**30})
    yield from requirements._full_disks(full)  # type: ignore[arg-type]
    yield raised(lambda: requirements.choose_architectures((), (80,)), Exception)
    yield raised(lambda: config.CPConfig(plan="local_first"))


def norm(text: str) -> str:
    return " ".join(text.split())


def quoted() -> set[str]:
    """The sentences in the first column of the page's tables."""
    rows = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| ")]
    return {norm(span) for row in rows for span in re.findall(r"`([^`]{24,})`", row)}


def test_the_page_quotes_what_is_printed_and_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(block_guard, "PACKAGES", (*block_guard.PACKAGES, "tests"))
    said = [*of_doctor(), *of_plans(tmp_path, caplog), *of_inputs(tmp_path), *of_ranks(monkeypatch, caplog)]
    said += [*of_extension(monkeypatch), *NATIVE]
    assert {norm(text) for text in said} == quoted()
