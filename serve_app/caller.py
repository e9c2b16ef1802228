"""Who asks: what the server knows of a request's sender, whatever the request says."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["query", "write", "admin"]


@dataclass(frozen=True, kw_only=True)
class Caller:
    """A tenant, or one of its programs."""

    name: str
    """For logs and metrics."""
    namespace: str
    """Whose documents are read and written."""
    shared: tuple[str, ...] = ()
    """Further namespaces whose documents can be read, in the order in which they are searched."""
    roles: frozenset[Role] = frozenset({"query", "write"})

    @property
    def readable(self) -> tuple[str, ...]:
        """All namespaces that are searched, its own first."""
        return (self.namespace, *self.shared)
