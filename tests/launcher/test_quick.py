"""Imports without what only slows them down."""

from __future__ import annotations

import gc
import os

import pytest

from launcher.quick import quick_imports


def test_nothing_is_collected_within_and_all_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there is frozen; plugins are looked for again."""
    monkeypatch.delenv("PYDANTIC_DISABLE_PLUGINS", raising=False)
    gc.unfreeze()
    try:
        with pytest.raises(ImportError), quick_imports():
            assert not gc.isenabled()
            assert os.environ["PYDANTIC_DISABLE_PLUGINS"] == "1"
            raise ImportError
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert "PYDANTIC_DISABLE_PLUGINS" not in os.environ
    finally:
        gc.unfreeze()


def test_what_the_user_says_about_plugins_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also afterwards."""
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "mine")
    with quick_imports():
        assert os.environ["PYDANTIC_DISABLE_PLUGINS"] == "mine"
    assert os.environ["PYDANTIC_DISABLE_PLUGINS"] == "mine"
    gc.unfreeze()
