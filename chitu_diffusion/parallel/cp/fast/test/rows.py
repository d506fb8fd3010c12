"""What the acceptance test runs: real layer shapes, methods, and small stand-ins for CPUs. Imports no torch."""

from dataclasses import dataclass, replace

METHODS = ("agkv", "ulysses")
DEGREES = (2, 4, 8)
SMALL_HEAD_DIM = 32

Grid = tuple[int, int, int]  # frames, rows and columns of tokens


@dataclass(frozen=True)
class Row:
    """One model at one size. ``small`` and ``small_heads`` stand in for ``grid`` and ``heads`` on CPUs."""

    name: str
    model: str
    heads: int
    ffn: int
    grid: Grid
    text: int
    small: Grid
    small_heads: int
    goal: float  # speed-up of two GPUs over one, from projection to projection
    head_dim: int = 128

    @property
    def tokens(self) -> int:
        """Of the image or video."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    def reduced(self) -> "Row":
        """The same kind of model in a size for CPUs; token and head counts stay uneven."""
        return replace(
            self, grid=self.small, heads=self.small_heads, head_dim=SMALL_HEAD_DIM, ffn=128, text=min(self.text, 13)
        )


_480P, _720P = (21, 30, 52), (21, 45, 80)  # 81 frames
ROWS = {
    row.name: row
    for row in (
        Row("wan-1.3b-480p", "wan", 12, 8960, _480P, 512, (3, 5, 5), 3, 1.9),
        Row("wan-1.3b-720p", "wan", 12, 8960, _720P, 512, (3, 7, 5), 3, 1.9),
        Row("wan-14b-480p", "wan", 40, 13824, _480P, 512, (3, 5, 5), 5, 1.95),
        Row("wan-14b-720p", "wan", 40, 13824, _720P, 512, (3, 7, 5), 5, 1.95),
        Row("qwen-image-1024", "qwen-image", 24, 12288, (1, 64, 64), 128, (1, 8, 8), 4, 1.6),
        Row("qwen-image-1328", "qwen-image", 24, 12288, (1, 83, 83), 128, (1, 7, 7), 4, 1.75),
        Row("z-image-1024", "z-image", 30, 10240, (1, 64, 64), 128, (1, 8, 8), 5, 1.6),
        Row("z-image-2048", "z-image", 30, 10240, (1, 128, 128), 128, (1, 7, 9), 5, 1.75),
    )
}


@dataclass(frozen=True)
class Case:
    """One row by one method on ``cp`` ranks."""

    row: str
    method: str
    cp: int

    @property
    def name(self) -> str:
        """As its file is called."""
        return f"{self.row}-{self.method}-cp{self.cp}"


def matrix(rows: tuple[str, ...], degrees: tuple[int, ...]) -> list[Case]:
    """Every case; those that share a row and a degree stand together, since they share one GPU's results."""
    return [Case(row, method, cp) for cp in degrees for row in rows for method in METHODS]
