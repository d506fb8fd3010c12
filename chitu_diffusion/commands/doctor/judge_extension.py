"""Judges the extension: is it there, does it fit NVSHMEM, GPUs and driver, and does it work; pure."""

from collections.abc import Iterator

from chitu_diffusion.commands.doctor.checks import FAST, SELF_TEST, SETUP, Check
from chitu_diffusion.commands.doctor.facts import DoctorFacts, ExtensionFacts
from chitu_diffusion.commands.doctor.judge_gpus import visible_gpus
from chitu_diffusion.commands.doctor.self_test import STEPS
from chitu_diffusion.parallel.cp.fast import extension
from chitu_diffusion.parallel.cp.fast.device import MachineFacts

NEEDED = "fast_ulysses with Fast CP's operators"


def judge_extension(facts: DoctorFacts) -> Iterator[Check]:
    """Whether it imports; then what it was built for and against, beside what this machine has."""
    yield _package(facts)
    value = facts.extension.value
    if value is not None and value.info:
        yield _nvshmem(value)
        yield _images(facts, value)
        yield _driver(value)


def judge_self_test(facts: DoctorFacts) -> Iterator[Check]:
    """One line per step, or one that says why it did not run; nothing where it was not asked for."""
    seen, needed = facts.self_test, "the extension, used by two processes"
    if seen is None:
        return
    if seen.value is None:
        has_gpu = facts.torch.value is not None and facts.torch.value.gpu_count > 0
        step = SETUP if has_gpu else "run it on a machine with an NVIDIA GPU"
        yield Check("self-test", "missing", seen.absent or "it did not run", needed, step, SELF_TEST)
        return
    gpus = seen.value.gpus
    one = len(set(gpus)) == 1
    where = f"both processes on GPU {gpus[0]}, no link is tried" if one else f"GPUs {' and '.join(map(str, gpus))}"
    for name, what in STEPS.items():
        if name not in seen.value.problems:
            step = "see the step before it"
            yield Check(f"self-test {name}", "missing", "not reached", what, step, SELF_TEST)
        elif problem := seen.value.problems[name]:
            step = "see what it says; NVSHMEM_DEBUG=INFO tells more, and --cp-backend nccl works without it"
            yield Check(f"self-test {name}", "wrong", f"{problem} ({where})", what, step, SELF_TEST)
        else:
            yield Check(f"self-test {name}", "ok", f"{what} ({where})", required_by=SELF_TEST)


def _package(facts: DoctorFacts) -> Check:
    name, seen = "extension", facts.extension
    if seen.broken:
        found = f"installed, but it does not import: {seen.broken}"
        return Check(name, "wrong", found, NEEDED, _repair(facts), FAST)
    if seen.value is None:
        return _absent(facts)
    value = seen.value
    found = f"{value.version or 'unknown version'}, {value.path}"
    if value.missing_operators:
        found += f", without the operators {', '.join(value.missing_operators)}"
        if facts.wheel is not None and facts.wheel.installed:
            found += f"; it has replaced {facts.wheel.path}, which was installed here"
        step = f"replace it, it is another build of the same name: {_repair(facts)}"
        return Check(name, "wrong", found, NEEDED, step, FAST)
    found += f", all {len(extension.OPERATORS)} operators"
    if facts.named_library:
        found += f", library {value.library} ({extension.LIBRARY_VARIABLE})"
    elif value.build:
        found += f", built with nvcc {value.build.get('nvcc', 'of unknown version')}"
    return Check(name, "ok", found, required_by=FAST)


def _absent(facts: DoctorFacts) -> Check:
    why = facts.extension.absent or "not found"
    if facts.wheel is None or facts.torch.value is None:
        return Check("extension", "missing", f"not built ({why})", NEEDED, SETUP, FAST)
    became = "installed: the extension was removed by a sync" if facts.wheel.installed else "built and is not installed"
    found = f"{why}, but {facts.wheel.path} was {became}"
    return Check("extension", "missing", found, NEEDED, f"run {facts.wheel.install}", FAST)


def _repair(facts: DoctorFacts) -> str:
    if facts.named_library:
        return extension.repair({extension.LIBRARY_VARIABLE: facts.named_library})
    return f"run {facts.wheel.install}, or, to build it again, {SETUP}" if facts.wheel else extension.repair({})


def _nvshmem(value: ExtensionFacts) -> Check:
    nvshmem = value.info["nvshmem"]
    found = f"built against {nvshmem['built']}, loads {nvshmem['loaded']} ({nvshmem.get('path', 'unknown path')})"
    return _line("extension nvshmem", found, extension.nvshmem_problem(value.info))


def _images(facts: DoctorFacts, value: ExtensionFacts) -> Check:
    machine = facts.machine.value or MachineFacts()
    visible = visible_gpus(machine, facts.torch.value)
    sms = sorted({gpu.sm for gpu in machine.gpus if gpu.index in visible} & set(extension.ARCHITECTURES))
    problems = [problem for sm in sms if (problem := extension.image_problem(value.info, sm))]
    found = ", ".join(value.info["images"]) + (f"; the GPUs are {', '.join(f'SM{sm}' for sm in sms)}" if sms else "")
    return _line("extension images", found, problems[0] if problems else None)


def _driver(value: ExtensionFacts) -> Check:
    driver = value.info["cuda_driver"]
    runs = "there is no driver" if driver == "0.0" else f"the driver runs CUDA up to {driver}"
    found = f"carries the runtime of CUDA {value.info['cuda_runtime']}; {runs}"
    return _line("extension cuda", found, extension.driver_problem(value.info))


def _line(name: str, found: str, problem: extension.Problem | None) -> Check:
    if problem is None:
        return Check(name, "ok", found, required_by=FAST)
    return Check(name, "wrong", problem.found, problem.needed, problem.next_step, FAST)
