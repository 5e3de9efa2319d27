"""Plots: each is drawn once, and is SVG in the page and PNG beside it.

Sides are told apart by colour, marker and line alike. The colours are those of Okabe and Ito that
stand out from white and from black; text and axes take the colour of the page's text.
"""

import base64
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402  (the choice above has to come first)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: E402

from lab import stats  # noqa: E402
from lab.report import tables  # noqa: E402
from lab.report.source import Source  # noqa: E402
from lab.stats import Figures, Summary  # noqa: E402

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#A57C00", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
INK = "#1b1f23"  # becomes the text's colour in the page
GRID = "#d0d7de"  # becomes that of the page's lines
INCHES = (4.7, 3.1)  # as wide as a phone, so that its text is read there as it is
POINTS_MAX = 300
EVENTS_MAX = 8  # that are marked; all are in the table of what happened
# From the middle to one in ten thousand, evenly by how rare it is.
TAIL = (50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99)

STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "figure.titlesize": 9.5,
    "figure.titleweight": "bold",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "ashlar-lab",
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Plot:
    name: str  # of its file
    title: str
    alt: str  # what it shows, for who does not see it
    svg: str
    section: str

    @property
    def encoded(self) -> str:
        return base64.b64encode(self.svg.encode()).decode()

    @property
    def inline(self) -> str:
        """For the page: in the colour of its text, and named for who cannot see it."""
        svg = re.sub(r"(?s)^.*?(?=<svg)|<metadata>.*?</metadata>", "", self.svg)
        svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
        svg = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", svg, count=1)
        # ids are of one drawing only, and all drawings are in one page
        svg = re.sub(r'( id="|href="#|url\(#)', rf"\1{self.name}-", svg)
        svg = svg.replace(INK, "currentColor").replace(GRID, "var(--line)")
        return svg.replace("<svg ", '<svg aria-hidden="true" ', 1)


def all_of(source: Source, directory: Path) -> list[Plot]:
    """Draws them, and leaves each as a PNG in `directory`."""
    made = []
    with pyplot.rc_context(STYLE):
        for drawn in drawings(source):
            made.append(drawn.save(directory))
    return made


@dataclass
class Drawing:
    name: str
    title: str
    alt: str
    section: str
    figure: Figure

    def save(self, directory: Path) -> Plot:
        self.figure.savefig(directory / f"{self.name}.png", dpi=200, facecolor="white")
        text = io.StringIO()
        self.figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(self.figure)
        return Plot(self.name, self.title, self.alt, text.getvalue(), self.section)


def drawings(source: Source) -> Iterator[Drawing]:
    yield from rates(source)
    if source.raw:
        yield efficiencies(source)
    yield from by_clients(source)
    yield from over_time(source)
    yield from tails(source)
    yield from processors(source)


def begin(title: str) -> tuple[Figure, Axes]:
    figure, axes = pyplot.subplots(figsize=INCHES, layout="constrained")
    axes.set_title(title)
    return figure, axes


def look(source: Source, side: str) -> dict:
    at = source.names.index(side) % len(COLOURS)
    return {"color": COLOURS[at], "marker": MARKERS[at], "linestyle": LINES[at]}


def slug(*words: object) -> str:
    return re.sub(r"[^a-z0-9]+", "-", "-".join(map(str, words)).lower()).strip("-")


def legend(axes: Axes, **options) -> None:
    if len(axes.get_legend_handles_labels()[0]) > 1 or options:
        axes.figure.legend(loc="outside lower center", ncols=3, **options)


def plain(axes) -> None:
    """12,000 and 0.5, also on a logarithmic axis."""
    axes.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.set_minor_formatter(FuncFormatter(lambda value, _: ""))


# Bars -------------------------------------------------------------------------------------------


def bars(axes: Axes, source: Source, summaries: list[Summary], value, unit: str) -> str:
    """Groups of states; a bar a side, with its least and greatest repeat. Returns it in words."""
    states = list(dict.fromkeys(one.cell.state for one in summaries))
    wide = 0.8 / len(source.names)
    said = []
    for at, side in enumerate(source.names):
        its = [
            (states.index(one.cell.state), value(one)) for one in summaries if one.cell.side == side
        ]
        its = [(place, spread) for place, spread in its if spread is not None]
        if not its:
            continue
        places = [place + (at - (len(source.names) - 1) / 2) * wide for place, _ in its]
        medians = [spread.median for _, spread in its]
        low = [spread.median - spread.least for _, spread in its]
        high = [spread.greatest - spread.median for _, spread in its]
        colour = COLOURS[at % len(COLOURS)]
        axes.bar(
            places, medians, wide * 0.92, label=side, color=colour,
            hatch=HATCHES[at % len(HATCHES)], edgecolor="white", linewidth=0,
        )  # fmt: skip
        axes.errorbar(places, medians, [low, high], fmt="none", ecolor=INK, capsize=2, linewidth=1)
        # above the repeats, whose line would strike it through
        for place, (_, spread) in zip(places, its, strict=True):
            axes.annotate(
                tables.number(spread.median), (place, spread.greatest), xytext=(0, 4),
                textcoords="offset points", ha="center", fontsize=7.5, color=INK,
            )  # fmt: skip
        said += [f"{side} {states[place]} {tables.number(one.median)} {unit}" for place, one in its]
    axes.set_xticks(range(len(states)), states)
    axes.grid(False, axis="x")
    axes.margins(y=0.15)
    plain(axes.yaxis)
    return "; ".join(said)


