"""CuTe's forward for SM90 with a producer of our own, which waits for keys. Imports CuTe: cute_launch does.

FlashAttention's kernel gives every block of threads one tile of queries of one head; one of its warps loads the keys
block by block, from the last to the first, while the others compute. Here that warp takes the rank's own rows from
where they lie, and before the first block that holds a row of another rank it waits until its head has arrived from all
of them. What it needs to know for that is in the ticket of the exchange (csrc/runtime/signals.hpp). It tells nobody
when its patience is at an end: a wait of the extension beside it does.
"""

from types import FunctionType
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync
from flash_attn.cute import interface
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned, to_cute_tensor, torch2cute_dtype_map
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.utils import AuxData
from quack import copy_utils, layout_utils
from quack.cute_dsl_utils import ParamsBase

from chitu_diffusion.parallel.cp.fast.attention.cute_wait import WAIT_ROW, wait_for_peers, word_at


def _inlined(kernel: Any) -> Any:
    """The body of a kernel as a function that another kernel calls; the kernel itself stays what it is."""
    body = kernel.__wrapped__
    copied = FunctionType(body.__code__, body.__globals__, body.__name__, body.__defaults__, body.__closure__)
    copied.__kwdefaults__, copied.__annotations__ = body.__kwdefaults__, dict(body.__annotations__)
    copied.__qualname__, copied.__module__ = body.__qualname__, body.__module__
    return cute.jit(copied)


_forward = _inlined(FlashAttentionForwardSm90.kernel)


