"""The benchmark's command line: right input becomes cases, wrong input one sentence, and neither needs torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from chitu_diffusion.parallel.cp.errors import ConfigError, CPError, ExitCode, UnavailableError
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS
from tools.benchmarks.fast_cp_frameworks import cases, chitu, launch, options, request


def parsed(line: str, output: Path | str = "outputs/x.json", **environment: str) -> options.Options:
    wanted = options.parse([*line.split(), "--output", str(output)], environment)
    wanted.request.check()
    return wanted


def test_all_combinations_of_a_shape_follow_each_other() -> None:
    wanted = parsed("--method single,nccl_agkv --sequence 7,9 --kernel sdpa,triton --heads 6 --kv-heads 3").request
    made = wanted.cases("cpu")
    assert [(c.sequence, c.kernel, c.method) for c in made[:4]] == [
        (7, "sdpa", "single"),
        (7, "sdpa", "nccl_agkv"),
        (7, "triton", "single"),
        (7, "triton", "nccl_agkv"),
    ]
    assert len(made) == 8
    assert {(c.heads, c.kv_heads, c.head_dim, c.dtype) for c in made} == {(6, 3, 128, "float32")}
    assert len({c.workload for c in made}) == 2


def test_the_fixed_command_of_the_design_is_understood() -> None:
    line = (
        "--method nccl_agkv --sequence 4096 --heads 40 --head-dim 128 --batch 1 --component e2e "
        "--warmup 3 --iterations 10 --repeats 3"
    )
    (case,) = parsed(line).request.cases("cuda")
    assert case == cases.Case("nccl_agkv", 4096, 40, 40, 128, 1, "bfloat16", "e2e", "auto")


def test_presets_and_models_have_their_shapes() -> None:
    dit = parsed("--method single --preset dit").request.cases("cuda")
    assert [(c.heads, c.head_dim, c.sequence) for c in dit] == [(40, 128, s) for s in (4096, 8192, 16384, 32760, 75600)]
    quick = parsed("--method single --preset quick").request
    assert len(quick.cases("cuda")) == len(quick.cases("cpu")) + 2
    assert max(c.sequence for c in quick.cases("cpu")) <= 2048
    heads = {"wan-1.3b": 12, "wan-14b": 40, "qwen-image": 24, "z-image": 30}
    for model, count in heads.items():
        assert {c.heads for c in parsed(f"--method single --model {model}").request.cases("cuda")} == {count}
    (one,) = parsed("--method single --model qwen-image --sequence 6889").request.cases("cuda")
    assert (one.heads, one.sequence) == (24, 6889)


def test_the_kernel_names_are_those_of_the_table() -> None:
    assert ("auto", *KERNELS) == cases.KERNEL_NAMES


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--method agkv --sequence 8", "method 'agkv' is unknown; choose one of single, nccl_agkv"),
        ("--method single --sequence 8 --component all", "component 'all' is unknown"),
        ("--method single --preset big", "preset 'big' is unknown; choose one of dit, quick"),
        ("--method single --model flux", "model 'flux' is unknown"),
        ("--method single --sequence 8 --kernel fa9", "kernel 'fa9' is unknown"),
        ("--method single --sequence 8 --dtype int8", "dtype 'int8' is unknown"),
        ("--method single,single --sequence 8", "names one twice"),
        ("--method single --sequence 0", "--sequence 0 cannot run"),
        ("--method single --sequence 8,-1", "--sequence -1 cannot run"),
        ("--method single --sequence eight", "'eight' is not a list of whole numbers"),
        ("--method single --sequence 8 --batch 0", "--batch 0 cannot run"),
        ("--method single --sequence 8 --heads 5 --kv-heads 2", "not a multiple"),
        ("--method single", "no sequence length"),
        ("--method single --preset dit --heads 3", "--preset fixes the shape, so --heads"),
        ("--method single --model z-image --head-dim 64", "--model fixes the shape, so --head-dim"),
        ("--method single,nccl_agkv --component communication --sequence 8", "leave single out"),
        ("--sequence 8", "there is nothing to run; give --method, or two plans with --compare"),
        ("--method single --sequence 8 --speed 3", "unrecognized arguments"),
    ],
)
def test_wrong_input_is_one_sentence(line: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("-", "[-]")) as error:
        parsed(line)
    assert error.value.exit_code == ExitCode.WRONG_USAGE
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["fast_agkv", "fast_ulysses", "fast_auto"])
def test_methods_without_the_extension_are_refused_by_name(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "find_spec", lambda name: None)
    with pytest.raises(
        UnavailableError, match=f"method {method} was asked for, but the CUDA extension fast_ulysses is not installed"
    ):
        parsed(f"--method single,{method} --sequence 8")


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ("--iterations 0", "--iterations 0"),
        ("--repeats 0", "--repeats 0"),
        ("--warmup -1", "--warmup -1"),
        ("--cp-size 0", "--cp-size 0"),
        ("--timeout 0", "--timeout 0"),
        ("--timeout nan", "--timeout nan"),
        ("--seed -1", "--seed -1"),
    ],
)
def test_counts_that_cannot_run_are_refused(extra: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told.replace("-", "[-]")):
        parsed(f"--method single --sequence 8 {extra}", tmp_path / "x.json").check()


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        parsed("--method single --sequence 8", tmp_path).check()
    with pytest.raises(ConfigError, match="does not exist"):
        parsed("--method single --sequence 8", tmp_path / "no" / "x.json").check()
    parsed("--method single --sequence 8", tmp_path / "x.json").check()


def test_only_the_default_folder_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parsed("--method single --sequence 8").check()
    assert (tmp_path / "outputs").is_dir()


def test_a_size_that_disagrees_with_the_launcher_names_both() -> None:
    assert options.world_size(None, {}) is None
    assert options.world_size(2, {"RANK": "0", "WORLD_SIZE": "2"}) == 2
    with pytest.raises(CPError, match=r"--cp-size 3 .* started 2 processes"):
        options.world_size(3, {"RANK": "1", "WORLD_SIZE": "2"})


def test_bad_input_needs_no_torch() -> None:
    modules = "cases, request, options, launch, chitu, result"
    code = f"import sys; from tools.benchmarks.fast_cp_frameworks import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_job_ends_as_rank_0_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.conclude([0, 0]) == ExitCode.RIGHT
    assert launch.conclude([3, 3]) == ExitCode.INCOMPLETE
    assert launch.conclude([1, -9]) == ExitCode.CHECK_FAILED
    assert capsys.readouterr().err == ""  # rank 0 has spoken
    assert launch.conclude([None, -9]) == ExitCode.CHECK_FAILED
    assert "rank 1 of 2 was ended by signal 9 (SIGKILL)" in capsys.readouterr().err
    assert launch.conclude([-11, 0]) == ExitCode.CHECK_FAILED
    assert "rank 0 of 2 was ended by signal 11 (SIGSEGV)" in capsys.readouterr().err
    assert launch.conclude([0, 1]) == ExitCode.CHECK_FAILED


def test_only_rank_0_says_what_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    line = ["--method", "x", "--sequence", "8"]
    assert chitu.main(line, {"RANK": "1", "WORLD_SIZE": "2"}) == ExitCode.WRONG_USAGE
    assert (capsys.readouterr().err, slept) == ("", [chitu.REFUSED_S])
    assert chitu.main(line, {"RANK": "0", "WORLD_SIZE": "2"}) == ExitCode.WRONG_USAGE
    assert capsys.readouterr().err.count("method 'x' is unknown") == 1


def test_transfers_multiply_the_fast_methods_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "find_spec", lambda name: True)
    wanted = parsed("--method nccl_agkv,fast_agkv --transfer ce,sm --sequence 8").request
    assert [(c.method, c.transfer) for c in wanted.cases("cuda")] == [
        ("nccl_agkv", None),
        ("fast_agkv", "ce"),
        ("fast_agkv", "sm"),
    ]


def test_the_environment_names_the_transfer_that_was_not_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "find_spec", lambda name: True)
    line, named = "--method nccl_agkv,fast_agkv --sequence 8", {"CHITU_FAST_ULYSSES_TRANSFER": "tma"}
    for typed, environ, used in (("", {}, "auto"), ("", named, "tma"), (" --transfer auto", named, "auto")):
        wanted = parsed(line + typed, **environ).request
        assert [(c.method, c.transfer) for c in wanted.cases("cuda")] == [("nccl_agkv", None), ("fast_agkv", used)]
    with pytest.raises(ConfigError, match="CHITU_FAST_ULYSSES_TRANSFER is 'dma', which is unknown"):
        parsed(line, CHITU_FAST_ULYSSES_TRANSFER="dma")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--method fast_agkv --transfer dma --sequence 8", "transfer 'dma' is unknown; choose one of auto, ce, sm"),
        ("--method nccl_agkv --transfer ce --sequence 8", "--transfer belongs to the fast methods"),
    ],
)
def test_a_transfer_that_cannot_be_meant_is_refused(line: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parsed(line)
