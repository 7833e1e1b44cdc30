"""All rules, in the order in which they are documented: docs/preflight has a page for each family."""

from sealegs.preflight.rule import Family, Rule
from sealegs.preflight.rules_architecture import ARCHITECTURE
from sealegs.preflight.rules_data import DATA
from sealegs.preflight.rules_operations import OPERATIONS
from sealegs.preflight.rules_optimizer import CLIP, OPTIMIZER
from sealegs.preflight.rules_precision import PRECISION
from sealegs.preflight.rules_schedule import SCHEDULE
from sealegs.preflight.rules_state import STATE

FAMILIES: tuple[Family, ...] = (OPTIMIZER, CLIP, SCHEDULE, PRECISION, ARCHITECTURE, STATE, DATA, OPERATIONS)
RULES: list[Rule] = [rule for family in FAMILIES for rule in family.rules]
