"""Turns facts into checks, and checks into an exit code and a sentence; pure."""

from collections.abc import Iterable, Iterator, Sequence

from chitu_diffusion.commands.doctor.checks import REQUIREMENTS, SELF_TEST, Check, Report
from chitu_diffusion.commands.doctor.facts import DoctorFacts
from chitu_diffusion.commands.doctor.judge_cute import judge_cute
from chitu_diffusion.commands.doctor.judge_extension import judge_extension, judge_self_test
from chitu_diffusion.commands.doctor.judge_gpus import judge_gpus
from chitu_diffusion.commands.doctor.judge_software import judge_libraries, judge_python, judge_tools, judge_torch
from chitu_diffusion.parallel.cp.errors import ConfigError, ExitCode


def parse_required(values: Iterable[str]) -> tuple[str, ...]:
    """``--require`` as given, repeated or with commas, in the order of REQUIREMENTS; unknown names are an error."""
    names = [name.strip() for value in values for name in value.split(",")]
    unknown = [name for name in names if name not in REQUIREMENTS]
    if unknown:
        listed = ", ".join(repr(name) for name in unknown)
        raise ConfigError(f"--require {listed} is unknown; choose from {', '.join(REQUIREMENTS)}")
    return tuple(name for name in REQUIREMENTS if name in names)


def judge(facts: DoctorFacts, required: Sequence[str] = ()) -> Report:
    """Without a requirement only what is wrong counts; with one, whatever it needs and is not ok.

    A self-test that was asked for always counts.
    """
    checks = tuple(_checks(facts))
    asked = {*required, *SELF_TEST}
    needed = [check for check in checks if set(check.required_by) & asked] if required else checks
    wrong = [check for check in needed if check.state == "wrong"]
    missing = [check for check in needed if check.state == "missing"]
    not_run = [check for check in missing if check.required_by == SELF_TEST]
    exit_code = _exit_code(wrong, missing if required else not_run)
    return Report(checks, tuple(required), exit_code, _verdict(required, wrong, missing, not_run))


def _checks(facts: DoctorFacts) -> Iterator[Check]:
    yield judge_python(facts)
    yield judge_torch(facts)
    yield from judge_gpus(facts)
    yield from judge_libraries(facts)
    yield judge_cute(facts)
    yield from judge_extension(facts)
    yield from judge_tools(facts)
    yield from judge_self_test(facts)


def _exit_code(wrong: Sequence[Check], missing: Sequence[Check]) -> ExitCode:
    if wrong:
        return ExitCode.CHECK_FAILED
    return ExitCode.INCOMPLETE if missing else ExitCode.RIGHT


def _verdict(
    required: Sequence[str], wrong: Sequence[Check], missing: Sequence[Check], not_run: Sequence[Check]
) -> str:
    asked = " and ".join(required)
    are = "are" if len(required) > 1 else "is"
    if not wrong and not missing:
        return f"{asked} {are} ready." if required else "Everything is there."
    listed = [f"{state}: {_names(checks)}" for state, checks in (("wrong", wrong), ("missing", missing)) if checks]
    listed[0] = listed[0] if required else listed[0].capitalize()
    first = [*wrong, *missing][0]
    if required:
        return f"{asked} {are} not ready ({'; '.join(listed)}). First ({first.name}): {first.next_step}."
    if wrong:
        return f"{'; '.join(listed)}. First ({first.name}): {first.next_step}."
    if not_run:
        return f"The self-test did not run: {not_run[0].found}. Next: {not_run[0].next_step}."
    return f"Nothing is wrong. {listed[0]}."


def _names(checks: Iterable[Check]) -> str:
    return ", ".join(check.name for check in checks)
