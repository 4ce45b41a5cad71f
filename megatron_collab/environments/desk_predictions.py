"""What policies reach in the desk world, as tables for readers and as scores beside which results are printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_collab.environments.desk_model import USERS, DeskModel
from megatron_collab.environments.desk_optimum import OPTIMAL, POLICIES, DeskPredictions, DeskValue, Starts


class DeskSet(NamedTuple):
    """An evaluated set: its incomplete first messages, and the kinds of its users."""

    starts: Starts
    users: Sequence[str]


Sets = Mapping[str, DeskSet]  # by name; the first is the one of the same kind as the training data


def solve(model: DeskModel, costs: Sequence[float], sets: Sets) -> dict[float, DeskPredictions]:
    """The policies at each cost. The bonus is tuned on the first set, with the kinds of users in training."""
    starts = next(iter(sets.values())).starts
    return {cost: DeskPredictions(model, cost, starts, model.seen_users) for cost in costs}


def predicted(prediction: DeskPredictions, sets: Sets) -> dict[str, dict[str, DeskValue]]:
    """What each policy reaches with the incomplete requests of each set, by policy and set."""
    return {
        policy: {name: prediction.value(policy, users, starts) for name, (starts, users) in sets.items()}
        for policy in POLICIES
    }


def predicted_scores(prediction: DeskPredictions, sets: Sets) -> dict[str, dict[str, float]]:
    """By policy, the mean scores SET/METRIC in evaluations of the sets, of which every second task is complete.

    To a complete request every policy answers at once and is right.
    """
    return {
        policy: {
            f"{name}/{metric}": score
            for name, value in values.items()
            for metric, score in {
                "desk_utility": (1 + value.utility(prediction.cost)) / 2,
                "desk_utility_incomplete": value.utility(prediction.cost),
                "desk_right": (1 + value.right) / 2,
                "desk_questions": value.questions / 2,
                "desk_needless": 0.0,
            }.items()
        }
        for policy, values in predicted(prediction, sets).items()
    }


def tables(solved: Mapping[float, DeskPredictions], sets: Sets, *, stated: bool = False) -> str:
    """Tables of what the policies of `solve` reach with incomplete requests: by set, and by kind of user on the first.

    If tasks state the cost, also a table of what reading it gains.
    """
    by_set, by_user = [_row("set", "cost", *POLICIES), _rule(len(POLICIES) + 2)], []
    for cost, prediction in solved.items():
        values = predicted(prediction, sets)
        for name in sets:
            reached = [values[policy][name] for policy in POLICIES]
            by_set.append(_row(name, f"{cost:.2f}", *(f"{v.utility(cost):.3f} ({v.questions:.2f})" for v in reached)))
        for policy in POLICIES:
            utilities = [f"{prediction.utility(policy, [user], prediction.starts):.3f}" for user in USERS]
            by_user.append(_row(policy, f"{cost:.2f}", *utilities))
    lines = [*by_set, "", _row("policy", "cost", *USERS), _rule(len(USERS) + 2), *by_user]
    return "\n".join([*lines, *(["", *_gains(solved)] if stated else [])]) + "\n"


def _gains(solved: Mapping[float, DeskPredictions]) -> Iterator[str]:
    """What a policy gains by reading the cost, on the first set, for costs that are equally likely.

    The best policy that ignores it is the optimal one at the mean cost, since utility is linear in the cost.
    """

    def optimal(prediction: DeskPredictions) -> DeskValue:
        return prediction.value(OPTIMAL, prediction.users, prediction.starts)

    costs = list(solved)
    ignoring = optimal(replace(solved[costs[0]], cost=sum(costs) / len(costs)))
    reading = {cost: optimal(prediction) for cost, prediction in solved.items()}
    rows = [(v.utility(cost), v.questions, v.right, ignoring.utility(cost)) for cost, v in reading.items()]
    means = [sum(column) / len(costs) for column in zip(*rows, strict=True)]
    yield _row(
        "cost", "utility of the optimal policy", "questions", "right", "utility of the best that ignores the cost"
    )
    yield _rule(5)
    for name, (utility, questions, right, same) in zip(
        [*(f"{cost:.2f}" for cost in costs), "mean"], [*rows, means], strict=True
    ):
        yield _row(name, f"{utility:.3f}", f"{questions:.2f}", f"{right:.3f}", f"{same:.3f}")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|---" * columns + "|"
