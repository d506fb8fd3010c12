"""CuTe's kernel that waits for its keys, on one GPU: signals and rows are set by hand, by a stream that comes late."""

import struct
import time
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
import torch

from chitu_diffusion.parallel.cp.fast.attention import cute, cute_fused
from chitu_diffusion.parallel.cp.fast.attention.kernels import TICKET_NUMBERS, KernelNeeds, OwnRows
from chitu_diffusion.parallel.cp.layout import Span
from tests.support.reference import reference_attention, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]

SCALE, BOUND = 0.11, 6e-3
MOST_RANKS = 8
LATE_CYCLES = 2_000_000  # about a millisecond
seeds = count(torch.initial_seed() % 2**31)


@dataclass(frozen=True)
class Exchange:
    """What the extension would know: csrc/runtime/signals.hpp has the layout that ``ticket`` writes."""

    heads: int
    chunks: int
    wait_row: int
    peers: tuple[int, ...] = (0,)
    wanted: int = 7
    limit_ms: int = 3000
    arrivals: torch.Tensor = field(
        default_factory=lambda: torch.full((32, MOST_RANKS), 6, dtype=torch.int64, device="cuda")
    )
    stopped: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32, device="cuda"))

    def ticket(self) -> torch.Tensor:
        numbers = struct.pack(
            "<4QI3iQ", self.arrivals.data_ptr(), self.wanted, self.limit_ms * 1_000_000, self.stopped.data_ptr(),
            sum(1 << p for p in self.peers), self.chunks, self.wait_row, self.heads, 0,
        )  # fmt: skip
        return torch.frombuffer(bytearray(numbers), dtype=torch.int64).cuda()

    def announce(self, chunk: int, rank: int) -> None:
        self.arrivals[chunk, rank] = self.wanted


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(next(seeds))
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def require(q: torch.Tensor) -> None:
    capability = torch.cuda.get_device_capability()
    needs = KernelNeeds("cuda", capability, q.dtype, q.shape[3], q.shape[2], q.shape[2], arriving=True)
    if (reason := cute.why_not(needs)) is not None:
        pytest.skip(f"cute: {reason}")


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(q, torch.nan)
    assert cute_fused.run(q, k, v, ticket, scale=SCALE, out=out) is out
    return out


@pytest.mark.parametrize("seq_k", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.bfloat16), (64, torch.float16), (96, torch.bfloat16)])
def test_it_is_the_plain_kernel_where_everything_is_there(seq_k: int, head_dim: int, dtype: torch.dtype) -> None:
    q = randn(2, 333, 4, head_dim, dtype=dtype)
    require(q)
    k, v = (randn(2, seq_k, 4, head_dim, dtype=dtype) for _ in range(2))
    out = attend(q, k, v, torch.zeros(TICKET_NUMBERS, dtype=torch.int64, device="cuda"))
    assert torch.equal(out, cute.run(q, k, v, scale=SCALE)[0])


