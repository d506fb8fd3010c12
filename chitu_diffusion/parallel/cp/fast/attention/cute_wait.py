"""How a warp of CuTe's kernel waits for what the ticket of an exchange names. Imports CuTe: cute_fused does."""

from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

WAIT_ROW = 40  # its place in the ticket

# A lane for each rank of the mask, all in step: a branch that only some of them took would make the compiler give up
# what it knows of the warp. Registers are scarce here (24), so the ticket is read again and again. Whoever makes this
# longer, or writes to memory here, compares times: ptxas then schedules the softmax of the other warps otherwise, and
# the kernel was 3 to 5 % slower. $0: the ticket; $1: the head that comes after the tile's.
WAIT = """{
    .reg .pred waits, again;
    .reg .b32 lane, word, other, begun, limit;
    .reg .b64 flag, wanted, seen, where;
    ld.global.b32 word, [$0 + 36];
    ld.global.b32 other, [$0 + 44];
    mul.lo.s32 word, word, $1;
    sub.s32 word, word, 1;
    div.s32 word, word, other;
    ld.global.b64 flag, [$0];
    mad.wide.s32 flag, word, 64, flag;
    ld.global.b64 wanted, [$0 + 8];
    mov.u32 lane, %laneid;
    ld.global.b32 word, [$0 + 32];
    shr.b32 word, word, lane;
    and.b32 word, word, 1;
    setp.ne.b32 waits, word, 0;
    mad.wide.s32 flag, lane, 8, flag;
    mov.b64 seen, wanted;
    mov.u64 where, %globaltimer;
    shr.u64 where, where, 20;
    cvt.u32.u64 begun, where;
LOOK:
    @waits ld.acquire.sys.global.b64 seen, [flag];
    ld.global.b64 where, [$0 + 24];
    ld.volatile.global.b32 other, [where];
    mov.u64 where, %globaltimer;
    shr.u64 where, where, 20;
    cvt.u32.u64 word, where;
    sub.u32 word, word, begun;
    ld.global.b64 where, [$0 + 16];
    shr.u64 where, where, 20;
    cvt.u32.u64 limit, where;
    setp.le.u32 again, word, limit;
    setp.eq.and.b32 again, other, 0, again;
    setp.lt.and.u64 again, seen, wanted, again;
    vote.sync.any.pred again, again, -1;
    @again bra LOOK;
}
bar.warp.sync -1;
fence.proxy.async.global;
"""


@dsl_user_op  # type: ignore[untyped-decorator]
def wait_for_peers(ticket: Int64, next_head: Int32, *, loc: object = None, ip: object = None) -> None:
    """Let the warp go on when the tile's head has arrived from all peers.

    The fence is there because keys are loaded by TMA, which sees memory through another proxy than the signals' reader.
    """
    llvm.inline_asm(
        None,
        [ticket.ir_value(loc=loc, ip=ip), next_head.ir_value(loc=loc, ip=ip)],
        WAIT,
        "l,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op  # type: ignore[untyped-decorator]
def word_at(ticket: Int64, offset: int, *, loc: object = None, ip: object = None) -> Int32:
    """One 32-bit number of the ticket."""
    text, address = f"ld.global.b32 $0, [$1 + {offset}];", ticket.ir_value(loc=loc, ip=ip)
    return Int32(
        llvm.inline_asm(
            T.i32(), [address], text, "=r,l",
            has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )  # fmt: skip
