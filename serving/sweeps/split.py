"""How many prefill and decode instances a disaggregated deployment would need of one layout: an estimate."""

from dataclasses import dataclass
from pathlib import Path

from profiler.core.registry import load_model
from profiler.core.units import NS_PER_MS, NS_PER_S
from serving.core.shape import StepShape
from serving.deployment import deploy
from serving.sweeps.points import Job
from serving.sweeps.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Split:
    """Rates of one instance that does only one of the two, in requests per second, and prefill instances per decode
    instance. decode_batch: requests per rank."""

    prefill_per_s: float
    decode_per_s: float
    decode_batch: int
    prefill_per_decode: float


def split_ratio(job: Job, traffic: Traffic, bundle_root: Path) -> Split | None:
    """From the tables, at the mean lengths of the job's requests: prefill works off prompts chunk by chunk; decode runs
    the largest batch whose step keeps the TPOT bound and whose KV fits. Transfers of KV and queueing are left out.

    None without a TPOT bound, with pipeline stages, or where a single decoding request breaks the bound. Raises
    CoverageError beyond the tables.
    """
    if job.slo is None or job.slo.tpot_ms is None or job.layout.parallel.pp > 1:
        return None
    deployed = deploy(job.cluster.instances[0], 0, bundle_root, job.allow_extrapolation, job.allow_projected)
    one, cost, ranks = deployed.deployment, deployed.table_cost, len(deployed.groups[0].engines)
    engines = len(one.engines)
    rows = traffic.at(None, job.seed, job.requests).requests
    prompt = round(sum(row.prompt_tokens for row in rows) / len(rows))
    output = sum(row.output_tokens for row in rows) / len(rows)
    prefill_ns, context = 0, 0
    while context < prompt:
        chunk = min(one.limits.max_num_batched_tokens, prompt - context)
        last = int(context + chunk == prompt)
        prefill_ns += cost.step_ns([StepShape(((chunk, context),), 0, 0, 0, 0, last)] * ranks)
        context += chunk
    keys = round(prompt + output / 2)
    indexer = load_model(job.layout.model).indexer
    capped = min(keys, indexer.attended_cap_tokens) if indexer else keys

    def step_ns(batch: int) -> int:
        return cost.step_ns([StepShape((), batch, batch * keys, keys, batch * capped, batch)] * ranks)

    low, high = 0, max(1, min(one.limits.max_num_seqs, one.kv_tokens // max(1, round(prompt + output))))
    while low < high:
        middle = (low + high + 1) // 2
        if step_ns(middle) <= job.slo.tpot_ms * NS_PER_MS:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        return None
    prefill_per_s = engines * NS_PER_S / prefill_ns
    decode_per_s = engines * low * NS_PER_S / (max(1.0, output - 1) * step_ns(low))
    return Split(prefill_per_s, decode_per_s, low, decode_per_s / prefill_per_s)
