"""The port, taken before anything is loaded."""

import socket

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.serving.stage import ServiceTable


def bind(service: ServiceTable) -> socket.socket:
    """Take the port, before anything is loaded. Raises ConfigError."""
    where = f"service.port {service.port} on {service.host}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(service.host, service.port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(address)
            taken.listen()
        except OSError:
            taken.close()
            raise
    except OSError as error:
        raise ConfigError(f"{where} cannot be taken: {error.strerror or error}; give another, or 0 for any") from error
    return taken


def address(taken: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