def arrive_late(exchange: Exchange, windows: list[torch.Tensor], full: list[torch.Tensor]) -> None:
    """The peers' rows, group by group, the last one first; each is announced when it is there."""
    heads, chunks = exchange.heads, exchange.chunks
    bounds = [heads * c // chunks for c in range(chunks + 1)]
    for chunk in reversed(range(chunks)):
        torch.cuda._sleep(LATE_CYCLES // chunks)
        of_group = slice(bounds[chunk], bounds[chunk + 1])
        for window, whole in zip(windows, full, strict=True):
            window[:, : exchange.wait_row, of_group].copy_(whole[:, : exchange.wait_row, of_group])
        for rank in exchange.peers:
            exchange.announce(chunk, rank)


@pytest.mark.parametrize(("heads", "chunks"), [(4, 1), (4, 4), (5, 2), (5, 4), (7, 3), (3, 8)])
@pytest.mark.parametrize("wait_row", [1, 127, 128, 129, 500, 700])
def test_every_tile_waits_for_its_own_group_of_heads(heads: int, chunks: int, wait_row: int) -> None:
    """Rows of the other ranks hold NaN until they are announced."""
    q, k, v = randn(2, 300, heads, 128), randn(2, 700, heads, 128), randn(2, 700, heads, 128)
    require(q)
    exchange = Exchange(heads, chunks, wait_row, peers=(0, 2))
    windows = [torch.full_like(x, torch.nan) for x in (k, v)]
    arrive_late(exchange, windows, [k, v])  # loads the kernels, which would wait for the one that waits for them
    exchange.arrivals.fill_(exchange.wanted - 1)
    for window, whole in zip(windows, (k, v), strict=True):
        window.copy_(whole)
        window[:, :wait_row].fill_(torch.nan)
    ticket, side = exchange.ticket(), torch.cuda.Stream()
    torch.cuda.synchronize()
    out = attend(q, *windows, ticket)
    with torch.cuda.stream(side):
        arrive_late(exchange, windows, [k, v])
    torch.cuda.synchronize()
    assert torch.equal(out, cute.run(q, k, v, scale=SCALE)[0])
    assert relative_error(out, reference_attention(q, k, v, scale=SCALE, dtype=torch.float32)[0]) <= BOUND


OWN = [(0, 700), (0, 1), (0, 300), (1, 128), (128, 256), (130, 250), (256, 700), (300, 700), (600, 700), (699, 700)]


@pytest.mark.parametrize("rows", OWN, ids=str)
@pytest.mark.parametrize("head_dim", [128, 64])
def test_own_rows_are_read_where_they_lie(rows: tuple[int, int], head_dim: int) -> None:
    """The windows hold NaN there."""
    q, k, v = (randn(2, length, 3, head_dim) for length in (300, 700, 700))
    require(q)
    expected = cute.run(q, k, v, scale=SCALE)[0]
    own = OwnRows(*(x[:, slice(*rows)].clone() for x in (k, v)), Span(*rows))
    for window in (k, v):
        window[:, slice(*rows)] = torch.nan
    out = torch.full_like(q, torch.nan)
    cute_fused.run(
        q, k, v, torch.zeros(TICKET_NUMBERS, dtype=torch.int64, device="cuda"), scale=SCALE, own=own, out=out
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("heads", [1, 40])
def test_it_goes_on_after_the_limit(heads: int) -> None:
    """A wait beside it tells what has not come: this one would never end."""
    q, k, v = (randn(1, 600, heads, 128) for _ in range(3))
    require(q)
    exchange = Exchange(heads, 1, 300, peers=(0, 3), limit_ms=50)
    exchange.announce(0, 0)
    attend(q, k, v, exchange.ticket())
    begin = time.perf_counter()
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 20
    assert not int(exchange.stopped)


def test_after_another_wait_has_given_up_it_does_not_wait() -> None:
    q, k, v = (randn(1, 600, 2, 128) for _ in range(3))
    require(q)
    exchange = replace(Exchange(2, 1, 300), limit_ms=60_000)
    exchange.stopped.fill_(1)
    attend(q, k, v, exchange.ticket())
    begin = time.perf_counter()
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 10


def test_what_is_not_waited_for_shows() -> None:
    """The negative control: the same late rows, with a ticket that names no ranks."""
    q, k, v = randn(1, 300, 2, 128), randn(1, 700, 2, 128), randn(1, 700, 2, 128)
    require(q)
    window = torch.full_like(k, torch.nan)
    out = attend(q, window, v, Exchange(2, 1, 700, peers=()).ticket())
    window.copy_(k)
    torch.cuda.synchronize()
    assert bool(out.isnan().any())


def test_it_is_as_fast_as_the_plain_kernel() -> None:
    """A longer loading warp, or one that writes, lets ptxas schedule the softmax otherwise: 5 % at this length."""
    q, k, v = randn(1, 4096, 40, 128), randn(1, 8192, 40, 128), randn(1, 8192, 40, 128)
    require(q)
    exchange, out = Exchange(40, 4, 4096), torch.empty_like(q)
    for chunk in range(4):
        exchange.announce(chunk, 0)
    ticket = exchange.ticket()
    calls = [
        lambda: cute.run(q, k, v, scale=SCALE, out=out),
        lambda: cute_fused.run(q, k, v, ticket, scale=SCALE, out=out),
    ]
    times: list[list[float]] = [[], []]
    for number in (0, 1) * 9:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        calls[number]()
        begin.record()
        for _ in range(10):
            calls[number]()
        end.record()
        end.synchronize()
        times[number].append(begin.elapsed_time(end))
    plain, arriving = (sorted(of_one)[4] for of_one in times)
    assert arriving < 1.03 * plain
