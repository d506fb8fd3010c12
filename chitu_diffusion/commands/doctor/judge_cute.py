"""Judges CuTe FlashAttention: is it there, in a combination that was tried, and does it work here; pure."""

from chitu_diffusion.commands.doctor.checks import CUTE, Check
from chitu_diffusion.commands.doctor.facts import CuteFacts, DoctorFacts
from chitu_diffusion.parallel.cp.fast.attention.cute_source import SYNC

NEEDED = "CuTe FlashAttention in versions that were tried together, and a GPU for it"
WITHOUT = "the other kernels work without it"


def judge_cute(facts: DoctorFacts) -> Check:
    """One line: the fastest kernel on SM90, which nothing else needs."""
    name, seen = "cute", facts.cute
    if seen.broken:
        return Check(name, "wrong", f"trying it fails: {seen.broken}", NEEDED, f"see what it says; {WITHOUT}", CUTE)
    if seen.value is None:
        return Check(name, "missing", seen.absent or "not found", NEEDED, SYNC, CUTE)
    value, found = seen.value, _origin(seen.value)
    if value.problem is not None:
        step = value.next_step or f"see what it says; {WITHOUT}"
        named = value.problem.startswith(value.origin)  # a clause that says it itself
        return Check(name, "wrong", value.problem if named else f"{found}: {value.problem}", NEEDED, step, CUTE)
    if value.no_gpu is not None:
        step = f"run on a GPU that it is for; {WITHOUT}"
        return Check(name, "missing", f"{found}; it imports, but {value.no_gpu}", NEEDED, step, CUTE)
    return Check(name, "ok", f"{found}; its first result is right here", required_by=CUTE)


def _origin(value: CuteFacts) -> str:
    parts = [value.origin, *(f"{name} {version}" for name, version in value.versions.items())]
    return ", ".join(parts) + f" (tried: {value.tried})" * (value.tried is not None)
