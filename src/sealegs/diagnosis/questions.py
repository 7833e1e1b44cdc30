"""The decision tree and the walk through it: the table of questions, and the path that a run takes.

Read the table from top to bottom. The walk asks a question once, and only if it applies to the run; otherwise it goes
to the question's ``otherwise``. From an answer it goes where ``then`` points, or to ``ANY`` for an answer not named
there. ``unknown`` is an answer like any other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sealegs.diagnosis import replies
from sealegs.diagnosis.contract import Answer
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.replies import Reply
from sealegs.diagnosis.signs import registry

ANY = "any"
END = "end"


def always(_: Facts) -> bool:
    """For every run."""
    return True


def in_fp16(facts: Facts) -> bool:
    """For fp16 only: bf16 and fp32 reach to 3e38."""
    return facts.dtype == "fp16"


def while_finite(facts: Facts) -> bool:
    """For a run that is not NaN for good, and whose loss measures something."""
    return facts.findings.kind.loss_measures and not facts.stays_bad


def after_a_leap(facts: Facts) -> bool:
    """For a run that goes on, and for one whose loss leapt before it was NaN; where the loss measures something."""
    return facts.findings.kind.loss_measures and (not facts.stays_bad or facts.leaps)


def of_changing_weights(facts: Facts) -> bool:
    """For a loss that may rise, and for weights that have changed too fast beside one that does not."""
    return replies.rising(facts).answer != replies.NO or bool(facts.norm_changes)


def of_rising_gradients(facts: Facts) -> bool:
    """For a loss that may rise, and for gradients that have risen for good beside one that does not."""
    return replies.rising(facts).answer != replies.NO or facts.norm_rise is not None


def of_a_policy(facts: Facts) -> bool:
    """For a policy that is trained for reward."""
    return facts.findings.kind.name == "policy-gradient"


def of_experts(facts: Facts) -> bool:
    """For a mixture of experts."""
    return "moe" in facts.findings.kind.traits


def in_few_bits(facts: Facts) -> bool:
    """For eight bits or fewer."""
    return "low-precision" in facts.findings.kind.traits


@dataclass(frozen=True, slots=True)
class Question:
    """One question of the decision tree."""

    number: str
    text: str
    ask: Callable[[Facts], Reply]
    then: Mapping[str, str] = field(default_factory=dict)
    asked: Callable[[Facts], bool] = always
    otherwise: str = END


TREE = (
    # 0. Before the run
    Question(
        "Q0",
        "Do the settings keep the margins of stability?",
        replies.margins,
        {ANY: "Q5.1"},
    ),
    # 5. A policy that is trained for reward
    Question(
        "Q5.1",
        "Is the reward surely below its best, and does it stay there?",
        replies.reward_lost,
        {ANY: "Q5.2"},
        asked=of_a_policy,
        otherwise="Q6.1",
    ),
    Question(
        "Q5.2",
        "Is there anything left to learn from: a spread of rewards within groups, and a gradient?",
        replies.left_to_learn,
        {ANY: "Q5.3"},
    ),
    Question(
        "Q5.3",
        "Is the entropy of the policy near nothing, or many times what it was?",
        replies.entropy_at_an_end,
        {ANY: "Q5.4"},
    ),
    Question(
        "Q5.4",
        "Does the policy leave the reference, or the sampler the trainer?",
        replies.policy_away,
        {ANY: "Q5.5"},
    ),
    Question(
        "Q5.5",
        "Do completions collapse, leap in length, or are they all cut?",
        replies.completions,
        {ANY: "Q6.1"},
    ),
    # 6. A mixture of experts
    Question(
        "Q6.1",
        "Do few experts take the load, or do more and more get none?",
        replies.load,
        {ANY: "Q6.2"},
        asked=of_experts,
        otherwise="Q7.1",
    ),
    Question(
        "Q6.2",
        "Does the router show it: its entropy gone, its logits or its balance loss many times their lowest?",
        replies.router,
        {ANY: "Q7.1"},
    ),
    # 7. Few bits
    Question(
        "Q7.1",
        "Are more and more values beyond the largest number or zero, or is a scale 0?",
        replies.few_bits,
        {ANY: "Q1.1"},
        asked=in_few_bits,
        otherwise="Q1.1",
    ),
    # 1. Is the loss NaN or infinite?
    Question(
        "Q1.1",
        "Is the loss, a weight, or outside fp16 a gradient, NaN or infinite at any logged step?",
        replies.nonfinite,
        {"yes": "Q1.2", ANY: "Q2.1"},
    ),
    Question(
        "Q1.2",
        "In which precision does the run compute?",
        replies.precision,
        {"fp16": "Q3.1", ANY: "Q1.3"},
    ),
    Question(
        "Q1.3",
        "Where did the NaN come from: which is the first layer or tensor?",
        replies.origin,
        {ANY: "Q1.4"},
    ),
    Question(
        "Q1.4",
        "Which fix belongs to it? If it is NaN again with the fix, the fault is in the model's structure.",
        replies.fix_of_nan,
        {ANY: "Q2.1"},
    ),
    # 2. Is there a spike?
    Question(
        "Q2.1",
        "Does the loss leap above what was usual (textbook: 3 sigma above the mean of the last 100)?",
        replies.leap,
        {"yes": "Q2.2", ANY: "Q3.1"},
        asked=after_a_leap,
        otherwise="Q4.1",
    ),
    Question(
        "Q2.2",
        "Is the loss back under mean + 0.5 sigma within 50 steps (mean of ten steps)?",
        replies.back,
        {ANY: "Q2.3"},  # the panels are read for a spike that stays, too
    ),
    Question(
        "Q2.3",
        "Which panels stand out: grad norm above 30 times its mean, LR that jumps, a batch that was there before?",
        replies.panels,
        {ANY: "Q2.4"},
    ),
    Question(
        "Q2.4",
        "The moments are spoilt: which is the last checkpoint before it?",
        replies.checkpoint,
        {ANY: "Q3.1"},
        asked=lambda facts: facts.persists,
        otherwise="Q3.1",
    ),
    # 3. Mixed precision
    Question(
        "Q3.1",
        "Is there a step with a gradient norm that is infinite or NaN?",
        replies.overflow,
        {"no": "Q4.1", ANY: "Q3.2"},
        asked=in_fp16,
        otherwise="Q4.1",
    ),
    Question(
        "Q3.2",
        "Does the loss scale halve on an overflow, and double after 2000 clean steps?",
        replies.loss_scale,
        {ANY: "Q3.3"},
    ),
    Question(
        "Q3.3",
        "Is it an overflow of fp16 (gradient first, scale halving) or structural (loss directly)?",
        replies.fingerprint,
        {"structural": "Q1.3", ANY: "Q3.4"},
    ),
    Question(
        "Q3.4",
        "Which fix belongs to it?",
        replies.fix_of_overflow,
        {ANY: "Q2.1"},
    ),
    # 4. Silent divergence
    Question(
        "Q4.1",
        "Has the loss been rising over the last 200 steps (textbook: without a break)?",
        replies.rising,
        {"no": "Q4.3", ANY: "Q4.2"},
        asked=while_finite,
    ),
    Question(
        "Q4.2",
        "Has the LR risen over the same steps?",
        replies.lr_rising,
        {"yes": END, ANY: "Q4.3"},
    ),
    Question(
        "Q4.3",
        "Has the norm of any group of weights changed more than 2-fold in 200 steps?",
        replies.weights_changing,
        {"yes": END, ANY: "Q4.4"},
        asked=of_changing_weights,
        otherwise="Q4.4",
    ),
    Question(
        "Q4.4",
        "Is the mean gradient norm going up? If not, this is a plateau.",
        replies.gradients_rising,
        {ANY: END},
        asked=of_rising_gradients,
    ),
)
"""All questions, in the order in which they are asked: what is first for its kind comes first."""


QUESTIONS = {question.number: question for question in TREE}


def walk(facts: Facts) -> tuple[tuple[Answer, ...], tuple[str, ...]]:
    """The answers of a run in order, and the signals that would settle the unknown ones."""
    path: list[Answer] = []
    missing: list[str] = []
    asked: set[str] = set()
    question = _next("Q0", facts, asked)
    while question is not None:
        asked.add(question.number)
        reply = question.ask(facts)
        missing += reply.missing
        leads = question.then.get(reply.answer, question.then[ANY])
        following = _next(leads, facts, asked)
        path.append(
            Answer(
                question=question.number,
                text=question.text,
                answer=reply.answer,
                evidence=reply.evidence,
                next=following.number if following else END,
            )
        )
        question = following
    return tuple(path), tuple(dict.fromkeys(missing))


def ending(facts: Facts, path: Sequence[Answer]) -> str:
    """The action in which the questions about silent divergence end; empty where a cause must say what to do."""
    if not path or path[-1].question != "Q4.4" or any((it.question, it.answer) == ("Q4.1", "no") for it in path):
        return ""
    if path[-1].answer == "yes":
        return "" if registry.SIGNS["rate-is-tiny"](facts).holds else "halve the LR"
    if path[-1].answer == "no":
        level = registry.SIGNS["eval-plateau"](facts).holds
        return (
            "stop: the evaluation loss is level, too" if level else "compare evaluation metrics: stop if they are level"
        )
    return ""


def _next(number: str, facts: Facts, asked: set[str]) -> Question | None:
    """The question of that number, or the first one in its place that applies."""
    passed: set[str] = set()
    while number != END and number not in passed:
        question = QUESTIONS[number]
        if number not in asked and question.asked(facts):
            return question
        passed.add(number)
        number = question.otherwise
    return None
