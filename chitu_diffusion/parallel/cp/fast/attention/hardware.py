"""What the cost model knows about GPUs and the link between them: plain numbers, each with where it comes from."""

import math
from dataclasses import dataclass, replace

TILE_ROWS = 128  # queries that one SM attends for at a time
ELEMENT_BYTES = 2  # of float16 and bfloat16, which the kernel rates are for


@dataclass(frozen=True)
class Hardware:
    """GPUs of one kind, joined by one kind of link; rates are per second, and per GPU where nothing else is said.

    ``link_bytes_per_s`` is what a GPU receives from all its peers together while it sends as much. ``kernel_flops``
    is what the attention kernel reaches under lasting load where every SM has a tile; a tile also costs ``prologue_s``
    however few keys it has. A kernel launched behind another costs ``launch_s``, and from a send to its announced
    arrival pass ``signal_s`` beside the bytes. ``copy_bytes_per_s`` is the rate of one pass of the merge, or of a copy,
    over the GPU's memory. Where a GPU's kernels take less than ``boost_below_s`` in one call, they run ``boost`` times
    as fast, presumably since it has not slowed its clock yet. ``shares_waves`` says that the last, partial wave of a
    kernel is filled by the next one, which is launched on another stream (lanes.py), and ``fuses`` that there is a
    kernel which waits for its keys itself.
    """

    name: str
    link_bytes_per_s: float
    kernel_flops: float
    num_sms: int
    copy_bytes_per_s: float
    prologue_s: float
    launch_s: float
    signal_s: float
    boost: float = 1.0
    boost_below_s: float = 0.0
    shares_waves: bool = True
    fuses: bool = True

    @property
    def steady(self) -> "Hardware":
        """The same under lasting load, as in the steps of a denoising loop."""
        return replace(self, boost=1.0, boost_below_s=0.0)

    def kernel_rate(self, flops: float) -> float:
        """Operations per second in a call that asks ``flops`` of them of one GPU."""
        return self.kernel_flops * (self.boost if flops < self.kernel_flops * self.boost_below_s else 1.0)

    def kernel_s(self, tiles: int, tile_flops: float, rate: float) -> float:
        """Seconds of one kernel alone: whole waves of tiles over the SMs."""
        waves = math.ceil(tiles / self.num_sms)
        return self.launch_s + waves * tile_flops / (rate / self.num_sms) + waves * self.prologue_s

    def tile_s(self, tile_flops: float, rate: float) -> float:
        """Seconds of one tile on its SM."""
        return tile_flops / (rate / self.num_sms) + self.prologue_s


# Measured on two of them, NV18, BF16, D = 128 (docs/results/NOTES.md and the result files beside it). A flat copy
# reaches 386 GB/s. The kernel is CuTe's: in a row, calls of up to 2.1 ms run at 1.19 times the rate of those of 3.1 ms
# and more. Two passes over half the keys take 20 µs more than one at S = 4096: a launch, and five waves of prologues.
H200 = Hardware(
    name="NVIDIA H200",
    link_bytes_per_s=385e9,
    kernel_flops=660e12,
    num_sms=132,
    copy_bytes_per_s=3.5e12,
    prologue_s=3e-6,
    launch_s=6e-6,
    signal_s=18e-6,
    boost=1.19,
    boost_below_s=2.5e-3,
)
