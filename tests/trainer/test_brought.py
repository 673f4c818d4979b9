"""Which of a trainer's directories engines may still be told to load."""

from __future__ import annotations

from zagent.trainer.brought import Brought


def test_nothing_is_needed_at_first() -> None:
    """Nor is there a version."""
    brought = Brought()
    assert (brought.served, brought.latest) == ((0, ""), 0)
    assert not brought.needs("/a")


def test_what_was_sent_is_needed_until_it_is_refused() -> None:
    """Nobody knows whether engines have it; its number is taken meanwhile."""
    brought = Brought()
    brought.sent(4, "/a")
    assert (brought.needs("/a"), brought.served, brought.latest) == (True, (0, ""), 4)
    brought.refused("/a")
    assert (brought.needs("/a"), brought.latest) == (False, 0)


def test_what_is_served_ends_all_that_came_before() -> None:
    """Older ones, and others of the same number; not what may yet come after."""
    brought = Brought()
    for version, directory in ((1, "/a"), (2, "/b"), (2, "/c"), (3, "/d")):
        brought.sent(version, directory)
    brought.serve(2, "/c")
    assert [brought.needs(f"/{name}") for name in "abcd"] == [False, False, True, True]
    assert (brought.served, brought.latest) == ((2, "/c"), 3)


def test_what_a_broken_off_update_sent_may_be_seen_to_be_served() -> None:
    """It follows the one before, whose directory may go."""
    brought = Brought()
    brought.sent(1, "/a")
    brought.serve(1, "/a")
    brought.sent(2, "/b")
    brought.serve(1, "/a")  # it is not, yet
    assert (brought.needs("/a"), brought.needs("/b")) == (True, True)
    brought.serve(2, "/b")
    assert (brought.needs("/a"), brought.needs("/b"), brought.served) == (False, True, (2, "/b"))


def test_what_others_brought_is_not_ours() -> None:
    """Our own latest stays, for a broker that has lost theirs; also where they used our directory, or our number."""
    brought = Brought()
    brought.sent(1, "/a")
    brought.serve(1, "/a")
    brought.sent(2, "/b")
    brought.serve(2, "/others")
    assert (brought.served, brought.needs("/a"), brought.needs("/b")) == ((1, "/a"), True, False)
    brought.serve(7, "/a")
    assert brought.served == (1, "/a")


def test_a_broker_that_knows_less_changes_nothing() -> None:
    """It was started again, and has not heard yet."""
    brought = Brought()
    brought.sent(3, "/a")
    brought.serve(3, "/a")
    brought.serve(0, "")
    assert (brought.served, brought.needs("/a")) == ((3, "/a"), True)
