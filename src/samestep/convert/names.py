"""Binds names, attributes and elements to values, and finds them again."""

import ast
import re
from dataclasses import replace

from samestep.convert.adding import FILLED, Adding
from samestep.convert.project import Scope
from samestep.convert.source import elements_added, name_of
from samestep.convert.values import ROWS, Kind, Named, Sum, Value, join, made_at, models_of, other

_OWN_LOSS = (
    "the model computes this loss itself, and it is taken for a mean over samples; for one over tokens, of which "
    "samples have unlike numbers, see docs/losses.md"
)
_EMPTY = re.compile(r"\{\}|([a-z]+\.)?(dict|OrderedDict)\(\)")
_HOLDS = "holds values of this process's share"


class Names(Adding):
    """A place is a scope and a name in it; `a.b` and `a[0]` are names in the scope of `a`."""

    def bind(self, target: ast.AST, value: Value, node: ast.expr | None = None) -> None:
        """Give a target this value, which the expression `node` made."""
        target = target.value if isinstance(target, ast.Starred) else target
        if isinstance(target, ast.Tuple | ast.List):
            for index, part in enumerate(target.elts):
                is_loss = self._is_loss_of_model(part, value, node)
                self.bind(
                    part,
                    self.loss_of_model(part) if is_loss else self.part_of(value, index, len(target.elts)),
                )
            return
        if self._is_loss_of_model(target, value, node):
            value = self.loss_of_model(target)
        scope, name = self.place_of(target)
        if isinstance(target, ast.Subscript):
            holder, container = self.place_of(target.value)
            old = holder.find(container) or Value()
            if not isinstance(target.slice, ast.Constant):
                at = self.value(target.slice)
                filled = self._filled(old, value, at)
                if old.kind == filled.kind == Kind.ROWS:
                    filled = self.rows_at(target, old, at)
                holder.names[container] = replace(filled, since=old.since)
                return
            self.note_element(target, value)
        for known in [known for known in scope.names if known.startswith((f"{name}.", f"{name}["))]:
            del scope.names[known]
        if value.kind == Kind.ROWS and self.batches and name != "_":
            self.batches.rows = self.batches.rows or name
        self._note_alias(scope, name, node)
        origin = value.origin if node is None or value.kind == "loader" else (node, self.source, self.since)
        # views are gathered where they are made, or nowhere: what is counted of them must know that
        late = (node,) if node is not None and value.edits else None
        edits = late if value.kind == Kind.VIEWS else value.edits
        scope.names[name] = replace(value, since=self.since, origin=origin, edits=edits)

    def opened_for(self, target: ast.expr, right: ast.expr | None) -> Value | None:
        """What a tuple with one `*rest` has for as many targets, as `b, c, n = *x.shape, 8`; None for others."""
        names, parts = getattr(target, "elts", []), right.elts if isinstance(right, ast.Tuple) else []
        starred = [part for part in parts if isinstance(part, ast.Starred)]
        if len(starred) != 1 or any(isinstance(name, ast.Starred) for name in names):
            return None
        values: list[Value] = []
        for part in parts:
            count = len(names) - len(parts) + 1 if part in starred else 0
            value = self.kept(self.value(part))
            values += [self.part_of(value, index) for index in range(count)] if part in starred else [value]
        return Value("list", dict(enumerate(values)), models_of(*values))

    def note_element(self, target: ast.expr, value: Value) -> None:
        """Note the value of an element with a constant key also in the list or dict that holds it."""
        if (found := self._container_of(target)) is None:
            return
        holder, container, old, key = found
        is_held = old.kind in ("list", "dict", Kind.BATCH) and self.is_of_turn(old)
        if is_held or (value.is_shared and self._is_empty(old)):
            held = {} if old.kind == Kind.ALIKE else old.by_key
            holder.names[container] = Value("dict", {**held, key: value}, since=old.since)

    def know_element(self, target: ast.expr) -> None:
        """Give an element of a list or dict, to which something is added, a place of its own."""
        scope, name = self.place_of(target)
        if name in scope.names or (found := self._container_of(target)) is None:
            return
        *_, held, key = found
        element = held.of.get(key) if held.kind in ("list", "dict") else None
        if element is not None and element.is_shared:
            scope.names[name] = replace(element, since=held.since)

    def _container_of(self, target: ast.expr) -> tuple[Scope, str, Value, object] | None:
        """The place and the value of what holds an element, and the element's key; None if that is no constant."""
        if not (isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant)):
            return None
        holder, container = self.place_of(target.value)
        return holder, container, holder.find(container) or Value(), target.slice.value

    def _is_empty(self, value: Value) -> bool:
        """Whether this is a dict that was made without keys, for the same batch."""
        made = value.origin[0] if value.kind == Kind.ALIKE and value.origin else None
        return made is not None and bool(_EMPTY.fullmatch(ast.unparse(made))) and self.is_of_turn(value)

    def loss_of_model(self, node: ast.AST) -> Value:
        """The loss that a model of a library computes itself: it is taken for a mean over the samples."""
        self.findings.note(self.source, node, _OWN_LOSS)
        return Value(Kind.MEAN, self.batches)

    def _is_loss_of_model(self, target: ast.AST, value: Value, node: ast.expr | None) -> bool:
        """Whether a name says that it gets the loss that a model of a library computes itself."""
        while isinstance(node, ast.Subscript):
            node = node.value
        is_of_model = isinstance(node, ast.Call) and self.known.get(node.func, Value()).kind == "model"
        is_named = isinstance(target, ast.Name) and "loss" in target.id.lower()
        return is_of_model and is_named and value.kind in (Kind.ROWS, Kind.OTHER) and self.batches is not None

    def adds_elements(self, target: ast.expr, node: ast.expr) -> bool:
        """Follow the addition of a list's own number to each of its elements, if this is one."""
        if (found := elements_added(node, target)) is None:
            return False
        values, name, added = found
        if (given := self.value(values)).kind != "list":
            return False
        place, scope = self.place_of(target), self.frame.scope
        self.frame.scope = Scope(scope)
        self.bind(name, self.by_element(given, added))
        place[0].names[place[1]] = self.accumulated(place, added, self.value(added))
        self.frame.scope = scope
        return True

    def _note_alias(self, scope: Scope, name: str, node: ast.expr | None) -> None:
        scope.aliases.pop(name, None)
        if (shared := _shared(node)) is not None or node is None:
            scope.aliases[name] = self.place_of(shared) if shared is not None else None

    def _filled(self, old: Value, value: Value, index: Value) -> Value:
        """The value of a container after an element with a variable index is set."""
        is_mixed = index.kind == Kind.OTHER or (index.is_shared and not old.is_shared)
        if old.kind == value.kind == Kind.ROWS and not index.is_shared:
            return old
        if value.kind in ROWS or (is_mixed and not self.in_forward):
            return Value(Kind.OTHER, FILLED)
        return value if value.kind == "list" else join(old, value)

    def put(self, node: ast.Call, receiver: ast.expr, value: Value) -> Value:
        """Follow `append` or `extend` of a list, also of parameters, or of one of two lists, which a test chooses."""
        if isinstance(receiver, ast.IfExp):
            self.put(node, receiver.orelse, value)
            return self.put(node, receiver.body, value)
        base, (scope, name) = self.value(receiver), self.place_of(receiver)
        value = self.total(node.args[0]) if self.is_lost(receiver, True) else value
        around, is_flat = self.around(scope.find(name) or Value()), name_of(node) == "extend"
        extended = self.extended(base, around, node.args[0], value, is_flat=is_flat)
        if extended.is_shared or value.models or extended.kind == "list":
            scope.names[name] = extended
        return Value()

    def merged(self, node: ast.Call, receiver: ast.expr) -> bool:
        """Follow `losses.update(more)` of a dict that was made for the same batch; whether it is one."""
        base, given = self.value(receiver), [self.kept(self.value(argument)) for argument in node.args]
        is_empty = self._is_empty(base)
        are_dicts = (base.kind == "dict" or is_empty) and {value.kind for value in given} <= {"dict"}
        options = {str(option.arg): self.kept(self.value(option.value)) for option in node.keywords}
        parts = [*(value.of for value in given), options]
        is_shared = any(value.is_shared for part in parts for value in part.values()) if are_dicts else False
        if not is_shared or "None" in options or not self.is_of_turn(base) or self.is_lost(receiver, True):
            return False
        scope, name = self.place_of(receiver)
        whole: Named = {} if is_empty else base.of
        for part in parts:
            whole = {**whole, **part}
        scope.names[name] = Value("dict", whole, models_of(*whole.values()), since=base.since)
        return True

    def place_of(self, target: ast.AST) -> tuple[Scope, str]:
        """The scope that has a target's value, and its name there."""
        if isinstance(target, ast.Attribute) and (base := self.value(target.value)).kind == "instance":
            return base.of.scope, target.attr
        root, own_scope = target, self.frame.scope
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        root_name, text = ast.unparse(root), ast.unparse(target)
        if root is not target and (place := own_scope.aliases.get(root_name)):
            return place[0], place[1] + text.removeprefix(root_name)
        scope = own_scope.elsewhere.get(root_name, own_scope)
        return (scope if root is target else scope.holder(root_name) or own_scope), text

    def _set_before(self, node: ast.expr) -> Value | None:
        """The value to which the script has set an attribute or element; None if it has not."""
        scope, name = self.place_of(node)
        value = scope.names.get(name)
        return value and self.held(scope, name, value)

    def held(self, scope: Scope, name: str, value: Value) -> Value:
        """The value of a place, which may be a dict or object whose elements were set separately."""
        prefixes, fields = (f"{name}[", f"{name}."), scope.names
        parts = [part for field, part in fields.items() if field.startswith(prefixes) and part.is_shared]
        if value.is_shared or not parts:
            return value
        by_key = {key: fields.get(f"{name}[{key!r}]", Value()) for key in _keys(value)}
        if all(part.is_shared for part in by_key.values()) and len(by_key) == len(parts):
            return Value("dict", by_key, since=value.since)
        return self.holding(parts, all(isinstance(part.of, Sum) for part in parts))

    def holding(self, values: list[Value], are_sums: bool = True) -> Value:
        """A container of sums over batches: in training the sums are totalled where they are added up."""
        sums = [value.of for value in values if isinstance(value.of, Sum) and value.of.loop.trains]
        nodes = tuple(node for batch_sum in sums for node in batch_sum.nodes) if are_sums else ()
        return other(_HOLDS, *values, edits=nodes or None)

    def either_way(self, *values: Value) -> Value:
        """The value of a name after both branches; unlike numbers are totalled where they are made."""
        joined = join(*values)
        made = [made_at(value) for value in values if value.is_shared]
        is_late = joined.kind == Kind.OTHER and joined.edits is None and None not in made
        edits = tuple(edit for edits in made for edit in edits or ())
        return replace(joined, edits=edits) if is_late else self.kept(joined)

    def is_lost(self, target: ast.expr, is_changed: bool = False) -> bool:
        """Whether a value put there cannot be followed: the target is inside an object from outside this function."""
        root, function = target, self.frame.function
        while isinstance(root, ast.Attribute | ast.Subscript):
            if isinstance(root, ast.Attribute) and (holder := self.value(root.value)).kind == "instance":
                is_element = holder.of.scope.aliases.get(root.attr, ()) is None  # of what a loop goes over
                return root is not target or (is_changed and is_element)
            root = root.value
        if not isinstance(root, ast.Name) or (root is target and not is_changed):
            return False
        names = [arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)] if function else []
        scope, held = self.frame.scope.aliases.get(root.id) or (self.frame.scope, root.id)
        is_local = scope is self.frame.scope and (root.id in scope.names or root.id in scope.elsewhere)
        is_given = root.id in names or (root is not target and re.split(r"[.\[]", held)[0] in names)
        return not is_local or is_given or (is_changed and root.id in self.frame.scope.aliases)

    def part_of(self, value: Value, key: object, count: int | None = None) -> Value:
        """The element of a value with this key; `count` is the number of targets of an unpacking."""
        if value.kind in ("list", "dict"):
            keys: dict[object, Value] = value.of
            key = key + len(keys) if isinstance(key, int) and key < 0 and None not in keys else key
            if key in keys and (count in (None, len(keys)) or None in keys):
                return keys[key]
            return keys[None] if None in keys and key is not None else join(*value.parts)
        if value.kind == "each":
            return other("is taken apart by zip", value) if value.is_shared else Value()
        return Value(Kind.ROWS, origin=value.origin) if value.kind == Kind.BATCH else value


def _keys(value: Value) -> list[object]:
    """The keys of a dict display or a dict() call."""
    expression = value.origin[0] if value.origin else None
    if isinstance(expression, ast.Dict):
        return [getattr(key, "value", None) for key in expression.keys]
    is_dict = isinstance(expression, ast.Call) and ast.unparse(expression.func) == "dict"
    return [keyword.arg for keyword in expression.keywords] if is_dict else []  # type: ignore[union-attr]


def _shared(node: ast.expr | None) -> ast.expr | None:
    """The place whose object an expression gives; that of `held.setdefault(key, [])` is `held[key]`."""
    match node:
        case ast.Call(func=ast.Attribute(value=held, attr="get" | "setdefault"), args=[key, *_]):
            return ast.copy_location(ast.Subscript(held, key), node)
    return node if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) else None
