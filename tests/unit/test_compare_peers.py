"""The table of peers: what every row says, when it is refused, and that it belongs to a family that plots know."""

from dataclasses import replace

import pytest
import torch

from chitu_diffusion.parallel.cp.errors import ConfigError
from tests.support.reference import reference_attention
from tools.benchmarks.fast_cp_frameworks import accuracy
from tools.benchmarks.fast_cp_frameworks.cases import METHODS, Case
from tools.benchmarks.fast_cp_frameworks.compare import style, wanted
from tools.benchmarks.fast_cp_frameworks.compare.families import FAMILIES, FAST, family_of
from tools.benchmarks.fast_cp_frameworks.inputs import Source
from tools.benchmarks.fast_cp_frameworks.peers import base
from tools.benchmarks.fast_cp_frameworks.peers.base import MissingError, Peer, RefusedError
from tools.benchmarks.fast_cp_frameworks.peers.stand_ins import _attention
from tools.benchmarks.fast_cp_frameworks.peers.table import PEERS

CPU = torch.device("cpu")
CASE = Case("x", 64, 8, 8, 16, 1, "float32", "e2e", "cudnn")


def test_every_row_is_one_of_a_family_that_is_not_ours() -> None:
    assert not set(PEERS) & set(METHODS)
    families = {name: family_of(name) for name in PEERS}
    assert all(family in FAMILIES and not family.ours for family in families.values())
    assert family_of("fast_agkv") == FAST
    # two names, two families: else rows of two libraries would pass for variants of one
    assert len({(PEERS[name].package, family.key) for name, family in families.items()}) == len(
        {peer.package for peer in PEERS.values()}
    )


def test_no_two_families_look_alike() -> None:
    looks = [style.look(family) for family in FAMILIES if family.key not in ("single", "flat_copy")]
    assert len({look.marker for look in looks}) == len(looks)
    assert len({str(look.linestyle) for look in looks}) == len(looks)


@pytest.mark.parametrize(
    ("need", "bad", "world"),
    [
        (base.EQUAL, {"sequence": 65}, 2),
        (base.HEADS, {"heads": 6}, 4),
        (base.ENOUGH_HEADS, {"heads": 3}, 4),
        (base.UNMASKED, {"masked": True}, 2),
        (base.FOUR, {}, 2),
        (base.GPUS, {}, 2),
    ],
)
def test_a_shape_that_a_library_does_not_take_is_refused_with_the_reason(
    need: str, bad: dict[str, int], world: int
) -> None:
    peer = replace(PEERS["torch_cp_allgather"], needs=(need,))
    with pytest.raises(RefusedError, match=need):
        peer.check(replace(CASE, **bad), world, "cpu")
    peer.check(CASE, 4, "cuda")


def row(package: str, oldest: str) -> Peer:
    return replace(PEERS["torch_cp_allgather"], package=package, oldest=oldest)


def test_a_library_that_is_missing_or_too_old_says_what_to_do() -> None:
    with pytest.raises(MissingError, match=r"no-such-package is not installed \(uv sync --inexact --group peers\)"):
        row("no-such-package", "1").installed_version()
    with pytest.raises(MissingError, match="is too old"):
        row("torch", "99.1").installed_version()
    assert row("torch", "2.9").installed_version() == torch.__version__.partition("+")[0]


def test_versions_are_compared_as_numbers() -> None:
    assert base._numbers("0.10.1") > base._numbers("0.9")
    assert base._numbers("2.11.0+cu130") == (2, 11)
    assert base._numbers("0.6.3.post1") == (0, 6, 3)


def test_only_takes_parts_of_names_and_keeps_one_gpu_alone() -> None:
    assert {name for name, _ in wanted.rows(("yunchang",), "cpu")} == {
        "single", "yunchang_ulysses", "yunchang_usp_ulysses", "yunchang_usp_ring"
    }  # fmt: skip
    with pytest.raises(ConfigError, match="--only nothing is part of no name"):
        wanted.rows(("nothing",), "cpu")
    assert [k for m, k in wanted.rows(None, "cuda") if m == "diffusers_ulysses"] == ["cudnn", "ours"]


def test_a_mask_leaves_out_keys_of_every_rank_and_the_reference_knows_it() -> None:
    source = Source(replace(CASE, sequence=67, masked=True), 3, 5, CPU)
    mask = source.key_mask()
    assert mask is not None
    assert all((~mask[:, source.rows(rank)]).any() for rank in range(3))
    given = source.whole()
    exact = accuracy.exact_attention(given.q, given.k, given.v, torch.float64, mask)
    wanted_rows = reference_attention(given.q, given.k, given.v, key_mask=mask)[0]
    assert (exact - wanted_rows).abs().max() < 1e-6
    assert (exact - accuracy.exact_attention(given.q, given.k, given.v, torch.float64)).abs().max() > 1e-2
    assert Source(CASE, 3, 5, CPU).key_mask() is None


def test_a_source_that_keeps_makes_every_tensor_once() -> None:
    source = Source(CASE, 2, 5, CPU)
    assert source.share(0).k is not source.share(0).k
    kept = source.keeping(7)
    assert kept.share(0).k is kept.share(0).k
    assert torch.equal(kept.share(1).k, Source(CASE, 2, 7, CPU).share(1).k)
    assert torch.equal(kept.whole().k[:, kept.rows(1)], kept.share(1).k)


def test_the_stand_in_of_cudnn_is_attention_with_its_log_sum_exp() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    out, lse = _attention(q, k, v, None, None)
    scores = q @ k.transpose(-1, -2) / 2
    assert torch.allclose(out, torch.softmax(scores, -1) @ v, atol=1e-6)
    assert torch.allclose(lse, torch.logsumexp(scores, -1))
    assert out.transpose(1, 2).is_contiguous()
