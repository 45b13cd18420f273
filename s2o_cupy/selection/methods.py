"""Which way to choose keys a call takes, and its plan. S2O's ordering is the first of them."""

from __future__ import annotations

from ..plan import launch_plan
from ..plan.device import DeviceLimits
from ..plan.launch_plan import LaunchPlan
from ..plan.method import Method, Setting
from ..problem import Problem
from ..spec import Pass, S2OConfig
from .s2o import S2O

__all__ = ["METHODS", "make_plan"]

METHODS = (S2O,)


def choose(setting: Setting) -> Method:
    return S2O(setting)


def make_plan(
    problem: Problem, config: S2OConfig | Pass, limits: DeviceLimits, aligned: bool, compact: bool = True,
    page_size: int = 0, fp8: bool = False,
) -> LaunchPlan:  # fmt: skip
    """plan.launch_plan.make_plan, where S2O's order chooses the keys."""
    return launch_plan.make_plan(problem, config, limits, aligned, compact, page_size, choose, fp8)
