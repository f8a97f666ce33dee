"""Follows a script statement by statement, through the functions and files of its project."""

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.convert.calls import MOST_STATEMENTS, Calls, without_gradients
from samestep.convert.project import Class, Frame, Function, Learnt, Scope, copied
from samestep.convert.source import Source, begins_from, is_option, updates
from samestep.convert.totals import TOTAL
from samestep.convert.values import NUMBERS, ROWS, Kind, Loop, Value

Find = Callable[[str, int, Path], Source | None]
_MOST_TIMES = 8
_MIXED = (
    "this loop takes batches of two loaders, of which a process may have unlike parts; give both one batch_size and "
    "drop_last=True, or add up samestep.mean(loss, weight=len(batch)) of each loader's loss"
)
_BY_SAMPLE = "this is called for each sample, and processes have unlike numbers; call it once for the batch"
_DECIDES = "this process's values decide when the loop ends, and the others go on; decide by a total"
_OF_THE_LOSS = (
    "compute it from the whole batch, as in `out, y = samestep.gather(model(x)), samestep.gather(y)`; see "
    "docs/losses.md"
)
_NO_TOTAL = "is of an evaluation with numbers that have no total"
_OF_NO_BATCH = (
    "the loop's batch was not followed into this loss; if it is made of noise alone, draw as many rows as the batch "
    "has, as in torch.randn(len(x), 8): without --same each process draws all rows of a fixed number"
)
_OF_A_PASS = (
    "this loss is of what a pass collected, of which each process has a part; take it of samestep.gather(...)"
)
_NOT_SHARED = "this loss is of data that no samestep.loader shares; take the batches from a DataLoader"


def follow(script: Source, find: Find) -> "Follower":
    """Follow a script; if numbers of its evaluation have no total, let every process evaluate all samples."""
    follower = _followed(script, find, Learnt())
    places: dict[Any, dict[ast.expr, None]] = {}  # the loaders that a function or statement evaluates
    for loop in follower.passes:
        if loop.call and not any(other.trains for other in follower.passes if other.call is loop.call):
            places.setdefault(loop.frame.function or loop.frame.statement, {})[loop.call] = None
    for calls in places.values():
        if not (gaps := follower.findings.gaps):
            break
        learnt = replace(copied(follower.learnt), eager=set())
        learnt.serial |= dict.fromkeys(calls, _NO_TOTAL)
        serial_follower = _followed(script, find, learnt)
        # a generator's loader may train by next()
        if len(found := serial_follower.findings.gaps) < len(gaps) and _NOT_SHARED not in found.values():
            serial_follower.explain(calls, gaps)
            follower = serial_follower
    return follower


def _followed(script: Source, find: Find, learnt: Learnt) -> "Follower":
    """Follow a script again and again until `learnt` stays the same."""
    for _ in range(_MOST_TIMES):
        before = copied(learnt)
        follower = Follower(script, find, learnt)
        if learnt == before:
            follower.check_totals()
            return follower
    reason = "what the script shows in its loops could not be followed to an end"
    follower.findings.gap(script, script.tree, reason)
    return follower


