"""Schedules: which keys queries attend to, given as data by whoever knows."""
