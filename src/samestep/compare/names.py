"""Gives every tensor and value of a state a dotted name without the prefixes of wrappers such as DDP."""

from collections import Counter
from collections.abc import Mapping

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def flatten(state: object) -> tuple[dict[str, object], set[str]]:
    """The values of a nested state by dotted name, and the prefixes that were left out of the names."""
    leaves: list[tuple[tuple[object, ...], object]] = []
    dropped: set[str] = set()
    _walk((), state, leaves, dropped)
    names = [_dotted(keys) for keys, _ in leaves]
    often = Counter(names)
    flat: dict[str, object] = {}
    for name, (keys, value) in zip(names, leaves, strict=True):
        # A key "a.b" and a key "b" in "a" have one dotted name, as have 1 and "1": such names get brackets.
        unique = name if often[name] == 1 else "".join(f"[{key!r}]" for key in keys)
        if unique in flat:
            raise ValueError(f"two values are named {unique}")
        flat[unique] = value
    return flat, dropped


def _walk(
    keys: tuple[object, ...],
    value: object,
    leaves: list[tuple[tuple[object, ...], object]],
    dropped: set[str],
) -> None:
    if isinstance(value, Mapping):
        inner = _unwrapped(value, dropped)
    elif isinstance(value, (list, tuple)) and not all(isinstance(item, _PLAIN) for item in value):
        inner = list(enumerate(value))
    else:
        leaves.append((keys, value))
        return
    for key, item in inner:
        _walk((*keys, key), item, leaves, dropped)


def _dotted(keys: tuple[object, ...]) -> str:
    # A name may be printed on a terminal.
    texts = [text if text.isprintable() else repr(text)[1:-1] for text in map(str, keys)]
    return ".".join(texts) or "value"


def _unwrapped(state: Mapping[object, object], dropped: set[str]) -> list[tuple[object, object]]:
    plain: dict[object, object] = {}
    prefixes: set[str] = set()
    for key, value in state.items():
        parts = str(key).split(".")
        kept = [part for part in parts if part not in _WRAPPERS] or [str(key)]
        while kept[0] == "module" and len(kept) > 1:
            kept = kept[1:]
        plain[".".join(kept) if len(kept) < len(parts) else key] = value
        prefixes |= set(parts) - set(kept)
    if len(plain) < len(state):  # two values would have the same name without its prefix
        return list(state.items())
    dropped |= {f"{prefix}." for prefix in prefixes}
    return list(plain.items())


def inner_level(flat: Mapping[str, object], other: Mapping[str, object]) -> str | None:
    """The level, such as `model.`, under which `flat` keeps the names that `other` has at the top."""
    if flat.keys() & other.keys():
        return None
    parts = (name.partition(".") for name in flat)
    found = Counter(f"{level}." for level, _, rest in parts if rest in other)
    return max(found, key=lambda level: found[level]) if found else None
