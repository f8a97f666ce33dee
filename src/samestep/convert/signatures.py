"""Rules for functions and methods of torch: the kind of their result, by their names and arguments."""

import ast
from typing import Any

from samestep.convert.source import values_given
from samestep.convert.values import (
    BETWEEN,
    NUMBERS,
    PAIRS,
    ROWS,
    TURNED,
    Kind,
    Loop,
    Value,
    Values,
    combined,
    makes_pairs,
    other,
    rows_of,
)

_TABLE = """
mean        mean nanmean average
sum         sum nansum count_nonzero bincount histc
count       nelement numel
field       size num_graphs batch_size loss
fact        dim ndimension get_device is_floating_point hasattr isinstance callable id is_tensor
statistic   max min amax amin std var median mode norm prod argmax argmin any all topk sort kthvalue unique quantile
statistic   cov corrcoef logsumexp std_mean argsort msort nanmedian nanquantile unique_consecutive
along       softmax log_softmax normalize cumsum cumprod cummax cummin logcumsumexp
pair        max min topk sort median kthvalue mode std_mean
number      item detach cpu cuda float double long int half to type numpy tolist clone data squeeze unsqueeze view
number      reshape contiguous requires_grad_ scale backward tensor as_tensor stack
between     cdist pdist randperm
paired      linear inner outer tensordot
moved       flip roll
second      norm quantile nanquantile roll
compared    eq ne lt le gt ge equal logical_and logical_or cosine_similarity
places      nonzero argwhere flatnonzero
numbered    arange linspace eye tril_indices triu_indices randperm
loss        cross_entropy binary_cross_entropy binary_cross_entropy_with_logits kl_div
weighted    crossentropy crossentropyloss nllloss
made        ones zeros full rand randn empty randint normal uniform random
spread      expand repeat repeat_interleave new_zeros new_ones new_empty new_full
model       to cuda cpu train eval apply float double half requires_grad_
kept        iter list tuple reversed islice tqdm trange float int abs cycle partial next
list        append extend add update insert scale items values keys get pop setdefault copy
bar         set_postfix set_postfix_str set_description
looked      gather index_select take take_along_dim log_prob cdf
of_spread   sample rsample log_prob cdf entropy kl_divergence
piece       split chunk unbind
stacked     array asarray stack tensor as_tensor
joined      cat concat concatenate vstack row_stack
"""
_MIXES = ", which belongs into the collate_fn where it mixes inputs, as mixup does"
_OPERATORS = {"mul": ast.Mult(), "div": ast.Div(), "add": ast.Add(), "sub": ast.Sub()}
_OPERATORS |= dict.fromkeys(("mm", "matmul"), ast.MatMult())
NAMED: dict[str, set[str]] = {}
for _kind, *_names in map(str.split, _TABLE.strip().splitlines()):
    NAMED.setdefault(_kind, set()).update(_names)
IN_MODEL = "this is in a model; write samestep.gather(...) of rows, samestep.mean(...) of a mean, here"
DIVIDES = (
    "is divided by the weights, or the number of targets not ignored, of a share; in an evaluation take "
    'reduction="sum", and samestep.sum(total) / samestep.sum(count) after the loop'
)
STACKS = "stacks batches, of which processes have unlike parts; join them by concatenate or cat"
CHOSEN = "is reduced over dimensions that are chosen while the script runs; write them as constants"
DIMENSIONS = ("dim", "dims", "axis")
_OVER_SAMPLES = "is {} over the samples of a share"
_IN_ORDER = {"sort", "argsort", "msort"}
_FLAT = ("reshape", "view", "flatten", "ravel")
MIXED = "mixes the rows of tensors that were joined"
NUMBERED = "numbers the samples of a share"
_CHOSEN = "is a mean over chosen samples of a share"


def is_loss(name: str) -> bool:
    """Whether this name of torch.nn or torch.nn.functional is a loss."""
    return name in NAMED["loss"] or name.endswith(("_loss", "Loss"))


def makes_rows(name: str) -> bool:
    """Whether this function, or a type as FloatTensor, makes a tensor whose first dimension is its first argument."""
    return name in NAMED["made"] or name.endswith("Tensor")


def given_to_loss(node: ast.Call, at: int, name: str) -> dict[str, Any]:
    """The arguments of a loss that say how it is reduced; `at` is the position of class weights."""
    given = {keyword.arg or "": getattr(keyword.value, "value", keyword.value) for keyword in node.keywords}
    is_weighted = name.lower().replace("_", "") in NAMED["weighted"]
    if is_weighted and len(node.args) > at:
        given = {"weight": node.args[at], **given}
    divides = is_weighted and (given.get("weight") or given.get("ignore_index") is not None)
    return {**given, "divides": divides}


