"""Judges driver, GPUs, and the links between them; pure."""

from collections.abc import Iterator

from chitu_diffusion.commands.doctor.checks import ALL, BOTH, FAST, Check, dotted
from chitu_diffusion.commands.doctor.facts import DoctorFacts, TorchFacts
from chitu_diffusion.parallel.cp.fast import extension
from chitu_diffusion.parallel.cp.fast.device import (
    GpuFacts,
    LinkFacts,
    MachineFacts,
    describe_link,
    driver_problem,
)

USE_NCCL = "use --cp-backend nccl, which works without it"


def judge_gpus(facts: DoctorFacts) -> Iterator[Check]:
    """The driver, whether there are GPUs enough, each GPU, each pair."""
    machine = facts.machine.value or MachineFacts()
    visible = visible_gpus(machine, facts.torch.value)
    yield _driver(facts, machine)
    yield _gpus(facts, machine)
    for gpu in machine.gpus:
        yield _gpu(gpu, gpu.index in visible)
    for link in machine.links:
        yield _link(link, link.a in visible and link.b in visible)


def visible_gpus(machine: MachineFacts, torch: TorchFacts | None) -> set[int]:
    """NVML's indices of the GPUs that torch can use; all of them where torch does not say which."""
    known = {gpu.uuid: gpu.index for gpu in machine.gpus}
    uuids = torch.gpu_uuids if torch else ()
    if uuids and all(uuid in known for uuid in uuids):
        return {known[uuid] for uuid in uuids}
    return {gpu.index for gpu in machine.gpus}


def _driver(facts: DoctorFacts, machine: MachineFacts) -> Check:
    name, cuda = "driver", facts.torch.value.cuda if facts.torch.value else None
    needed = f"a driver that runs CUDA {dotted(cuda)}" if cuda else "an NVIDIA driver"
    if facts.machine.broken:
        found = f"asking the driver fails: {facts.machine.broken}"
        return Check(name, "wrong", found, needed, "run nvidia-smi and repair the driver", ALL)
    if machine.driver is None:
        found = machine.reason or facts.machine.absent or "no driver"
        step = "install the NVIDIA driver, or start the container with access to the GPUs; runs on CPU need neither"
        return Check(name, "missing", found, needed, step if machine.asked else "install it: uv sync", ALL)
    if problem := driver_problem(machine, (cuda[0], cuda[1]) if cuda else None):
        older = dotted(machine.driver_cuda)
        step = f"update the driver, or install a torch that is built for CUDA {older} or older"
        return Check(name, "wrong", problem, needed, step, ALL)
    newest = f", runs CUDA up to {dotted(machine.driver_cuda)}" if machine.driver_cuda else ""
    return Check(name, "ok", f"{machine.driver}{newest}", required_by=ALL)


def _gpus(facts: DoctorFacts, machine: MachineFacts) -> Check:
    name, needed, torch, total = "gpus", "2 GPUs that torch can use", facts.torch.value, len(machine.gpus)
    limited = f" (CUDA_VISIBLE_DEVICES={facts.visible_devices})" if facts.visible_devices is not None else ""
    if total == 0:
        found = "unknown without the driver" if machine.driver is None else machine.reason or "no NVIDIA GPU"
        return Check(name, "missing", found, needed, "run on a machine with two or more NVIDIA GPUs", BOTH)
    if torch is None or torch.cuda is None:
        why = "torch does not import" if torch is None else f"torch {torch.version} is a CPU build"
        step = "install the locked CUDA build of torch: uv sync"
        return Check(name, "missing", f"{total} in the machine, none for torch: {why}", needed, step, BOTH)
    if torch.gpu_count == 0 and not limited:
        found = f"{total} in the machine, none for torch: {torch.cuda_problem or 'it does not say why'}"
        step = (
            "bring driver and torch's CUDA build together (see the lines of both), and check the container's GPU access"
        )
        return Check(name, "wrong", found, needed, step, BOTH)
    found = f"torch can use {torch.gpu_count} of {total}{limited}"
    if torch.gpu_count < 2:
        step = (
            "make more GPUs visible in CUDA_VISIBLE_DEVICES" if total > 1 else "run on a machine with two or more GPUs"
        )
        return Check(name, "missing", found, needed, step, BOTH)
    return Check(name, "ok", found, required_by=BOTH)


def _gpu(gpu: GpuFacts, visible: bool) -> Check:
    name, needed = (
        f"gpu {gpu.index}",
        f"a whole GPU of {' or '.join(f'SM{sm}' for sm in extension.ARCHITECTURES)} for the fast backend",
    )
    found = f"{gpu.name}, SM{gpu.sm}, {gpu.memory_bytes / 2**30:.1f} GiB" + ("" if visible else ", hidden from torch")
    required_by = FAST if visible else ()
    if gpu.mig:
        found += ", cut into MIG instances, which have no peer access"
        return Check(name, "missing", found, needed, USE_NCCL, required_by)
    if gpu.sm not in extension.ARCHITECTURES:
        return Check(name, "missing", found, needed, USE_NCCL, required_by)
    return Check(name, "ok", found, required_by=required_by)


def _link(link: LinkFacts, visible: bool) -> Check:
    name, required_by = f"link {link.a}-{link.b}", FAST if visible else ()
    found = describe_link(link)
    if link.peer_access:
        return Check(name, "ok", found, required_by=required_by)
    step = f"{USE_NCCL}, or choose GPUs that reach each other (nvidia-smi topo -p2p w lists them)"
    return Check(name, "missing", found, "peer access between all GPUs of a run", step, required_by)
