"""Measured cells in, Markdown and plain numbers out."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from bench.detection.cells import AFTER_NAN, LASTING
from bench.detection.contenders import ALONE, DECISIONS, STATISTIC, TURNED, families
from bench.detection.data import Data
from bench.detection.measures import DELAYS, Recall, higher_than, poisson, recall
from bench.detection.turned import COMPARED, RATES, SEALEGS
from bench.peers import RULES

from bench import streams
from sealegs import judge

Results = Mapping[str, Mapping[str, Any]]
Cells = dict[str, str]
"""What a table says of each contender, by its name."""
CONTROL = RULES[-1].name
TURNABLE = {SEALEGS: TURNED, STATISTIC: STATISTIC, **{who: who for who in families()}}
"""Whose threshold is turned, and under what name that is told."""
Recalls = dict[str, dict[str, dict[str, Recall]]]
"""By setting (defaults, @10, ...), event and row."""
HERE = "by false flags in the injected run"
"""The setting whose rows are Sealegs by one signal alone: ``loss#3`` with three false flags there."""


def table(title: str, note: str, columns: Mapping[str, Cells]) -> str:
    """Contenders down, measures across, the control last."""
    names = dict.fromkeys(name for cells in columns.values() for name in cells)
    lines = [f"### {title}", "", note, "", "| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    lines += [f"| {name} | " + " | ".join(cells.get(name, "") for cells in columns.values()) + " |" for name in names]
    return "\n".join(lines)


# ---- what is found


def recalls_of(results: Results, data: Data) -> Recalls:
    """Everything that is found, at the defaults and at every rate."""
    first = results["found"]
    every: Recalls = {}
    for event, injection in streams.EVENTS.items():
        shown = injection(data.base, data.places[0])
        peaks = [shown.peak and shown.peak - shown.onset] * len(data.places)
        rows = {name: own for who in (SEALEGS, *families()) for name, own in first[who][event].items()}
        defaults = {name: recall(own, peaks) for name, own in rows.items() if not name.startswith("@")}
        every.setdefault("defaults", {})[event] = {
            name: defaults[name] for name in (*DECISIONS, *(rule.name for rule in RULES))
        }
        for setting in (f"@{rate:g}" for rate in RATES):
            turned = {row: first[who][event].get(setting) for who, row in TURNABLE.items()}
            alone = {row: first[SEALEGS][event].get(f"{signal}{setting}") for signal, row in ALONE.items()}
            every.setdefault(setting, {})[event] = {
                row: recall(own, peaks) for row, own in ours_first(turned, alone).items() if own is not None
            }
        counted = {name: own for name, own in first[SEALEGS][event].items() if "#" in name}
        every.setdefault(HERE, {})[event] = {name: recall(own, peaks) for name, own in counted.items()}
    return every


Row = TypeVar("Row")


def ours_first(turned: Mapping[str, Row], alone: Mapping[str, Row]) -> dict[str, Row]:
    """Rows of those whose threshold is turned, with what Sealegs does by one signal alone below what it does."""
    return {TURNED: turned[TURNED], **alone, **turned}


def found_cell(own: Recall) -> str:
    """``3 3 32 (25-40) 35 40; 1``: per cent by delay, the interval of the third; median latency; before the peak."""
    shares = [f"{100 * count / own.n:.0f}" for count in own.within]
    interval = "({:.0f}-{:.0f})".format(*(100 * end for end in own.interval(8)))
    words = (
        f"{shares[2]} {interval}"
        if len(set(shares)) == 1
        else f"{shares[0]} {shares[1]} {shares[2]} {interval} {shares[3]} {shares[4]}"
    )
    if own.latency is not None:
        words += f"; {own.latency:g}"
    if own.before_peak is not None:
        words += f"; {100 * own.before_peak / own.n:.0f} before the peak" + (f" by {own.lead:g}" if own.lead else "")
    return words


def found_tables(recalls: Recalls, setting: str, title: str, extra: Mapping[str, Cells]) -> Iterable[str]:
    """A table for each kind of fault, each with its control."""
    note = FOUND
    for kind, faults in streams.KINDS.items():
        events = {event: recalls[setting][event] for event in (streams.NOTHING, *faults)}
        cells = {event: {name: found_cell(own) for name, own in rows.items()} for event, rows in events.items()}
        yield table(f"{kind}, {title}", note, {**extra, **cells})
        extra, note = {}, "As above."


def higher(recalls: Recalls, setting: str, ours: str) -> dict[int, dict[str, dict[str, Recall]]]:
    """By delay and fault: the peers that find more than ``ours`` beyond the intervals."""
    answer: dict[int, dict[str, dict[str, Recall]]] = {delay: {} for delay in DELAYS}
    for delay in DELAYS:
        for fault in streams.FAULTS:
            rows = recalls[setting][fault]
            peers = {
                name: own for name, own in rows.items() if name not in (TURNED, STATISTIC, CONTROL, *ALONE.values())
            }
            above = {name: own for name, own in peers.items() if higher_than(rows[ours], own, delay)}
            if above:
                answer[delay][fault] = above
    return answer


def higher_words(recalls: Recalls, setting: str, healthy: Mapping[str, Any]) -> str:
    """On how many faults a peer is higher, and which; and what Sealegs finds of them with as many false flags there."""
    lines = [f"### Where a peer finds more, at {setting[1:]} per 100k", "", HIGHER, ""]
    for ours in (TURNED, STATISTIC):
        beaten = higher(recalls, setting, ours)
        counts = ", ".join(f"{counted(faults, delay)} within {delay}" for delay, faults in beaten.items())
        lines.append(f"- than {ours}: of {len(streams.FAULTS)} faults {counts} steps;")
    for delay, faults in higher(recalls, setting, TURNED).items():
        for fault, above in faults.items():
            best = max(above, key=lambda name: above[name].share(delay))
            others = f" ({len(above) - 1} more)" if len(above) > 1 else ""
            rows, by_chance = recalls[setting][fault], recalls[setting][streams.NOTHING][best]
            lines.append(
                f"- within {delay}, {fault}: {best} {share_words(above[best], delay)}{others}, Sealegs "
                f"{share_words(rows[TURNED], delay)}; with nothing injected {share_words(by_chance, delay)};"
                f"{with_as_many(recalls, fault, delay, healthy[best]['turned'][setting]['flags_here'])}"
            )
    return "\n".join(lines)


def counted(faults: Collection[str], delay: int) -> str:
    """``4 (2 different)``: what lasts and what does not is one and the same until it has lasted."""
    different = streams.different(faults, delay)
    return f"{len(faults)}" + (f" ({different} different)" if different < len(faults) else "")


def with_as_many(recalls: Recalls, fault: str, delay: int, count: int) -> str:
    """What Sealegs finds by the signal that a fault is in, alone, with so many false flags in the injected run."""
    signal = "grad_norm" if fault.startswith("norm") else "loss"
    own = recalls[HERE][fault].get(f"{signal}#{count}")
    return (
        f" {ALONE[signal]}, with as many false flags in this run ({count}): {share_words(own, delay)};" if own else ""
    )


def share_words(own: Recall, delay: int) -> str:
    """``32 % (25-40)``"""
    low, high = own.interval(delay)
    return f"{100 * own.share(delay):.0f} % ({100 * low:.0f}-{100 * high:.0f})"


# ---- what is flagged in health


def per_100k(own: Mapping[str, int]) -> str:
    """``12.3 (8.1-18)``"""
    scale = 1e5 / own["steps"]
    low, high = (end * scale for end in poisson(own["flags"]))
    return f"{short(own['flags'] * scale)} ({short(low)}-{short(high)})"


def short(x: float) -> str:
    """Two digits of what is small, none after the point of what is large."""
    return f"{x:.1f}" if x < 10 else f"{x:,.0f}"


def ordered(cells: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """By row, in the order of every table."""
    known = dict(cells)
    return {name: known[name] for name in (*DECISIONS, *(rule.name for rule in RULES)) if name in known}


def merged(results: Results, cell: str, header: str) -> dict[str, Any]:
    """One column of a cell, of every contender."""
    return ordered(row for who in (SEALEGS, *families()) for row in results[cell][who].get(header, {}).items())


def headers(results: Results, cell: str) -> Sequence[str]:
    """The columns of a cell."""
    return list(results[cell][SEALEGS])


def each(words: Callable[[Any], Any], rows: Mapping[str, Any]) -> dict[str, Any]:
    """In words."""
    return {name: words(own) for name, own in rows.items()}


def false_flags(results: Results, kind: str) -> str:
    """On the healthy runs, and on noise."""
    found = merged(results, "healthy", "found")
    columns = {
        kind: each(per_100k, found),
        "flags there, step numbers": each(lambda own: f"{own['flags']:,}, {own['numbers']:,}", found),
    }
    columns |= {header: each(per_100k, merged(results, "noise", header)) for header in headers(results, "noise")}
    return table("False flags per 100k healthy steps", FALSE_FLAGS, columns)


def by_detector(results: Results, steps: int) -> str:
    """Findings on healthy steps, by the detector that made them."""
    counted = results["healthy"][SEALEGS]["by_detector"]
    names = [detector.name for detector in judge.standard()]
    kinds = ("flag", "alarm", "skip")
    columns = {kind: {name: str(counted.get(f"{name} {kind}", 0)) for name in names} for kind in kinds}
    columns["control: healthy steps looked at"] = dict.fromkeys(names, f"{steps:,}")
    note = "Findings beyond a remark; those of them that raised an alarm; those that asked for a skip."
    return table("Sealegs on the same runs, by detector", note, columns)


def flagged_words(results: Results) -> str:
    """The healthy steps that set the threshold of Sealegs at the first rate that is compared."""
    lines = [f"### What {TURNED} flags in health at {COMPARED[0]:g} per 100k", "", FLAGGED, ""]
    lines += ["| signal | times the usual | -log10 p | run | step |", "|---|---|---|---|---|"]
    for one in sorted(results["healthy"][SEALEGS]["flagged"], key=lambda one: -one["score"]):
        score = f"{one['score']:.2f}" if one["score"] < 99 else "found by other means"
        lines.append(f"| {one['by']} | {one['times']:.2f} | {score} | {one['run']} | {one['step']:,} |")
    return "\n".join(lines)


def when_young(results: Results) -> str:
    """False flags in the first steps of runs."""

    def words(own: Mapping[str, int]) -> str:
        return (
            f"{own['flags'] / own['steps'] * 5000:.2f} ({own['flags']} in {own['steps']:,}; {own['numbers']} numbers)"
        )

    columns = {header: each(words, merged(results, "young", header)) for header in headers(results, "young")}
    return table("Young runs: false flags per 5,000 steps", YOUNG, columns)


# ---- what lasts, and recorded runs


def mean_words(header: str) -> Callable[[Sequence[float]], str]:
    """How the values of a column are put together."""

    def until_accepted(values: Sequence[float]) -> str:
        ended = [value for value in values if math.isfinite(value)]
        words = [f"{np.mean(ended):.0f}, at most {max(ended):.0f}"] if ended else []
        if len(ended) < len(values):
            words.append(f"never in {1 - len(ended) / len(values):.0%}")
        return "; ".join(words)

    if "accepted" in header:
        return until_accepted
    return lambda values: f"{np.mean(values):.1f}" if "flagged" in header else f"{np.mean(values):.0%}"


def lasting_table(results: Results, title: str, note: str, wanted: Iterable[str]) -> str:
    """Some columns of what lasts."""
    return table(
        title, note, {header: each(mean_words(header), merged(results, "lasting", header)) for header in wanted}
    )


def lab_recalls(results: Results, data: Data, source: str) -> dict[str, dict[str, Recall]]:
    """By fault and row."""
    answer = {}
    for fault in results["labs"][SEALEGS][source]["first"]:
        runs = [lab.run for lab in data.labs if lab.source == source and lab.fault == fault and not lab.healthy]
        peaks = [run.peak and run.peak - run.onset for run in runs]
        rows = (row for who in (SEALEGS, *families()) for row in results["labs"][who][source]["first"][fault].items())
        answer[fault] = {name: recall(firsts, peaks) for name, firsts in ordered(rows).items()}
    return answer


def lab_table(results: Results, data: Data, source: str) -> str:
    """What is found of recorded faults, and flagged of their clean twins."""
    rows = ordered(row for who in (SEALEGS, *families()) for row in results["labs"][who][source]["clean"].items())
    clean = {f"control: {sum(lab.healthy for lab in data.labs if lab.source == source)} clean runs": rows}
    found = {
        f"{fault} (n = {next(iter(own.values())).n})": each(found_cell, own)
        for fault, own in lab_recalls(results, data, source).items()
    }
    words = {
        header: each(lambda own: f"{own['flags']:,} flags in {own['steps']:,}", own) for header, own in clean.items()
    }
    return table(f"At defaults: {source}", LABS, {**words, **found})


# ---- all of it


def report(results: Results, data: Data, kind: str) -> Iterable[str]:
    """As Markdown, part by part."""
    recalls = recalls_of(results, data)
    yield false_flags(results, kind)
    yield by_detector(results, sum(map(len, data.healthy)))
    yield flagged_words(results)
    yield when_young(results)
    yield from found_tables(recalls, "defaults", "at defaults", {})
    for rate in COMPARED:
        setting = f"@{rate:g}"
        turned = ours_first(
            {row: results["healthy"][who]["turned"][setting] for who, row in TURNABLE.items()},
            {row: results["healthy"][SEALEGS]["alone"][signal][setting] for signal, row in ALONE.items()},
        )
        extra = {
            "threshold": {row: one["words"] for row, one in turned.items()},
            "flags in the injected run": {row: str(one.get("flags_here", "")) for row, one in turned.items()},
        }
        yield EQUAL.format(rate=rate, steps=len(data.base))
        yield from found_tables(recalls, setting, f"at {rate:g} per 100k", extra)
        yield higher_words(recalls, setting, results["healthy"])
    yield lasting_table(results, "Bursts, shifts and drifts to their end, at defaults", LONG, LASTING)
    yield lasting_table(results, "One NaN, then spikes, at defaults", NANS, AFTER_NAN)
    for source in dict.fromkeys(lab.source for lab in data.labs):
        yield lab_table(results, data, source)


def raw(results: Results, data: Data) -> dict[str, Any]:
    """The numbers behind the tables."""
    lasting = {header: merged(results, "lasting", header) for header in headers(results, "lasting")}
    return {
        "healthy": merged(results, "healthy", "found"),
        "by_detector": results["healthy"][SEALEGS]["by_detector"],
        "noise": {header: merged(results, "noise", header) for header in headers(results, "noise")},
        "young": {header: merged(results, "young", header) for header in headers(results, "young")},
        "turned": ours_first(
            {row: results["healthy"][who]["turned"] for who, row in TURNABLE.items()},
            {row: results["healthy"][SEALEGS]["alone"][signal] for signal, row in ALONE.items()},
        ),
        "flagged": results["healthy"][SEALEGS]["flagged"],
        "delays": DELAYS,
        "found": plain(recalls_of(results, data)),
        "lasting": {header: each(summary, rows) for header, rows in lasting.items()},
        "labs": {
            source: {
                "found": plain(lab_recalls(results, data, source)),
                "clean": {
                    name: own
                    for who in (SEALEGS, *families())
                    for name, own in results["labs"][who][source]["clean"].items()
                },
            }
            for source in results["labs"][SEALEGS]
        },
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Of a column of what lasts; infinite is never."""
    ended = [value for value in values if math.isfinite(value)]
    return {"mean": float(np.mean(ended)) if ended else 0.0, "n": len(values), "never": len(values) - len(ended)}


def plain(recalls: Any) -> Any:
    """As JSON has it."""
    if isinstance(recalls, Recall):
        return asdict(recalls)
    return {key: plain(own) for key, own in recalls.items()}


FALSE_FLAGS = """Every step counts, the first ones too; in brackets the 95 % Poisson interval. Noise: 15k steps on
a flat and 15k on a power-law loss, loss alone but for the last column. Of Sealegs: *flag*, what it finds beyond a
remark; *alarm*, what opens an incident; *skip*, the updates it leaves out, which most of what it finds is no reason
for. The last row is the control of every table: one step in a hundred, by chance. Step numbers: how many different ones
the flags fall on; runs of one data order share their hard batches."""
YOUNG = """The first steps of healthy runs; numbers: different step numbers, as above. Sealegs must not skip more than
1 in 5,000. Synthetic: power law with norm, five runs of each noise."""
FOUND = """Per cent of 150 places found within 0, 1, 8 (95 % Wilson interval), 32 and 200 steps of onset, one number
where all are the same; after the semicolon the median latency in steps, and for the traces the share found before the
loss peak and by how many steps in the median. The first column is the control: the same steps with nothing injected."""
HIGHER = """Higher beyond the interval: the lower end of the peer's Wilson interval is above the upper end of ours, at
the same delay. Where the rates are equal over all runs, the false flags in the run that faults are put into are not:
the last figure is of Sealegs with as many as the peer has there. Different: a step of +10 % is the same step whether or
not it goes on after it, and is missed once, not three times."""
FLAGGED = """The last of them sets the threshold: one more would be too many. Usual: the median of the 32 steps before.
In the first 1000 steps of a run one signal alone counts for a factor of ten less, here too."""
LONG = """At 40 places. Bursts: share of their steps that is flagged. Accepted: steps until 50 in a row are not
flagged, of 1500; 0 means that the shift was not seen. A drift is to be read against its control."""
NANS = """At 40 places: step 0 is NaN in both signals, steps 20 and 500 have loss x2 and norm x10; 498 healthy steps
between them. A rule that flags everything after a NaN finds every spike too: the fourth column tells."""
LABS = """Whole runs, each from its first step. As above: per cent found within 0, 1, 8 (interval), 32 and 200 steps of
onset; median latency; share found before the loss peaks or is NaN."""
EQUAL = """**At {rate:g} false flags per 100k.** Each rule at the smallest threshold that gives no more than this rate
on the healthy runs; rules of the norm alone have only the steps that have one. Threshold of Sealegs: -log10 p; of SPOT
-log10 q. "cannot": no threshold is quiet enough. The rates are equal over all the runs, not in the one injected into:
the second column has the false flags of its {steps:,} healthy steps. The control flags by chance at this rate.
*Turned* is all of Sealegs with one chance for gate and alarm of both spike detectors, and everything else as it is;
*loss alone* and *norm alone* are the same, given one of the two signals only (the norm has the steps of one run);
*bare statistic* is `streaming.look` and `learn` alone."""
