"""Settings of a process, made of the groups that its packages declare."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import Field, create_model
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

ENV_PREFIX = "BATON_"

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Group of settings: the fields of a frozen dataclass that `baton.settings.setting` made.

    With the prefix `images_` the field `max_bytes` is `--images-max-bytes`,
    `BATON_IMAGES_MAX_BYTES`, and in a file either `images_max_bytes: 1000` or
    `images: {max_bytes: 1000}`.
    """

    of: type
    prefix: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Defaults other than those of the dataclass, by field."""

    @property
    def names(self) -> dict[str, dataclasses.Field[Any]]:
        """Fields by the names of their settings."""
        return {self.prefix + f.name: f for f in dataclasses.fields(self.of) if f.metadata}

    def values(self, settings: "Settings") -> dict[str, Any]:
        """Returns the values of the fields."""
        return {field.name: getattr(settings, name) for name, field in self.names.items()}


class Settings(BaseSettings):
    """Settings of a process. The constructor uses its arguments and defaults alone;
    `baton.settings.loading` reads flags, environment and file."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        cli_exit_on_error=False,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_kebab_case=True,
        cli_show_env_vars=True,
    )

    GROUPS: ClassVar[Mapping[str, Group]] = {}
    OLD_NAMES: ClassVar[Mapping[str, str]] = {}
    """Fields by the names that they had in the release before; these still work, with a warning."""

    def group(self, of: type[_T], name: str, **others: object) -> _T:
        """Returns the settings of a group as its dataclass. `others`: fields that are no settings
        of the group."""
        return of(**self.GROUPS[name].values(self), **others)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def grouped(base: type[Settings], **groups: Group) -> Any:
    """Returns settings that have those of the groups, too."""
    fields: Any = {
        name: (field.type, Field(group.defaults.get(field.name, field.default), **field.metadata))
        for group in groups.values()
        for name, field in group.names.items()
    }
    made: Any = create_model(base.__name__, __base__=base, **fields)
    made.GROUPS = {**base.GROUPS, **groups}
    return made


def flag_of(name: str) -> str:
    """Returns the flag of a setting."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """Returns the environment variable of a setting."""
    return ENV_PREFIX + name.upper()
