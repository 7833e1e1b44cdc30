"""Facts in, the path through the decision tree out."""

from sealegs.diagnosis.contract import Answer
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.questions import ANY, END, TREE, Question

QUESTIONS = {question.number: question for question in TREE}


def walk(facts: Facts) -> tuple[tuple[Answer, ...], tuple[str, ...]]:
    """Every question that was asked, in order; and the signals that would have told what is unknown."""
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


def _next(number: str, facts: Facts, asked: set[str]) -> Question | None:
    """The question of that number, or the one that stands in for it."""
    passed: set[str] = set()
    while number != END and number not in passed:
        question = QUESTIONS[number]
        if number not in asked and question.asked(facts):
            return question
        passed.add(number)
        number = question.otherwise
    return None
