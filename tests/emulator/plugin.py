"""For pytest: -p emulator.plugin has the tests of a GPU run on the emulated one, with S2O_EMULATED_CAPABILITY=90 as on
Hopper."""

import sys

from s2o_cupy._source_tree import SourceTreeFinder

from . import fake_cupy

sys.meta_path.insert(0, SourceTreeFinder)  # this tree's kernels, whatever is installed
fake_cupy.install()
