"""Read numbers from a config.json: with mlx-lm's defaults, noting each one that had to stand in."""

from __future__ import annotations

from collections.abc import Mapping

from daemon.errors import PolicyError


class Reader:
    """The keys of one (text) configuration over the defaults of its family.

    *notes* collects, in words for a user, every default that was used.
    """

    def __init__(self, config: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        self._config = config
        self._defaults = defaults
        self.notes: dict[str, None] = {}

    def get(self, key: str, layer: int | None = None) -> object | None:
        """Return the value at the dotted *key*, else the default, else None; null counts as missing.

        A list on the way is entered at *layer*: some families give one value per layer.
        """
        value = self._written(key, layer)
        if value is None and key in self._defaults:
            value = self._defaults[key]
            self.notes[f'"{key}" is missing from config.json; mlx-lm takes {value}'] = None
        return value

    def first(self, *keys: str, layer: int | None = None) -> int | None:
        """Return the number at the first of *keys* that config.json has, then at the first default."""
        present = next((key for key in keys if self._written(key, layer) is not None), None)
        if present is None:
            present = next((key for key in keys if key in self._defaults), None)
        return None if present is None else self._whole(present, self.get(present, layer), least=1)

    def count(self, key: str, layer: int | None = None) -> int:
        """Return the number above 0 at *key*.

        Raises:
            PolicyError: it is missing or no such number.
        """
        return self._whole(key, self.get(key, layer), least=1)

    def number(self, key: str, layer: int | None = None) -> int:
        """Return the number at *key*, 0 allowed; raises PolicyError as `count` does."""
        return self._whole(key, self.get(key, layer), least=0)

    def sequence(self, key: str) -> list[object]:
        """Return the list at *key*; a string is a list of letters."""
        value = self.get(key)
        if isinstance(value, str):
            return [*value]
        if not isinstance(value, list):
            raise PolicyError("", f'config.json: "{key}" is {value!r}; a list is needed')
        return value

    def integers(self, key: str) -> list[int]:
        """Return the list of numbers at *key*."""
        return [self._whole(key, item, least=0) for item in self.sequence(key)]

    def _written(self, key: str, layer: int | None) -> object | None:
        value: object | None = self._config
        for part in (*key.split("."), None):
            if isinstance(value, list) and layer is not None:
                value = value[layer] if layer < len(value) else None
            if part is not None:
                value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def _whole(self, key: str, value: object | None, *, least: int) -> int:
        if value is None:
            raise PolicyError("", f'config.json lacks "{key}", and mlx-lm has no default for it')
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        raise PolicyError(
            "", f'config.json: "{key}" is {value!r}; a whole number of at least {least} is needed'
        )
