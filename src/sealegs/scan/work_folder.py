"""The folder in which the tasks of a scan meet: the plan, and the counts of each bundle of parts.

A *bundle* is a few parts on end that are counted together: the unit of work, and of going on after a kill. Bundles come
of the corpus alone, never of the number of tasks, and are merged in the order of the corpus. So the report has the same
bytes for any number of tasks. The counts of a bundle are plain values: arrays, JSON, and a table of its documents in
the order of their digests; the JSON is written last and says that all of it is there. Nothing is unpickled.
"""

import io
import json
import os
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from sealegs.errors import ConfigError, SourceError
from sealegs.record.files import whole_file, writing
from sealegs.scan.blocks import Part, Ways
from sealegs.scan.counts import Counts, DocumentFinding, Documents, Places, SourceSizes, Unit, UnreadablePart
from sealegs.scan.files import file_system, is_address, opened, reading, settled, stamp_of

T = TypeVar("T")

SCHEMA = 1
MOST_BUNDLES = 10_000
"""Of a corpus: larger ones have larger bundles."""
_PLAN, _TOKENIZER, _COUNTS, _FAILED = "plan.json", "tokenizer.json", "counts", "failed"
_RANGES = 256
"""Of digests, by their first byte: a table is read a few of them at a time."""
_AT_ONCE = 1 << 22
"""Documents of a table that are held at a time."""
_READS = 16
_DOCUMENT = np.dtype([("digest", "<u8"), ("key", "<i8"), ("origin", "<u4")])


