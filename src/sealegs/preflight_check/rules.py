"""All rules, in the order in which they are documented: docs/preflight has a page for each family."""

from sealegs.preflight_check.rule import Family, Rule
from sealegs.preflight_check.rules_architecture import ARCHITECTURE
from sealegs.preflight_check.rules_data import DATA
from sealegs.preflight_check.rules_finetuning import FINETUNING
from sealegs.preflight_check.rules_operations import OPERATIONS
from sealegs.preflight_check.rules_optimizer import CLIP, OPTIMIZER
from sealegs.preflight_check.rules_precision import PRECISION
from sealegs.preflight_check.rules_schedule import SCHEDULE
from sealegs.preflight_check.rules_state import STATE

FAMILIES: tuple[Family, ...] = (
    OPTIMIZER,
    CLIP,
    SCHEDULE,
    PRECISION,
    ARCHITECTURE,
    STATE,
    DATA,
    FINETUNING,
    OPERATIONS,
)
RULES: list[Rule] = [rule for family in FAMILIES for rule in family.rules]