def rates(source: Source) -> Iterator[Drawing]:
    for load, loads in source.loads:
        summaries = source.telling(load, loads)
        clients = source.telling_clients(load, loads)
        unit = tables.rate_unit(source, load)
        title = source.title_of(load, loads) + (f", {clients} clients" if clients else "")
        figure, axes = begin(f"{title}: {unit}")

        def value(one: Summary):
            found, times = tables.rate(source, one)
            return found and type(found)(
                *(each * times for each in (found.median, found.least, found.greatest)), found.count
            )

        said = bars(axes, source, summaries, value, unit)
        legend(axes)
        alt = f"Bars of {unit} by state and side: {said}."
        yield Drawing(slug("rate", load, loads), title, alt, "How much", figure)


def efficiencies(source: Source) -> Drawing:
    """Whole and degraded, all patterns, as a share of what the bare drives do."""
    wanted = [one for load, loads in source.loads for one in source.telling(load, loads)]
    rows = [(one, tables.efficiency(source, one)) for one in wanted]
    rows = [(one, share) for one, share in rows if share is not None][::-1]
    high = 1.1 + 0.2 * len(rows)
    figure, axes = pyplot.subplots(figsize=(INCHES[0], high), layout="constrained")
    # of the whole figure: labels take half of it
    figure.suptitle("Share of what the bare drives do", x=0.01, ha="left")
    for place, (one, share) in enumerate(rows):
        at = source.names.index(one.cell.side) % len(COLOURS)
        axes.barh(place, share * 100, 0.75, color=COLOURS[at], hatch=HATCHES[at], edgecolor="white",
                  linewidth=0)  # fmt: skip
        axes.text(share * 100 + 1, place, f"{share * 100:.0f} %", va="center", fontsize=7.5)
    labels = [
        f"{source.title_of(one.cell.load, one.cell.loads)}, {one.cell.state}: {one.cell.side}"
        for one, _ in rows
    ]
    axes.set_yticks(range(len(rows)), labels, fontsize=7.5)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.axvline(100, color=INK, linewidth=1, linestyle=":")
    axes.set_xlim(0, max(112, *(share * 112 for _, share in rows)))
    axes.set_xlabel("% of the bare drives' own rate")
    axes.grid(False, axis="y")
    said = "; ".join(
        f"{label} {share * 100:.0f} %" for label, (_, share) in zip(labels, rows, strict=True)
    )
    return Drawing("efficiency", "Efficiency", f"Bars: {said}.", "How much", figure)


def processors(source: Source) -> Iterator[Drawing]:
    """Of storage and load together: what sides can be compared by."""
    for load, loads in source.loads:
        summaries = source.telling(load, loads)
        cells = [figures.cell for one in summaries for figures in one.figures]
        if all(tables.busy_cores(source, cell) is None for cell in cells):
            continue
        title = f"{source.title_of(load, loads)}: busy cores, of storage and load"
        figure, axes = begin(title)
        said = bars(
            axes, source, summaries,
            lambda one: one.spread(lambda each: tables.busy_cores(source, each.cell)), "cores",
        )  # fmt: skip
        legend(axes)
        yield Drawing(
            slug("cores", load, loads), title, f"Bars of cores: {said}.", "Processors", figure
        )


# Lines ------------------------------------------------------------------------------------------


def by_clients(source: Source) -> Iterator[Drawing]:
    for load, loads in source.loads:
        its = source.of_load(load, loads)
        if len({one.cell.clients for one in its}) < 2:
            continue
        for state in dict.fromkeys(one.cell.state for one in its):
            title = f"{source.title_of(load, loads)}, {state}: clients against tps"
            figure, axes = begin(title)
            said = []
            for side in source.names:
                line = sorted(
                    (one.cell.clients, one.per_second)
                    for one in its
                    if (one.cell.side, one.cell.state) == (side, state)
                )
                if not line:
                    continue
                clients = [count for count, _ in line]
                axes.plot(
                    clients, [one.median for _, one in line], label=side, **look(source, side)
                )
                axes.fill_between(
                    clients, [one.least for _, one in line], [one.greatest for _, one in line],
                    color=look(source, side)["color"], alpha=0.18, linewidth=0,
                )  # fmt: skip
                best = max(line, key=lambda each: each[1].median)
                said.append(f"{side} at most {best[1].median:,.0f} tps, with {best[0]} clients")
            axes.set_xscale("log")
            axes.set_xticks(sorted({one.cell.clients for one in its}))
            axes.xaxis.set_minor_locator(NullLocator())
            plain(axes.xaxis)
            plain(axes.yaxis)
            axes.set_ylim(bottom=0)
            axes.set_ylabel("transactions a second")
            axes.set_xlabel("clients")
            legend(axes)
            yield Drawing(
                slug("clients", load, loads, state), title, "; ".join(said) + ".", "Clients", figure
            )


