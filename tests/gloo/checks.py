"""Comparing what the ranks returned with one process: the check that every negative control must fail."""

import torch

from tests.gloo.scenarios import Case, Whole, share, whole
from tests.support.reference import reference_attention

Outputs = list[tuple[torch.Tensor, torch.Tensor | None]]  # one entry per rank


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
    """One process's attention in the input's dtype, BSHD."""
    mask = None if key_mask is None else key_mask[:, None, None, :]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def one_process(case: Case, inputs: Whole, *, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(tokens, text) of one process: SDPA in the input's dtype, or ``exact`` in float64."""
    q, k, v = inputs.joined(case)
    out = reference_attention(q, k, v, key_mask=inputs.key_mask)[0] if exact else sdpa(q, k, v, inputs.key_mask)
    if inputs.text is None or inputs.text.q is None:
        return out, None
    sizes = [case.text_len, case.seq_len]
    parts = out.split(sizes if case.text_in_front else sizes[::-1], 1)
    return (parts[1], parts[0]) if case.text_in_front else (parts[0], parts[1])


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value or of 1; NaN counts as infinite."""
    if got.shape != wanted.shape:
        raise AssertionError(f"shape {tuple(got.shape)}, but {tuple(wanted.shape)} is right")
    if not got.numel():
        return 0.0
    worst = (got.double() - wanted.double()).abs().max().item() / max(1.0, wanted.abs().max().item())
    return float("inf") if worst != worst else worst


def assert_equal_to_one_process(case: Case, outputs: Outputs) -> None:
    """Every rank's rows and text are those of one process.

    Within 1e-6 in float32; in half precision within twice the error that one process's own kernel has.
    """
    inputs = whole(case)
    tokens, text = one_process(case, inputs)
    limit = 1e-6
    if case.dtype != torch.float32:
        exact_tokens, exact_text = one_process(case, inputs, exact=True)
        limit = 2 * error(tokens, exact_tokens)
        tokens, text = exact_tokens, exact_text
    for rank, (out, text_out) in enumerate(outputs):
        worst = error(out, share(tokens, rank, len(outputs)))
        assert worst <= limit, f"rank {rank} is off by {worst:.2e}, limit {limit:.1e}, in {case}"
        assert (text_out is None) == (text is None), f"rank {rank} returned {text_out is None=} in {case}"
        if text is not None and text_out is not None:
            worst = error(text_out, text)
            assert worst <= limit, f"the text on rank {rank} is off by {worst:.2e}, limit {limit:.1e}, in {case}"
