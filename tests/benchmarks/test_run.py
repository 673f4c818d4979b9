"""The runner: which benchmarks and peers run, what is written, and that one failure stops nothing else."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, run
from benchmarks.report_facts import commit
from benchmarks.run import Unusable, select
from benchmarks.suite import Figure, Options, Record


class Fake:
    """A benchmark that needs no time."""

    def __init__(self, name: str, peers: tuple[str, ...] = ("zagent", "ray"), *, breaks: bool = False) -> None:
        self.NAME, self.PEERS = name, peers
        self.breaks = breaks
        self.options: Options | None = None

    def run(self, options: Options, record: Record) -> None:
        self.options = options
        for peer in options.peers:
            record(Figure(self.NAME, "a, b", peer, 0, "seconds", 1.5, "s"))
        if self.breaks:
            raise RuntimeError("no such luck")

    def table(self, figures: Sequence[Figure]) -> str:
        return f"| {self.NAME}: {len(figures)} figures |"

    def plots(self, figures: Sequence[Figure], directory: Path) -> list[Path]:
        (directory / f"{self.NAME}.png").write_bytes(b"picture")
        return [directory / f"{self.NAME}.png"]


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    """Two that work around one that fails; `lost` is registered and does not exist. Ray is not installed."""
    fakes = {"good": Fake("good"), "bad": Fake("bad", breaks=True), "last": Fake("last", ("zagent", "static"))}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, f"fake_{name}", fake)
    modules = {**{name: f"fake_{name}" for name in fakes}, "lost": "benchmarks.no_such_module"}
    monkeypatch.setattr(run, "BENCHMARKS", modules)
    monkeypatch.setattr(report, "can_plot", lambda: True)
    monkeypatch.setattr(run, "select", lambda names, asked, load: select(names, asked, load, why_not))
    return fakes


def why_not(peer: str) -> str | None:
    return "not installed" if peer == "ray" else None


def document(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return found


def test_a_failure_is_reported_and_the_others_go_on(benchmarks, tmp_path, capsys):
    """Its traceback and the figures before it are kept; the exit status is 1."""
    assert run.main(["--out", str(tmp_path)]) == 1
    found = {part["name"]: part for part in document(tmp_path)["benchmarks"]}
    assert "no such luck" in found["bad"]["error"]
    assert len(found["bad"]["figures"]) == 1
    assert "no_such_module" in found["lost"]["error"]
    assert found["good"]["error"] is found["last"]["error"] is None
    printed = capsys.readouterr().out
    assert "| good: 1 figures |" in printed
    assert "no such luck" in printed
    assert printed.index("## good") < printed.index("## last")


def test_all_well_is_status_0(benchmarks, tmp_path):
    """Of those asked for; the broken ones are not even imported."""
    assert run.main(["--only", "good", "last", "--out", str(tmp_path / "new" / "place")]) == 0
    assert {path.name for path in (tmp_path / "new" / "place").iterdir()} == {
        *("good.csv", "good.png", "last.csv", "last.png", "report.json", "report.md")
    }


def test_a_csv_has_a_row_per_figure(benchmarks, tmp_path):
    """Cases with commas in them survive."""
    run.main(["--only", "last", "--out", str(tmp_path)])
    with (tmp_path / "last.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["case"], row["peer"], float(row["value"])) for row in rows] == [
        ("a, b", "zagent", 1.5),
        ("a, b", "static", 1.5),
    ]


def test_a_run_that_is_ended_keeps_its_figures(benchmarks, tmp_path, monkeypatch):
    """Those that were recorded before Ctrl-C (or SIGTERM, which is made one) are in the file."""

    def interrupted(options: Options, record: Record) -> None:
        record(Figure("good", "a", "zagent", 0, "seconds", 2.5, "s"))
        assert "2.5" in (tmp_path / "good.csv").read_text()
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmarks["good"], "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.main(["--only", "good", "--out", str(tmp_path)])
    assert (tmp_path / "good.csv").read_text().splitlines()[1] == "good,a,zagent,0,seconds,2.5,s"


def test_the_report_says_how_it_was_made(benchmarks, tmp_path):
    """Machine, versions, each benchmark's own command, and who was left out."""
    run.main(["--only", "good", "--repeats", "3", "--quick", "--out", str(tmp_path)])
    found = document(tmp_path)
    assert found["command"].startswith("python -m benchmarks.run --only good --repeats 3")
    assert found["benchmarks"][0]["command"] == "python -m benchmarks.run --only good --quick --repeats 3"
    assert found["versions"]["python"] and found["versions"]["numpy"] and "cores" in found["machine"]
    assert found["left_out"] == {"ray": "not installed"}
    text = (tmp_path / "report.md").read_text()
    assert "Left out: ray (not installed)." in text
    assert "![good.png](good.png)" in text


def test_options_reach_the_benchmark(benchmarks, tmp_path):
    """As they were given; the peers are its own."""
    trace = tmp_path / "trace.jsonl"
    trace.touch()
    run.main(["--only", "last", "--quick", "--repeats", "2", "--trace", str(trace), "--out", str(tmp_path)])
    assert benchmarks["last"].options == Options(True, 2, ("zagent", "static"), trace, tmp_path)


@pytest.mark.parametrize(
    ("peers", "said"), [("ray", "peer ray: not installed"), ("rya", "no peer 'rya' here; there are zagent, ray")]
)
def test_a_peer_that_is_asked_for_must_be_there(benchmarks, tmp_path, capsys, peers, said):
    """Nothing runs, nothing is written."""
    assert run.main(["--only", "good", "--peers", peers, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert benchmarks["good"].options is None and not list(tmp_path.iterdir())


def test_zagent_always_runs(benchmarks, tmp_path):
    """The other peers are compared with it; a benchmark without the one asked for has it alone."""
    modules = {"one": Fake("one"), "two": Fake("two", ("zagent", "static", "sockets"))}
    chosen = select(["one", "two"], ["sockets"], modules.__getitem__, why_not)
    assert chosen.peers == {"one": ("zagent",), "two": ("zagent", "sockets")}
    assert chosen.left_out == {}


def test_peers_that_are_not_installed_are_left_out():
    """Unless they are asked for by name."""
    chosen = select(["one"], None, Fake, why_not)
    assert (chosen.peers, chosen.left_out) == ({"one": ("zagent",)}, {"ray": "not installed"})
    with pytest.raises(Unusable, match="not installed"):
        select(["one"], ["ray"], Fake, why_not)


@pytest.mark.parametrize("wrong", [["--only", "nothing"], ["--repeats", "0"], ["--trace", "no/such/file"]])
def test_a_wrong_command_line_runs_nothing(benchmarks, tmp_path, wrong):
    """Exit status 2, as argparse has it."""
    with pytest.raises(SystemExit, match="2"):
        run.main([*wrong, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_there_are_figures_but_no_plots(benchmarks, tmp_path, monkeypatch):
    """Which the report says."""
    monkeypatch.setattr(report, "can_plot", lambda: False)
    assert run.main(["--only", "good", "--out", str(tmp_path)]) == 0
    assert not (tmp_path / "good.png").exists()
    assert "matplotlib is not installed" in (tmp_path / "report.md").read_text()


def test_the_commit_is_named_with_its_changes(tmp_path):
    """None where there is no repository."""
    assert commit(tmp_path) is None
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    clean = commit(tmp_path)
    assert clean is not None and len(clean) == 40
    (tmp_path / "new").touch()
    assert commit(tmp_path) == f"{clean}+changes"
