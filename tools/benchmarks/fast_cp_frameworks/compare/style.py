"""How plots look: readable in black and white and by the colour-blind, and the same bytes from the same data."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.benchmarks.fast_cp_frameworks.compare.families import Family

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DASHED, _DOTTED, _DASHDOT = "--", (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5))
_LONG, _TWO_DOTS, _LONG_DOT = (0, (8, 2)), (0, (4, 1.5, 1, 1.5, 1, 1.5)), (0, (9, 2, 1, 2))
# text stays text, so a reader can search it; ids come from this salt instead of at random
SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "chitu-compare",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
}
ATTENTION = {"color": "#BBBBBB", "edgecolor": "#000000", "linewidth": 0.6}
EXPOSED = {"color": "#FFFFFF", "edgecolor": "#D55E00", "linewidth": 0.6, "hatch": "/////"}


@dataclass(frozen=True)
class Look:
    """A line of one family: colour, marker and dashes, each of which is enough to tell it from those beside it."""

    color: str
    marker: str
    linestyle: Any
    linewidth: float = 1.2

    def line(self) -> dict[str, Any]:
        """As matplotlib takes it."""
        return {
            "color": self.color,
            "marker": self.marker,
            "linestyle": self.linestyle,
            "linewidth": self.linewidth,
            "markersize": 5,
            "markeredgecolor": "#FFFFFF",
            "markeredgewidth": 0.5,
        }


# Okabe and Ito's palette, which every kind of colour vision tells apart, without its yellow, which white swallows;
# those that are installed most rarely share a colour with another, and no marker
_LOOKS = {
    "fast_": Look("#0072B2", "o", "-", 2.4),
    "nccl_": Look("#000000", "s", _DASHED),
    "torch_cp": Look("#D55E00", "^", _DASHDOT),
    "diffusers": Look("#009E73", "D", _DOTTED),
    "yunchang": Look("#CC79A7", "v", _LONG),
    "xdit": Look("#777777", "P", _TWO_DOTS),
    "para_attn": Look("#E69F00", "X", _LONG_DOT),
    "cache_dit": Look("#56B4E9", "h", (0, (2, 1))),
    "ring_flash_attn": Look("#D55E00", "<", (0, (1, 3))),
    "flashinfer": Look("#009E73", ">", (0, (6, 1, 2, 1))),
    "fast_ulysses_upstream": Look("#CC79A7", "p", (0, (3, 3))),
}
_OTHER = Look("#000000", "*", (0, (1, 4)))


def look(family: Family) -> Look:
    """The same for a family in all plots."""
    return _LOOKS.get(family.key, _OTHER)


def save(figure: "Figure", folder: Path, name: str) -> list[Path]:
    """As PNG and SVG, without dates and versions in them."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0], dpi=150, bbox_inches="tight", metadata={"Software": None})
    figure.savefig(paths[1], bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return paths
