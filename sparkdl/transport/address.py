"""Where a service is."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where a service in the driver is and what opens it; travels to the workers with the task."""

    uri: str
    """``tcp://host:port``"""
    token: str = field(repr=False)
    fingerprint: str | None = None
    """Fingerprint of the certificate that it has to show; None if connections are not encrypted."""

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The parts of ``uri``."""
        parts = urlsplit(self.uri)
        return parts.hostname or "", parts.port or 0
