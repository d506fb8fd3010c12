"""Context-parallel attention, the whole story: agree on the call, then send, attend, receive (``call.perform``)."""

import torch

from chitu_diffusion.parallel.cp import compiled
from chitu_diffusion.parallel.cp.call import perform
from chitu_diffusion.parallel.cp.graphs import input_key
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.transport import Inputs, Text


def cp_attention(
    session: CPSession,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    seq_len: int | None = None,
    text: Text | None = None,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax attention, non-causal, over a sequence that is split between the ranks of ``session``.

    Args:
        session: the group at work; every rank of it makes the same call.
        q: this rank's queries (B, S_local, H, D), FP32, FP16 or BF16. Rank r holds part r of
            ``torch.tensor_split`` of the ``seq_len`` tokens; a part may be empty.
        k: this rank's keys (B, S_local, Hk, D), H a multiple of Hk; None, with ``v``, to attend to the text only.
        v: this rank's values, shaped as ``k``.
        seq_len: tokens of all ranks together; by default S_local times the number of ranks.
        text: rows that every rank holds whole, attended to once, in front of the tokens or behind them.
        key_mask: (B, Sk) bool, the same on every rank, in the order of the whole sequence with the text in its
            place; True where a key is attended to. A query without any key gets 0.
        scale: factor of the scores; by default 1 / sqrt(D).

    Returns:
        The output for this rank's tokens (B, S_local, H, D), and the text's output (B, T, H, D), the same on every
        rank, where the text has queries, else None. Either may be a view.

    Raises:
        InputError, DisagreementError, UnavailableError: with one message on every rank, before anything is sent.

    """
    if torch.compiler.is_compiling():
        return compiled.call(session.handle, q, k, v, seq_len, text, key_mask, scale)
    graphs = session.graphs
    if graphs is not None:
        key = input_key(q, k, v, text, key_mask, seq_len, scale)
        outputs = graphs.replay(key, q)
        if outputs is not None:
            return outputs
    with torch.no_grad():
        inputs = Inputs(q, k, v, text)
        call = session.admit(inputs, seq_len, key_mask, scale)
        if graphs is not None and call.plan.graph and not torch.cuda.is_current_stream_capturing():
            return graphs.run(key, call, inputs, key_mask)
        return perform(session.transport, call.layout, call.plan, inputs, scale=call.scale, key_mask=key_mask)


compiled.register(cp_attention)
