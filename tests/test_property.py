"""Random geometry, layout, dtype, mask and call path against float64. tests/fuzz.py runs the same for hours."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from problems import as_dict, check, random_problem

EXAMPLES = int(os.environ.get("DEPTHCONV_FUZZ_EXAMPLES", "300"))


@seed(int(os.environ["DEPTHCONV_TEST_SEED"]))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_any_problem(device: str, data: st.DataObject) -> None:
    problem = random_problem(
        lambda low, high: data.draw(st.integers(low, high)), lambda options: data.draw(st.sampled_from(options))
    )
    note(f"Problem(**{as_dict(problem)})")
    check(problem, device)
