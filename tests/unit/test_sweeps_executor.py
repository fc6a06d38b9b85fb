"""Worker processes that die, raise or finish; the same on a local Ray cluster."""

import pytest
import sweep_workers

from profiler.core.errors import ConfigError
from serving.sweeps.executor import run_local, run_ray


def test_every_job_comes_back_once():
    ended = list(run_local(sweep_workers.double, list(range(9)), 2))
    assert sorted((one.job, one.value["value"]) for one in ended) == [(n, 2 * n) for n in range(9)]


def test_a_worker_that_dies_once_is_replaced_and_its_job_tried_again(tmp_path):
    jobs = [str(tmp_path / name) for name in ("first", "well", "second")]
    ended = {one.job: one for one in run_local(sweep_workers.die_once, jobs, 1)}
    assert [ended[job].value for job in jobs] == [{"value": "first"}, {"value": "well"}, {"value": "second"}]


def test_a_job_that_kills_its_worker_twice_is_reported_and_the_others_go_on():
    ended = {one.job: one for one in run_local(sweep_workers.die_at_three, list(range(6)), 2)}
    assert ended.pop(3).failure == "the worker died (signal SIGKILL), 2 times"
    assert all(one.value == {"value": number} for number, one in ended.items())
    assert sorted(ended) == [0, 1, 2, 4, 5]


def test_an_exception_is_reported_with_its_place():
    ended = {one.job: one for one in run_local(sweep_workers.raise_at_three, [1, 3], 1)}
    assert ended[3].failure is not None
    assert ended[3].failure.startswith("ValueError: three is not liked (raise_at_three, line ")
    assert ended[1].value == {"value": 1}


def test_leaving_early_ends_the_workers():
    jobs = run_local(sweep_workers.double, list(range(50)), 2)
    next(jobs)
    jobs.close()


def test_no_workers_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        next(run_local(sweep_workers.double, [1], 0))


@pytest.mark.filterwarnings("ignore")
def test_a_local_ray_cluster_runs_the_jobs_and_reports_the_one_that_fails():
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    ended = [(one.job, one.value, one.failure) for one in run_ray(dict, [[("a", 1)], 5], 1)]
    good = next(one for one in ended if one[0] == [("a", 1)])
    bad = next(one for one in ended if one[0] == 5)
    assert good[1:] == ({"a": 1}, None)
    assert bad[1] is None
    assert "TypeError" in bad[2] and bad[2].endswith("2 times")


@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_that_is_not_there_is_one_message():
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with pytest.raises(ConfigError, match="--ray-address"):
        next(run_ray(dict, [[("a", 1)]], 1, "not a cluster address"))
