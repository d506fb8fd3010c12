"""Environment variables that give settings a default: how they are called and read, from a mapping that is given."""

from collections.abc import Mapping
from dataclasses import replace

from chitu_diffusion.parallel.cp.config import TRANSFERS, CPConfig
from chitu_diffusion.parallel.cp.errors import ConfigError

FAST_TRANSFER = "CHITU_FAST_ULYSSES_TRANSFER"


def default_transfer(environ: Mapping[str, str]) -> str:
    """What moves bytes under ``fast`` where nobody said it: the variable's value, else ``auto``; or a ConfigError."""
    value = environ.get(FAST_TRANSFER) or "auto"
    if value not in TRANSFERS:
        raise ConfigError(
            f"the environment variable {FAST_TRANSFER} is {value!r}, which is unknown; "
            f"set it to one of {', '.join(TRANSFERS)}, or unset it"
        )
    return value


def with_defaults(config: CPConfig, environ: Mapping[str, str]) -> CPConfig:
    """``config`` with what it leaves open filled in. Raises ConfigError where a variable that matters is wrong."""
    if config.backend != "fast" or config.transfer is not None:
        return config
    return replace(config, transfer=default_transfer(environ))
