"""A position of other ranks in, the same place for the present ones out: the rest of the epoch is divided anew."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from sealegs.data.cuts import ENDLESS, Piece
from sealegs.data.loaders import check_of
from sealegs.data.shares import Cut, Share, world_size
from sealegs.data.stateful import UNKNOWN, Epoch, Loader
from sealegs.errors import RanksChanged, SourceError

GUIDE = "docs/elastic.md says how"


class Recut(NamedTuple):
    """A position that was divided anew."""

    position: dict[str, Any]
    piece: Piece
    """What its batch numbers mean from here on."""
    told: dict[str, Any]
    """For the record."""


def piece_at(loader: Loader, number: int, epoch: int, sample: int = 0, left: int | None = None) -> Piece | None:
    """What batch numbers mean from one on; None where the loader does not say."""
    if (rows := rows_in(loader)) is None:
        return None
    length = loader.identity.get("length")
    length = length if isinstance(length, int) else ENDLESS
    return Piece(number, epoch, sample, rows, length if left is None else left, length)


def rows_in(loader: Loader) -> int | None:
    """Samples of a batch of all ranks; None where the loader does not say."""
    rows: int | None = loader.identity.get("global_batch")
    return rows if loader.shared is None else loader.shared.share.rows_of_all


def is_divided_otherwise(loader: Loader, position: Mapping[str, Any]) -> bool:
    """Whether a position is of another number of ranks, or of another size of batches."""
    there, here = position["loader"], loader.identity
    if loader.shared is not None and (share := _share_of(there)) is not None:
        return not share.is_as(loader.shared.share)
    if there.get("global_batch") is not None and here.get("global_batch") is not None:
        return bool(there["global_batch"] != here["global_batch"])
    if there.get("kind") == UNKNOWN["kind"]:
        return False
    return bool(there.get("ranks", world_size()) != world_size())


def recut(given: Any, loader: Loader, position: Mapping[str, Any]) -> Recut:
    """Divide the rest of the epoch of a position anew, as the loader divides its own. Refused where it cannot be."""
    there = position["loader"]
    if loader.shared is not None and (share := _share_of(there)) is not None:
        return _of_shared_order(given, loader, position, share)
    if there.get("global_batch") and loader.identity.get("global_batch") and there["kind"] == loader.identity["kind"]:
        return _of_own_loader(given, loader, position)
    before, now = there.get("ranks", "other"), world_size()
    why = "does not say how ranks share a batch"
    if loader.shared is not None or loader.identity.get("global_batch"):
        why = "is not the kind of loader that was there"
    raise RanksChanged(
        f"the place in the data is of {_ranks(before)}, and here {'is' if now == 1 else 'are'} {now}: loader="
        f"{type(given).__name__} {why}, so that the rest of the epoch cannot be divided anew; start again on "
        f"{_ranks(before)}, or begin another run with a DataLoader over a DistributedSampler ({GUIDE})",
        ranks=before if isinstance(before, int) else None,
    )


def _of_shared_order(given: Any, loader: Loader, position: Mapping[str, Any], there: Share) -> Recut:
    assert loader.shared is not None
    here, epoch, number = loader.shared.share, position["epoch"], int(position["next"])
    for name, what in (("samples", "samples in an epoch"), ("order", "order of an epoch")):
        if getattr(there, name) != getattr(here, name):
            raise SourceError(
                f"the position is in the data of another loader: {what} {getattr(there, name)} there, "
                f"{getattr(here, name)} in this {type(given).__name__}; give the loader that it was taken of"
            )
    cut = epoch.get("cut")
    of = there if cut is None else Share(**cut["of"])
    done = there.done(number - epoch["first"]) if cut is None else _done_since(cut, there, number)
    whole = epoch.get("end") == number or done >= there.samples
    order: Any = ()
    if "start" in epoch:
        order = loader.shared.order(epoch["start"], loader.origins, of)
        _refuse_another_order(given, epoch, of, order)
    rest = loader.shared.share.rest(order, done) if len(order) and not whole else None
    left = 0 if rest is None else len(rest.lists)
    divided: Epoch = {"number": epoch["number"], "first": epoch["first"], "is_after_end": epoch["is_after_end"]}
    if "start" in epoch:
        divided |= {"start": epoch["start"], "cut": Cut(number=number, done=done, of=of.to_plain())}
        divided["end"] = number + left
    told = {
        "epoch": epoch["number"],
        "batch": number,
        "ranks": [there.ranks, here.ranks],
        "rows": [there.rows_of_all, here.rows_of_all],
        "done": done,
        "left": 0 if whole else there.samples - done,
        "used_twice": [] if rest is None else rest.twice,
        "left_out": [] if rest is None else rest.dropped,
    }
    piece = piece_at(loader, number, epoch["number"], done, left if "start" in epoch else None)
    assert piece is not None
    return Recut(_at(loader, position, divided, None), piece, told)


def _of_own_loader(given: Any, loader: Loader, position: Mapping[str, Any]) -> Recut:
    """Of a sequence, or a loader with a state, that says how many samples a batch of all ranks has."""
    there, here, epoch, number = position["loader"], loader.identity, position["epoch"], int(position["next"])
    rows, cut = here["global_batch"], epoch.get("cut")
    since, before = (epoch["first"], 0) if cut is None else (cut["number"], cut["done"])
    done = before + (number - since) * there["global_batch"]
    told = {
        "epoch": epoch["number"],
        "batch": number,
        "ranks": [there.get("ranks"), world_size()],
        "rows": [there["global_batch"], rows],
        "done": done,
        "used_twice": [],
        "left_out": [],
    }
    if here["kind"] != "sequence":  # its own state says where it is
        piece = piece_at(loader, number, epoch["number"], done)
        assert piece is not None
        return Recut(_at(loader, position, copy.deepcopy(epoch), position["state"]), piece, told)
    item = -(-done // rows)
    if abs(there["length"] * there["global_batch"] - here["length"] * rows) > max(there["global_batch"], rows):
        raise SourceError(
            f"the position is in the data of another loader: {there['length']} batches of {there['global_batch']} "
            f"there, {here['length']} of {rows} in this {type(given).__name__}; give the loader that it was taken of"
        )
    left = max(here["length"] - item, 0)
    told["left_out"] = [*range(done, item * rows)] if left else []
    divided: Epoch = {"number": epoch["number"], "first": epoch["first"], "is_after_end": epoch["is_after_end"]}
    divided |= {"start": {}, "cut": Cut(number=number, done=item * rows, of={}), "end": number + left}
    piece = piece_at(loader, number, epoch["number"], item * rows, left)
    assert piece is not None
    return Recut(_at(loader, position, divided, None), piece, told)


def _done_since(cut: Mapping[str, Any], share: Share, number: int) -> int:
    return min(int(cut["done"]) + (number - int(cut["number"])) * share.rows_of_all, share.samples)


def _at(loader: Loader, position: Mapping[str, Any], epoch: Epoch, state: Any) -> dict[str, Any]:
    known = {name: value for name, value in position.items() if name not in ("later", "loader", "epoch", "state")}
    return {**known, "loader": {**loader.identity, "ranks": world_size()}, "epoch": epoch, "state": state}


def _refuse_another_order(given: Any, epoch: Mapping[str, Any], of: Share, order: Any) -> None:
    if (check := epoch["start"].get("check")) is None:
        return
    first: Any = of.first_batch(order)
    if check not in (check_of(first), check_of(first[0]) if first and len(first) == 1 else None):
        raise SourceError(
            f"the position is in another order of the data: epoch {epoch['number']} begins with other samples in this "
            f"{type(given).__name__}; give the sampler the seed and the dataset that it had"
        )


def _share_of(identity: Mapping[str, Any]) -> Share | None:
    share = identity.get("share")
    return None if share is None else Share(**share)


def _ranks(count: object) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def recut_text(told: Mapping[str, Any]) -> str:
    """What became of the rest of an epoch, in a sentence.

    >>> told = {"ranks": [2, 1], "rows": [16, 8], "epoch": 3, "done": 64, "used_twice": [], "left_out": [5]}
    >>> recut_text(told)
    'the rest of epoch 3, after 64 samples, is divided anew: 2 ranks before and 1 now, 16 samples a batch of all ranks \
before and 8 now; left out at its end: samples 5'
    """
    (ranks, ranks_now), (rows, rows_now) = told["ranks"], told["rows"]
    words = [
        f"the rest of epoch {told['epoch']}, after {told['done']} samples, is divided anew: {_ranks(ranks)} before and "
        f"{ranks_now} now, {rows} samples a batch of all ranks before and {rows_now} now"
    ]
    for name, how in (("used_twice", "used twice at its end"), ("left_out", "left out at its end")):
        if told[name]:
            words.append(f"{how}: samples {', '.join(map(str, told[name]))}")
    return "; ".join(words)
