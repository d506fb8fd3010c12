"""The overlapped region: K and V into this rank's slots, sent while projections go on, then attention.

K and V leave first and Q comes last: what is left of the transfer hides behind the projection, norm and rotary
embedding of Q. The own rows lie where attention reads them, so nothing is copied.
"""

from dataclasses import replace
from functools import partial

import torch

from chitu_diffusion.parallel.cp.fast.adapters.aside import Aside
from chitu_diffusion.parallel.cp.fast.adapters.projection import is_plain_linear, position, project
from chitu_diffusion.parallel.cp.fast.adapters.region import RegionCall, Stream
from chitu_diffusion.parallel.cp.fast.adapters.region_plan import RegionPlan
from chitu_diffusion.parallel.cp.fast.adapters.slots import SlotOperators, Slots
from chitu_diffusion.parallel.cp.fast.attention.execution import attend
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT, head_groups
from chitu_diffusion.parallel.cp.layout import Layout, Span
from chitu_diffusion.parallel.cp.transport import Arrived

Outputs = tuple[torch.Tensor, torch.Tensor | None]


@torch.no_grad()
def run_overlapped(plan: RegionPlan, call: RegionCall, layout: Layout, ops: SlotOperators, rank: int) -> Outputs:
    """The outputs (B, S_local, C) of the tokens and (B, T, C) of the text.

    Where something fails on this rank, it still sends and receives everything before the error goes on, so that no
    other rank waits for it.
    """
    tokens, own = call.tokens, layout.shards[rank].shifted(layout.text_len)
    slots = Slots(ops, layout, tokens.hidden, tokens.head_dim, plan.sends, fused=plan.schedule.fused)
    try:
        send_projected(plan, tokens, slots)
        if plan.text_aside and call.text is not None:
            outputs = _answer_aside(plan, call, call.text, slots, own)
        else:
            outputs = _answer(plan, call, slots, own)
    except Exception:
        slots.abandon()
        raise
    if plan.schedule.fused:
        slots.done()
    return outputs


def _answer(plan: RegionPlan, call: RegionCall, slots: Slots, own: Span) -> Outputs:
    """The queries of the text, if any, and of the tokens by one kernel."""
    tokens, text = call.tokens, call.text
    if text is None:
        return tokens.project_out(_attend(plan, call, _arriving(plan, queries(tokens), slots, own))), None
    text_len = text.hidden.shape[1]
    place_keys(text, slots.k[:, :text_len], slots.v[:, :text_len])
    out = _attend(plan, call, _arriving(plan, queries(text, tokens), slots, own))
    return tokens.project_out(out[:, text_len:]), text.project_out(out[:, :text_len])


def _answer_aside(plan: RegionPlan, call: RegionCall, text: Stream, slots: Slots, own: Span) -> Outputs:
    """Everything of the text on a stream of its own.

    Its queries are so few that in one kernel with the tokens' they can cost a whole further wave of the SMs. By
    themselves they run where the last wave of the tokens, and their projection, leave room: behind the waits of the
    tokens, so that they do not come first.
    """
    text_len = text.hidden.shape[1]
    with Aside(text.hidden.device) as aside:
        aside.follow()
        with aside.running():
            place_keys(text, slots.k[:, :text_len], slots.v[:, :text_len])
            text_q = queries(text)
        q = queries(call.tokens)
        aside.join()
        arriving = _arriving(plan, q, slots, own)

        def wait(group: int) -> None:
            arriving.wait(group)
            aside.follow()

        def ticket() -> torch.Tensor:
            taken = arriving.ticket()
            aside.follow()
            return taken

        out = _attend(plan, call, replace(arriving, wait=wait, ticket=ticket))
        with aside.running():
            alone = plan if plan.schedule.fused else replace(plan, schedule=ONE_SHOT)  # all has come by then
            text_out = _attend(alone, call, Arrived(text_q, slots.k, slots.v, ticket=slots.ticket))
            projected = text.project_out(text_out)
        return call.tokens.project_out(out), projected


def _attend(plan: RegionPlan, call: RegionCall, arriving: Arrived) -> torch.Tensor:
    return attend(plan, arriving, scale=call.tokens.head_dim**-0.5, key_mask=call.key_mask)


def _arriving(plan: RegionPlan, q: torch.Tensor, slots: Slots, own: Span) -> Arrived:
    """The windows as they fill; the rows ``own`` of this rank are there from the start."""
    wait = slots.wait if len(plan.schedule.groups) == plan.sends else lambda _: slots.wait_for_all()
    lies_apart = plan.schedule.local_first  # else the own rows are read in their place, like all others
    return Arrived(
        q,
        slots.k,
        slots.v,
        wait,
        own_k=slots.k_slot if lies_apart else None,
        own_v=slots.v_slot if lies_apart else None,
        own_rows=own,
        ticket=slots.ticket,
    )


def send_projected(plan: RegionPlan, tokens: Stream, slots: Slots) -> None:
    """Project K and V, each whole or by groups of heads, and let every group leave as soon as it is there."""
    every = Span(0, tokens.heads)
    key, value = partial(_keys, tokens, slots.k_slot), partial(project, tokens.to_v, tokens.hidden, slots.v_slot)
    # a norm over all heads needs all of them, and a module computes all of them in any case
    over_heads = tokens.norm_k is not None and tokens.norm_over_heads
    steps = [
        (key, plan.by_group and not over_heads and is_plain_linear(tokens.to_k, tokens.hidden)),
        (value, plan.by_group and is_plain_linear(tokens.to_v, tokens.hidden)),
    ]
    for project_heads, grouped in steps:
        if not grouped:
            project_heads(every)
    for group, (_, heads) in enumerate(head_groups(tokens.heads, tokens.heads, (1,) * plan.sends)):
        for project_heads, grouped in steps:
            if grouped:
                project_heads(heads)
        slots.send(group)


def place_keys(stream: Stream, k: torch.Tensor, v: torch.Tensor) -> None:
    """All keys and values of ``stream`` into k and v (B, S, H, D)."""
    every = Span(0, stream.heads)
    _keys(stream, k, every)
    project(stream.to_v, stream.hidden, v, every)


def queries(*streams: Stream) -> torch.Tensor:
    """The queries (B, S, H, D) of all rows of ``streams``, one stream behind the other."""
    hidden, heads, head_dim = streams[0].hidden, streams[0].heads, streams[0].head_dim
    q = hidden.new_empty(hidden.shape[0], sum(stream.hidden.shape[1] for stream in streams), heads, head_dim)
    start = 0
    for stream in streams:
        landing = q.narrow(1, start, stream.hidden.shape[1])
        project(stream.to_q, stream.hidden, landing, Span(0, stream.heads))
        position(landing, stream.norm_q, stream.rope, over_heads=stream.norm_over_heads, out=landing)
        start += stream.hidden.shape[1]
    return q


def _keys(stream: Stream, slot: torch.Tensor, heads: Span) -> None:
    project(stream.to_k, stream.hidden, slot, heads)
    landing = slot[:, :, heads.start : heads.stop]
    position(landing, stream.norm_k, stream.rope, over_heads=stream.norm_over_heads, out=landing)
