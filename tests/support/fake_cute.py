"""CuTe FlashAttention that is not there: a site folder of empty packages, and a forward that computes on a CPU."""

from pathlib import Path
from typing import Any

import torch

from chitu_diffusion.parallel.cp.fast.attention.cute_source import DSL, DSL_LIBRARIES, MODULES, PACKAGE, QUACK
from tests.support.reference import reference_attention

VERSIONS = {PACKAGE: "4.0.0b29", DSL: "4.6.2", DSL_LIBRARIES: "4.6.2", QUACK: "0.6.4"}
# as upstream writes its imports: absolute, by the fixed name
INTERFACE = """
from flash_attn.cute import part
import flash_attn.cute.part as also
def _flash_attn_fwd():
    return part is also
"""


def write_site(site: Path, versions: dict[str, str] = VERSIONS, *, without: str = "") -> None:
    """Packages of these versions, the modules they bring but for one, and ``flash_attn/cute``."""
    for name, version in versions.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for module in MODULES:
        if module != without:
            folder = site.joinpath(*module.split("."))
            folder.mkdir(parents=True)
            (folder / "__init__.py").touch()
    if PACKAGE in versions:
        write_cute(site)


def write_cute(root: Path, interface: str = INTERFACE) -> None:
    """``flash_attn/cute`` in ``root``."""
    folder = root / "flash_attn" / "cute"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").touch()
    (folder / "part.py").touch()
    (folder / "interface.py").write_text(interface)


class FakeForward:
    """Stands in for ``_flash_attn_fwd``: refuses what upstream refuses, and compiles once per class of calls."""

    def __init__(self, error: float = 0.0, raises: Exception | None = None) -> None:
        self.compile_cache: dict[object, Any] = {}
        self.error, self.raises, self.lse_error = error, raises, 0.0
        self.wrapped, self.launched = 0, 0
        self.calls_per_call = 1

    def __call__(
        self,
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        num_splits: int,
        return_lse: bool,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        if self.raises is not None:
            raise self.raises
        assert not causal
        assert num_splits == 1
        assert return_lse == (lse is not None)
        self.wrapped += 1
        key = q.dtype, q.shape[3], q.shape[2] // k.shape[2], lse is None
        if key not in self.compile_cache:
            self.compile_cache[key] = self.compiled
        for _ in range(self.calls_per_call):
            self.compile_cache[key](q.detach(), k.detach(), v.detach(), out.detach(), lse, softmax_scale, None, (None,))
        return out, lse, None, None

    def compiled(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scale: float,
        *rest: object,
    ) -> None:
        """What upstream compiles: aligned tensors only, and the arguments that the wrapper would pass."""
        assert rest == (None, (None,))
        for x in (q, k, v, out):
            assert x.data_ptr() % 16 == 0
            assert x.stride(3) == 1
            assert all(stride and stride % 8 == 0 for stride in x.stride()[:3])
        self.launched += 1
        exact, exact_lse = reference_attention(q, k, v, scale=scale)
        out.copy_(exact * (1 + self.error))
        if lse is not None:
            lse.copy_(exact_lse * (1 + self.lse_error))
