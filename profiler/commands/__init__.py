"""Commands of `python -m profiler`, one file each."""

SUMMARIES = {
    "coverage": "Account for every kernel of a model: bound to a component, or named.",
    "profile": "Measure a model's kernels and write a bundle of tables.",
    "show": "Summarise a bundle and plot its tables on one page.",
    "slice": "Measure one table of an existing bundle anew.",
}
