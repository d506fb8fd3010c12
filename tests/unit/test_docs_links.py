"""Every relative link of every page leads to a file, and to a heading of it."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")


def pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def prose(text: str) -> str:
    """A page without its code, in which brackets are no links and # no heading."""
    text = re.sub(r"^( *)(```+).*?^\1\2\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page: lower case, without punctuation, spaces as hyphens."""
    found: dict[str, int] = {}
    made = set()
    for heading in re.findall(r"^#{1,6} +(.+?)\s*$", without_fences(page.read_text()), re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        times = found[anchor] = found.get(anchor, -1) + 1
        made.add(f"{anchor}-{times}" if times else anchor)
    return made


def without_fences(text: str) -> str:
    return re.sub(r"^( *)(```+).*?^\1\2\s*$", "", text, flags=re.MULTILINE | re.DOTALL)


def problem(page: Path, target: str) -> str | None:
    """Why a link of ``page`` leads nowhere, or None."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists() or not file.is_relative_to(ROOT):
        return f"there is no {path}"
    if anchor and file.suffix == ".md" and anchor not in anchors(file):
        return f"{file.relative_to(ROOT)} has no heading #{anchor}"
    return None


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = LINK.findall(prose(page.read_text()))
    broken = {target: told for target in targets if (told := problem(page, target))}
    assert not broken


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    page, other = tmp_path / "a.md", tmp_path / "b.md"
    other.write_text("# One, `two`\n\n```\n# no heading\n```\n## A [link](a.md)\n## One two\n")
    page.write_text("[a](b.md) `[b](nothing)` [c](b.md#one-two-1)\n```\n[d](nothing)\n```\n")
    assert LINK.findall(prose(page.read_text())) == ["b.md", "b.md#one-two-1"]
    for right in ("b.md", "b.md#one-two", "b.md#one-two-1", "b.md#a-link", "https://x.org/y", "mailto:a@b"):
        assert problem(page, right) is None
    for wrong in ("c.md", "b.md#three", "b.md#no-heading", "#one", "../x.md"):
        assert problem(page, wrong), wrong
