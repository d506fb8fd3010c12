"""torch.compile traces through cp_attention without a graph break, and computes the same."""

import pytest
import torch

from chitu_diffusion.parallel.cp.attention import cp_attention
from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.session import CPSession
from tests.gloo.checks import assert_equal_to_one_process
from tests.gloo.scenarios import Case, attend, share, whole
from tests.support.pool import RankError, Worker, pool

CASES = (
    Case(75, 6),
    Case(75, 6, 2, method="ulysses", text_len=13, valid_text=(9,)),
    Case(33, 4, text_len=6, text_queries=False, text_in_front=False),
)


def compiled(worker: Worker, case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call inside a function that is compiled whole, with work of its own around it."""
    session, inputs = worker.session(case.config), whole(case)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, text_out = cp_attention(
            session, q * 0.5, k * 2, v, seq_len=case.seq_len, text=inputs.text, key_mask=inputs.key_mask
        )
        return out + 1, text_out

    q, k, v = (share(x, worker.rank, worker.world) for x in (inputs.q, inputs.k, inputs.v))
    out, text_out = block(q * 2, k * 0.5, v)
    return out - 1, text_out


@pytest.mark.parametrize("case", CASES, ids=["agkv", "ulysses with a masked text", "text without queries"])
def test_compiled_whole_it_equals_one_process(case: Case) -> None:
    pool().run(2, attend, case)  # agreed on before, so that a rank which traces longer is not taken for lost
    assert_equal_to_one_process(case, pool().run(2, compiled, case, timeout=110))


def with_a_closed_session(worker: Worker) -> None:
    """The operator holds no session alive; what it was compiled with may be gone."""
    session = CPSession(CPConfig(timeout_s=5), worker.group)
    handle = session.handle
    session.close()
    del session
    q = torch.zeros(1, 4, 2, 8)
    torch.ops.chitu.cp_attention(handle, q, q, q, None, None, None, None, True, None, None)


def test_a_session_that_is_gone_is_named() -> None:
    results = pool().results(2, with_a_closed_session)
    assert all(isinstance(result, RankError) and "compiled with is closed" in str(result) for result in results), (
        results
    )
