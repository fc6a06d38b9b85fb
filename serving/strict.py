"""The base of everything that a file may contain."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from profiler.core.errors import unknown


class Strict(BaseModel):
    """A part of a file: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        for key in value if isinstance(value, Mapping) else ():
            if key not in cls.model_fields:
                message = str(unknown("key", str(key), cls.model_fields))
                raise PydanticCustomError("unknown_key", "{message}", {"message": message})
        return value
