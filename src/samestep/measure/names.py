"""Gives every tensor and value of a state one plain dotted name, whatever wrapped the model that saved it."""

from collections.abc import Mapping

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def flatten(state: object) -> tuple[dict[str, object], set[str]]:
    """What a nested state holds by dotted name, and the wrappers' prefixes left out of the names."""
    flat: dict[str, object] = {}
    dropped: set[str] = set()
    _walk("", state, flat, dropped)
    return flat, dropped


def _walk(path: str, value: object, flat: dict[str, object], dropped: set[str]) -> None:
    if isinstance(value, Mapping):
        inner = _unwrapped(value, dropped)
    elif isinstance(value, (list, tuple)) and not all(isinstance(item, _PLAIN) for item in value):
        inner = {str(index): item for index, item in enumerate(value)}
    elif path in flat:
        raise ValueError(f"two values are named {path}")
    else:
        flat[path or "value"] = value
        return
    for key, item in inner.items():
        key = key if key.isprintable() else repr(key)[1:-1]  # a name may be printed on a terminal
        _walk(f"{path}.{key}" if path else key, item, flat, dropped)


def _unwrapped(state: Mapping[object, object], dropped: set[str]) -> dict[str, object]:
    plain: dict[str, object] = {}
    prefixes: set[str] = set()
    for key, value in state.items():
        kept = [part for part in str(key).split(".") if part not in _WRAPPERS] or [str(key)]
        while kept[0] == "module" and len(kept) > 1:
            kept = kept[1:]
        plain[".".join(kept)] = value
        prefixes |= set(str(key).split(".")) - set(kept)
    if len(plain) < len(state):  # without its prefix one value would hide another
        return {str(key): value for key, value in state.items()}
    dropped |= {f"{prefix}." for prefix in prefixes}
    return plain


def inner_level(flat: Mapping[str, object], other: Mapping[str, object]) -> str | None:
    """The level, such as `model`, under which `flat` keeps the names that `other` has at the top."""
    if flat.keys() & other.keys():
        return None
    found: dict[str, int] = {}
    for name in flat:
        level, _, rest = name.partition(".")
        if rest in other:
            found[level] = found.get(level, 0) + 1
    return max(found, key=lambda level: found[level]) if found else None
