"""`python -m zagent.launch` with tiny rooms: ``fake_launch.py BROKER ENGINE WORKER [arguments]``, functions of
`support.rooms`; `-` is the obedient one."""

from __future__ import annotations

import sys


def main() -> int:
    from zagent.launch import main as launch

    names = {"-": "obedient"}
    rooms = dict(zip(("broker", "engine", "worker"), sys.argv[1:4], strict=True))
    return launch(sys.argv[4:], {room: f"support.rooms:{names.get(name, name)}" for room, name in rooms.items()})


if __name__ == "__main__":
    sys.exit(main())