def of_loss(given: dict[str, Any], values: Values, batch: Loop | None) -> Value:
    """The value of a loss of torch; `given` has constant arguments as values, others as ast nodes."""
    kinds = {value.kind for value in values if value.is_shared}
    reduction = given.get("reduction", "sum" if given.get("size_average") is False else "mean")
    if not kinds:
        return Value()
    if not kinds <= {*ROWS, Kind.ROW}:
        return other("is computed from values of this rank's share", *values)
    if isinstance(reduction, ast.AST):
        return Value(Kind.OTHER, "has a reduction that is chosen while the script runs")
    if reduction == "none" or given.get("reduce") is False:
        return Value(Kind.SOME if Kind.SOME in kinds else Kind.ROWS)
    if reduction == "sum":
        return Value(Kind.PART, batch)
    if given["divides"]:
        return Value(Kind.OTHER, DIVIDES)
    return Value(Kind.OTHER, _CHOSEN) if Kind.SOME in kinds else Value(Kind.MEAN, batch)


def dims_of(name: str, args: list[ast.expr]) -> list[ast.expr]:
    """The arguments for dimensions, among the arguments after the tensor."""
    if name == "flip" and len(args) > 1:
        return [ast.Tuple(args)]
    is_second = name in NAMED["second"]  # after the order of a norm, the quantile, or the shift
    return args[1:] if is_second or name in ("split", "chunk") else args


def over_rows(dims: list[ast.expr], in_forward: int) -> bool:
    """Whether a reduction is over the samples: it names no dimension, or the first."""
    if not (dimension := dims[:1]):
        return True
    parts = dimension[0].elts if isinstance(dimension[0], ast.Tuple | ast.List) else dimension
    are_first = (isinstance(part, ast.Constant) and part.value in (0, None) for part in parts)
    return not in_forward and any(are_first)


def reduced(name: str, value: Value, is_over_rows: bool, has_dim: bool, batch: Loop | None) -> Value:
    if value.kind in NUMBERS:
        is_number = name in NAMED["mean"] | NAMED["sum"]
        return value if is_number else Value(Kind.OTHER, f"is {name} of a value of a share")
    if value.kind not in ROWS:
        return value
    if value.kind in TURNED and has_dim:
        return Value(Kind.ROWS) if is_over_rows else Value(Kind.OTHER, BETWEEN)
    if not is_over_rows:
        return Value(Kind.BATCH if name in NAMED["pair"] else value.kind)
    if name in NAMED["sum"]:
        return Value(Kind.PART, batch)
    if name not in NAMED["mean"]:
        return Value(Kind.OTHER, _OVER_SAMPLES.format(name))
    return Value(Kind.OTHER, _CHOSEN) if value.kind == Kind.SOME else Value(Kind.MEAN, batch)


def of_tensors(name: str, values: Values, is_over_rows: bool, batch: Loop | None, in_forward: int) -> Value:
    """The value of a method (its object is first) or function: rows give rows, unless it combines samples."""
    base, shared = values[0], [value for value in values if value.is_shared]
    if not shared or base.kind == Kind.OTHER:
        return other(base.of, base) if shared else Value()
    if name in NAMED["mean"] | NAMED["sum"] | NAMED["statistic"]:
        if name in ("max", "min") and values[1:2] and values[1].is_shared:
            return Value(Kind.ROWS)
        is_over_rows |= name == "topk" and len(shared) > 1  # so many of the samples
        return reduced(name, base, is_over_rows, len(values) > 1, batch)
    if name in NAMED["along"] and is_over_rows and len(values) > 1:
        return Value(Kind.OTHER, _OVER_SAMPLES.format(name))
    if name in NAMED["piece"] and base.kind in ROWS:
        is_part = is_over_rows and base.kind != Kind.VIEWS
        return Value(Kind.OTHER, "is a part of a share") if is_part else Value(Kind.BATCH)
    if is_over_rows and name in NAMED["joined"] | {"stack"}:
        return _joined(name, base, in_forward)
    is_between = name in NAMED["between"] or (name in NAMED["moved"] and is_over_rows)
    is_between |= name in NAMED["compared"] and makes_pairs({value.kind for value in values})
    is_between |= name in NAMED["paired"] and len(shared) > 1
    if is_between and not in_forward:
        mixes = _MIXES * (name in NAMED["moved"] | {"randperm"})
        return Value(Kind.OTHER, f"{BETWEEN} ({name}{mixes}); see docs/losses.md")
    is_plain = base.kind in NUMBERS or not TURNED.isdisjoint(value.kind for value in values)
    if name.rstrip("_") in _OPERATORS and is_plain and len(values) == 2:
        return combined(_OPERATORS[name.rstrip("_")], base, values[1], batch)
    if base.kind in TURNED and name in ("t", "squeeze", *_FLAT):
        return turned(base, is_flat=name in _FLAT)
    is_turned = name == "t" or (name == "unsqueeze" and is_over_rows and base.kind == Kind.ROWS)
    return turned(base) if is_turned and base.kind in ROWS else _by_rows(name, shared, in_forward)


