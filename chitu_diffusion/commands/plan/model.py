"""What the planner's cost model says about GPUs that need not be at hand, for every method on them."""

from dataclasses import dataclass, replace

from chitu_diffusion.commands.plan.estimate import signature
from chitu_diffusion.commands.plan.question import Machine, Question
from chitu_diffusion.parallel.cp.fast.attention.candidates import schedules
from chitu_diffusion.parallel.cp.fast.attention.cost import Work, attention_s, estimate_s, transfer_s
from chitu_diffusion.parallel.cp.fast.attention.hardware import H200, Hardware
from chitu_diffusion.parallel.cp.planning import work_of


@dataclass(frozen=True)
class MethodRow:
    """One method on the rank that has most to do.

    ``transfer_ms`` and ``attention_ms`` are what each takes alone, ``total_ms`` what both take by ``schedule``, the
    quickest. ``exposed_ms`` is what the call takes longer than its attention in one kernel; below 0 where a schedule's
    smaller kernels leave fewer SMs without work at the end.
    """

    method: str
    ulysses_degree: int
    schedule: str
    bytes_received: int
    transfer_ms: float
    attention_ms: float
    exposed_ms: float
    total_ms: float
    speedup: float


@dataclass(frozen=True)
class ModelReport:
    """Every method on ``world`` GPUs, the quickest first, and ``single_ms`` on one of them."""

    question: Question
    world: int
    hardware: Hardware
    single_ms: float
    rows: tuple[MethodRow, ...]


def hardware_of(machine: Machine) -> Hardware:
    """An H200 under lasting load, with the link and the kernel rate that are given."""
    given = H200.steady
    if machine.link_gbs is not None:
        given = replace(given, link_bytes_per_s=1e9 * machine.link_gbs)
    if machine.kernel_tflops is not None:
        given = replace(given, kernel_flops=1e12 * machine.kernel_tflops)
    return given if given == H200.steady else replace(given, name="as given, else as an NVIDIA H200")


def report(question: Question, world: int, hardware: Hardware) -> ModelReport:
    """The methods that are asked for, with every number of ranks that may split the heads."""
    single_s = attention_s(_work(question, 1, 1), hardware)
    rows = [_row(_work(question, world, degree), world, single_s, hardware) for degree in _degrees(question, world)]
    return ModelReport(question, world, hardware, 1e3 * single_s, tuple(sorted(rows, key=lambda row: row.total_ms)))


def _degrees(question: Question, world: int) -> list[int]:
    """1 is AGKV, ``world`` is Ulysses, and between them are the hybrids, which belong to it."""
    legal = [degree for degree in range(1, world + 1) if world % degree == 0 and degree <= question.kv_heads]
    return {"auto": legal, "agkv": [1], "ulysses": legal[1:] or [1]}[question.method]


def _work(question: Question, world: int, degree: int) -> Work:
    call = signature(question)
    return work_of(call, "agkv" if degree == 1 else "ulysses", call.layout(world, degree))


def _row(work: Work, world: int, single_s: float, hardware: Hardware) -> MethodRow:
    gathers = work.ulysses_degree == 1
    fuses = hardware.fuses and work.least_own_rows > 0 and work.num_heads == work.num_kv_heads
    every = schedules(work, gathers, hardware, fused=gathers and fuses)
    seconds = [estimate_s(work, schedule, hardware) for schedule in every]
    total_s = min(seconds)
    schedule = every[seconds.index(total_s)]  # the simplest of equals, since it comes first
    alone_s = attention_s(work, hardware)
    names = {1: "agkv", world: "ulysses"}
    return MethodRow(
        method=names.get(work.ulysses_degree, f"hybrid({work.ulysses_degree})"),
        ulysses_degree=work.ulysses_degree,
        schedule=str(schedule),
        bytes_received=work.bytes_in + work.bytes_out,
        transfer_ms=1e3 * transfer_s(work, hardware),
        attention_ms=1e3 * alone_s,
        exposed_ms=1e3 * (total_s - alone_s),
        total_ms=1e3 * total_s,
        speedup=single_s / total_s,
    )
