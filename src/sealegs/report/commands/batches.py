"""The report of ``sealegs batches``: how rare tokens are spread over batches, as text or JSON."""

from collections.abc import Iterator

import msgspec


class UnmetShown(msgspec.Struct, frozen=True, kw_only=True):
    """A rare token that a batch has in several rows."""

    token: int
    batch: int
    rows: int


class Batched(msgspec.Struct, frozen=True, kw_only=True):
    """An order of rows: ``sealegs batches --json``."""

    tokens: str
    """The file with the tokens."""
    rows: int
    batches: int
    batch: int
    """Rows per batch."""
    seed: int
    epoch: int
    rare: int
    """Tokens that occur fewer than ten times, and at least once."""
    rare_rows: int
    """Rows that hold one of them."""
    shuffled: int
    """Rows that would repeat a rare token of their batch if rows were only shuffled."""
    unmet: int
    """Rows that still do so in this order."""
    worst: list[UnmetShown]
    """Examples, the worst first."""
    in_one_row: int
    """Rare tokens that one row holds twice or more: no order separates them."""
    order: str | None
    """The file with the order."""


def page(batched: Batched) -> str:
    """The report as text."""
    return "\n".join(_lines(batched))


def _lines(batched: Batched) -> Iterator[str]:
    yield f"{batched.rows:,} rows, {batched.batches:,} batches of {batched.batch}"
    yield f"{batched.rare:,} rare tokens (fewer than 10 times), in {batched.rare_rows:,} rows"
    yield (
        f"rows with a rare token that their batch has already: {batched.shuffled:,} if they are only shuffled, "
        f"{batched.unmet:,} in this order"
    )
    for each in batched.worst:
        yield f"  token {each.token}: in {each.rows} rows of batch {each.batch}"
    if batched.unmet > sum(each.rows - 1 for each in batched.worst):
        yield "  ..."
    if batched.in_one_row:
        yield f"{batched.in_one_row:,} times a row has a rare token twice or more, which no order of rows parts"
    if batched.order:
        yield f"{batched.order}: the numbers of the rows, a line to a batch"
