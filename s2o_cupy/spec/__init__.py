"""What S2O is, in numbers: configuration, geometry and shared constants.

Standard library only. The reference, the plan and (rendered as ``constexpr``) the kernels all
read these definitions, so that each is written once.
"""

from ..errors import S2OError
from .config import (
    DEFAULT_UNIT,
    MAX_POOLED_QUERIES,
    ORDER_OF_RANK,
    RANKS,
    UNIT_RANKS,
    Pass,
    S2OConfig,
    check_path,
    not_a_config,
    tau_text,
)
from .constants import *  # noqa: F403
from .fields import checked_int, is_one_of, names_its_fields
from .geometry import Geometry, moment_group, moment_keys, moment_place, moment_samples, tail_samples

__all__ = [
    "DEFAULT_UNIT",
    "Geometry",
    "MAX_POOLED_QUERIES",
    "ORDER_OF_RANK",
    "Pass",
    "RANKS",
    "S2OConfig",
    "S2OError",
    "UNIT_RANKS",
    "check_path",
    "checked_int",
    "is_one_of",
    "moment_group",
    "moment_keys",
    "moment_place",
    "moment_samples",
    "names_its_fields",
    "not_a_config",
    "tail_samples",
    "tau_text",
]
