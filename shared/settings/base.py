"""The base class of all settings. It makes each subclass a frozen dataclass, without generated methods.

A class of settings has up to 200 fields, and a process defines about ten such classes before it can do anything. The
methods that `@dataclass` generates for them would have to be compiled at each start, which takes 100 ms of CPU time
in all processes of a server together. The methods here read the fields when they are called.
"""

from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar, NoReturn, dataclass_transform


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Settings:
    """Settings that cannot be changed. The fields of a subclass are made with `shared.flags.flag`; all have defaults.

    The constructor accepts the fields by name. `dataclasses.fields` and `dataclasses.replace` can be used.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        dataclass(init=False, repr=False, eq=False)(cls)

    def __init__(self, **values: Any) -> None:
        known = self.__dataclass_fields__
        if unknown := values.keys() - known.keys():
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        self.__dict__.update({name: item.default for name, item in known.items()}, **values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))
