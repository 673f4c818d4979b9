"""What was measured, as Markdown: medians, zagent's ratio to each peer with its lowest and highest, and the sweeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.relay.plan import MODULES, SIZES, SWEEPS, SWEPT
from benchmarks.relay.traffic import CALLERS, IN_FLIGHT, SERVERS, Case, Load
from benchmarks.suite import Figure, cases, markdown, median, spread, values

OURS = "zagent"


def table(figures: Sequence[Figure]) -> str:
    """All of it."""
    parts = [part for size in SIZES for part in _size(figures, *size)]
    parts += [part for name, loads in SWEEPS.items() for part in _sweep(figures, name, loads)]
    return "\n\n".join(parts)


def _size(figures: Sequence[Figure], prompt: int, response: int) -> Iterator[str]:
    rows = [row for as_lists in (False, True) for row in _peers(figures, Case(prompt, response, as_lists))]
    if rows:
        head = [
            *("peer, tokens as", "calls/s", "zagent with arrays", "zagent with lists", "p50 ms", "p99 ms"),
            *("CPU µs a call", "bytes a call", "one at a time: p50 ms", "zagent / peer"),
        ]
        setting = f"{CALLERS} callers × {IN_FLIGHT} in flight, {SERVERS} servers"
        yield f"**{prompt} prompt tokens, {response} answered**; {setting}."
        yield markdown(head, rows)


def _peers(figures: Sequence[Figure], case: Case) -> Iterator[list[str]]:
    loaded, single = str(Load(case)), str(Load(case, callers=1, in_flight=1))
    for peer in MODULES:
        if not values(figures, case=loaded, peer=peer, name="calls_per_s"):
            continue

        def middle(name: str, form: str, of: str = loaded, peer: str = peer) -> str:
            return format(median(figures, case=of, peer=peer, name=name), form)

        alone = [] if peer == OURS else ratios(figures, "p50_ms", over=single, under=(single, peer))
        yield [
            f"{peer}, {'lists' if case.as_lists else 'arrays'}",
            middle("calls_per_s", ",.0f"),
            *(_against(figures, case, peer, as_lists) for as_lists in (False, True)),
            middle("p50_ms", ".1f"),
            middle("p99_ms", ".1f"),
            middle("cpu_us", ",.0f"),
            middle("wire_bytes", ",.0f"),
            middle("p50_ms", ".2f", single),
            spread(alone),
        ]


def _against(figures: Sequence[Figure], case: Case, peer: str, as_lists: bool) -> str:
    if peer == OURS:
        return "–"
    over = str(Load(Case(case.prompt, case.response, as_lists)))
    return spread(ratios(figures, "calls_per_s", over=over, under=(str(Load(case)), peer)))


def ratios(figures: Sequence[Figure], name: str, *, over: str, under: tuple[str, str]) -> list[float]:
    """zagent's in the case ``over`` divided by that of ``under`` (case, peer), of every repeat that has both."""
    above = values(figures, case=over, peer=OURS, name=name)
    below = values(figures, case=under[0], peer=under[1], name=name)
    return [above[repeat] / below[repeat] for repeat in sorted(above.keys() & below.keys())]


def _sweep(figures: Sequence[Figure], name: str, loads: Sequence[Load]) -> Iterator[str]:
    found = [load for load in loads if str(load) in cases(figures)]
    if len(found) < 2 or not all(values(figures, case=str(found[0]), peer=p, name="calls_per_s") for p in SWEPT):
        return
    yield f"**By {name}** (zagent / sockets)."
    yield markdown(
        ["load", "calls/s", "ratio", "p50 ms", "p99 ms", "CPU µs a call"], [_point(figures, load) for load in found]
    )


def _point(figures: Sequence[Figure], load: Load) -> list[str]:
    def both(name: str, form: str) -> str:
        return " / ".join(format(median(figures, case=str(load), peer=peer, name=name), form) for peer in SWEPT)

    ratio = spread(ratios(figures, "calls_per_s", over=str(load), under=(str(load), "sockets")))
    return [
        str(load),
        both("calls_per_s", ",.0f"),
        ratio,
        both("p50_ms", ".2f"),
        both("p99_ms", ".1f"),
        both("cpu_us", ".0f"),
    ]
