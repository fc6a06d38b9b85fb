"""Commands of `python -m profiler`, one file each."""

SUMMARIES = {
    "collectives": "Measure collective operations among the GPUs here.",
    "compare": "Ratio of two bundles of a model, kernel by kernel and shape by shape.",
    "coverage": "Account for every kernel of a model: bound to a component, or named.",
    "import": "Turn tables that others measured into bundles.",
    "profile": "Measure a model's kernels and write a bundle of tables.",
    "project": "Scale a bundle to a GPU that nobody measured, with an error band.",
    "queue": "Run many acquisitions on one card, without pauses between them.",
    "show": "Summarise a bundle and plot its tables on one page.",
    "slice": "Measure one table of an existing bundle anew.",
}