def over_time(source: Source) -> Iterator[Drawing]:
    """The repeat with the median rate of each side; all of what happened to its array."""
    for load, loads in source.loads:
        summaries = source.telling(load, loads)
        for state in dict.fromkeys(one.cell.state for one in summaries):
            title = f"{source.title_of(load, loads)}, {state}: {source.rate} over time"
            figure, axes = begin(title)
            said = []
            events = []
            for one in (one for one in summaries if one.cell.state == state):
                figures = with_events(one)
                style = look(source, one.cell.side) | {"marker": None}
                axes.plot(*line_of(figures), label=one.cell.side, **style)
                said.append(f"{one.cell.side} {figures.per_second:,.0f} {source.rate} on average")
                events += [
                    (second, f"{one.cell.side}: {what}, {second:.0f} s", style["color"])
                    for second, what in figures.cell.events
                ]
            said += [what for _, what, _ in events]
            began = min((min(line.get_xdata(), default=0) for line in axes.lines), default=0)
            said_below = "seconds"
            if began < 0:
                axes.axvspan(began, 0, color=INK, alpha=0.06, linewidth=0)
                said_below = "seconds; shaded: warm-up, not measured"
            axes.set_ylim(bottom=0)
            axes.set_xlim(left=min(began, 0))
            plain(axes.yaxis)
            axes.set_xlabel("\n".join([said_below, *mark(axes, events)]))
            # what came long after is told below, and does not press the line together
            axes.set_xlim(right=max(each.cell.seconds for one in summaries for each in one.figures))
            legend(axes)
            yield Drawing(
                slug("time", load, loads, state), title, "; ".join(said) + ".", "Over time", figure
            )


def mark(axes: Axes, events: list[tuple[float, str, str]]) -> list[str]:
    """A numbered line at each moment, and what the numbers mean."""
    for at, (second, _, colour) in enumerate(events[:EVENTS_MAX], 1):
        axes.axvline(second, color=colour, linewidth=1.2, linestyle=(0, (1, 1)))
        height = 1 - 0.09 * ((at - 1) % 4)  # beside each other, where they come together
        axes.annotate(f" {at}", (second, height), xycoords=("data", "axes fraction"), va="top",
                      annotation_clip=True, fontsize=8, color=INK)  # fmt: skip
    return [f"{at}  {what}" for at, (_, what, _) in enumerate(events[:EVENTS_MAX], 1)]


def with_events(one: Summary) -> Figures:
    """The middle repeat; or, where something happened to the array in some, the middle of these."""
    eventful = tuple(each for each in one.figures if each.cell.events)
    return type(one)(eventful or one.figures).middle()


def line_of(figures: Figures) -> tuple[list[float], list[float]]:
    """Seconds in which nothing ended count as none; many are drawn as means of several."""
    each = figures.each_second
    last = round(figures.cell.seconds)
    if not each:
        return [], []
    seconds = range(min(each), last)
    step = -(-len(seconds) // POINTS_MAX)
    points = [seconds[at : at + step] for at in range(0, len(seconds), step)]
    return (
        [part[0] + len(part) / 2 for part in points],
        [sum(each.get(second, 0) for second in part) / len(part) for part in points],
    )


def tails(source: Source) -> Iterator[Drawing]:
    for load, loads in source.loads:
        summaries = [
            one for one in source.telling(load, loads) if one.middle().distribution is not None
        ]
        for state in dict.fromkeys(one.cell.state for one in summaries):
            title = f"{source.title_of(load, loads)}, {state}: latency"
            figure, axes = begin(title)
            said = []
            for one in (one for one in summaries if one.cell.state == state):
                distribution = one.middle().distribution
                known = [
                    each for each in TAIL if stats.enough_beyond(distribution.total, each)
                ]
                if not known:
                    continue
                values = [distribution.percentile_ms(each) for each in known]
                rare = [100 / (100 - each) for each in known]
                axes.plot(rare, values, label=one.cell.side, **look(source, one.cell.side))
                said.append(
                    f"{one.cell.side} p50 {tables.number(values[0])} ms, "
                    f"p{known[-1]:g} {tables.number(values[-1])} ms"
                )
            axes.set_xscale("log")
            axes.set_yscale("log")
            shown = (50, 90, 99, 99.9, 99.99)
            axes.set_xticks(
                [100 / (100 - each) for each in shown], [f"p{each:g}" for each in shown]
            )
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            plain(axes.yaxis)
            axes.set_ylabel("milliseconds")
            axes.set_xlabel("this share took no longer")
            legend(axes)
            yield Drawing(
                slug("latency", load, loads, state), title, "; ".join(said) + ".", "Latency", figure
            )
