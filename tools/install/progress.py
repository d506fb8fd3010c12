"""What is shown while a build runs: a counter that stays in its line in a terminal, plain lines elsewhere."""

import re
import sys
from typing import TextIO

_NINJA = re.compile(r"^\[(\d+)/(\d+)\] (.*)$")


class Progress:
    """Writes the steps of a build, and one count for each thing compiled, to ``stream``."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._counting = False

    def step(self, text: str) -> None:
        """A new step begins."""
        self._end_line()
        print(text, file=self._stream, flush=True)

    def compiler_line(self, line: str) -> bool:
        """A line of the build program's output; what is no progress is shown only where it warns."""
        if found := _NINJA.match(line):
            self._count(f"  {found[1]}/{found[2]} {subject(found[3])}")
        elif ": warning" in line:
            self.step(f"  {line}")
        return found is not None

    def finish(self) -> None:
        """Leave the line of the counter."""
        self._end_line()

    def _count(self, text: str) -> None:
        if not self._stream.isatty():
            print(text, file=self._stream, flush=True)
            return
        print(f"\r{text}\x1b[K", end="", file=self._stream, flush=True)
        self._counting = True

    def _end_line(self) -> None:
        if self._counting:
            print(file=self._stream)
            self._counting = False


def subject(description: str) -> str:
    """The file that a line of ninja is about: ``csrc/tma.cu`` of ``Building CUDA object …/x.dir/csrc/tma.cu.o``."""
    words = description.split()
    return words[-1].rpartition(".dir/")[2].removesuffix(".o") if words else description
