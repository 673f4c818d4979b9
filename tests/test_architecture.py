"""Imports go one way, and each heavy package has its few importers: read from the source, function-level ones too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: What each part of zagent may import of zagent, beside itself. Process rooms never import each other.
MAY_IMPORT = {
    "errors": "",
    "alive": "",
    "config": "errors",
    "types": "errors",
    "wire": "errors",
    "build_once": "errors",
    "models": "errors build_once",
    "tiny": "",
    "images": "errors",
    "rope": "errors types",
    "jsonl": "",
    "data_proto": "errors types",
    "client": "errors config types wire",
    "loops": "errors config types wire client images alive",
    "broker": "errors wire alive",
    "worker": "errors config types wire client models rope loops jsonl alive",
    "service": "errors wire client loops.imports loops.threads alive",
    "engine": "errors config types wire client models loops.tokenizer alive",
    "trainer": "errors config types wire client data_proto models images rope loops.tokenizer loops.threads jsonl",
    "adapters": "errors config types client data_proto loops models trainer",
    "demo": "config data_proto errors loops models tiny trainer types",
    "launch": "errors config client.launcher_link demo.run trainer.job",
}
LAUNCHER_MAY_IMPORT = {
    "__version__",
    "alive",
    "config",
    "errors",
    "models",
    "client.launcher_link",
    "types",
    "loops.tokenizer",
    "wire.keys",
}

IMPORTERS = {
    "zmq": {"zagent/wire/"},
    "sglang": {
        *("zagent/engine/sglang_engine.py", "zagent/engine/sglang_launch.py", "zagent/engine/sglang_control.py"),
        *("zagent/engine/cpu_platform.py", "zagent/engine/sglang_parsers.py"),
    },
    "torch": {
        *(
            "zagent/engine/sglang_engine.py",
            "zagent/engine/cpu_platform.py",
            "zagent/models.py",
            "zagent/data_proto.py",
            "zagent/tiny/train.py",
        ),
        "zagent/adapters/",
        "zagent/trainer/",
        "zagent/demo/",
    },
    "verl": {"zagent/adapters/verl/"},
    "launcher": {"zagent/launch.py", "launcher/"},
    "pickle": set(),
}


@cache
def sources() -> dict[str, ast.Module]:
    """Each source file of both packages by its path from the root."""
    files = [*(ROOT / "zagent").rglob("*.py"), *(ROOT / "launcher").rglob("*.py")]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(tree: ast.AST, *, runtime: bool = True, top_level: bool = False) -> Iterator[tuple[str, int]]:
    """Dotted names a file imports (``from a import b`` gives `a.b`), with their line; not those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and runtime:
            continue
        if top_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        else:
            yield from imports(node, runtime=runtime, top_level=top_level)


def within(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


def part_of(path: str) -> str:
    return module_of(path).split(".")[1] if "." in module_of(path) else ""


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_lies_before_it(part: str) -> None:
    """errors ← config, types, wire ← client, loops ← process rooms."""
    allowed = [part, *MAY_IMPORT[part].split(), "__version__"]
    wrong = [
        f"{path}:{line} imports {name}"
        for path, tree in sources().items()
        if path.startswith("zagent/") and part_of(path) == part
        for name, line in imports(tree)
        if name.startswith("zagent.") and not any(within(name, f"zagent.{one}") for one in allowed)
    ]
    assert not wrong


def test_every_part_has_its_rule() -> None:
    """A new room or module must be given its place."""
    parts = {part_of(path) for path in sources() if path.startswith("zagent/")} - {""}
    assert parts == set(MAY_IMPORT)


def test_the_launcher_uses_only_the_plain_parts() -> None:
    """It names the rooms' entry points by dotted path, and never imports them."""
    wrong = [
        f"{path}:{line} imports {name}"
        for path, tree in sources().items()
        if path.startswith("launcher/")
        for name, line in imports(tree)
        if within(name, "zagent") and not any(within(name, f"zagent.{one}") for one in LAUNCHER_MAY_IMPORT)
    ]
    assert not wrong


@pytest.mark.parametrize("package", IMPORTERS)
def test_a_package_has_its_importers_and_no_others(package: str) -> None:
    """zmq, sglang, torch, launcher: few places each; pickle nowhere."""
    wrong = [
        f"{path}:{line} imports {name}"
        for path, tree in sources().items()
        for name, line in imports(tree)
        if within(name, package) and not path.startswith(tuple(IMPORTERS[package]))
    ]
    assert not wrong


def test_the_package_itself_imports_nothing() -> None:
    """Names are resolved on first use."""
    found = {name for name, _ in imports(sources()["zagent/__init__.py"])}
    assert found <= {"__future__.annotations", "importlib.import_module", "typing.TYPE_CHECKING", "typing.Any"}


def test_wire_and_the_brokers_brain_know_no_clock_and_no_socket() -> None:
    """Pure logic: the time is an argument."""
    brain = "core dispatch gates held leases pool presence pulse roster sticky waiting"
    for path in brain.split():
        found = {name.split(".")[0] for name, _ in imports(sources()[f"zagent/broker/{path}.py"])}
        assert not found & {"time", "asyncio", "socket", "zmq", "threading", "os"}, path


def test_there_are_no_cycles() -> None:
    """No module needs, directly or not, one that needs it while both are loaded."""
    modules = {module_of(path) for path in sources()}
    needs = {
        module_of(path): {found for name, _ in imports(tree, top_level=True) if (found := _module(name, modules))}
        for path, tree in sources().items()
    }
    cycles = [cycle for start in sorted(needs) if (cycle := _cycle(start, needs))]
    assert not cycles


def _module(name: str, modules: set[str]) -> str | None:
    while name:
        if name in modules and name != "zagent":  # the package itself is loaded first, and imports nothing
            return name
        name = name.rpartition(".")[0]
    return None


def _cycle(start: str, needs: dict[str, set[str]]) -> list[str] | None:
    """A path from ``start`` back to it."""
    todo, seen = [[start]], set()
    while todo:
        path = todo.pop()
        for found in needs.get(path[-1], set()) - {path[-1]}:
            if found == start:
                return [*path, start]
            if found not in seen:
                seen.add(found)
                todo.append([*path, found])
    return None


def test_files_stay_readable() -> None:
    """At most 300 lines each, give or take a header."""
    long = {path: len((ROOT / path).read_text().splitlines()) for path in sources()}
    assert {path: lines for path, lines in long.items() if lines > 310} == {}
