"""The extension's package without a GPU: it loads, registers its operators, traces, and says what is missing.

One child process tries everything and reports it, because a library that is loaded stays loaded.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("extension")

SOURCES = Path(__file__).parents[2] / "csrc" / "python"
OPERATORS = {"fast_cp_device_info", "all_gather_kv_4d", "kv_projection_prepare", "kv_projection_send_ce_group",
             "projection_sync_prepare", "projection_sync", "projection_ticket", "fast_cp_all_to_all_qkv_4d",
             "fast_cp_all_to_all_out_4d", "fast_cp_manage_capture", "fast_cp_check", "fast_cp_forget",
             "fast_cp_exchange_ticket"}  # fmt: skip

CHILD = """
import json
import fast_ulysses as fu, torch
from torch._subclasses.fake_tensor import FakeTensorMode

def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def fake_shapes():
    q, k = (torch.empty(1, 6, h, 64, device="cuda", dtype=torch.bfloat16) for h in (6, 4))
    split = fu.Split((6, 5), (3, 3), (2, 2), (1, 2), fu.TextRows(2, 1, 2, 1))
    shapes = {"gathered": fu.all_gather_kv_4d(k, k, (6, 5))[1]}
    windows = fu.exchange_start(q, k, k, split, tag="in", own_chunks=1, generation=0)
    fu.exchange_wait(windows, 1, tag="in")
    fu.exchange_done(windows, tag="in")
    even = fu.Split((6, 5), (3, 3), (2, 2), (1, 1))
    read_by_ticket = fu.exchange_start(None, k, k, even, tag="in", own_last=True, ticket=True)
    ticket = fu.exchange_ticket(read_by_ticket, tag="in")
    assert ticket.dtype == torch.int64 and ticket.is_cuda
    shapes |= {"k_of_ticket": read_by_ticket[1], "ticket": ticket}
    fu.exchange_done(read_by_ticket, tag="in")
    held = q.new_empty(1, 14, 3, 64)
    shapes |= {"q": windows[0], "k": windows[1], "home": fu.all_to_all_out_4d(held, split)}
    shapes["home_with_text"] = fu.return_start(held, split, tag="out", send_text=True, generation=1)
    k_full, v_full, k_slot, v_slot = fu.kv_projection_prepare(k, 1, (6, 5), 4, 64, num_groups=2)
    fu.kv_projection_send_ce_group(k_full, v_full, 0)
    fu.projection_sync_prepare(k_full, v_full, 0)
    fu.projection_sync(k_full, v_full, 0)
    *turned, last_slot, _ = fu.kv_projection_prepare(
        k, 1, (6, 5), 4, 64, num_groups=2, text_front=2, text_back=1, own_last=True, ticket=True
    )
    assert last_slot.storage_offset() == (2 + 5) * 4 * 64, "rank 0's rows come after those of rank 1"
    shapes |= {"turned": turned[0], "last_slot": last_slot, "projected": fu.projection_ticket(*turned)}
    return {name: list(t.shape) for name, t in (shapes | {"k_full": k_full, "v_slot": v_slot}).items()}

def unlike():
    with FakeTensorMode():
        k = torch.empty(1, 6, 4, 64, device="cuda", dtype=torch.bfloat16)
        fu.all_gather_kv_4d(k, k.to(torch.float16))

def bytes_kept_by_a_call(calls=20_000):
    def resident():
        return 4096 * int(open("/proc/self/statm").read().split()[1])
    def call():
        for _ in range(calls):
            try:
                torch.ops.fast_ulysses.fast_cp_forget.default("a tag that is too long to lie within a string" * 4)
            except RuntimeError:
                pass  # there is no runtime; the argument was taken all the same
    call()
    before = resident()
    call()
    return (resident() - before) / calls

on_cpu = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)
with FakeTensorMode():
    shapes = fake_shapes()
