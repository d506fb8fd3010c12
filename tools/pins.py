"""Keep the exact version of every package in pyproject.toml, where a lock file may not be committed.

``uv.lock`` records the addresses of package registries, so it is generated and ignored by git. What is
committed instead is ``[tool.uv] constraint-dependencies``: one ``name==version`` for each package of the
resolution. ``python tools/pins.py [FOLDER]`` writes that list from ``uv.lock``; ``--check`` compares the two and
exits with 1 when a sync resolved to anything but the pins.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"constraint-dependencies = \[\n.*?^\]\n", re.DOTALL | re.MULTILINE)


def locked_pins(lock_text: str) -> list[str]:
    """``name==version`` of every package that the lock took from an index, sorted."""
    packages = tomllib.loads(lock_text)["package"]
    return sorted(f"{p['name']}=={p['version']}" for p in packages if "registry" in p["source"])


def declared_pins(pyproject_text: str) -> list[str]:
    """The committed list."""
    return sorted(tomllib.loads(pyproject_text)["tool"]["uv"].get("constraint-dependencies", []))


def with_pins(pyproject_text: str, pins: list[str]) -> str:
    """The text of pyproject.toml with its list replaced by ``pins``."""
    body = "".join(f'    "{pin}",\n' for pin in pins)
    text, found = BLOCK.subn(f"constraint-dependencies = [\n{body}]\n", pyproject_text)
    if found != 1:
        raise SystemExit("pins: pyproject.toml has no single [tool.uv] constraint-dependencies list to replace")
    return text


def differences(declared: list[str], locked: list[str]) -> list[str]:
    """One line for each pin that only one side has."""
    missing = [f"resolved but not pinned: {pin}" for pin in sorted(set(locked) - set(declared))]
    extra = [f"pinned but not resolved: {pin}" for pin in sorted(set(declared) - set(locked))]
    return missing + extra


def main() -> int:
    """Write the pins, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT, metavar="FOLDER", help="default: the repository")
    asked = parser.parse_args()
    check, lock, pyproject = asked.check, asked.folder / "uv.lock", asked.folder / "pyproject.toml"
    if not lock.is_file():
        print(f"pins: there is no {lock}; run `uv lock` in its folder first", file=sys.stderr)
        return 1
    locked, text = locked_pins(lock.read_text()), pyproject.read_text()
    if not check:
        pyproject.write_text(with_pins(text, locked))
        print(f"pins: {len(locked)} versions written to {pyproject}")
        return 0
    problems = differences(declared_pins(text), locked)
    print("\n".join(problems) if problems else f"pins: {len(locked)} versions as pinned")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
