"""Commands of `python -m profiler`, one file each."""

SUMMARIES = {
    "profile": "Measure a model's kernels and write a bundle of tables.",
}
