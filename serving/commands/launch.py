"""`python -m serving launch`: the command that starts a placement."""

from pathlib import Path

import click

_COUNT = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.option("--hardware", required=True, help="GPU name.")
@click.option("--tp", type=_COUNT, default=1, show_default=True, help="Tensor-parallel degree.")
@click.option("--pp", type=_COUNT, default=1, show_default=True, help="Pipeline-parallel degree.")
@click.option("--dp", type=_COUNT, default=1, show_default=True, help="Data-parallel degree.")
@click.option("--ep", type=_COUNT, help="1, or all ranks.  [default: all ranks for a model with experts]")
@click.option("--max-model-len", type=_COUNT, help="Longest sequence.  [default: the model's own]")
@click.option("--kv-dtype", default="auto", show_default=True, help="KV cache.")
@click.option("--block-tokens", type=_COUNT, help="KV block.  [default: the engine's choice]")
@click.option("--utilization", type=float, default=0.9, show_default=True, help="Share of the memory.")
@click.option("--max-num-seqs", type=_COUNT, help="Running requests per engine.  [default: the engine's for the GPU]")
@click.option("--max-num-batched-tokens", type=_COUNT, help="Tokens per step.  [default: the engine's for the GPU]")
@click.option("--accept-risk", is_flag=True, help="Write the command even without headroom for unknown workspaces.")
@click.option("--model-path", help="What the engine loads.  [default: MODEL, of a config.json its folder]")
@click.option(
    "--format",
    "style",
    type=click.Choice(["shell", "compose", "kubernetes", "json"]),
    default="shell",
    show_default=True,
)
@click.option("--image", help="Container image with its tag, for compose and kubernetes.")
@click.option("--output", type=click.Path(path_type=Path), help="File to write.  [default: stdout]")
def command(
    model: str,
    hardware: str,
    tp: int,
    pp: int,
    dp: int,
    ep: int | None,
    max_model_len: int | None,
    kv_dtype: str,
    block_tokens: int | None,
    utilization: float,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    accept_risk: bool,
    model_path: str | None,
    style: str,
    image: str | None,
    output: Path | None,
) -> None:
    """Write the `vllm serve` command of a placement of MODEL that starts by the memory budget.

    A placement that does not fit, or fits without headroom, is refused with exit code 5 and what would fit.
    """
    from profiler.core.errors import ConfigError
    from profiler.core.hardware import load_hardware
    from profiler.core.load import atomic_write
    from profiler.core.registry import load_model
    from profiler.core.types import Parallel
    from serving.launch import STYLES, launch

    spec = load_model(model)
    if style in ("compose", "kubernetes") and image is None:
        raise ConfigError(f"--format {style} needs --image with a tag, such as vllm/vllm-openai:v0.26.0")
    if model.endswith(".json") and model_path is None:
        file = Path(model)
        if file.name != "config.json":
            raise ConfigError(f"{model}: the engine loads a folder or a name; give it as --model-path")
        model_path = str(file.parent)
    made = launch(
        spec,
        load_hardware(hardware),
        Parallel(tp, pp, dp, ep or (tp * dp if spec.moe else 1)),
        model=model_path,
        max_model_len=max_model_len,
        kv_dtype=kv_dtype,
        block_tokens=block_tokens,
        utilization=utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        accept_risk=accept_risk,
    )
    text = STYLES[style](made, image or "")
    if output is None:
        click.echo(text, nl=False)
        return
    with atomic_write(output) as stream:
        stream.write(text)
