"""Sweeps over models, hardware, placements, limits, rates and seeds, and the search for the highest rate of an SLO."""
