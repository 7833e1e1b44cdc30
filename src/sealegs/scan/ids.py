"""Counts a block of token ids, and finds what is wrong with its documents."""

from collections import Counter

import numpy as np

from sealegs.scan.blocks import Ids
from sealegs.scan.counts import Counts, SourceSizes, document_key, source_key
from sealegs.scan.repeats import repeats
from sealegs.scan.text import Found, count_ids, digest, numbered, repeated

_SHOWN = 24


def look_at_ids(block: Ids, part: int, *, longest: int, end: int | None) -> Counts:
    """Count a block, and find what is wrong with its documents. ``end`` is the token after each, and is not text."""
    documents = document_key(part, block.numbers)
    counted, places = count_ids(block.ids, block.starts, documents, block.offset)
    lengths = np.diff(block.starts, append=len(block.ids))
    ends = block.starts + lengths
    if end is not None:
        has_end = (lengths > 0) & (block.ids[np.maximum(ends - 1, 0)] == end)
        ends = ends - has_end
    with_text = np.flatnonzero(ends > block.starts)
    findings: list[Found] = [
        repeated(each, _shown(block, each.start), "token", int(lengths[each.document]))
        for each in repeats(block.ids, block.starts)
    ]
    for number in np.flatnonzero(ends <= block.starts).tolist():
        findings.append((number, "empty", "drop", "no tokens", ""))
    for number in np.flatnonzero(lengths > longest).tolist():
        about = _shown(block, int(block.starts[number]))
        findings.append((number, "over-long", "defer", f"{lengths[number]:,} tokens", about))
    raw = memoryview(block.ids.astype("<u4").tobytes())  # the same bytes for the same ids, whatever their width
    bounds = zip((4 * block.starts[with_text]).tolist(), (4 * ends[with_text]).tolist(), strict=True)
    digests = [digest(raw[start:stop]) for start, stop in bounds]
    return Counts(
        tokens=counted,
        places=places,
        digests=np.array(digests, np.uint64),
        documents=documents[with_text],
        origins=np.full(len(with_text), source_key(block.source), np.uint32),
        sources={block.source: SourceSizes.of(lengths, block.ids.nbytes)},
        found=Counter((block.source, kind) for _, kind, *_ in findings),
        findings=numbered(findings, part, block.numbers),
        units=frozenset(["tokens"]),
    )


def _shown(block: Ids, place: int) -> str:
    """Token ids as text; a caller with a tokenizer can decode them."""
    return " ".join(map(str, block.ids[place : place + _SHOWN].tolist()))
