"""All rules, in the order in which they are documented: docs/preflight has a page for each family."""

from sealegs.prevention.rule import Family, Rule
from sealegs.prevention.rules_architecture import ARCHITECTURE
from sealegs.prevention.rules_data import DATA
from sealegs.prevention.rules_operations import OPERATIONS
from sealegs.prevention.rules_optimizer import CLIP, OPTIMIZER
from sealegs.prevention.rules_precision import PRECISION
from sealegs.prevention.rules_schedule import SCHEDULE
from sealegs.prevention.rules_state import STATE

FAMILIES: tuple[Family, ...] = (OPTIMIZER, CLIP, SCHEDULE, PRECISION, ARCHITECTURE, STATE, DATA, OPERATIONS)
RULES: list[Rule] = [rule for family in FAMILIES for rule in family.rules]
