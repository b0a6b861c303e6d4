"""Rounds of random worlds, stores and faults, for minutes or hours: ``make soak``."""
