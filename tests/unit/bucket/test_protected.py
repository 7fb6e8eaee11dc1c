# SPDX-License-Identifier: Apache-2.0
"""The newest healthy commit and the best one are protected."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from swansongd.bucket.protected import Ranking, protected_commits
from swansongd.model import CommitRef, is_healthy


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 3), st.integers(0, 20)),
        st.tuples(st.floats(0, 9), st.booleans()),
        max_size=12,
    )
)
def test_the_newest_healthy_and_the_best_commit_are_protected(
    made: dict[tuple[int, int], tuple[float, bool]],
) -> None:
    """No healthy commit is newer, and none is better; each reason occurs once."""
    commits = [
        (CommitRef(*ref), {"loss": loss, "loss_is_finite": float(good)})
        for ref, (loss, good) in made.items()
    ]
    healthy = {ref: health["loss"] for ref, health in commits if is_healthy(health)}
    protected = protected_commits(commits)
    owners = {reason: ref for ref, reasons in protected.items() for reason in reasons}
    assert sum(len(reasons) for reasons in protected.values()) == len(owners)
    if not healthy:
        assert not protected
    else:
        assert owners["healthy"] == max(healthy)
        assert healthy[owners["best loss"]] == min(healthy.values())


def test_the_best_may_be_the_highest() -> None:
    """The greatest accuracy is the best; of equal ones the newest; without the metric no commit is."""
    commits = [
        (CommitRef(1, step), {"accuracy": accuracy})
        for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.9), (4, 0.1))
    ]
    assert protected_commits(commits, Ranking("accuracy", is_highest=True)) == {
        CommitRef(1, 3): ["best accuracy"]
    }
    assert protected_commits(commits, Ranking("accuracy")) == {CommitRef(1, 4): ["best accuracy"]}
    assert protected_commits(commits) == {}, "a commit of unknown health is not healthy"
