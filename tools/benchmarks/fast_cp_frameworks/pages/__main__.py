"""``python -m tools.benchmarks.fast_cp_frameworks.pages --write|--check``: numbers of README and docs.

They come from the files of docs/results. ``--check`` changes nothing, and fails with a sentence that names the parts
that are out of date.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from chitu_diffusion.parallel.cp.errors import CPError, ExitCode
from tools.benchmarks.fast_cp_frameworks.pages import attention, extension, libraries, models, verified
from tools.benchmarks.fast_cp_frameworks.pages.files import Files
from tools.benchmarks.fast_cp_frameworks.pages.fill import Part, fill, stale
from tools.benchmarks.fast_cp_frameworks.result_file import read
from tools.benchmarks.fast_cp_frameworks.table import markdown

ROOT = Path(__file__).resolve().parents[4]
RESULTS = "docs/results"
# by page: by name, what stands between the comments of that name
PAGES: Mapping[str, Mapping[str, Part]] = {
    "README.md": {
        "verified": verified.verified,
        "results": attention.front,
        "first": libraries.first,
    },
    "docs/benchmarks.md": {
        "attention": attention.by_shape,
        "plans": attention.plans,
        "runs": attention.runs,
        "first": libraries.first,
        "libraries": libraries.best_library,
        "speed-ups": libraries.speedups,
        "not-right": libraries.not_right,
        "rates": extension.rates,
        "costs": extension.costs,
        "regions": models.regions,
        "steps": models.steps,
        "lost-ranks": extension.lost_ranks,
        "endurance": extension.endurance,
        "pictures": extension.pictures,
    },
}
TABLES = f"{RESULTS}/README.md"  # generated as a whole


def tables(folder: Path) -> str:
    """docs/results/README.md: every row of every file of the benchmark."""
    return markdown([(path.stem, read(path)) for path in folder.glob("*.json")])


def write(root: Path) -> None:
    """Make every page of ``root`` anew. Raises ConfigError for a page or file that cannot be read so."""
    files = Files(root / RESULTS)
    made = {root / TABLES: tables(files.folder)}
    for page, parts in PAGES.items():
        made[root / page] = fill((root / page).read_text(), parts, files)
    for path, text in made.items():
        path.write_text(text)


def outdated(root: Path) -> list[str]:
    """Names of what differs from the files: a part and its page, or a page. Raises ConfigError as ``write`` does."""
    files = Files(root / RESULTS)
    found = [
        f"{name} of {page}" for page, parts in PAGES.items() for name in stale((root / page).read_text(), parts, files)
    ]
    return found + ([TABLES] if (root / TABLES).read_text() != tables(files.folder) else [])


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.fast_cp_frameworks.pages", description=__doc__, allow_abbrev=False
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--write", action="store_true", help="make the parts anew")
    asked.add_argument("--check", action="store_true", help="compare only; exit 1 where a part is out of date")
    try:
        if parser.parse_args(arguments).write:
            write(root)
            return ExitCode.RIGHT
        found = outdated(root)
    except CPError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if found:
        print(f"error: out of date: {', '.join(found)}; run: make results", file=sys.stderr)
        return ExitCode.CHECK_FAILED
    return ExitCode.RIGHT


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
