"""Weights that one trainer has brought to the engines, and which of their directories must stay. Pure."""

from __future__ import annotations


class Brought:
    """An update that was broken off, or whose answers were lost, may take effect all the same: engines finish what they
    have begun. So whatever was sent is kept until it is known that nobody has it, or that the engines serve newer ones.
    """

    def __init__(self) -> None:
        #: Version and directory of the latest that the engines served, as far as is known; 0 = none of ours.
        self.served: tuple[int, str] = (0, "")
        #: Sent, and of these or newer versions: by directory.
        self._sent: dict[str, int] = {}

    @property
    def latest(self) -> int:
        """The highest version that engines may have from here. Another one of that number could be taken for it."""
        return max(self.served[0], *self._sent.values(), 0)

    @property
    def pending(self) -> set[str]:
        """Directories of what may take effect yet."""
        return set(self._sent)

    def sent(self, version: int, directory: str) -> None:
        """Engines are told to load that, from now on."""
        self._sent[directory] = version

    def refused(self, directory: str) -> None:
        """None of them has it, or will."""
        self._sent.pop(directory, None)

    def serve(self, version: int, directory: str) -> None:
        """The engines serve that, whoever has brought it: older ones are of no use any more, nor others of that
        version. Our own latest stays, for a broker that has lost what others brought."""
        if self._sent.get(directory) == version:
            self.served = version, directory
        self._sent = {place: number for place, number in self._sent.items() if number > version}

    def needs(self, directory: str) -> bool:
        """Whether engines may be told to load that."""
        return directory in self._sent or directory == self.served[1]
