"""Settings that environment variables give."""

from collections.abc import Mapping

import pytest

from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.environment import with_defaults
from chitu_diffusion.parallel.cp.errors import ConfigError


@pytest.mark.parametrize(
    ("asked", "environ", "used"),
    [
        (None, {}, "auto"),
        (None, {"CHITU_FAST_ULYSSES_TRANSFER": ""}, "auto"),
        (None, {"CHITU_FAST_ULYSSES_TRANSFER": "sm"}, "sm"),
        ("auto", {"CHITU_FAST_ULYSSES_TRANSFER": "sm"}, "auto"),
        ("ce", {"CHITU_FAST_ULYSSES_TRANSFER": "warp"}, "ce"),
    ],
)
def test_the_environment_names_the_transfer_that_nobody_else_named(
    asked: str | None, environ: Mapping[str, str], used: str
) -> None:
    assert with_defaults(CPConfig(backend="fast", transfer=asked), environ).transfer == used


def test_a_transfer_that_is_unknown_is_refused_by_the_name_of_its_variable() -> None:
    environ = {"CHITU_FAST_ULYSSES_TRANSFER": "warp"}
    told = "CHITU_FAST_ULYSSES_TRANSFER is 'warp', which is unknown; set it to one of auto, ce, sm, tma, or unset it"
    with pytest.raises(ConfigError, match=told):
        with_defaults(CPConfig(backend="fast"), environ)
    assert with_defaults(CPConfig(), environ) == CPConfig()


def test_a_configuration_by_itself_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHITU_FAST_ULYSSES_TRANSFER", "warp")
    assert CPConfig(backend="fast").transfer is None
    with pytest.raises(ConfigError, match="transfer 'warp' is unknown; choose one of auto, ce, sm, tma"):
        CPConfig(backend="fast", transfer="warp")
