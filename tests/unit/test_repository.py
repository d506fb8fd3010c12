"""Rules that the whole tree keeps: layers, pins, no address or path of one machine."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools.pins import declared_pins, differences, locked_pins, with_pins

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "chitu_diffusion"
COMPARISON = "tools/comparison/fast_ulysses"
CP = "chitu_diffusion.parallel.cp"
FLOOR = f"{CP}.fast.attention"

# Lowest first (docs/design.md); a module imports only from its own layer and those before it. The longest prefix names
# a module's layer. `planner` and `transport` never import each other.
LAYERS = [
    [f"{CP}.errors", f"{CP}.interrupts"],
    [f"{CP}.config"],
    [f"{CP}.environment"],
    [f"{CP}.layout"],
    [f"{CP}.fast.device", f"{CP}.fast.profiles"],
    [FLOOR],
    [f"{CP}.fast.attention.planner"],
    [f"{CP}.fast.norm_rope", f"{CP}.fast.norm_rope_triton"],
    [f"{CP}.transport", f"{CP}.control", f"{CP}.blocks"],
    [
        f"{CP}.collective",
        f"{CP}.signature",
        f"{CP}.fast.extension",
        f"{CP}.fast.graph_pool",
        f"{CP}.fast.runtime",
        f"{CP}.fast.transport",
        f"{CP}.fast.way_back",
    ],
    [f"{CP}.call", f"{CP}.plan_cache", f"{CP}.rounds"],
    [f"{CP}.recorder"],
    [f"{CP}.graphs"],
    [f"{CP}.tuning"],
    [f"{CP}.planning"],
    [f"{CP}.session"],
    [f"{CP}.compiled"],
    [f"{CP}.attention"],
    [f"{CP}.fast.adapters"],
    [f"{CP}.fast.backend"],
    [f"{CP}.fast.wrapper"],
    [f"{CP}.fast.test"],
    ["chitu_diffusion.parallel.selection"],
    ["chitu_diffusion.parallel.groups"],
    ["chitu_diffusion.models"],
    ["chitu_diffusion.serving"],
    ["chitu_diffusion.commands"],
    ["chitu_diffusion.cli"],
]
RANK = {prefix: level for level, prefixes in enumerate(LAYERS) for prefix in prefixes}
PURE_FLOOR = (f"{CP}.errors", f"{CP}.config", f"{CP}.layout", FLOOR)


def modules() -> dict[str, Path]:
    """Every module of the package that is more than a docstring."""
    files = {path: path.relative_to(ROOT).with_suffix("") for path in PACKAGE.rglob("*.py")}
    return {".".join(name.parts): path for path, name in files.items() if path.name != "__init__.py"}


def imports(path: Path) -> set[str]:
    """Modules of the package that ``path`` imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith(("chitu_diffusion.", "tools."))}


def layer(module: str) -> int | None:
    prefixes = [prefix for prefix in RANK if module == prefix or module.startswith(prefix + ".")]
    return RANK[max(prefixes, key=len)] if prefixes else None


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_imports_only_from_layers_below(module: str) -> None:
    mine = layer(module)
    assert mine is not None, f"{module} has no layer in this test: add it where docs/design.md puts it"
    in_floor = module.startswith(FLOOR)
    for other in imports(modules()[module]):
        assert not other.startswith("tools."), f"{module} imports {other}, which sits on top"
        if in_floor:
            assert other.startswith(PURE_FLOOR) or other in (CP, f"{CP}.fast"), f"{module} imports {other}"
        elif (theirs := layer(other)) is not None:
            assert theirs <= mine, f"{module} imports {other}, which is a layer above it"


def test_planner_and_transport_do_not_know_each_other() -> None:
    found = modules()
    assert not any("transport" in name for name in imports(found[f"{FLOOR}.planner"]))
    assert not any("planner" in name for name in imports(found[f"{CP}.transport"]))


def test_the_installer_imports_nothing_of_the_package() -> None:
    for path in (ROOT / "tools/install").rglob("*.py"):
        assert not any(name.startswith("chitu_diffusion") for name in imports(path)), path


def test_every_package_says_what_it_is_for() -> None:
    for init in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(init.read_text())), init


def test_importing_the_core_creates_no_device_and_no_process_group() -> None:
    code = (
        f"import {CP}.attention, torch, torch.distributed as dist; "
        "assert not torch.cuda.is_initialized() and not dist.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_pins_read_write_and_compare() -> None:
    lock = """
[[package]]
name = "b"
version = "2"
source = { registry = "somewhere" }
[[package]]
name = "a"
version = "1.5"
source = { registry = "somewhere" }
[[package]]
name = "me"
version = "0"
source = { editable = "." }
"""
    project = '[tool.uv]\nconstraint-dependencies = [\n    "a==1",\n]\n'
    pins = locked_pins(lock)
    assert pins == ["a==1.5", "b==2"]
    assert declared_pins(with_pins(project, pins)) == pins
    assert differences(declared_pins(project), pins) == [
        "resolved but not pinned: a==1.5",
        "resolved but not pinned: b==2",
        "pinned but not resolved: a==1",
    ]


def test_the_pins_of_a_named_folder_are_written_and_checked(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.uv]\nconstraint-dependencies = [\n    "a==1",\n]\n')
    (tmp_path / "uv.lock").write_text('[[package]]\nname = "a"\nversion = "2"\nsource = { registry = "somewhere" }\n')
    pins = [sys.executable, ROOT / "tools/pins.py", tmp_path]
    assert subprocess.run([*pins, "--check"], capture_output=True, check=False, timeout=30).returncode == 1
    subprocess.run(pins, capture_output=True, check=True, timeout=30)
    assert declared_pins((tmp_path / "pyproject.toml").read_text()) == ["a==2"]
    assert subprocess.run([*pins, "--check"], capture_output=True, check=False, timeout=30).returncode == 0


def asked_for(project: dict[str, Any]) -> set[str]:
    """Names of everything that a pyproject.toml may have installed."""
    table, groups = project["project"], project.get("dependency-groups", {})
    lists = [table["dependencies"], *table.get("optional-dependencies", {}).values(), *groups.values()]
    lists.append(project["tool"]["uv"]["constraint-dependencies"])
    return {re.split(r"[^A-Za-z0-9_.-]", requirement)[0] for listed in lists for requirement in listed}


def test_upstreams_package_is_asked_for_by_a_project_of_its_own_alone() -> None:
    """Every plain sync would resolve it, and the wheel of the extension has the same name."""
    ours, theirs = (tomllib.loads((ROOT / folder / "pyproject.toml").read_text()) for folder in ("", COMPARISON))
    assert "fast-ulysses" not in asked_for(ours)
    assert "fast-ulysses" in asked_for(theirs)
    pins = theirs["tool"]["uv"]["constraint-dependencies"]
    assert {pin.split("==")[0] for pin in pins} >= {"fast-ulysses", "torch", "triton"}
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", pin) for pin in pins)


def committed_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    return [ROOT / name for name in listed.stdout.decode().splitlines() if (ROOT / name).is_file()]


def test_no_file_names_a_package_registry_or_a_path_of_one_machine() -> None:
    address = re.compile(
        r"https?://[^ \"']+(/simple|\.whl|\.tgz|\.deb)|(^|[^A-Za-z0-9_.])/(wor" + r"k|roo" + r"t|far" + r"m)/"
    )
    for path in committed_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            assert not address.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
