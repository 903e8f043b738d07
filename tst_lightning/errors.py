"""What the user is told when something that they gave cannot work."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """One or more faults in what the user gave, each with its value and the way out.

    The command line prints the faults without a traceback and exits with status 2.

    Args:
        faults: one sentence, or all sentences at once.
    """

    def __init__(self, faults: str | Iterable[str]) -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        assert self.faults, "a UserError needs at least one fault"
        super().__init__("\n".join(self.faults))


class TSTWarning(UserWarning):
    """Something that works, but probably not as the user hopes."""