class ArrivingForward(FlashAttentionForwardSm90):  # type: ignore[misc]
    """Dense attention, one K/V head to a query head, over windows of an exchange with a ticket."""

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        own_k: cute.Tensor,
        own_v: cute.Tensor,
        out: cute.Tensor,
        softmax_scale: Float32,
        ticket: cute.Tensor,
        own_start: Int32,
        own_stop: Int32,
        stream: cuda.CUstream = None,
    ) -> None:
        """q, out (B, Sq, H, D); k, v (B, Sk, H, D), whose rows from ``own_start`` to ``own_stop`` are those of own_k,
        own_v (B, S, H, D), where a block of keys holds no others; ticket (7,) int64.
        """
        self.given = own_k, own_v, ticket, own_start, own_stop
        FlashAttentionForwardSm90.__call__(self, q, k, v, out, None, softmax_scale, stream=stream)

    def kernel(self, *args: Any) -> Any:
        """What the forward launches: its own kernel, with what it has no arguments for."""
        own_k, own_v, *rest = self.given
        descriptors: list[Any] = []
        for x, layout, dim in ((own_k, self.sK_layout, self.tile_hdim), (own_v, self.sV_layout, self.tile_hdimv)):
            rows = layout_utils.select(assume_tensor_aligned(x), [1, 3, 2, 0])
            tile = cute.select(layout, mode=[0, 1]), (self.tile_n, dim)
            descriptors += cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, *tile, 1)
        return self.arriving_kernel(*descriptors, *rest, *args)

    @cute.kernel  # type: ignore[untyped-decorator]
    def arriving_kernel(
        self,
        own_atom_k: cute.CopyAtom,
        own_k: cute.Tensor,
        own_atom_v: cute.CopyAtom,
        own_v: cute.Tensor,
        ticket: cute.Tensor,
        own_start: Int32,
        own_stop: Int32,
        # those of FlashAttention's kernel, which passes them by position
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        page_table: cute.Tensor | None,
        atom_q: cute.CopyAtom | None,
        atom_k: cute.CopyAtom | None,
        atom_v: cute.CopyAtom | None,
        atom_out: cute.CopyAtom | None,
        softmax_scale_log2: Float32,
        softmax_scale: Float32 | None,
        window_size_left: Int32 | None,
        window_size_right: Int32 | None,
        learnable_sink: cute.Tensor | None,
        blocksparse_tensors: BlockSparseTensors | None,
        smem_q: cute.ComposedLayout,
        smem_k: cute.ComposedLayout,
        smem_v: cute.ComposedLayout,
        smem_out: cute.ComposedLayout,
        smem_p: cute.ComposedLayout | None,
        tiled_copy_q: cute.TiledCopy,
        tiled_copy_k: cute.TiledCopy,
        tiled_copy_v: cute.TiledCopy,
        tiled_copy_out: cute.TiledCopy,
        tiled_mma_qk: cute.TiledMma,
        tiled_mma_pv: cute.TiledMma,
        scheduler_params: ParamsBase,
        scheduler: cutlass.Constexpr,
        storage: cutlass.Constexpr,
        aux_data: AuxData,
        fastdiv_mods: Any,
    ) -> None:
        """FlashAttention's kernel, within which ``load`` is called."""
        self.own = (own_atom_k, own_k), (own_atom_v, own_v)
        self.own_rows, self.ticket = (own_start, own_stop), ticket.iterator.toint()
        _forward(
            self, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table,
            atom_q, atom_k, atom_v, atom_out, softmax_scale_log2, softmax_scale, window_size_left, window_size_right,
            learnable_sink, blocksparse_tensors, smem_q, smem_k, smem_v, smem_out, smem_p,
            tiled_copy_q, tiled_copy_k, tiled_copy_v, tiled_copy_out, tiled_mma_qk, tiled_mma_pv,
            scheduler_params, scheduler, storage, aux_data, fastdiv_mods,
        )  # fmt: skip

    @cute.jit  # type: ignore[untyped-decorator]
    def load(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        smem_q: cute.Tensor,
        smem_k: cute.Tensor,
        smem_v: cute.Tensor,
        atom_q: cute.CopyAtom,
        atom_k: cute.CopyAtom,
        atom_v: cute.CopyAtom,
        pipeline_k: pipeline.PipelineAsync,
        pipeline_v: pipeline.PipelineAsync,
        pipeline_q: pipeline.PipelineAsync,
        tiled_copy_q: cute.TiledCopy,
        page_table: cute.Tensor | None,
        blocksparse_tensors: BlockSparseTensors | None,
        block_info: Any,
        seqlen_info: Any,
        scheduler: Any,
    ) -> None:
        """What the producer warps do. Keys of a block are loaded before the values of the one before it, as the others
        use them.
        """
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            m_block, head, batch = cute.arch.block_idx()
            own_start, own_stop = self.own_rows
            blocks = cute.ceil_div(k.shape[0], self.tile_n)
            # the block of the last row that another rank sends; -1, and never met, where there is none
            arriving = (word_at(self.ticket, WAIT_ROW) + self.tile_n - 1) // self.tile_n - 1
            arriving = cute.arch.make_warp_uniform(arriving)
            own_first, own_end = (own_start + self.tile_n - 1) // self.tile_n, own_stop // self.tile_n
            if own_stop == k.shape[0]:
                own_end = blocks
            queries = cute.local_tile(q[None, None, head, batch], (self.tile_m, self.tile_hdim), (m_block, 0))
            load_q, _, _ = copy_utils.tma_get_copy_fn(
                atom_q, 0, cute.make_layout(1), queries, smem_q, single_stage=True
            )
            (own_atom_k, own_k), (own_atom_v, own_v) = self.own
            moved = -own_start, 0
            own_k = cute.domain_offset(moved, own_k[None, None, head, batch])
            own_v = cute.domain_offset(moved, own_v[None, None, head, batch])
            load_k = self.loader(atom_k, k[None, None, head, batch], self.tile_hdim, smem_k, pipeline_k)
            load_v = self.loader(atom_v, v[None, None, head, batch], self.tile_hdimv, smem_v, pipeline_v)
            load_own_k = self.loader(own_atom_k, own_k, self.tile_hdim, smem_k, pipeline_k)
            load_own_v = self.loader(own_atom_v, own_v, self.tile_hdimv, smem_v, pipeline_v)
            pipeline_q.producer_acquire_w_index_phase(0, Int32(1))
            load_q(tma_bar_ptr=pipeline_q.sync_object_full.get_barrier(0))
            state_k = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
            state_v = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
            # each load stands here once: a longer producer makes the whole kernel slower (see cute_wait.py)
            for i in cutlass.range(blocks + 1, unroll=1):
                if i < blocks:
                    block = blocks - 1 - i
                    if block == arriving:
                        wait_for_peers(self.ticket, head + 1)
                    pipeline_k.producer_acquire(state_k)
                    if block >= own_first and block < own_end:
                        load_own_k(src_idx=block, producer_state=state_k)
                    else:
                        load_k(src_idx=block, producer_state=state_k)
                    pipeline_k.producer_commit(state_k)
                    state_k.advance()
                if i > 0:
                    block = blocks - i
                    pipeline_v.producer_acquire(state_v)
                    if block >= own_first and block < own_end:
                        load_own_v(src_idx=block, producer_state=state_v)
                    else:
                        load_v(src_idx=block, producer_state=state_v)
                    pipeline_v.producer_commit(state_v)
                    state_v.advance()
            pipeline_v.producer_tail(state_v)

    def loader(self, atom: Any, rows: Any, dim: int, smem: Any, stages: Any) -> Any:
        """A function that loads the block ``src_idx`` of ``rows``."""
        tiles = cute.local_tile(rows, (self.tile_n, dim), (None, 0))
        load, _, _ = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), tiles, smem)
        return copy_utils.tma_producer_copy_fn(load, stages)


def keys_per_block(head_dim: int) -> int:
    """Rows of keys that the kernel loads at a time."""
    return int(_tile(head_dim).n_block_size)


def _tile(head_dim: int) -> Any:
    return interface._tile_size_fwd_sm90(head_dim, head_dim, False, False)


def compiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float, ticket: torch.Tensor
) -> object:
    """The forward, compiled for the dtype and head dimension of these tensors; lengths and strides are arguments."""
    head_dim, tile = q.shape[3], _tile(q.shape[3])
    forward = ArrivingForward(
        torch2cute_dtype_map[q.dtype], head_dim, head_dim,
        pack_gqa=False,
        tile_m=tile.m_block_size,
        tile_n=tile.n_block_size,
        num_stages=2,  # as FlashAttention's own wrapper has it
        intra_wg_overlap=tile.intra_wg_overlap,
        mma_pv_is_rs=tile.mma_pv_is_rs,
    )  # fmt: skip
    tensors = [to_cute_tensor(x) for x in (q, k, v, k, v, out)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)  # torch's current stream at every call
    told = to_cute_tensor(ticket, assumed_align=8, leading_dim=0)
    return cute.compile(forward, *tensors, scale, told, Int32(0), Int32(0), stream, options="--enable-tvm-ffi")