def keeps_rows(reason: object) -> bool:
    """Whether a value with this reason may have an element for each sample, as a softmax over them."""
    if not isinstance(reason, str):
        return False
    return reason.startswith(BETWEEN) or reason in [
        _OVER_SAMPLES.format(name) for name in NAMED["along"] | _IN_ORDER
    ]


def turns(name: str, dims: list[str]) -> bool:
    """Whether this brings the samples from the first dimension to the second, as `transpose(0, 1)`."""
    is_swapped = name in ("transpose", "swapaxes", "swapdims") and sorted(dims) == ["0", "1"]
    is_row = name in ("view", "reshape") and dims == ["1", "-1"]
    return is_swapped or is_row or (name == "permute" and dims[1:2] == ["0"])


def turned(rows: Value, is_flat: bool = False) -> Value:
    """Rows with the samples in the second dimension, or back in the first, or there one after another."""
    if is_flat:
        return Value(Kind.OTHER, MIXED) if rows.of == MIXED else Value(Kind.VIEWS)
    if rows.kind in TURNED:
        return Value(Kind.VIEWS if rows.of == MIXED else Kind.ROWS)
    return Value(Kind.COLUMNS, MIXED if rows.kind == Kind.VIEWS else None)


def of_einsum(equation: str, values: Values, batch: Loop | None) -> Value:
    terms, _, result = equation.replace(" ", "").partition("->")
    opened = [part for value in values for part in value.opened]
    rows = [term[:1] for term, value in zip(terms.split(","), opened, strict=False) if value.kind in ROWS]
    if len({*rows}) > 1:
        return Value(Kind.OTHER, PAIRS)
    return Value(Kind.ROWS) if rows[:1] == [*result[:1]] else Value(Kind.PART, batch)


def counted(rows: Value, batch: Loop | None) -> Value:
    """The number of samples, or of their elements, in these rows."""
    return Value(Kind.PART if rows.kind == Kind.SOME else Kind.COUNT, batch)


def _joined(name: str, tensors: Value, in_forward: int) -> Value:
    """The value of `cat`, or of `stack` with a new dimension before the samples'."""
    kinds = [part.kind for part in tensors.opened]
    if name == "stack" and {*kinds} <= {Kind.ROWS, Kind.BATCH}:
        return Value(Kind.STACKED)
    if name == "stack":
        return _by_rows(name, [tensors], in_forward)
    is_mixed = Kind.ALIKE in kinds and not in_forward
    if is_mixed and {*kinds} & ROWS:
        return Value(Kind.OTHER, "joins samples of a share with what all processes have")
    each = tensors.of.get(None) if tensors.kind == "list" else None
    # a list that is not of a pass's batches has the same samples several times
    is_again = each is not None and each.kind == Kind.ROWS and not isinstance(each.of, Loop)
    are_views = is_again or kinds.count(Kind.ROWS) > 1
    return Value(Kind.VIEWS) if are_views else _by_rows(name, [tensors], in_forward)


def _by_rows(name: str, shared: Values, in_forward: int) -> Value:
    opened = [part for value in shared for part in value.opened]
    kinds = {part.kind for part in opened} - {Kind.ALIKE}
    if name in NAMED["numbered"] and kinds <= {Kind.COUNT, Kind.PART} and not in_forward:
        return Value(Kind.OTHER, NUMBERED)
    if kinds <= {Kind.ROW}:
        return Value(Kind.ROW)
    if kinds <= NUMBERS and name in NAMED["number"] and len(opened) == 1:
        return opened[0]
    is_data = name.endswith("Tensor") and shared[0].kind == "list" and None not in shared[0].of
    is_number = kinds <= {Kind.COUNT, Kind.PER} and (is_data or not makes_rows(name))
    if kinds <= {*ROWS, Kind.ROW, Kind.COUNT, Kind.PER} and not (is_number and not in_forward):
        return rows_of(kinds)
    return other(f"is {name} of values of this process's share", *opened)


def averages(name: str) -> bool:
    """Whether a class is of averaged models, by its name: AveragedModel, ModelEmaV2, EMA."""
    return any(word in name.lower() for word in ("ema", "average"))


def places_found(name: str, node: ast.Call) -> Value | None:
    """The places of some samples in the share, by `nonzero`; with one condition, `where` gives them in a tuple."""
    if name not in NAMED["places"] and (name != "where" or len(values_given(node)) > 1):
        return None
    is_tuple = name == "where" or any(option.arg == "as_tuple" for option in node.keywords)
    return Value("list", {0: Value(Kind.SOME, NUMBERED)}) if is_tuple else Value(Kind.SOME, NUMBERED)
