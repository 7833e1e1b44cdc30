"""``sealegs audit A B``: compares the tensors of two checkpoints, or of two ranks of one."""

from pathlib import Path
from typing import TYPE_CHECKING

from sealegs.cli.output import show, show_json
from sealegs.errors import MissingExtra
from sealegs.report.commands.audit_comparison import Compared, DifferingTensor, page
from sealegs.report.commands.contracts import contract

if TYPE_CHECKING:
    from sealegs.state.checkpoint_comparison import Comparison


def compare(a: Path, b: Path, *, json: bool, ranks: bool) -> int:
    """Read both, print where they differ, and give the exit code."""
    try:
        from sealegs.state.checkpoint_comparison import are_ranks, compared, tensors_of
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("sealegs audit", "PyTorch", "torch") from None
    is_of_ranks = ranks or are_ranks(a, b)
    found = compared(tensors_of(a), tensors_of(b), ranks=is_of_ranks)
    told = _told((str(a), str(b)), found, is_of_ranks)
    show_json(contract(told)) if json else show(page, told)
    return int(not found.is_alike)


def _told(sources: tuple[str, str], found: "Comparison", ranks: bool) -> Compared:
    return Compared(
        a=sources[0],
        b=sources[1],
        ranks=ranks,
        shared=found.shared,
        equal=found.equal,
        unjudged=found.unjudged,
        differing=[
            DifferingTensor(
                name=each.name,
                what=each.what,
                sizes=list(each.sizes),
                largest=each.largest,
                at=list(each.at),
                values=None if each.values is None else list(each.values),
                share=each.share,
                relative=each.relative,
                rows=None if each.rows is None else list(each.rows),
            )
            for each in found.differing
        ],
        only_in_a=list(found.only_in[0]),
        only_in_b=list(found.only_in[1]),
        alike=found.is_alike,
        because=because(found, ranks),
    )


def because(found: "Comparison", ranks: bool) -> str:
    """What follows from the comparison, in one sentence."""
    if not found.shared:
        return (
            "NOTHING IN COMMON: no tensor has the same name in both; compare checkpoints of one model and one format."
        )
    if ranks and not found.equal and not found.differing:
        return (
            "CANNOT TELL: these ranks have no tensor that is known to be a copy (norms, routers, biases after a sum)."
        )
    if found.is_alike:
        what = "every copy that ranks must share is equal" if ranks else "every tensor is equal"
        return f"ALIKE: {what}, to the last bit ({found.equal} tensors)."
    if not found.differing:
        return (
            f"DIFFERENT: what both have is equal, but {sum(map(len, found.only_in))} tensors are in one of them only."
        )
    first = found.differing[0]
    judged = found.equal + len(found.differing)
    values = [each for each in found.differing if each.what == "values"]
    why = ""
    if ranks:
        why = ": copies have gone apart, and each rank trains a model of its own from there on"
    elif any(each.what == "shape" for each in found.differing):
        why = ": the first of another shape cannot have been loaded from the other"
    elif not values:
        why = ": the numbers are the same, in another type"
    elif all(each.is_rounding for each in values):
        why = ": all of it is rounding to bf16, as where one went through a narrower type"
    elif len(found.differing) == judged:
        why = ": all of them do, as after an update or from another start"
    return f"DIFFERENT: {len(found.differing)} of {judged} tensors, the first is {first.name}{why}."
