"""The attention kernels, in the order in which ``auto`` prefers them. A new kernel is one file and one row here."""

from chitu_diffusion.parallel.cp.fast.attention import cudnn, cute, flash, sdpa, triton
from chitu_diffusion.parallel.cp.fast.attention.kernels import Kernel, KernelNeeds

KERNELS: dict[str, Kernel] = {row.name: row for row in (cute.ROW, cudnn.ROW, flash.ROW, triton.ROW, sdpa.ROW)}


def explain(needs: KernelNeeds) -> dict[str, str | None]:
    """For every kernel, in order of preference: None where it serves the call, else why it does not."""
    return {name: _why_not(kernel, needs) for name, kernel in KERNELS.items()}


def _why_not(kernel: Kernel, needs: KernelNeeds) -> str | None:
    if needs.arriving and kernel.run_arriving is None:
        return "it does not wait for keys itself"
    return kernel.why_not(needs)
