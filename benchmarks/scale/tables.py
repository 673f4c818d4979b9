"""The figures of `scale` as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.scale.figures import (
    AT_REST,
    ENGINES,
    GROUPS,
    IN_FLIGHT,
    REFERENCE,
    SESSIONS,
    TRAJECTORIES,
    WAITING,
    limit,
    points,
    samples,
)
from benchmarks.scale.laws import Traffic, exponent, slope
from benchmarks.suite import Figure, markdown, spread

#: Tokens that a GPU samples per second, over all its sequences: a large model, one of some 8 billion, a small one.
GPU_SPEEDS = (1000, 3000, 10_000)
#: Fewer trajectories take less than what the cluster takes at rest.
LEAST_ROWS = 1000
#: Tokens of one answer.
CALL_LENGTHS = (128, 512, 2048)


def table(figures: Sequence[Figure]) -> str:
    """Everything; parts that were not measured have no rows."""
    return "\n\n".join((_broker(figures), _gpus(figures), _waiting(figures), _at_rest(figures), *_flights(figures)))


def _broker(figures: Sequence[Figure]) -> str:
    head = ["the broker, per call", "", "its own thread µs", "its sockets' thread µs", "calls/s here", "saturates at"]
    forms = {"main_us": ".1f", "sockets_us": ".1f", "calls_per_s": ",.0f", "limit": ",.0f"}
    rows = []
    for what in (ENGINES, IN_FLIGHT, SESSIONS):
        found = {name: samples(figures, what, name) for name in forms}
        for number in found["main_us"]:
            cells = [spread(found[name][number], form) for name, form in forms.items()]
            rows.append([what.removeprefix("broker, "), f"{number:,}", *cells])
    rest = f"else {REFERENCE.engines} engines, {REFERENCE.in_flight} in flight, a session per call"
    return f"{markdown(head, rows)}\n\n1024 tokens in, 128 out; {rest}."


def _gpus(figures: Sequence[Figure]) -> str:
    """What the limit is worth."""
    most = limit(figures)
    head = ["GPUs that one broker serves", *(f"{speed:,} tokens/s each" for speed in GPU_SPEEDS)]
    rows = [
        [f"{length} tokens an answer", *(f"{Traffic(speed, length).gpus(most):,.0f}" for speed in GPU_SPEEDS)]
        for length in CALL_LENGTHS
    ]
    text = f"It saturates at {most:,.0f} calls/s; four answers a trajectory, which is itself one call more."
    return f"{markdown(head, rows)}\n\n{text}"


def _waiting(figures: Sequence[Figure]) -> str:
    rows = []
    for what in WAITING:
        found = points(figures, what, "broker_mb")
        rows.append([what, *(f"{found[i][1]:.0f}" if found else "–" for i in (0, -1)), f"{slope(found) * 1000:.2f}"])
    most = max((number for what in WAITING for number, _ in points(figures, what, "broker_mb")), default=0)
    return markdown(["the broker's memory", "MB with none", f"MB with {most:,}", "kB each"], rows)


def _at_rest(figures: Sequence[Figure]) -> str:
    kinds = {"cores": "% of a core", "mb": "MB", "descriptors": "descriptors"}
    shown = ("broker", "engines", "launcher")
    head = ["at rest: engines", "start s", *(f"{group} {kind}" for kind in kinds.values() for group in shown)]
    rows = []
    for number, start in points(figures, AT_REST, "start_s"):
        cells = [f"{start:.1f}"]
        for kind in kinds:
            scale = 100 if kind == "cores" else 1
            found = (dict(points(figures, AT_REST, f"{group}_{kind}"))[number] * scale for group in shown)
            cells += [format(value, ".1f" if kind == "cores" else ".0f") for value in found]
        rows.append([f"{number:,.0f}", *cells])
    return markdown(head, rows)


def _flights(figures: Sequence[Figure]) -> tuple[str, str]:
    """Times and processor time, and memory; with how they grow."""
    columns = ("peak", "all_up_s", "answer_s", "total_s", *(f"{group}_ms" for group in GROUPS))
    found = {name: dict(points(figures, TRAJECTORIES, name)) for name in columns}
    head = ["trajectories", "at once", "all up s", "an answer s", "total s", *(f"{group} ms each" for group in GROUPS)]
    rows = []
    for number in found["peak"]:
        times = [f"{found[name][number]:.1f}" for name in columns[1:4]]
        each = [f"{found[name][number]:.2f}" if number >= LEAST_ROWS else "–" for name in columns[4:]]
        rows.append([f"{number:,.0f}", f"{found['peak'][number]:,.0f}", *times, *each])
    memory = ["memory MB", *(f"{number:,.0f}" for number in found["peak"]), "kB each", "k of y ~ x^k beyond 1000"]
    return markdown(head, rows), markdown(memory, [_memory(figures, group) for group in GROUPS])


def _memory(figures: Sequence[Figure], group: str) -> list[str]:
    found = points(figures, TRAJECTORIES, f"{group}_mb")
    least = found[0][1] if found else 0.0
    grown = exponent([(number, size - least) for number, size in found if number >= LEAST_ROWS])
    return [group, *(f"{size:.0f}" for _, size in found), f"{slope(found) * 1000:.1f}", f"{grown:.2f}"]
