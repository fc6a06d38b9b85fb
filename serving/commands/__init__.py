"""Commands of `python -m serving`, one file each."""

SUMMARIES = {
    "chakra": "Steps as Chakra execution traces, which ASTRA-Sim reads.",
    "collectives": "Measured collectives beside those computed from links.",
    "compare": "Compare a simulated run with a recorded one, request by request.",
    "describe": "Fit a workload description to a trace, or make a trace of one.",
    "explain": "One step's cost as a tree: kernels, collectives, bounds, provenance.",
    "host": "What a step costs the host, from recordings.",
    "launch": "The vllm serve command of a placement, checked to start.",
    "plan": "What fits where: weights, KV cache and placements.",
    "record": "Play a trace on a real vLLM engine and keep what happened.",
    "replay": "Replay a trace on a cluster (the default command).",
    "report": "Results as one HTML page, Markdown, CSV or on the terminal.",
    "retime": "Give a trace the queueing times of a recorded run as arrivals.",
    "routing": "How a gate loads expert-parallel ranks.",
    "size": "The highest rate and the fewest GPUs that keep an SLO.",
    "sweep": "Run every legal point of a sweep file; one table, resumable.",
    "trace": "Convert, rescale, cut, filter, merge, generate, summarise and plot traces.",
    "validate": "Recordings of a real engine against the simulator: requests, steps, blocks.",
}
