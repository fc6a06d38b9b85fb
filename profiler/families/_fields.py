"""Reading typed fields out of a raw HF config, with errors that name the key."""

from collections.abc import Mapping
from typing import Any, Literal

from profiler.core.errors import ConfigError
from profiler.core.types import Component, MlaDims, Quantization

_DTYPES: Mapping[str, Literal["bf16", "fp16", "fp32"]] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_LARGEST = {"num_hidden_layers": 4096}


class Fields:
    """A view of one mapping of a config that knows where it came from. Reads raise ConfigError, nothing is coerced."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.where}: key {key!r} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: {key} must be an integer, found {value!r}")
        if value < minimum:
            raise ConfigError(f"{self.where}: {key} is {value}; it must be at least {minimum}")
        if value > (largest := _LARGEST.get(key, 1 << 31)):
            raise ConfigError(f"{self.where}: {key} is beyond {largest}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e9:
            raise ConfigError(f"{self.where}: {key} must be a finite number, found {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} must be true or false, found {value!r}")
        return value

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.where}: {key} must be a string, found {value!r}")
        return value

    def choice(self, key: str, legal: tuple[str, ...], default: str) -> str:
        value = self.values.get(key, default)
        if value not in legal:
            raise ConfigError(f"{self.where}: {key} is {value!r}; known: {', '.join(legal)}")
        return str(value)

    def section(self, key: str) -> "Fields":
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {key} must be a mapping, found {value!r}")
        return Fields(value, f"{self.where}: {key}")


def architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [""]
    return str(names[0])


def quantization(config: Mapping[str, Any], text: Fields) -> Quantization:
    """Weight format of the checkpoint. Raises ConfigError for a method whose layout is not known here."""
    section = config.get("quantization_config") or text.values.get("quantization_config")
    if section is None:
        dtype = text.values.get("torch_dtype") or text.values.get("dtype") or config.get("torch_dtype")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ConfigError(f"{text.where}: torch_dtype is {dtype!r}; known: {', '.join(_DTYPES)}")
        return Quantization(_DTYPES[dtype])
    if not isinstance(section, Mapping):
        raise ConfigError(f"{text.where}: quantization_config must be a mapping, found {section!r}")
    fields = Fields(section, f"{text.where}: quantization_config")
    if fields.text("quant_method") != "fp8":
        raise ConfigError(
            f"{fields.where}: quant_method {section.get('quant_method')!r} has no weight layout here; known: 'fp8' "
            "(e4m3, block scales), or no quantization_config (bf16, fp16, fp32)"
        )
    fields.choice("fmt", ("e4m3",), "e4m3")
    block = section.get("weight_block_size")
    if block is None:
        return Quantization("fp8")
    if not (isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
        raise ConfigError(f"{fields.where}: weight_block_size must be two positive integers, found {block!r}")
    return Quantization("fp8", (block[0], block[1]))


def _is_scaled(text: Fields) -> bool:
    """Whether positions are scaled (yarn): vLLM 0.26 keeps the tables of these classes in fp32 and plain ones in the
    dtype of activations (model_executor/layers/rotary_embedding)."""
    for key in ("rope_parameters", "rope_scaling"):
        if text.has(key):
            section = text.section(key)
            return (section.text("rope_type") or section.text("type") or "default") != "default"
    return False


def mla_dims(text: Fields) -> MlaDims:
    dims = MlaDims(
        q_lora_rank=text.integer("q_lora_rank") if text.has("q_lora_rank") else None,
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
        rotary_tables=2 if text.has("index_topk") and not text.boolean("indexer_rope_interleave", False) else 1,
        rotary_bytes=4 if _is_scaled(text) else 2,
    )
    stated = text.integer("qk_head_dim", default=dims.qk_nope_head_dim + dims.qk_rope_head_dim)
    if stated != dims.qk_nope_head_dim + dims.qk_rope_head_dim:
        raise ConfigError(f"{text.where}: qk_head_dim {stated} is not qk_nope_head_dim + qk_rope_head_dim")
    return dims


def dense(*names: str) -> tuple[Component, ...]:
    return tuple(Component("dense", name) for name in names)
