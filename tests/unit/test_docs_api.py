"""docs/api.md is what the docstrings say, and has every public name of the chosen modules."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chitu_diffusion.parallel.cp import config, errors
from chitu_diffusion.parallel.cp.fast import extension
from chitu_diffusion.parallel.cp.fast.adapters.table import ADAPTERS
from tools import api_docs

ROOT = Path(__file__).resolve().parents[2]
PAGE = api_docs.PAGE.read_text()
LISTED = set(re.findall(r"^from (\S+) import (\w+)$", PAGE, re.MULTILINE))


def test_the_page_is_what_the_docstrings_say() -> None:
    assert api_docs.page() == PAGE, "run: python tools/api_docs.py"


@pytest.mark.parametrize(("module", "name"), sorted(pair for pair in LISTED if pair[0] != "fast_ulysses"))
def test_every_name_is_there_to_be_imported(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_every_public_name_of_the_extension_is_listed() -> None:
    source = ast.parse((ROOT / "csrc/python/fast_ulysses/__init__.py").read_text())
    (everything,) = [text for node in source.body if (text := ast.unparse(node)).startswith("__all__ = ")]
    names = set(ast.literal_eval(everything.partition(" = ")[2])) - {"__version__"}
    assert {name for module, name in LISTED if module == "fast_ulysses"} == names
    assert all(f"\n{operator}(" in PAGE for operator in extension.OPERATORS)


def test_every_error_adapter_and_setting_is_listed() -> None:
    names = {name for _, name in LISTED}
    assert names >= {name for name, value in vars(errors).items() if isinstance(value, type) and name != "IntEnum"}
    assert names >= {adapter.__name__ for adapter in ADAPTERS.values()}
    for field in config.CPConfig.__dataclass_fields__:
        assert f"    {field}: " in PAGE


def test_a_page_that_differs_is_seen(tmp_path: Path) -> None:
    """By the script, which CI and people call."""
    copy = tmp_path / "tools" / "api_docs.py"
    for folder in ("tools", "docs", "chitu_diffusion", "csrc"):
        (tmp_path / folder).mkdir() if folder in ("tools", "docs") else (tmp_path / folder).symlink_to(ROOT / folder)
    copy.write_text(Path(api_docs.__file__).read_text())
    codes = []
    for text in (PAGE, PAGE.replace("seq_len", "seqlen", 1)):
        (tmp_path / "docs/api.md").write_text(text)
        ended = subprocess.run([sys.executable, copy, "--check"], capture_output=True, text=True, check=False)
        codes.append(ended.returncode)
    assert codes == [0, 1]
    assert ended.stderr == "docs/api.md is not what the docstrings say; run: python tools/api_docs.py\n"
