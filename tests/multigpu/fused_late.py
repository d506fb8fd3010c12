"""A rank that comes late between the start and the send of a use whose reader waits by itself.

    FAST_CP_LIBRARY=build/libfast_cp.so python -m torch.distributed.run --standalone --nproc-per-node=2 \\
        tests/multigpu/fused_late.py --late 1.5 --output late.json

The last rank sleeps for ``--late`` times the limit of a wait after all have begun the use. On every rank the output
must be right, or the extension must say why not: a kernel that gave up in silence must not pass for one that was right.
"""

import time
from typing import Any

import common
import fast_ulysses as fu
import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.errors import CPError
from chitu_diffusion.parallel.cp.fast.attention import cute, cute_fused
from chitu_diffusion.parallel.cp.fast.attention.kernels import OwnRows
from chitu_diffusion.parallel.cp.fast.runtime import init_fast_cp
from chitu_diffusion.parallel.cp.layout import Span

LIMIT_S, CHUNKS, HEADS, ROWS, HEAD_DIM = 1.0, 4, 40, 2048, 128
TAG, SCALE = "late", HEAD_DIM**-0.5


def tensors(rank: int) -> list[torch.Tensor]:
    """q, k, v of ``rank``: the same wherever they are made."""
    generator = torch.Generator("cuda").manual_seed(rank)
    shape = (1, ROWS, HEADS, HEAD_DIM)
    return [torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(3)]


def expected(place: common.Place, q: torch.Tensor) -> torch.Tensor:
    """By the plain kernel, over rows in the order of the windows: the rank's own come last."""
    order = [(place.rank + 1 + i) % place.world for i in range(place.world)]
    k, v = (torch.cat([tensors(rank)[role] for rank in order], 1) for role in (1, 2))
    return cute.run(q, k, v, scale=SCALE)[0]


def late_use(place: common.Place, late_s: float, out: torch.Tensor) -> None:
    """One use of the windows, in which the last rank sends late."""
    q, k, v = tensors(place.rank)
    rows = ROWS * place.world
    split = fu.Split((ROWS,) * place.world, (HEADS,), (HEADS,), (1,) * CHUNKS)
    windows = fu.exchange_start(
        None, k, v, split, tag=TAG, send_now=False, own_chunks=0, own_last=True, ticket=True
    )  # fmt: skip
    for window in windows[1:]:
        window.fill_(torch.nan)  # before any rank sends: all have begun, and nobody has got past the barrier
    common.together()
    if place.rank == place.world - 1:
        time.sleep(late_s)
    for chunk in range(CHUNKS):
        fu.exchange_send((k, v), windows, chunk, tag=TAG)
    ticket = fu.exchange_ticket(windows, tag=TAG)
    own = OwnRows(k, v, Span(rows - ROWS, rows))
    cute_fused.run(q, windows[1], windows[2], ticket, scale=SCALE, own=own, out=out)
    fu.exchange_done(windows, tag=TAG)


def main() -> int:
    parser = common.parser(__doc__, 40)
    parser.add_argument("--late", type=float, required=True, help="in limits of a wait")
    options = parser.parse_args()
    place = common.start(options)
    q, k, v = tensors(place.rank)
    cute_fused.prepare(q, k, v, torch.empty_like(q), SCALE)  # compiling takes longer than a wait may
    wanted, told = expected(place, q), ""
    common.together()
    fast = init_fast_cp(device=place.device, pool_bytes=512 * common.MB, timeout_s=LIMIT_S)
    began, out = time.monotonic(), torch.full_like(q, torch.nan)
    try:
        late_use(place, options.late * LIMIT_S, out)
        torch.cuda.synchronize()
        fast.check()
    except (RuntimeError, CPError) as error:  # of an operator, or of the check
        told = str(error)
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    right = torch.equal(out, wanted)
    print(
        f"[rank {place.rank}] {'right' if right else 'WRONG'} after {seconds:.1f} s: {told or 'nothing said'}",
        flush=True,
    )
    # the late rank itself has all keys; but a wait that begins two limits after the use cannot vouch for its reader
    most = 2 if place.rank == place.world - 1 else 1
    ranks: list[Any] = [None] * place.world
    dist.all_gather_object(ranks, {"right": right, "told": told, "seconds": round(seconds, 2)})
    report: dict[str, Any] = {"late": options.late, "limit_s": LIMIT_S, "ranks": ranks}
    checks = {
        "right, or told why not": right or bool(told),
        "told exactly of what is too late": bool(told) == (options.late > most),
        "no wait without an end": seconds < (max(options.late, 2) + 3) * LIMIT_S,
    }
    common.together()
    fast.close(collective=not options.late > 1)
    code: int = common.finish(report, checks, options.output)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
