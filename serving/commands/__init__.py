"""Commands of `python -m serving`, one file each."""

SUMMARIES = {
    "compare": "Compare a simulated run with a recorded one, request by request.",
    "explain": "One step's cost as a tree: kernels, collectives, bounds, provenance.",
    "plan": "What fits where: weights, KV cache and placements.",
    "record": "Play a trace on a real vLLM engine and keep what happened.",
    "replay": "Replay a trace on a cluster (the default command).",
    "retime": "Give a trace the queueing times of a recorded run as arrivals.",
    "trace": "Convert, rescale, cut, filter, merge, generate, summarise and plot traces.",
}
