"""Write docs/api.md from the docstrings of the public names, without importing what they belong to.

python tools/api_docs.py           write it
python tools/api_docs.py --check   exit with 1 where it differs
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
CP = "chitu_diffusion/parallel/cp"
ULYSSES = "csrc/python/fast_ulysses"
MADE_BY_OTHERS = ("FastCP", "FastCPHandle", "Processor")  # their constructors are not called by users
SCHEMA = re.compile(r'\{("(?:[^"\\]|\\.)*"(?:\s*"(?:[^"\\]|\\.)*")*)')

INTRODUCTION = """\
# Python API

Written from the docstrings by `python tools/api_docs.py`; a test compares. Shapes: B batch, S tokens, T text rows, H
query heads, Hk key and value heads, D head dimension, C channels. What is not on this page may change without a word.
"""


@dataclass(frozen=True)
class Part:
    """One section: a title, some words, and names by the file that defines them."""

    title: str
    words: str
    names: tuple[tuple[str, tuple[str, ...]], ...]


PARTS = (
    Part(
        "Attention",
        "One call on every rank, over a session.",
        (
            (f"{CP}/attention.py", ("cp_attention",)),
            (f"{CP}/transport.py", ("Text",)),
            (f"{CP}/session.py", ("CPSession",)),
            (f"{CP}/config.py", ("CPConfig", "Choice", "Rejected")),
        ),
    ),
    Part(
        "The fast transports",
        'A session with `backend="fast"` starts them by itself; `init_fast_cp` sets the size of the memory.',
        ((f"{CP}/fast/runtime.py", ("init_fast_cp", "FastCP")),),
    ),
    Part(
        "A diffusers pipeline",
        "[How it is used](../chitu_diffusion/parallel/cp/fast/README.md).",
        ((f"{CP}/fast/wrapper.py", ("enable_fast_cp", "FastCPHandle")),),
    ),
    Part(
        "Adapters",
        "[How to write one](adding_a_model.md).",
        (
            (f"{CP}/fast/adapters/wan.py", ("WanAdapter",)),
            (f"{CP}/fast/adapters/qwen_image.py", ("QwenImageAdapter",)),
            (f"{CP}/fast/adapters/z_image.py", ("ZImageAdapter",)),
            (f"{CP}/fast/adapters/base.py", ("Adapter", "Processor")),
            (f"{CP}/fast/adapters/region.py", ("Stream", "RegionCall")),
            (f"{CP}/fast/norm_rope.py", ("Rope", "rope_from_real", "rope_from_complex")),
        ),
    ),
    Part(
        "Errors and exit codes",
        "Every error of ours is a `CPError`; a command ends with the `exit_code` of the one that ended it.",
        (
            (
                f"{CP}/errors.py",
                ("CPError", "ConfigError", "InputError", "UnavailableError", "DisagreementError", "ExitCode"),
            ),
        ),
    ),
    Part(
        "CuTe",
        "[Where it is taken from](cute.md).",
        ((f"{CP}/fast/attention/cute_load.py", ("load_cute_flash_attn_fwd",)),),
    ),
    Part(
        "The extension, with checked arguments",
        "`import fast_ulysses` (laid over upstream's package: `fast_ulysses.fast_cp`). "
        "[How an exchange works](../csrc/README.md).",
        (
            (
                f"{ULYSSES}/lifetime.py",
                (
                    "device_info",
                    "unique_id",
                    "init",
                    "finalize",
                    "check",
                    "rank_and_world",
                    "forget",
                    "managed_capture",
                    "remove_waits",
                ),
            ),
            (f"{ULYSSES}/library.py", ("library_path",)),
            (f"{ULYSSES}/split.py", ("Split", "TextRows", "chunk_heads")),
            (
                f"{ULYSSES}/operators.py",
                (
                    "all_gather_kv_4d",
                    "all_to_all_qkv_4d",
                    "all_to_all_out_4d",
                    "exchange_start",
                    "exchange_send",
                    "exchange_wait",
                    "exchange_ticket",
                    "exchange_done",
                    "return_start",
                    "kv_projection_prepare",
                    "kv_projection_send_ce_group",
                    "projection_sync_prepare",
                    "projection_sync",
                    "projection_ticket",
                ),
            ),
        ),
    ),
)


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for part in PARTS:
        parts.append(f"## {part.title}\n\n{part.words}\n")
        for file, names in part.names:
            defined = {node.name: node for node in _definitions(ROOT / file)}
            parts += [_entry(_module(file), defined[name]) for name in names]
    parts.append(_operators())
    return "\n".join(parts)


def _definitions(path: Path) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node


def _module(file: str) -> str:
    return "fast_ulysses" if file.startswith(ULYSSES) else file.removesuffix(".py").replace("/", ".")


def _entry(module: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """A name with its signature and docstring; of a class its public members too."""
    code = [f"from {module} import {node.name}", "", *_signatures(node)]
    members = list(_members(node)) if isinstance(node, ast.ClassDef) else []
    lines = [f"### `{node.name}`", "", "```", *code, "```", "", _prose(ast.get_docstring(node) or "")]
    lines += [f"* {member}" for member in members]
    return "\n".join(lines).rstrip() + "\n"


def _signatures(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [_signature(node.name, node)]
    made = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
    fields = [
        f for f in node.body if isinstance(f, ast.AnnAssign) and not ast.unparse(f.annotation).startswith("Class")
    ]
    values = [f for f in node.body if isinstance(f, ast.Assign)]
    bases = ", ".join(map(ast.unparse, node.bases))
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    if made:
        return [head] if node.name in MADE_BY_OTHERS else [_signature(node.name, made[0])]
    shown = [f"    {ast.unparse(field)}" for field in (*fields, *values) if "init=False" not in ast.unparse(field)]
    return [head + ":" * bool(shown), *shown]


def _signature(name: str, node: ast.FunctionDef, width: int = 100) -> str:
    """As it is called: without self, one argument a line where one line is too short."""
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments = ast.arguments(**{**vars(arguments), "args": arguments.args[1:]})
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    listed = re.sub(r"(?<=[\w\])])=(?=\S)", " = ", ast.unparse(arguments))
    if len(whole := f"{name}({listed}){returns}") <= width:
        return whole
    parts = re.split(r", (?![^\[(]*[\])])", listed)
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _members(node: ast.ClassDef) -> Iterator[str]:
    for member in node.body:
        if not isinstance(member, ast.FunctionDef) or member.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator) for decorator in member.decorator_list}
        told = " ".join(_prose(ast.get_docstring(member) or "").split())
        if not told.startswith("See `"):  # another class says it
            shown = member.name if "property" in decorators else _signature(member.name, member, width=1000)
            yield f"`{shown}`: {told}"


def _prose(docstring: str) -> str:
    """A docstring as Markdown: the lists of Google's style become lists."""
    text = docstring.replace("``", "`")
    text = re.sub(r"^(Args|Returns|Raises):$", r"\1:\n", text, flags=re.MULTILINE)
    text = re.sub(r"^    (\w[\w, ]*): ", r"* `\1`: ", text, flags=re.MULTILINE)
    return re.sub(r"^ {4,}", "  ", text, flags=re.MULTILINE).strip() + "\n"


def _operators() -> str:
    """The schemas of all operators, by the file that registers them."""
    lines = [
        "## Operators",
        "",
        "`torch.ops.fast_ulysses.…`, after `import fast_ulysses`; the wrappers above check more.",
        "",
    ]
    lines.append("```")
    for path in sorted((ROOT / "csrc/ops").glob("*.cpp")):
        for literal in SCHEMA.findall(path.read_text()):
            text = "".join(ast.literal_eval(part) for part in re.findall(r'"(?:[^"\\]|\\.)*"', literal))
            if " -> " in text:
                lines.append(text)
    return "\n".join([*lines, "```", ""])


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the page differs, and write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() == page():
        return 0
    print("docs/api.md is not what the docstrings say; run: python tools/api_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