print(json.dumps({
    "shapes": shapes,
    "registered": [n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("fast_ulysses::")],
    "info": fu.device_info(),
    "no_runtime": error_of(fu.check),
    "cpu_tensor": error_of(lambda: fu.all_gather_kv_4d(on_cpu, on_cpu)),
    "cpu_tensor_to_operator": error_of(lambda: torch.ops.fast_ulysses.all_gather_kv_4d(on_cpu, on_cpu)),
    "uneven_counts": error_of(lambda: fu.Split((4, 4), (2,), (1, 1))),
    "no_weight": error_of(lambda: fu.Split((4, 4), (2,), (2,), (1, 0))),
    "too_many_chunks": error_of(lambda: fu.Split((4, 4), (2,), (2,), (1,) * 33)),
    "unlike": error_of(unlike),
    "no_generation": error_of(lambda: fu.exchange_start(None, on_cpu, on_cpu, fu.Split((4,), (2,), (2,)), tag="in",
                                                        generation=2)),
    "uneven_ticket": error_of(lambda: fu.exchange_start(None, on_cpu, on_cpu, fu.Split((4,), (2,), (2,), (1, 2)),
                                                        tag="in", ticket=True)),
    "no_ticket": error_of(lambda: torch.ops.fast_ulysses.fast_cp_exchange_ticket([on_cpu], "in")),
    "not_managed": error_of(fu.managed_capture().__enter__),
    "chunks": [[q.start, q.stop, k.start, k.stop] for q, k in fu.chunk_heads(10, 5, (1, 1))],
    "weighted": [[q.start, q.stop, k.start, k.stop] for q, k in fu.chunk_heads(10, 5, (1, 3, 1))],
    "no_ratio": [[q.start, q.stop, k.start, k.stop] for q, k in fu.chunk_heads(7, 5, (1, 3))],
    "kept": bytes_kept_by_a_call(),
    "library": str(fu.library_path()),
    "version": fu.__version__,
}))
"""


def run(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env=os.environ | environment
    )


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What the child says, with FAST_CP_LIBRARY and the sources, or else with the installed package."""
    library = os.environ.get("FAST_CP_LIBRARY")
    if library is None and importlib.util.find_spec("fast_ulysses") is None:
        pytest.skip("no built extension: set FAST_CP_LIBRARY, or install the wheel (tools/install/build_fast_cp.py)")
    path = {"PYTHONPATH": str(SOURCES)} if library else {}
    result = run(CHILD, CUDA_VISIBLE_DEVICES="", **path)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_operators_are_registered(told: dict[str, Any]) -> None:
    assert set(told["registered"]) >= OPERATORS
    assert set(told["info"]["operators"]) >= OPERATORS


def test_device_info_says_that_there_is_no_gpu(told: dict[str, Any]) -> None:
    assert told["info"]["available"] is False
    assert "GPU" in told["info"]["problem"]
    assert told["info"]["nvshmem"]["built"].startswith("3.")
    assert told["info"]["images"]


def test_an_operator_without_a_runtime_says_what_to_do(told: dict[str, Any]) -> None:
    assert "init_fast_cp" in told["no_runtime"]
    assert "init_fast_cp" in told["cpu_tensor_to_operator"]
    assert "init_fast_cp" in told["not_managed"]
    assert "init_fast_cp" in told["no_ticket"]


def test_wrong_arguments_end_in_a_sentence(told: dict[str, Any]) -> None:
    assert told["cpu_tensor"].startswith("ValueError: k lies on cpu")
    assert "must be the same number" in told["uneven_counts"]
    assert told["no_weight"] == "ValueError: weights of chunks must be 1 to 1000000: (1, 0)"
    assert told["too_many_chunks"] == "ValueError: chunks must hold 1 to 32 weights, not 33"
    assert told["unlike"] == "ValueError: k and v have different dtypes: torch.bfloat16, torch.float16"
    assert "give 0 or 1" in told["no_generation"]
    assert told["uneven_ticket"] == "ValueError: a ticket was asked for chunks (1, 2); give equal weights: (1,) * 2"


def test_fake_implementations_give_the_shapes(told: dict[str, Any]) -> None:
    assert told["shapes"] == {
        "gathered": [1, 11, 4, 64],
        "q": [1, 14, 3, 64],
        "k": [1, 14, 2, 64],
        "k_of_ticket": [1, 11, 2, 64],
        "ticket": [7],
        "home": [1, 6, 6, 64],
        "home_with_text": [1, 9, 6, 64],
        "k_full": [1, 11, 4, 64],
        "v_slot": [1, 6, 4, 64],
        "turned": [1, 14, 4, 64],
        "last_slot": [1, 6, 4, 64],
        "projected": [7],
    }


def test_chunks_keep_the_ratio_of_query_and_key_heads(told: dict[str, Any]) -> None:
    assert told["chunks"] == [[0, 4, 0, 2], [4, 10, 2, 5]]
    assert told["weighted"] == [[0, 2, 0, 1], [2, 8, 1, 4], [8, 10, 4, 5]]
    assert told["no_ratio"] == [[0, 1, 0, 1], [1, 7, 1, 5]]


def test_only_stable_symbols_are_needed(told: dict[str, Any]) -> None:
    command = ["nm", "-D", "--undefined-only", told["library"]]
    names = [line.split()[-1] for line in subprocess.check_output(command, text=True).splitlines()]
    assert "torch_library_impl" in names
    assert not [n for n in names if n.startswith(("_ZN3c10", "_ZN2at", "_ZNK3c10", "_ZNK2at", "cuda", "nvshmem"))]


def test_text_arguments_leave_nothing_behind(told: dict[str, Any]) -> None:
    assert told["kept"] < 8


def test_a_missing_library_is_an_import_error_that_names_the_builder(tmp_path: Path) -> None:
    result = run("import fast_ulysses", PYTHONPATH=str(SOURCES), FAST_CP_LIBRARY=str(tmp_path / "none.so"))
    assert result.returncode == 1
    assert "build_fast_cp.py" in result.stderr.splitlines()[-1]
