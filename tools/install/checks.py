"""What must be true of a built wheel, each a check of its own; the parsers take a program's output as text."""

import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.install.environment import Environment
from tools.install.errors import InstallError
from tools.install.process import ask, failure, surroundings

OPERATORS = (
    "fast_cp_device_info",
    "all_gather_kv_4d",
    "kv_projection_prepare",
    "kv_projection_send_ce_group",
    "projection_sync_prepare",
    "projection_sync",
    "projection_ticket",
)
LIMIT_BYTES = 3_000_000
_LIBRARY_NEEDED = "libtorch_cpu.so"
_LIBRARY_FORBIDDEN = ("libtorch_cuda.so", "libtorch_python.so", "libc10.so", "libc10_cuda.so", "libnvshmem_host.so")

# A length-prefixed name of a namespace inside a mangled symbol: torch's C++ symbols change with every release.
_UNSTABLE = re.compile(r"^_Z.*?(?<!\d)(?:3c10|2at|5torch|6caffe2)(?=[A-Z\d])")
_IMPORT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
import fast_ulysses
missing = [name for name in sys.argv[2:] if not hasattr(torch.ops.fast_ulysses, name)]
print(json.dumps({"file": fast_ulysses.__file__, "torch": torch.__version__, "missing": missing}))
"""


@dataclass(frozen=True)
class Linkage:
    """What a shared library asks of others: library names, and symbols without their version."""

    needed: tuple[str, ...]
    undefined: tuple[str, ...]


def parse_images(listing: str) -> tuple[str, ...]:
    """The architectures of the native images in ``cuobjdump --list-elf`` output: ``sm_90a``, each once."""
    return tuple(sorted(set(re.findall(r"\.(sm_\d+[a-z]?)\.cubin\s*$", listing, re.MULTILINE))))


def check_images(images: Iterable[str], architectures: Sequence[int], name: str) -> None:
    """Exactly the asked architectures, whatever their suffix; PTX is not counted."""
    found = {int(re.sub(r"\D", "", image)) for image in images}
    if found != set(architectures):
        listed = ", ".join(sorted(images)) or "none"
        asked = ", ".join(map(str, architectures))
        raise InstallError(
            f"{name} should hold native images for SM {asked}, and holds {listed} (PTX is not counted); "
            "remove the build folder and build again"
        )


def parse_linkage(readelf: str) -> Linkage:
    """What ``readelf --wide --dynamic --dyn-syms`` says."""
    needed = re.findall(r"\(NEEDED\).*\[([^\]]+)\]", readelf)
    undefined = re.findall(r"^\s*\d+:[ \t].*[ \t]UND[ \t]+(\S+)", readelf, re.MULTILINE)
    return Linkage(tuple(needed), tuple(sorted({name.split("@")[0] for name in undefined})))


def check_linkage(linkage: Linkage) -> None:
    """Only the stable symbols of torch, found through libtorch_cpu.so and nothing that ties to one build of torch."""
    problems = []
    unstable = [name for name in linkage.undefined if _UNSTABLE.match(name)]
    if unstable:
        shown = ", ".join(unstable[:3]) + (f" and {len(unstable) - 3} more" if len(unstable) > 3 else "")
        problems.append(f"it needs C++ symbols of one torch release ({shown})")
    if _LIBRARY_NEEDED not in linkage.needed:
        problems.append(f"it does not name {_LIBRARY_NEEDED}, so torch's symbols would not be found")
    tied = [name for name in linkage.needed if name.startswith(_LIBRARY_FORBIDDEN)]
    if tied:
        problems.append(f"it needs {', '.join(tied)}, which ties it to one build")
    if problems:
        raise InstallError(f"the library is not on the stable ABI: {'; '.join(problems)}; correct csrc/CMakeLists.txt")


def check_size(size: int, what: str) -> None:
    """A wheel small enough to send around."""
    if size > LIMIT_BYTES:
        raise InstallError(
            f"{what} is {size / 1e6:.1f} MB, and at most {LIMIT_BYTES / 1e6:.0f} MB are allowed; "
            "strip the library, or build fewer architectures"
        )


def read_images(cuobjdump: Path, library: Path) -> tuple[str, ...]:
    """The native images of ``library``."""
    command = [str(cuobjdump), "--list-elf", str(library)]
    ended = ask(command, limit_s=120)
    if ended.code != 0 and "does not contain device code" not in ended.stdout + ended.stderr:
        raise InstallError(failure(command, ended.code, ended.stdout + ended.stderr))
    return parse_images(ended.stdout)


def read_linkage(readelf: Path, library: Path) -> Linkage:
    """What ``library`` asks of others."""
    command = [str(readelf), "--wide", "--dynamic", "--dyn-syms", str(library)]
    ended = ask(command, limit_s=120)
    if ended.code != 0:
        raise InstallError(failure(command, ended.code, ended.stdout + ended.stderr))
    return parse_linkage(ended.stdout)


def check_import(environment: Environment, files: dict[str, bytes]) -> str:
    """Import the wheel's files in a fresh process beside the environment's torch; return torch's version.

    The process has no other copy of the package before this one on its path, and looks for every operator.
    """
    with tempfile.TemporaryDirectory(prefix="fast-cp-import-") as folder:
        for name, data in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        command = [str(environment.python), "-P", "-B", "-c", _IMPORT, folder, *OPERATORS]
        ended = ask(command, limit_s=300, env=surroundings({"CUDA_VISIBLE_DEVICES": ""}), cwd=Path(folder))
        if ended.code != 0:
            shown = [*command[:3], "-c", "import torch, fast_ulysses"]
            output = ended.stderr or ended.stdout
            raise InstallError(f"the built wheel does not import: {failure(shown, ended.code, output)}")
        said = json.loads(ended.stdout.splitlines()[-1])
        if not Path(said["file"]).is_relative_to(folder):
            raise InstallError(f"another fast_ulysses is imported before the built one: {said['file']}; uninstall it")
    if said["missing"]:
        raise InstallError(
            f"the built wheel imports, but does not register {', '.join(said['missing'])}; correct csrc/ops"
        )
    return str(said["torch"])
