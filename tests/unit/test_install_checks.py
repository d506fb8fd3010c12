"""What a built library must be, judged from the text of the programs that read it."""

import io

import pytest

from tools.install.checks import Linkage, check_images, check_linkage, check_size, parse_images, parse_linkage
from tools.install.errors import InstallError
from tools.install.process import run
from tools.install.progress import Progress, subject

LISTING = """
ELF file    1: libfast_cp.1.sm_90a.cubin
ELF file    2: libfast_cp.2.sm_120.cubin
ELF file    3: libfast_cp.3.sm_90a.cubin
PTX file    1: libfast_cp.1.sm_100.ptx
"""
READELF = """
Dynamic section at offset 0x1000 contains 2 entries:
  Tag                Type           Name/Value
 0x0000000000000001 (NEEDED)       Shared library: [libtorch_cpu.so]
 0x0000000000000001 (NEEDED)       Shared library: [libc.so.6]
 0x000000000000000e (SONAME)       Library soname: [libfast_cp.so]

Symbol table '.dynsym' contains 5 entries:
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     0: 0000000000000000     0 NOTYPE  LOCAL  DEFAULT  UND
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND aoti_torch_get_device_type
     2: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND malloc@GLIBC_2.2.5 (2)
     3: 0000000000001000     9 FUNC    GLOBAL DEFAULT   12 _ZN2at5emptyEv
"""
GOOD = Linkage(("libtorch_cpu.so", "libdl.so.2", "libstdc++.so.6"), ("aoti_torch_get_device_type", "malloc"))


def test_native_images_are_read_and_ptx_is_not_counted() -> None:
    assert parse_images(LISTING) == ("sm_120", "sm_90a")
    check_images(("sm_120", "sm_90a"), (90, 120), "x")


@pytest.mark.parametrize("images", [(), ("sm_90a",), ("sm_90a", "sm_100", "sm_120")])
def test_fewer_and_more_images_than_asked_are_wrong(images: tuple[str, ...]) -> None:
    with pytest.raises(InstallError, match="native images for SM 90, 120"):
        check_images(images, (90, 120), "x")


def test_only_undefined_symbols_count_and_lose_their_version() -> None:
    assert parse_linkage(READELF) == Linkage(("libtorch_cpu.so", "libc.so.6"), ("aoti_torch_get_device_type", "malloc"))


@pytest.mark.parametrize(
    "symbol",
    ["_ZN3c1010TensorImpl4sizeEv", "_ZNK2at6Tensor3addEv", "_ZN5torch7LibraryC1Ev", "_ZTIN3c105ErrorE"],
)
def test_a_symbol_of_torchs_cpp_interface_is_unstable(symbol: str) -> None:
    with pytest.raises(InstallError, match="not on the stable ABI"):
        check_linkage(Linkage(GOOD.needed, (*GOOD.undefined, symbol)))


@pytest.mark.parametrize("symbol", ["_ZNSt6vectorIiE4sizeEv", "_ZN7flat12at5emptyE", "torch_library_impl", "atexit"])
def test_other_symbols_are_no_matter(symbol: str) -> None:
    check_linkage(Linkage(GOOD.needed, (*GOOD.undefined, symbol)))


def test_libtorch_cpu_has_to_be_named_and_nothing_that_ties_to_a_build() -> None:
    with pytest.raises(InstallError, match=r"does not name libtorch_cpu\.so"):
        check_linkage(Linkage(("libdl.so.2",), GOOD.undefined))
    for name in ("libtorch_cuda.so", "libtorch_python.so", "libc10.so", "libnvshmem_host.so.3"):
        with pytest.raises(InstallError, match=name):
            check_linkage(Linkage((*GOOD.needed, name), GOOD.undefined))


def test_a_wheel_has_at_most_three_megabytes() -> None:
    check_size(3_000_000, "the wheel")
    with pytest.raises(InstallError, match=r"the wheel is 3\.1 MB"):
        check_size(3_100_000, "the wheel")


def test_a_failed_command_is_one_message_with_command_code_and_output() -> None:
    progress = Progress(io.StringIO())
    script = "echo '[1/9] compiling a.cu'; echo 'a.cu(3): error: no'; exit 7"
    with pytest.raises(InstallError) as failed:
        run(["sh", "-c", script], on_line=progress.compiler_line)
    said = str(failed.value)
    assert "ended with code 7" in said
    assert "sh -c" in said
    assert said.endswith("\na.cu(3): error: no")
    assert said.count("[1/9]") == 1, "progress is in the command's text alone"
    with pytest.raises(InstallError, match="ended with code 127"):
        run(["there-is-no-such-program"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_stays_in_its_line_in_a_terminal_and_is_plain_lines_elsewhere() -> None:
    plain, terminal = "  1/2 a.cu\n  2/2 b.cu\ndone\n", "\r  1/2 a.cu\x1b[K\r  2/2 b.cu\x1b[K\ndone\n"
    for stream, said in ((io.StringIO(), plain), (Terminal(), terminal)):
        progress = Progress(stream)
        for line in ("[1/2] compiling a.cu", "a note of the compiler", "[2/2] compiling b.cu"):
            progress.compiler_line(line)
        progress.step("done")
        assert stream.getvalue() == said


def test_the_subject_of_a_line_is_its_file() -> None:
    assert subject("Building CUDA object CMakeFiles/_C.dir/csrc/tma.cu.o") == "csrc/tma.cu"
    assert subject("compiling transfer/tma.cu") == "transfer/tma.cu"