class Store:
    """A folder at a path or an address. Files in it are whole or absent."""

    def __init__(self, place: str) -> None:
        place = settled(place)
        self.place = place.rstrip("/") if is_address(place) else str(Path(place).absolute())
        self._system: Any = None
        self._root = self.place
        if is_address(self.place):
            self._system, self._root = file_system(self.place)

    def address(self, name: str) -> str:
        """The path or address of a file in it."""
        return f"{self.place}/{name}"

    def write(self, name: str, data: bytes) -> None:
        """Write a file aside, and give it its name."""
        with writing(self.address(name)):
            if self._system is None:
                path = Path(self.place) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(path, durable=False) as file:
                    file.write(data)
                return
            with reading(self.place):
                aside = f"{self._root}/{name}.{uuid.uuid4().hex}.partial"
                self._system.makedirs(aside.rpartition("/")[0], exist_ok=True)
                self._system.pipe_file(aside, data)
                self._system.mv(aside, f"{self._root}/{name}")

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes of a file, or some of them."""
        if self._system is None:
            with (Path(self.place) / name).open("rb") as file:
                file.seek(start)
                return file.read() if end is None else file.read(end - start)
        with reading(self.place):
            found: bytes = self._system.cat_file(f"{self._root}/{name}", start=start, end=end)
        return found

    def sizes(self, folder: str) -> dict[str, int]:
        """The files of a folder in it, and their sizes."""
        if self._system is None:
            found = {}
            with suppress(FileNotFoundError), os.scandir(Path(self.place) / folder) as listed:
                for each in listed:
                    if not each.name.startswith("."):  # one that is being written
                        found[each.name] = each.stat().st_size
            return found
        with reading(self.place):
            if not self._system.isdir(f"{self._root}/{folder}"):
                return {}
            self._system.invalidate_cache(f"{self._root}/{folder}")
            there = self._system.ls(f"{self._root}/{folder}", detail=True)
        return {each["name"].rpartition("/")[2]: int(each["size"] or 0) for each in there}

    def names(self, folder: str) -> set[str]:
        """The files of a folder, without a question about each."""
        if self._system is None:
            with suppress(FileNotFoundError), os.scandir(Path(self.place) / folder) as listed:
                return {each.name for each in listed if not each.name.startswith(".")}
            return set()
        return set(self.sizes(folder))

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        if self._system is None:
            return (Path(self.place) / name).is_file()
        with reading(self.place):
            return bool(self._system.isfile(f"{self._root}/{name}"))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        if self._system is None:
            (Path(self.place) / name).unlink(missing_ok=True)
        elif self.has(name):
            with reading(self.place):
                self._system.rm_file(f"{self._root}/{name}")


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is counted: a corpus in bundles of parts."""

    schema: int
    corpus: list[str]
    base: str
    """The folder that relative paths of the corpus start from."""
    ways: Ways
    parts: list[Part]
    bundles: list[int]
    """The first part of each."""
    stamps: list[str]
    """Of each file, what changes with it."""
    number: str
    """A digest of all that: counts of another plan are not taken."""

    def of_bundle(self, bundle: int) -> list[Part]:
        """The parts of a bundle."""
        end = self.bundles[bundle + 1] if bundle + 1 < len(self.bundles) else len(self.parts)
        return self.parts[self.bundles[bundle] : end]

    def size(self, bundles: Iterable[int]) -> int:
        """The bytes of some bundles."""
        return sum(part.size for bundle in bundles for part in self.of_bundle(bundle))


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the counts of a bundle that is no array."""

    schema: int
    plan: str
    sizes: dict[str, int]
    """Of the other two files, which were written before."""
    ranges: list[int]
    """Where in the table of documents the digests of each first byte start."""
    sources: dict[str, SourceSizes]
    parts: dict[int, int]
    found: list[tuple[str, str, int]]
    findings: tuple[DocumentFinding, ...]
    problems: tuple[UnreadablePart, ...]
    problem_count: int
    units: list[Unit]


@dataclass(frozen=True)
class Progress:
    """How far the tasks are."""

    bundles: int
    done: int
    bytes: int
    bytes_done: int
    failed: Mapping[int, str] = field(default_factory=dict)
    """By task: why it ended."""


class WorkFolder:
    """The plan of a scan, and the counts so far."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self.store = store
        self.plan = plan
        self._ranges: dict[int, list[int]] = {}

    @classmethod
    def opened(cls, place: str) -> "WorkFolder":
        """The one that is there."""
        store = Store(place)
        try:
            plan = _from_json(store.read(_PLAN), Plan)
        except FileNotFoundError as error:
            raise SourceError(f"--work {place}: no scan has been started in it") from error
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise SourceError(f"--work {place}: {_PLAN} cannot be read ({error}); name a new folder") from error
        if plan.schema != SCHEMA:
            raise SourceError(f"--work {place}: schema {plan.schema}, this Sealegs reads {SCHEMA}; name a new folder")
        return cls(store, plan)

    @classmethod
    def prepared(cls, place: str, corpus: Sequence[str], parts: Sequence[Part], ways: Ways) -> "WorkFolder":
        """A new one, or the one in which the same scan was begun."""
        store = Store(place)
        tokenizer = None
        if ways.tokenizer is not None:  # every task sees the one that was given, and not what came of it
            with opened(ways.tokenizer) as file:
                tokenizer = file.read()
            ways = replace(ways, tokenizer=store.address(_TOKENIZER))
        plan = planned_bundles(corpus, parts, ways, also=tokenizer or b"")
        if store.has(_PLAN):
            before = cls.opened(place)
            if before.plan.number != plan.number:
                raise ConfigError(f"--work {place}: {_difference(before.plan, plan)}; name a new folder")
            return before
        if tokenizer is not None:
            store.write(_TOKENIZER, tokenizer)
        store.write(_PLAN, _to_json(plan))
        return cls(store, plan)

    def counted(self) -> set[int]:
        """The bundles whose counts are whole."""
        there = self.store.names(_COUNTS)
        return {bundle for bundle in range(len(self.plan.bundles)) if f"{bundle:05d}.json" in there}

    def keep(self, bundle: int, counts: Counts) -> None:
        """Write the counts of a bundle; those of the same bundle by another task are the same."""
        table = np.empty(len(counts.documents), _DOCUMENT)
        table["digest"], table["key"], table["origin"] = counts.digests, counts.documents, counts.origins
        table = table[np.lexsort((counts.documents, counts.digests))]
        arrays = io.BytesIO()
        places = counts.places
        occurring = np.flatnonzero(counts.tokens)  # of a million characters, some hundred occur
        at = np.stack([places.tokens, places.documents, places.offsets])
        np.savez(arrays, ids=len(counts.tokens), occurring=occurring, times=counts.tokens[occurring], at=at)
        files = {"npz": arrays.getvalue(), "documents": table.tobytes()}
        for kind, data in files.items():
            self.store.write(f"{_COUNTS}/{bundle:05d}.{kind}", data)
        stored = _Stored(
            schema=SCHEMA,
            plan=self.plan.number,
            sizes={kind: len(data) for kind, data in files.items()},
            ranges=ranges_of(table["digest"]),
            sources=counts.sources,
            parts=counts.parts,
            found=[(source, kind, times) for (source, kind), times in counts.found.items()],
            findings=counts.findings,
            problems=counts.problems,
            problem_count=counts.problem_count,
            units=sorted(counts.units),
        )
        self.store.write(f"{_COUNTS}/{bundle:05d}.json", _to_json(stored))

    def kept(self) -> Iterator[Counts]:
        """The counts of each bundle in the order of the corpus, without documents, of which ``tables`` has more."""
        for bundle, (stored, data) in enumerate(self._ahead(range(len(self.plan.bundles)), self._read)):
            self._ranges[bundle] = stored.ranges
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                tokens, at = np.zeros(int(arrays["ids"]), np.int64), arrays["at"]
                tokens[arrays["occurring"]] = arrays["times"]
            yield Counts(
                tokens=tokens,
                places=Places(*at),
                sources=stored.sources,
                parts=stored.parts,
                found=Counter({(source, kind): times for source, kind, times in stored.found}),
                findings=stored.findings,
                problems=stored.problems,
                problem_count=stored.problem_count,
                units=frozenset(stored.units),
            )

    def _read(self, bundle: int) -> tuple[_Stored, bytes]:
        return self._stored(bundle), self.store.read(f"{_COUNTS}/{bundle:05d}.npz")

    def _ahead(self, bundles: Iterable[int], read: Callable[[int], T]) -> Iterator[T]:
        """What is read of each bundle, in order; a few are read ahead, because an address takes its time."""
        waiting = iter(bundles)
        with ThreadPoolExecutor(_READS) as threads:
            pending = deque(threads.submit(read, bundle) for bundle in islice(waiting, _READS))
            while pending:
                yield pending.popleft().result()
                pending.extend(threads.submit(read, bundle) for bundle in islice(waiting, 1))

    def tables(self) -> Iterator[Documents]:
        """All documents, some millions at a time: those whose digests begin alike come together."""
        assert len(self._ranges) == len(self.plan.bundles), "the counts are read first"
        ranges = [self._ranges[bundle] for bundle in range(len(self.plan.bundles))]
        for table in self.in_ranges(_COUNTS, "documents", _DOCUMENT, ranges):
            yield Documents(table["digest"].copy(), table["key"].copy(), table["origin"].copy())

    def in_ranges(
        self, folder: str, kind: str, row: np.dtype[Any], ranges: Sequence[Sequence[int]]
    ) -> Iterator[NDArray[Any]]:
        """The rows of all bundles, some millions at a time: those whose hashes begin alike come together. ``ranges`` is
        ``ranges_of`` the table of each bundle."""
        starts = np.array(ranges, np.int64)
        ends_at = np.append(0, np.cumsum(np.diff(starts, axis=1).sum(0)))

        def read(bundle: int) -> bytes:
            start, end = (int(starts[bundle, each]) * row.itemsize for each in (first, last))
            return self.store.read(f"{folder}/{bundle:05d}.{kind}", start, end) if start < end else b""

        first = 0
        while first < _RANGES:
            last = int(np.searchsorted(ends_at, ends_at[first] + _AT_ONCE, side="right")) - 1
            last = min(max(last, first + 1), _RANGES)
            with ThreadPoolExecutor(_READS) as threads:
                yield np.frombuffer(b"".join(threads.map(read, range(len(starts)))), row)
            first = last

    def _stored(self, bundle: int) -> _Stored:
        name = f"{_COUNTS}/{bundle:05d}.json"
        try:
            stored: _Stored = _from_json(self.store.read(name), _Stored)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise SourceError(f"{self.store.address(name)}: cannot be read ({error}); remove it, and go on") from error
        if stored.schema != SCHEMA or stored.plan != self.plan.number:
            raise SourceError(f"{self.store.address(name)}: of another scan; remove it, and go on")
        return stored

    def damaged(self) -> list[int]:
        """Bundles whose counts are torn, as a power cut may leave them; they are forgotten, to be counted again."""
        sizes = self.store.sizes(_COUNTS)
        found = []
        counted = sorted(self.counted())
        for bundle, stored in zip(counted, self._ahead(counted, self._stored), strict=True):
            wanted = stored.sizes
            if any(sizes.get(f"{bundle:05d}.{kind}") != size for kind, size in wanted.items()):
                self.store.remove(f"{_COUNTS}/{bundle:05d}.json")
                found.append(bundle)
        return found

    def tell_failure(self, task: int, why: str | None) -> None:
        """Say why a task ended, or that it did not."""
        if why is None:
            self.store.remove(f"{_FAILED}/{task:05d}.txt")
        else:
            self.store.write(f"{_FAILED}/{task:05d}.txt", why.encode(errors="replace"))

    def progress(self) -> Progress:
        """How far the tasks are."""
        counted = self.counted()
        failed = {int(name[:5]): self.store.read(f"{_FAILED}/{name}").decode() for name in self.store.sizes(_FAILED)}
        everything = range(len(self.plan.bundles))
        return Progress(len(everything), len(counted), self.plan.size(everything), self.plan.size(counted), failed)


