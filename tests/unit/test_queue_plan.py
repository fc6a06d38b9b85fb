"""Queue plans: what is read, and which message a fault gets."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from profiler.__main__ import main
from profiler.commands import queue as queue_command
from profiler.core.errors import ConfigError
from profiler.core.paths import data_root
from profiler.queue_plan import Compile, Plan, only, read_plan

V32 = "deepseek-ai/DeepSeek-V3.2-Exp"
SHIPPED = sorted((data_root() / "configs" / "queue").glob("*.yaml"))


def a_job(**changes: Any) -> dict[str, Any]:
    job = {"name": "a", "argv": f"profile {V32} --hardware H200 --grid tiny", "max_seconds": 60} | changes
    return {key: value for key, value in job.items() if value is not ...}


def write(tmp_path: Path, *jobs: Any, **changes: Any) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"name": "p", "jobs": list(jobs)} | changes))
    return path


def test_a_plan_is_read_with_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "name: p\n"
        "compile: {model: M, tp: [2, 1], workers: 3}\n"
        "jobs:\n"
        "- {name: a, argv: [&shared profile M --hardware H200, --save-samples 'a b'], max_seconds: 5}\n"
        "- {name: b, argv: [*shared, --kv-cache-gib=9], max_seconds: 0.5, after: a, env: {X: 1, Y: z}}\n"
        "- {name: c, argv: record M, module: serving, max_seconds: 5, after: a/b}\n"
        "- {name: d, argv: collectives, max_seconds: 5, after: compile}\n"
    )
    plan = read_plan(path)
    assert isinstance(plan, Plan) and (plan.name, plan.stand_by_after_s) == ("p", 40.0)
    assert plan.compile == Compile("M", (2, 1), 3, 16384, "all", 600.0)
    a, b, c, d = plan.jobs
    assert a.argv == ("profile", "M", "--hardware", "H200", "--save-samples", "a b") and not a.sized_cache
    assert b.argv[:2] == ("profile", "M") and b.sized_cache and b.env == (("X", "1"), ("Y", "z"))
    assert [job.after for job in plan.jobs] == [None, "a", "a/b", "compile"]
    assert (c.module, d.module, b.max_seconds) == ("serving", "profiler", 0.5)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"argvs": "x"}, r"plan\.yaml: job a: unknown key 'argvs'; did you mean 'argv'\?"),
        ({"argv": ...}, r"plan\.yaml: job a: lacks argv"),
        ({"max_seconds": ...}, r"lacks max_seconds"),
        ({"max_seconds": 0}, r"max_seconds must be positive"),
        ({"max_seconds": "5"}, r"max_seconds must be a number, found '5'"),
        ({"argv": []}, r"argv is empty"),
        ({"argv": ["profile", 1]}, r"argv must be a text or a list of texts"),
        ({"argv": "profile 'M"}, r"argv: No closing quotation"),
        ({"argv": "show M"}, r"argv: unknown command of profiler 'show'.*Known: collectives, coverage, profile, slice"),
        ({"argv": "profile M", "module": "serving"}, r"unknown command of serving 'profile'.*Known: record"),
        ({"module": "profilr"}, r"unknown module 'profilr'; did you mean 'profiler'\?"),
        ({"name": "../a"}, r"a name is letters, digits"),
        ({"name": "compile"}, r"a name is letters, digits, _ and -, and not compile"),
        ({"after": "b"}, r"after: unknown job above 'b'.*A file is written with a slash or a dot"),
        ({"after": "compile"}, r"unknown job above 'compile'"),
        ({"env": {"X": True}}, r"env: X must be a text or an integer"),
        ({"env": "X=1"}, r"env must be a mapping"),
    ],
)
def test_a_fault_is_named_with_its_job_and_key(job: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_plan(write(tmp_path, a_job(**job)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"jobs": []}, "at least one job"),
        ({"jobs": ["x"]}, r"jobs\[1\]: must be a mapping"),
        ({"job": 1}, "unknown key 'job'; did you mean 'jobs'"),
        ({"stand_by_after_s": -1}, "stand_by_after_s must be at least 0"),
        ({"compile": {"model": V32, "tp": 1, "workers": 2}}, "compile: tp must be a list"),
        ({"compile": {"model": V32, "tp": [1, 1], "workers": 2}}, "each once"),
        ({"compile": {"model": V32, "tp": [1], "workers": 0}}, "workers must be a positive integer"),
        ({"compile": {"model": V32, "tp": [1], "workers": 1, "shots_after": "none"}}, "must be all or first"),
    ],
)
def test_a_fault_of_the_plan_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_plan(write(tmp_path, a_job(), **changes))


def test_two_jobs_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is a job of this name above"):
        read_plan(write(tmp_path, a_job(), a_job()))


def refused(tmp_path: Path, *jobs: Any, **changes: Any) -> str:
    """The message with which the command refuses, before anything is started or written."""
    for dry in (["--dry-run"], []):
        with pytest.raises(ConfigError) as error:
            arguments = ["queue", str(write(tmp_path, *jobs, **changes)), "--output", str(tmp_path / "out"), *dry]
            main(arguments, standalone_mode=False)
        assert not (tmp_path / "out").exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"argv": f"profile {V32} --hardwar H200"}, "job a: profile: No such option '--hardwar'"),
        ({"argv": f"profile {V32}"}, "job a: profile: Missing option '--hardware'"),
        ({"argv": f"profile {V32} --hardware H200 --tp x"}, "'x' is not a comma-separated list"),
        ({"argv": f"profile {V32} --hardware H200 --help"}, "asks for help"),
        ({"argv": f"profile {V32} --hardware H200 --resume"}, "--resume goes with --save-samples"),
        ({"argv": "profile deepseek --hardware H200"}, "job a: unknown model 'deepseek'"),
        ({"argv": f"profile {V32} --hardware H20"}, "job a: unknown GPU 'H20'"),
        ({"argv": f"profile {V32} --hardware H200 --grid fulll"}, "unknown grid 'fulll'; did you mean 'full'"),
        ({"argv": f"profile {V32} --hardware H200 --categories indexr"}, "unknown category 'indexr'"),
        ({"argv": f"coverage {V32} --hardware CPU --kv-cache-gib 4"}, "--kv-cache-gib sizes the cache of engine vllm"),
        ({"argv": f"slice {V32} --hardware H200"}, "slice: Missing option"),
        ({"argv": "collectives --hardware H200 --batches 1"}, "collectives: Invalid value for '--batches'"),
        ({"module": "serving", "argv": f"record {V32} --hardware H200"}, "record: Missing option '--dataset'"),
    ],
)
def test_every_command_line_is_read_before_anything_runs(job: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, a_job(**job))


def test_a_model_without_gemms_to_compile_is_refused(tmp_path: Path) -> None:
    step = {"model": "MiniMaxAI/MiniMax-M3", "tp": [1], "workers": 2}
    assert "compile: MiniMaxAI/MiniMax-M3 has none" in refused(tmp_path, a_job(), compile=step)


def test_a_dry_run_adds_up_minutes_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = tmp_path / "not" / "there.gz"
    plan = write(
        tmp_path,
        a_job(argv=f"profile {V32} --hardware H200 --grid tiny --moe-from {samples} --skip-skew"),
        a_job(name="b", argv=f"profile {V32} --hardware H200 --grid tiny --tp 2,4 --save-samples {samples}"),
        a_job(name="c", argv="collectives --hardware H200", max_seconds=90),
        a_job(name="d", module="serving", argv=f"record {V32} --hardware H200 --dataset t --output o"),
        compile={"model": V32, "tp": [1, 2], "workers": 2},
    )
    main(["queue", str(plan), "--output", str(tmp_path / "out"), "--dry-run"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compile: GEMMs of 16 shapes by 2 processes, at most 600 s"
    assert lines[1].startswith("a: profile: ") and "at tp 1, about " in lines[1]
    assert "at tp 2, " in lines[2] and "at tp 4, about " in lines[2] and "for lack of --resume" in lines[2]
    assert lines[3] == "c: collectives: at most 1.5"
    minutes = [float(line.split("about ")[1].split()[0]) for line in (lines[1], lines[2], lines[-1])]
    assert minutes[0] + minutes[1] == pytest.approx(minutes[2], abs=0.11) and minutes[0] >= 1.0
    assert (
        lines[-1].startswith("4 jobs, 0 done before; ") and "minutes, 2 without an estimate, at most 4.5" in lines[-1]
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_plans_are_legal(path: Path) -> None:
    plan = read_plan(path)
    assert plan.name == path.stem
    saved, reports = [], 0
    for job in plan.jobs:
        context = queue_command._parsed(plan, job)
        if job.argv[0] == "record":
            assert context.params["force"], "a queue that goes on plays again"
            saved.append(context.params["output"])
            continue
        queue_command._prepare(plan, job, context, "tiny")
        if job.argv[0] == "coverage":
            assert set(context.params["from_samples"]) <= set(saved), "of samples that a job above wrote"
            reports += 1
            continue
        assert context.params["resume"] and context.params["samples_only"]
        saved.append(context.params["save_samples"])
    assert len(set(saved)) + reports == len(plan.jobs)
    queue_command._check_compile(plan)


def test_the_shipped_plans_measure_what_is_shared_once() -> None:
    wanted = {}
    for path in SHIPPED:
        plan = read_plan(path)
        for job in plan.jobs:
            if job.argv[0] == "profile":
                wanted[path.stem, job.name] = queue_command._parsed(plan, job).params["categories"]
    # Of the 656-byte cache neither experts nor the indexer; of a first cache both at tp 1 alone.
    assert not any({"indexer", "moe"} & set(wanted["h200-deepseek-v32", name]) for name in ("tp1", "tp2", "tp4", "tp8"))
    for plan_name in ("h200-glm-5-fp8", "h200-glm-5", "h200-glm-52"):
        assert wanted.pop((plan_name, "tp1")) is None
        others = [categories for (stem, _), categories in wanted.items() if stem == plan_name]
        assert len(others) == (7 if plan_name == "h200-glm-5-fp8" else 3)
        assert not any({"indexer", "moe"} & set(categories) for categories in others)


def test_some_jobs_alone_wait_for_none_that_is_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        a_job(),
        a_job(name="b", after="a"),
        a_job(name="c", after="b"),
        a_job(name="d", after="there.txt"),
    )
    found = only(read_plan(path), ["d", "c", "b"])
    assert [(job.name, job.after) for job in found.jobs] == [("b", None), ("c", "b"), ("d", "there.txt")]
    ran = CliRunner().invoke(queue_command.command, [str(path), "--dry-run", "--only", "b"])
    assert ran.exit_code == 0 and "1 jobs, 0 done before" in ran.output
    with pytest.raises(ConfigError, match="unknown job 'bb'; did you mean 'b'"):
        only(read_plan(path), ["bb"])
