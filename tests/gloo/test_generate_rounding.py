"""Where the last bits of a picture of several ranks come from, so that the limits of test_generate are no guess.

Z-Image at guidance 4 on 3 or 4 CPU ranks differs from one process by 2.5e-6 in float32. Run operation by operation on
slices of rows, all of its operations give every row the same bits, but for SiLU in the feed-forward: torch computes
the exponential of whole SIMD vectors by one routine and of the elements left over behind the last one by another, which
differ in the last bit, and which elements are left over depends on how many a rank has. A tiny model has 170 columns
there, so rows do not end where vectors do; the real one has 10240, so nothing is ever left over. Guidance and the
decoder multiply that bit. It is rounding and nothing else: in float64 the pictures are equal, and so are those of a
model whose columns are a multiple of a vector, in float32.
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.gloo.test_generate import CASES, LIMIT, Shape, generated
from tests.support.pool import SIZE, Worker, pool

pytestmark = pytest.mark.xdist_group("gloo")
GUIDANCE = {"guidance": 4.0}
RANKS = (3, 4)
WHOLE = 6  # heads, of 16 columns each, with which the feed-forward has 256


def save_z_image(worker: Worker, folder: Path, heads: int) -> None:
    """A tiny Z-Image whose transformer has ``heads``."""
    from tests.support import tiny_models, tiny_pipelines

    pipeline = tiny_pipelines.z_image()
    pipeline.transformer = tiny_models.z_image(heads=heads)
    pipeline.save_pretrained(folder)


def made(worker: Worker, root: Path, out: Path, shape: Shape, dtype: str) -> Any:
    """The picture of rank 0, where ``dtype`` may also be float64, which users are not offered."""
    from chitu_diffusion.commands.generate import options
    from chitu_diffusion.parallel.cp import signature
    from chitu_diffusion.parallel.cp.fast import norm_rope
    from chitu_diffusion.parallel.cp.fast.adapters import projection, shares
    from tests.gloo import test_generate

    test_generate._loaded.clear()
    check = options.check
    with ExitStack() as patches:
        patches.enter_context(patch.object(options, "check", lambda *asked: replace(check(*asked), dtype=dtype)))
        for module in (signature, norm_rope, projection, shares):
            patches.enter_context(patch.object(module, "DTYPES", (torch.float32, torch.float64)))
        pictures = generated(worker, root, out, "zimage", shape)
    test_generate._loaded.clear()
    return pictures and pictures[0]


@pytest.mark.parametrize(
    ("heads", "dtype", "limit"),
    [
        (4, "float64", 1e-7),  # latents stay float32 between steps, as the pipeline wants them
        (WHOLE, "float32", LIMIT),
    ],
    ids=["in float64", "in whole vectors"],
)
def test_with_strong_guidance_only_rounding_tells_ranks_from_one_process(
    heads: int, dtype: str, limit: float, tmp_path: Path
) -> None:
    pool().run(1, save_z_image, tmp_path / "zimage", heads)
    assert CASES["zimage"]["guidance"] < GUIDANCE["guidance"]
    wanted = pool().run(SIZE, made, tmp_path, tmp_path, Shape(1, 1, typed=GUIDANCE), dtype)[0]
    for cp in RANKS:
        got = pool().run(SIZE, made, tmp_path, tmp_path, Shape(1, cp, typed=GUIDANCE), dtype)[0]
        assert wanted.std() > 0.1
        assert abs(got - wanted).max() <= limit
