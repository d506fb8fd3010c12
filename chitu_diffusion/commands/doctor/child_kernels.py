"""The stages of the doctor's child that look at attention kernels: those that torch brings, and CuTe."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from chitu_diffusion.commands.doctor.facts import CuteFacts, KernelFacts, Seen

if TYPE_CHECKING:
    from chitu_diffusion.parallel.cp.fast.attention.kernels import KernelNeeds


def look_at_kernels() -> KernelFacts:
    """What every row but CuTe's says of the usual call; CuTe has a stage of its own, which may take a minute."""
    from chitu_diffusion.parallel.cp.fast.attention.cute import ROW
    from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS

    needs = _usual_call()
    others = [row for row in KERNELS.values() if row.name != ROW.name]
    return KernelFacts(why_not={row.name: row.why_not(needs) for row in others}, device=needs.device_type)


def look_at_cute() -> CuteFacts | Seen[CuteFacts]:
    """Where CuTe comes from; then import it, and on a GPU that it is for let it compute something."""
    from chitu_diffusion.parallel.cp.fast.attention import cute, cute_load, cute_source

    found = cute_load.source()
    if found.root is None and found.origin == cute_source.PACKAGE:
        kept = cute_load.compiled_folder(os.environ)
        before = f"; it was used before, as {kept} says: a sync without the extra removes it" if kept.is_dir() else ""
        return Seen(absent=f"{found.problem}{before}")
    facts = CuteFacts(found.origin, found.versions, found.tried.where if found.tried else None)
    if found.problem is not None:
        return replace(facts, problem=found.problem, next_step=found.next_step)
    if problem := cute_load.load_problem():
        return replace(facts, problem=problem)
    needs = _usual_call()
    if needs.capability not in cute.CAPABILITIES:
        return replace(facts, no_gpu=cute.why_not(needs))
    return replace(facts, problem=cute.why_not(needs))


def _usual_call() -> "KernelNeeds":
    import torch

    from chitu_diffusion.parallel.cp.fast.attention.kernels import KernelNeeds

    gpu = torch.cuda.is_available()
    return KernelNeeds(
        device_type="cuda" if gpu else "cpu",
        capability=torch.cuda.get_device_capability() if gpu else None,
        dtype=torch.bfloat16 if gpu else torch.float32,
        head_dim=128,
        num_heads=40,
        num_kv_heads=40,
    )
