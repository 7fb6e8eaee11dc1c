# SPDX-License-Identifier: Apache-2.0
"""The example with JAX and Orbax, in the environment of ``make test-jax``."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from swansong.testing import check_resume

from testkit import EXAMPLES, REPOSITORY
from testkit.python_process import ENVIRONMENT, output_of

PYTHON = os.environ.get("SWANSONG_JAX_PYTHON", str(REPOSITORY / "build" / "jax" / "bin" / "python"))

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not os.path.exists(PYTHON), reason="make test-jax makes its environment"),
]
ON_CPU = {"JAX_PLATFORMS": "cpu"}

EQUAL = """
import sys
import jax, numpy, orbax.checkpoint as ocp
one, other = (ocp.StandardCheckpointer().restore(path) for path in sys.argv[1:])
assert jax.tree.structure(one) == jax.tree.structure(other)
leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other))
print(sum(numpy.asarray(a).tobytes() == numpy.asarray(b).tobytes() for a, b in leaves))
"""

BEHIND = """
import sys
from pathlib import Path
import orbax.checkpoint as ocp
from swansong.orbax import SavePolicy

home, sealed = Path(sys.argv[1]), Path(sys.argv[2])
policy = SavePolicy()
options = ocp.CheckpointManagerOptions(save_decision_policy=policy)
with ocp.CheckpointManager(home, options=options) as manager:
    for step in (1, 2, 3):
        manager.save(step, args=ocp.args.StandardSave({"a": step}), force=True)
    assert policy.restore(manager) == 3
    policy.load(sealed)
    assert manager.all_steps(read=True) == [1, 2], manager.all_steps()
    assert "params" in manager.restore(2)
"""


DOC = (REPOSITORY / "docs" / "trainers" / "frameworks.md").read_text(encoding="utf-8")


def run(script: str, *arguments: object) -> str:
    settings = {**ON_CPU, "SWANSONG_SOCKET": "/nonexistent"}
    return output_of("-c", script, *arguments, python=PYTHON, **settings)


@pytest.fixture(scope="module")
def preempted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of ten steps: ``reference``, and ``resumed``, which twice lost its VM and disk."""
    place = tmp_path_factory.mktemp("orbax")
    example = EXAMPLES / "with_orbax.py"
    on_a_new_disk = f'exec {PYTHON} {example} --directory "$(mktemp -d {place}/vm-XXXXXX)"'
    report = check_resume(
        ["sh", "-c", on_a_new_disk],
        steps=10,
        kill_at=[2, 7],
        directory=place,
        environment={**ENVIRONMENT, **ON_CPU},
        ignoring="rank-0",  # Orbax gives its files random names; compared below
    )
    assert report.saved_steps == [2, 7]
    assert report.losses >= 10
    return place


def set_of(run: Path, step: int) -> Path:
    (found,) = run.glob(f"staging/step-{step:012d}.*/rank-00000")
    return found


def test_orbax_resumes_bit_by_bit(preempted: Path) -> None:
    """Parameters, momentum and random key of the last step equal those of the uninterrupted run."""
    ends = [set_of(preempted / name, 10) / "10" / "default" for name in ("reference", "resumed")]
    assert run(EQUAL, *ends).split()[-1] == "5"


def test_the_checkpoint_of_the_daemon_replaces_local_ones(preempted: Path, tmp_path: Path) -> None:
    """A restore removes local steps that are not older than its own, and keeps the older ones."""
    run(BEHIND, tmp_path, set_of(preempted / "resumed", 2))


def test_the_block_of_the_page_runs(tmp_path: Path) -> None:
    """It runs without a change, on a machine without a daemon."""
    (block,) = re.findall(r"^```py\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)
    run(block.replace("/tmp/my-run", str(tmp_path)))
