"""These are no tests of pytest's: tests/test_torture_dry.py runs what needs no GPU."""

collect_ignore_glob = ["*.py"]
