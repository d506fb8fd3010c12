"""Fast CP's operators: K/V all-gather and Ulysses' all-to-all over symmetric memory, for context-parallel attention.

Importing loads ``libfast_cp.so`` and registers the operators of ``torch.ops.fast_ulysses`` with fake implementations;
it touches no GPU. The same files serve as the package ``fast_ulysses`` and, laid over upstream's, as
``fast_ulysses.fast_cp``.
"""

from . import fakes as _fakes  # importing it registers the fake implementations
from .library import library_path
from .lifetime import (
    check,
    device_info,
    finalize,
    forget,
    init,
    managed_capture,
    rank_and_world,
    remove_waits,
    unique_id,
)
from .operators import (
    all_gather_kv_4d,
    all_to_all_out_4d,
    all_to_all_qkv_4d,
    exchange_done,
    exchange_send,
    exchange_start,
    exchange_ticket,
    exchange_wait,
    kv_projection_prepare,
    kv_projection_send_ce_group,
    projection_sync,
    projection_sync_prepare,
    projection_ticket,
    return_start,
)
from .split import Split, TextRows, chunk_heads

__version__ = "0.1.0"

_fakes.register()

__all__ = [
    "Split",
    "TextRows",
    "__version__",
    "all_gather_kv_4d",
    "all_to_all_out_4d",
    "all_to_all_qkv_4d",
    "check",
    "chunk_heads",
    "device_info",
    "exchange_done",
    "exchange_send",
    "exchange_start",
    "exchange_ticket",
    "exchange_wait",
    "finalize",
    "forget",
    "init",
    "kv_projection_prepare",
    "kv_projection_send_ce_group",
    "library_path",
    "managed_capture",
    "projection_sync",
    "projection_sync_prepare",
    "projection_ticket",
    "rank_and_world",
    "remove_waits",
    "return_start",
    "unique_id",
]
