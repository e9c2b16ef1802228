"""How long reads took, for whoever asked for them."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class ReadTiming:
    """Seconds of one or several reads; give the same object to each read that is to be counted."""

    verify_s: float = 0.0
    """Checking what was read. Of a local store it includes the disk: a mapped file is read when it is touched."""
    from_disk: set[str] = field(default_factory=set)
    """Ids of documents whose copy on the local disk was read (``DiskTier``)."""
