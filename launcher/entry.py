"""The start of a child under another interpreter: `python -m launcher.entry REPORTS TRACKER`, its orders on standard
input. The numbers are of inherited descriptors: its line to the launcher, and that of the resource tracker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection

from launcher import bootstrap, tracker
from zagent import __version__
from zagent.errors import ConfigError


def signature() -> dict[str, str]:
    """Which zagent this is, and where."""
    return {"version": __version__, "python": sys.executable}


def check_same(launcher: Mapping[str, str], name: str) -> None:
    """Raise `ConfigError` unless this is the ``launcher``'s version of zagent: the two would misunderstand each
    other."""
    ours = signature()
    if ours["version"] != launcher["version"]:
        raise ConfigError(
            f"{name} would run zagent {ours['version']} under {ours['python']}, but was started by zagent "
            f"{launcher['version']} under {launcher['python']}: install the same version in both"
        )


def main(reports: int, tracker_line: int) -> None:
    """Arm this process and run its room, as `bootstrap.enter` does for a spawned one."""
    tracker.join(tracker_line)
    message = json.load(sys.stdin)
    line = Connection(reports, readable=False)
    try:
        check_same(message["by"], message["orders"]["name"])
    except ConfigError as error:
        bootstrap.Reporter(line).failed(error)
        sys.exit(str(error))
    bootstrap.enter(bootstrap.Orders(**message["orders"]), line)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
