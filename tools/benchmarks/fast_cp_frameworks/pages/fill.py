"""Texts between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``."""

import re
from collections.abc import Callable, Mapping

from chitu_diffusion.parallel.cp.errors import ConfigError
from tools.benchmarks.fast_cp_frameworks.pages.files import Files

Part = Callable[[Files], str]
GENERATED = re.compile(
    r"^<!-- begin: (?P<name>\S+) -->\n(?P<text>.*?)^<!-- end: (?P=name) -->$", re.MULTILINE | re.DOTALL
)


def fill(text: str, parts: Mapping[str, Part], files: Files) -> str:
    """``text`` with every part made anew. Raises ConfigError where a part has no place in it, or a place no part."""
    marked = [found["name"] for found in GENERATED.finditer(text)]
    if sorted(marked) != sorted(parts):
        raise ConfigError(
            f"the page has the parts {', '.join(marked) or 'none'}, and the table of pages has "
            f"{', '.join(parts) or 'none'}; "
            "each needs one pair of comments, <!-- begin: NAME --> and <!-- end: NAME -->"
        )
    return GENERATED.sub(lambda found: _around(found["name"], parts[found["name"]](files)), text)


def stale(text: str, parts: Mapping[str, Part], files: Files) -> list[str]:
    """Names of the parts that are not what the files say. Raises ConfigError as ``fill`` does."""
    fresh = {found["name"]: found["text"] for found in GENERATED.finditer(fill(text, parts, files))}
    return [found["name"] for found in GENERATED.finditer(text) if found["text"] != fresh[found["name"]]]


def _around(name: str, made: str) -> str:
    return f"<!-- begin: {name} -->\n\n{made}\n\n<!-- end: {name} -->"
