"""Scans the parts of a corpus on the cores of one machine: ``scan_part`` is the map, ``merge`` the reduce."""

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing import active_children, get_context
from typing import TypeVar

from sealegs.errors import MissingExtra, SealegsError, SourceError
from sealegs.scan.blocks import End, Ids, Part, TextDocuments, Unreadable, Ways
from sealegs.scan.counts import Counts, UnreadablePart, merged
from sealegs.scan.encoder import encoder
from sealegs.scan.ids import look_at_ids
from sealegs.scan.plan import READERS
from sealegs.scan.text import look_at_text

T = TypeVar("T")

_PENDING = 2  # parts per process that are under way or waiting: this bounds the memory


def scan_part(part: Part, ways: Ways) -> Counts:
    """The counts of one part: a pure function of the files."""
    return merged(_looked_at(part, ways))


def _looked_at(part: Part, ways: Ways) -> Iterator[Counts]:
    encode = encoder(ways.tokenizer) if ways.tokenizer else None
    if part.trouble is not None:
        yield _problem(part, 0, part.trouble)
        return
    try:
        for block in READERS[part.format](part, ways):
            match block:
                case TextDocuments():
                    yield look_at_text(block, part.number, longest=ways.longest, encode=encode)
                case Ids():
                    yield look_at_ids(block, part.number, longest=ways.longest, end=ways.end)
                case Unreadable():
                    yield _problem(part, block.number, block.text)
                case End():
                    yield Counts(parts={part.number: block.numbers})
    except MissingExtra:
        raise
    except (SourceError, OSError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        yield _problem(part, 0, text.removeprefix(f"{part.file}: "))


def _problem(part: Part, number: int, text: str) -> Counts:
    return Counts(problems=(UnreadablePart(part.number, number, text),), problem_count=1)


def scan(parts: Sequence[Part], ways: Ways, *, jobs: int, tell: Callable[[int], None] = lambda _: None) -> Counts:
    """The counts of all parts, ``jobs`` at a time. ``tell`` gets the bytes of each finished part."""
    return merged(over_parts(parts, partial(scan_part, ways=ways), jobs=jobs, tell=tell))


def over_parts(
    parts: Sequence[Part], work: Callable[[Part], T], *, jobs: int, tell: Callable[[int], None] = lambda _: None
) -> Iterator[T]:
    """What a function makes of each part, in the order of the corpus, ``jobs`` at a time."""
    if jobs == 1 or len(parts) == 1:
        for part in parts:
            yield work(part)
            tell(part.size)
        return
    others = set(active_children())
    pool = ProcessPoolExecutor(min(jobs, len(parts)), get_context("spawn"), initializer=_be_one_of_several)
    waiting = iter(parts)
    pending: deque[tuple[Part, Future[T]]] = deque()

    def submit(count: int) -> None:
        pending.extend((part, pool.submit(work, part)) for part in islice(waiting, count))

    try:
        with interrupts_held():
            submit(_PENDING * jobs)
        while pending:  # in the order of the corpus, so that the kept findings are always the same ones
            part, future = pending.popleft()
            yield future.result()
            submit(1)
            tell(part.size)
    except (KeyboardInterrupt, GeneratorExit):  # here, or where the counts are merged
        for process in set(active_children()) - others:
            process.terminate()
        raise
    except BrokenProcessPool as error:
        raise SealegsError(
            "a process of the scan was killed, most often for want of memory: give fewer --jobs"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True, wait=False)


def _be_one_of_several() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C from the processes that are started inside; their parent gets it, and ends them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