def ranges_of(hashes: NDArray[np.uint64]) -> list[int]:
    """Where those of each first byte start, in rising order, and the end."""
    found: list[int] = np.searchsorted(hashes >> np.uint64(56), np.arange(_RANGES + 1)).tolist()
    return found


def planned_bundles(corpus: Sequence[str], parts: Sequence[Part], ways: Ways, *, also: bytes = b"") -> Plan:
    """The plan of a scan; ``also`` is content that its number depends on."""
    files = dict.fromkeys(chain.from_iterable(part.files or (part.path or part.file,) for part in parts))
    stamps = [_stamp(name) for name in files]
    least = max(sum(part.size for part in parts) // MOST_BUNDLES, 1)
    bundles: list[int] = []
    size = least
    for number, part in enumerate(parts):
        if size >= least:
            bundles.append(number)
            size = 0
        size += part.size
    made = Plan(
        schema=SCHEMA,
        corpus=list(corpus),
        base=str(Path.cwd()),
        ways=ways,
        parts=list(parts),
        bundles=bundles,
        stamps=stamps,
        number="",
    )
    digest = blake2b(_to_json(made) + also, digest_size=16).hexdigest()
    return msgspec.structs.replace(made, number=digest)


def _stamp(name: str) -> str:
    try:
        return stamp_of(name)
    except OSError as error:  # named as unreadable by whoever reads it
        return f"error {error.errno}"


def _difference(before: Plan, now: Plan) -> str:
    """What two plans do not share, in words."""
    if before.corpus != now.corpus or before.base != now.base:
        return f"it holds the scan of {' '.join(before.corpus)} in {before.base}"
    old, new = asdict(before.ways), asdict(now.ways)
    for name, value in old.items():
        if value != new[name]:
            return f"it was begun with --{name} {value}"
    return "the corpus or the tokenizer has changed since it was begun"


def _to_json(value: Any) -> bytes:
    """As JSON in ASCII: names of files may have bytes that are no UTF-8."""
    return json.dumps(msgspec.to_builtins(value, str_keys=True)).encode()


def _from_json(data: bytes, kind: Any) -> Any:
    return msgspec.convert(json.loads(data), kind, strict=True, str_keys=True)
