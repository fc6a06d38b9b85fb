"""Prices scheduler steps from a bundle: `build_cost` gives the StepCost of one data-parallel group."""

from serving.cost.build import build_cost
from serving.cost.graphs import default_capture_sizes
from serving.cost.lines import Line
from serving.cost.pipeline import PipelineCost
from serving.cost.step import TableCost

__all__ = ["Line", "PipelineCost", "TableCost", "build_cost", "default_capture_sizes"]