class Follower(Calls):
    """Follows statements, and knows the modules of the project."""

    def __init__(self, script: Source, find: Find, learnt: Learnt) -> None:
        super().__init__(learnt)
        self.find = find
        self.modules: dict[Source, Scope] = {}
        self.follow_module(script)

    def explain(self, calls: Iterable[ast.expr], gaps: dict[tuple[Source, int], str]) -> None:
        """Say in the notes of loaders that stay torch's own which of these gaps is gone by that."""
        place = next((place for place in gaps if place not in self.findings.gaps), next(iter(gaps)))
        text = f"{_NO_TOTAL} ({place[0].path.name}:{place[1]}: {gaps[place]}; see docs/convert.md)"
        self.learnt.serial |= dict.fromkeys(calls, text)
        notes = (note.replace(f"{_NO_TOTAL};", f"{text};") for note in self.findings.notes)
        self.findings.notes = dict.fromkeys(notes)

    def path_of(self, node: ast.expr) -> str:
        """The path in an argument: its text if it is known, else its expression."""
        return self.known.get(node, Value()).text or ast.unparse(node)

    def follow_module(self, source: Source) -> Scope:
        if source in self.modules:
            return self.modules[source]
        scope = self.modules[source] = Scope()
        outer_loops, self.loops = self.loops, []
        self.frames.append(Frame(scope, source))
        self.statements(source.tree.body)
        # functions that no line calls, for example because a decorator registers them
        for node in source.tree.body if len(self.modules) == 1 else ():
            if isinstance(node, ast.FunctionDef) and node not in self.reached:
                self.run(self._function(node).of, [], {}, None)
        self.frames.pop()
        self.loops = outer_loops
        return scope

    def statements(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self.frame.statement = statement
            self.followed += 1
            getattr(self, f"_{type(statement).__name__.lower()}", self._parts_of)(statement)
            if self.frame.has_ended:
                break

    def _parts_of(self, node: ast.AST) -> None:
        """Follow the expressions and statements of a statement without a rule of its own."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
            elif isinstance(child, ast.stmt):
                self.statements([child])
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                self._parts_of(child)

    def _expr(self, node: ast.Expr) -> None:
        self.value(node.value)
        receiver = getattr(getattr(node.value, "func", None), "value", None)
        if receiver in self.known and self.known[receiver].kind == Kind.OTHER and not self.in_forward:
            # the object's method may use the share's value in an unknown way
            self.total(receiver)
        if isinstance(node.value, ast.Yield | ast.YieldFrom) and node.value.value is not None:
            given = self.known[node.value.value]
            is_from = isinstance(node.value, ast.YieldFrom)
            loop = self.batches or Loop()
            given_on = Loop(given, sizes=loop.sizes, fed_by=(loop.place,))
            self.frame.yielded.append(self.each(given) if is_from else given_on)

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            source = self.find(alias.name, 0, self.source.path)
            value = Value("module", self.follow_module(source)) if source else Value("external", name)
            self.frame.scope.names[alias.asname or name] = value

    def _importfrom(self, node: ast.ImportFrom) -> None:
        source = self.find(node.module or "", node.level, self.source.path)
        names, known = self.frame.scope.names, self.follow_module(source).names if source else {}
        for alias in node.names:
            full = f"{node.module}.{alias.name}" if node.module else alias.name
            if alias.name == "*":
                names.update(known)
                self.frame.scope.stars += [] if source else [str(node.module)]
            elif alias.name not in known and (inner := self.find(full, node.level, self.source.path)):
                names[alias.asname or alias.name] = Value("module", self.follow_module(inner))
            else:
                value = Value() if source else Value("external", full)
                names[alias.asname or alias.name] = known.get(alias.name, value)

    def _functiondef(self, node: ast.FunctionDef) -> None:
        self.frame.scope.names[node.name] = self._function(node)

    def _function(self, node: ast.FunctionDef) -> Value:
        marks = frozenset(ast.unparse(decorator) for decorator in node.decorator_list)
        return Value("function", Function(node, self.frame.scope, self.source, marks))

    def _classdef(self, node: ast.ClassDef) -> None:
        outer, scope = self.frame.scope, Scope(self.frame.scope)
        methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
        scope.names |= {child.name: self._function(child) for child in methods}
        outer.names[node.name] = Value("class", Class(node, [self.value(base) for base in node.bases], scope))
        self.frame.scope = scope
        self.statements([child for child in node.body if isinstance(child, ast.Assign | ast.AnnAssign)])
        self.frame.scope = outer

    def _return(self, node: ast.Return) -> None:
        """Follow a return; a function called outside all loops over batches returns totals."""
        if node.value is None:
            return
        value, frame = self.value(node.value), self.frame
        around = self.loops[: frame.loops_before]
        is_for_batch = self.in_forward or any(loop.kind != "plain" for loop in around)
        is_property = frame.call is None and isinstance(self.source.parents[frame.function], ast.ClassDef)
        if value.is_shared and (frame.had_batches or not is_for_batch) and not is_property:
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            totals = [self._returned_total(part) for part in parts]
            value = Value("list", dict(enumerate(totals))) if len(totals) > 1 else totals[0]
        elif not value.is_shared:
            self.seen_alike(node.value)
        frame.returned.append(self.kept(value))
        frame.has_ended = self.depth == frame.depth and len(self.loops) == frame.loops_before

    def _returned_total(self, node: ast.expr) -> Value:
        """The total of a part of a return value; a list without a total gets one where it is used."""
        value = self.value(node)
        return value if value.kind in ("list", "dict") and value.edits is None else self.total(node)

    def _assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        targets, right = node.targets if isinstance(node, ast.Assign) else [node.target], node.value
        pairs = [(target, right) for target in targets if right is not None]
        parts = [getattr(part, "elts", ()) for part in (targets[0], right)]
        if isinstance(right, ast.Tuple) and len(parts[0]) == len(parts[1]):
            pairs = list(zip(*parts, strict=True))
        assignments = [(target, self._assigned(target, part), part) for target, part in pairs]
        for target, value, part in assignments:
            if value is not None:
                self.bind(target, value, part)

    _annassign = _assign

    def _assigned(self, target: ast.expr, node: ast.expr) -> Value | None:
        """The value for a target; None for an addition to the target, which is done here."""
        match node:
            case ast.BinOp(left=left, op=ast.Add(), right=right) if begins_from(left, target):
                self._add(target, right)
                return None
        if self.adds_elements(target, node):
            return None
        is_late = node in self.learnt.eager or self.is_lost(target) or is_option(target)
        value = self.total(node) if is_late else self.opened_for(target, node) or self.value(node)
        if self._is_element(target) and self.batches is not None and value.kind in (*NUMBERS, Kind.OTHER):
            value = self.accumulated(self._place_added_to(target), node, value)
        # a value in an object cannot be followed further, so other kinds must be totalled too
        return self.named(node, value, NUMBERS if isinstance(target, ast.Name) else {*NUMBERS, Kind.OTHER})

    def _is_element(self, target: ast.expr) -> bool:
        return isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Constant)

    def _place_added_to(self, target: ast.expr) -> tuple[Scope, str]:
        """The place that an addition changes: for an element with a variable index, and for x.data, the whole of it."""
        is_part = self._is_element(target) or getattr(target, "attr", "") == "data"
        return self.place_of(target.value if is_part else target)  # type: ignore[attr-defined]

    def _add(self, target: ast.expr, added: ast.expr) -> None:
        self.know_element(target)
        scope, name = self._place_added_to(target)
        value = self.total(added) if self.is_lost(target) else self.value(added)
        scope.names[name] = result = self.added_at(target, (scope, name), added, value)
        self.note_element(target, result)

    def _augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub):
            self._add(node.target, node.value)
            return
        self.know_element(node.target)
        scope, name = self._place_added_to(node.target)
        old, value = scope.find(name) or Value(), self.value(node.value)
        if old.is_shared or value.is_shared:
            scope.names[name] = result = replace(self.divided(node, old, value), since=old.since)
            self.note_element(node.target, result)

    def _global(self, node: ast.Global | ast.Nonlocal) -> None:
        """Note in which scope names live that are declared global or nonlocal."""
        for name in node.names:
            scope = self.frame.scope.parent or self.frame.scope
            while scope.parent is not None and (isinstance(node, ast.Global) or name not in scope.names):
                scope = scope.parent
            self.frame.scope.elsewhere[name] = scope

    _nonlocal = _global

    def _if(self, node: ast.If) -> None:
        is_uneven = (tested := self.value(node.test)).is_shared
        if not is_uneven or self.may_total():
            is_uneven = self.total(node.test).is_shared
        is_main = ast.unparse(node.test) in ("__name__ == '__main__'", "TYPE_CHECKING")
        if (known := True if is_main else self.decided(node.test)) is not None:
            self.statements(node.body if known else node.orelse)
            return
        self.uneven += is_uneven
        self.by_total += tested.edits is not None
        self.depth += 1
        scopes, backwards_before = self.frame.scope.reached(), self.backwards
        before, none = [dict(scope.names) for scope in scopes], self.found_none(node.test)
        self.statements(node.body)
        changed, backwards_between = [(scope, scope.names) for scope in scopes], self.backwards
        for scope, names in zip(scopes, before, strict=True):
            scope.names = names
        self.statements(node.orelse)
        for scope, names in changed:
            for name, value in names.items():
                else_value = scope.names.get(name, value)
                scope.names[name] = value if else_value is value else self.either_way(else_value, value)
        if none is not None:
            none[0].names[none[1]] = Value("none", since=self.since)
        self.depth -= 1
        self.by_total -= tested.edits is not None
        self.uneven -= is_uneven
        if backwards_before < backwards_between < self.backwards:
            self._trained()

    def _trained(self) -> None:
        for loop in self.loops:
            loop.found_training = max(loop.found_training, 1 + (loop.depth >= self.depth - self.by_total))

    def _for(self, node: ast.For) -> None:
        over = self.over(node.iter)
        if over.models and updates(node):
            self.optimizes(over)
        self._repeated(node, replace(self.each(over)))
        self.statements(node.orelse)

    def _while(self, node: ast.While) -> None:
        self.total(node.test)
        self._repeated(node, Loop())

    def _repeated(self, node: ast.For | ast.While, loop: Loop) -> None:
        """Follow a loop's body twice: values at its end reach its beginning. Only the second findings count."""
        loop.place = place = (*(frame.call for frame in self.frames), node)
        loop.trains = self.learnt.trains.get(place, 2)
        findings, eager = copied(self.findings), set(self.learnt.eager)
        before = dict(self.frame.scope.names)
        held = self.frame.scope.reached_values() if self.in_forward else []
        self._follow_turn(node, loop)
        self.learnt.feeds |= dict.fromkeys(loop.fed_by, loop.found_training)
        self.learnt.trains[place] = loop.trains = max(loop.found_training, self.learnt.feeds.get(place, 0))
        loop.steps = loop.found_steps
        is_settled = bool(held) and all(names[name].kind == value.kind for names, name, value in held)
        if self.followed < MOST_STATEMENTS and not is_settled:
            self.findings, self.learnt.eager = findings, eager
            self._follow_turn(node, loop)
        self.check_first_turn(node, before if loop.kind == "plain" else {})
        self.frame.had_batches |= loop.kind == "batches"
        for names, name, value in self.frame.scope.reached_values():
            if loop.number not in value.since:
                continue
            if value.kind == "turn":
                names[name] = Value(Kind.ALIKE if loop.trains else Kind.PASSES)
            elif value.kind in ROWS and loop.kind == "batches":
                remedy = f"; as the last line of the loop write `{name} = samestep.gather({name})`"
                reason = "is of the last batch, of which this process has a part at most"
                names[name] = Value(Kind.OTHER, reason + remedy * bool(loop.trains))

    def _follow_turn(self, node: ast.For | ast.While, loop: Loop) -> None:
        self.mark_earlier(node, loop)
        self.enter(loop, node)
        loop.taken = dict.fromkeys(loop.sizes, True)
        for element in loop.objects or (loop.element,):
            if isinstance(node, ast.For):
                self.bind(node.target, element)
            self.statements(node.body)
        self.loops.remove(loop)

    def _try(self, node: ast.Try) -> None:
        """Skip handlers of ImportError: they replace a library that is not installed."""
        skipped = [part for part in node.handlers if part.type and "ImportError" in ast.unparse(part.type)]
        node.handlers = [handler for handler in node.handlers if handler not in skipped]
        self._parts_of(node)
        node.handlers += skipped

    def _with(self, node: ast.With) -> None:
        quiet = 0
        for item in node.items:
            value = self.value(item.context_expr)
            callee = self.known.get(getattr(item.context_expr, "func", item.context_expr), value)
            shown = ast.unparse(callee.of.node if callee.kind == "function" else item.context_expr)
            quiet = max(quiet, without_gradients(shown))
            if item.optional_vars is not None:
                self.bind(item.optional_vars, value)
        self.without_gradients += quiet
        self.statements(node.body)
        self.without_gradients = max(0, self.without_gradients - quiet)

    def _break(self, node: ast.stmt) -> None:
        if self.uneven and self.batches is not None and self.loops[-1].kind == "batches":
            self.gap(node, _DECIDES)

    _continue = _break

    def backward(self, node: ast.Call, loss: Value) -> Value:
        """Note whether this loss needs averaged or added gradients, or that it is unclear."""
        if self.without_gradients > 1:
            return Value()  # a test that is not known returned before this line
        self.backwards += 1
        self.comes_together()
        self._trained()
        if any(loop.kind == "rows" for loop in self.loops):
            self.gap(node, _BY_SAMPLE)
        if self.batches is not None and sum(self.batches.taken.values()) > 1:
            self.gap(node, _MIXED)
        loss_of: ast.expr = node.func.value  # type: ignore[attr-defined]
        if self.batches is None and loss.is_shared and not self._is_of_held(loss_of):
            self.gap(node, _OF_A_PASS)
        if self.batches is None and (loss.is_shared or loss.of == TOTAL):
            self.trained_alike[self.frame.function or self.source.tree] = self.source
        if loss.kind == Kind.OTHER and loss.edits and self.may_total():
            self.apply(loss.edits)
        elif loss.of == TOTAL:
            pass  # its gradient is the whole batch's
        elif loss.kind == Kind.MEAN or (loss.kind in NUMBERS and self.batches is not None):
            self.findings.losses.setdefault("mean" if loss.kind == Kind.MEAN else "sum", (self.source, node))
        elif loss.is_shared:
            reason = f"the loss {loss.of}" if isinstance(loss.of, str) else "no total of this loss is known"
            part, source = self.cause(loss_of, str(loss.of), self.source)
            is_inside = any(getattr(around, "name", "") == "forward" for around in source.around(part))
            returned = "return the outputs from forward, and " * is_inside
            text = f"{reason.partition(';')[0]}; {returned}{_OF_THE_LOSS}"
            self.findings.gaps[source, part.lineno] = text  # type: ignore[attr-defined]
        else:
            self.gap(node, _NOT_SHARED if self.batches is None else _OF_NO_BATCH)
        return Value()
