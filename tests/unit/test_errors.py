"""What is said of errors that are not ours."""

from chitu_diffusion.parallel.cp.errors import first_line


def test_a_failure_is_told_in_one_line() -> None:
    assert first_line(MemoryError()) == first_line(MemoryError(" \n")) == "MemoryError"
    assert first_line(ValueError("\n  what it is  \nand more")) == "ValueError: what it is"
    assert len(first_line(ValueError("x" * 1000))) < 330


def test_the_colours_of_a_compiler_are_left_out() -> None:
    assert first_line(RuntimeError("\x1b[31m\x1b[1m[Error]\x1b[0m no ptxas")) == "RuntimeError: [Error] no ptxas"
