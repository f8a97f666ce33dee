"""Gives every tensor and value of a state a dotted name, without prefixes of wrappers such as DDP."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PLAIN = (bool, int, float, complex, str, type(None))
_STREAMS = b'{"torch": "'  # the beginning of the bytes in which a checkpoint keeps random streams

Keys = tuple[object, ...]
Flat = dict[str, object]


def aligned(a: object, b: object, names: tuple[str, str]) -> tuple[Flat, Flat, list[str]]:
    """Both states by plain name, from the level at which their names agree, and notes on what was left out."""
    (left, stripped), (right, also) = flatten(a), flatten(b)
    prefixes = " and ".join(f"`{prefix}`" for prefix in sorted(stripped | also, reverse=True))
    notes = [f"names are compared without {prefixes}"] if prefixes else []
    states = [left, right]
    for side in (0, 1):
        if level := _inner_level(states[side], states[1 - side]):
            inner = (name for name in states[side] if name.startswith(level))
            states[side] = {name.removeprefix(level): states[side][name] for name in inner}
            notes.append(f"of {names[side]} only `{level}` is compared; {names[1 - side]} has no such level")
    return states[0], states[1], notes


def flatten(state: object) -> tuple[Flat, set[str]]:
    """The values of a nested state by dotted name, and the prefixes that were left out of the names."""
    dropped: set[str] = set()
    leaves = list(_leaves((), state, dropped))
    names = [_dotted(keys) for keys, _ in leaves]
    often = Counter(names)
    flat: Flat = {}
    for name, (keys, value) in zip(names, leaves, strict=True):
        # Key "a.b" and key "b" inside "a" have the same dotted name, and so have 1 and "1": these names get brackets.
        unique = name if often[name] == 1 else "".join(f"[{key!r}]" for key in keys)
        if unique in flat:
            raise ValueError(f"two values are named {unique}")
        flat[unique] = value
    return flat, dropped


def _leaves(keys: Keys, value: object, dropped: set[str]) -> Iterator[tuple[Keys, object]]:
    if isinstance(value, bytes) and value.startswith(_STREAMS):
        value = json.loads(value)
    if isinstance(value, Mapping):
        inner = _unwrapped(value, dropped)
    elif isinstance(value, (list, tuple)) and not all(isinstance(item, _PLAIN) for item in value):
        inner = dict(enumerate(value))
    else:
        yield keys, value
        return
    for key, item in inner.items():
        yield from _leaves((*keys, key), item, dropped)


def _dotted(keys: Keys) -> str:
    # names may be printed on a terminal, so escape control characters
    texts = [text if text.isprintable() else repr(text)[1:-1] for text in map(str, keys)]
    return ".".join(texts) or "value"


def _unwrapped(state: Mapping[object, object], dropped: set[str]) -> Mapping[object, object]:
    plain: dict[object, object] = {}
    prefixes: set[str] = set()
    for key, value in state.items():
        parts = str(key).split(".")
        inner_parts = [part for part in parts if part not in _WRAPPERS] or [str(key)]
        while inner_parts[0] == "module" and len(inner_parts) > 1:
            inner_parts = inner_parts[1:]
        plain[".".join(inner_parts) if len(inner_parts) < len(parts) else key] = value
        prefixes |= set(parts) - set(inner_parts)
    if len(plain) < len(state):  # without prefixes two values would have the same name
        return state
    dropped |= {f"{prefix}." for prefix in prefixes}
    return plain


def _inner_level(flat: Flat, other: Flat) -> str | None:
    """The level, such as `model.`, under which `flat` keeps the names that `other` has at the top."""
    if flat.keys() & other.keys():
        return None
    parts = (name.partition(".") for name in flat)
    counts = Counter(f"{level}." for level, _, rest in parts if rest in other)
    return max(counts, key=lambda level: counts[level]) if counts else None
