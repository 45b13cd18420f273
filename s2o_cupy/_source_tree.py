"""In a source checkout raw_kernels/ and reference/ stand beside s2o_cupy/; installed, inside it.

Both are found under one name, s2o_cupy.reference and s2o_cupy.raw_kernels, and nothing else of the checkout is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
PACKAGES = {
    f"{__package__}.{name}": HERE.parent / name / "__init__.py"
    for name in ("raw_kernels", "reference")
    if not (HERE / name).is_dir()
}


class SourceTreeFinder:
    """Asked before all others: another checkout that is installed as editable has a finder for the same two names."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        init = PACKAGES.get(name)
        if init is None or not init.is_file():
            return None
        return spec_from_file_location(name, init, submodule_search_locations=[str(init.parent)])


if SourceTreeFinder not in sys.meta_path:
    sys.meta_path.insert(0, SourceTreeFinder)
