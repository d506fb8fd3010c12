"""What was measured is not typed by hand: the pages' own words hold no number with a unit, but for listed ones."""

import re
from pathlib import Path

import pytest

from tools.benchmarks.fast_cp_frameworks.pages.__main__ import PAGES
from tools.benchmarks.fast_cp_frameworks.pages.fill import GENERATED

ROOT = Path(__file__).resolve().parents[2]
VALUE = r"\d[\d.,]*(?: ?(?:to|and|or|–|-|/) ?\d[\d.,]*)*"
UNIT = r"(?:ms|µs|us|s|seconds?|minutes?|[GMk]B(?:/s)?|TFLOP/s|bytes|%|per cent|×|times)"
NUMBER = re.compile(rf"(?<![\w.]){VALUE} ?{UNIT}(?![\w²])")
# by page: a number that no file of docs/results has, and why it may stand in its words
ALLOWED: dict[str, dict[str, str]] = {"README.md": {}, "docs/benchmarks.md": {}}


def by_hand(text: str) -> str:
    """A page without its generated parts, its code, and where its links lead; on one line."""
    text = GENERATED.sub("", text)
    text = re.sub(r"^( *)(```+).*?^\1\2\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?:(?<=\n\n)|\A)(?:    .*\n)+", "", text)
    text = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


def numbers(text: str) -> list[str]:
    """Every number with a unit in a page's own words."""
    return NUMBER.findall(by_hand(text))


@pytest.mark.parametrize("page", PAGES)
def test_the_words_of_a_page_hold_no_number_that_was_measured(page: str) -> None:
    found = numbers((ROOT / page).read_text())
    unknown = [number for number in found if number not in ALLOWED[page]]
    assert not unknown, "generate it from its file (pages/__main__.py), or say here why no file has it"
    assert set(ALLOWED[page]) <= set(found), "no longer on the page: take it off the list"


@pytest.mark.parametrize(
    "written",
    [
        "8 ms",
        "0.5ms",
        "1.3 to 1.7 times",
        "1.3\nto 1.7\ntimes",
        "97 %",
        "355 GB/s",
        "2.7 µs",
        "1.48×",
        "2,000 MB",
        "5 s",
    ],
)
def test_a_number_with_a_unit_is_seen(written: str) -> None:
    assert numbers(f"It takes {written}.") == [" ".join(written.split())]


@pytest.mark.parametrize(
    "written",
    [
        "`8 ms`",
        "\n\n    sleep 8 s\n",
        "\n```\n8 ms\n```\n",
        "[a](b 8 ms c)",
        "<!-- begin: x -->\n8 ms\n<!-- end: x -->",
        "24 heads of 128",
        "Python 3.12, torch 2.10",
        "1328² tokens",
        "H40 S4096",
    ],
)
def test_code_generated_parts_and_numbers_without_a_unit_are_not(written: str) -> None:
    assert numbers(f"It is\n{written}\n and so on.") == []
