"""One-line changes to Python source that ought to make a test fail.

Syntax trees say where; the text between two columns of one line is replaced. Left out is what changes no number:
messages, annotations, docstrings, ``__repr__``, assertions, ``raise`` and the conditions in front of it, decorators,
defaults of configuration fields (the generated documentation pins them), tuning of kernels.
"""

import ast
import re
from typing import NamedTuple


class Mutant(NamedTuple):
    """One change, and the lines whose execution shows that a test can see it."""

    path: str
    line: int
    what: str
    before: str
    after: str
    lines: tuple[int, int]
    """First and last line of the statement; of the function, class or file that it configures if it runs on import."""
    on_import: bool

    @property
    def key(self):
        """Identity of the mutant, which does not change when lines move."""
        return self.path, self.before.strip(), self.after.strip()

    def apply(self, text):
        """The file with this change; None if that is no Python."""
        lines = text.split("\n")
        lines[self.line - 1] = self.after
        try:
            compile("\n".join(lines), self.path, "exec", dont_inherit=True)
        except SyntaxError:
            return None
        return "\n".join(lines)


COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: (r"is\b", "is not"), ast.IsNot: (r"is\s+not\b", "is"), ast.In: (r"in\b", "not in"),
    ast.NotIn: (r"not\s+in\b", "in"),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"), ast.BitXor: ("^", "|"),
}  # fmt: skip
SWAPPED = {
    "tp": "cp", "cp": "tp", "dp": "tp", "pp": "dp", "dp_cp": "dp", "tp_cp": "cp", "tp_pp": "tp",
    "dp_cp_shard": "dp_cp", "dp_cp_replica": "dp_cp", "pp_up": "pp_down", "pp_down": "pp_up", "cp_a2a": "cp_p2p",
    "cp_p2p": "cp_a2a", "rank": "size", "is_first": "is_last", "is_last": "is_first", "pre_process": "post_process",
    "post_process": "pre_process", "min": "max", "max": "min", "any": "all", "all": "any", "sum": "mean", "mean": "sum",
    "SUM": "MAX", "MAX": "SUM", "AVG": "SUM", "zeros": "ones", "zeros_like": "ones_like", "ones": "zeros", "cos": "sin",
    "sin": "cos", "sqrt": "square", "rsqrt": "sqrt", "floor": "ceil", "ceil": "floor", "softmax": "log_softmax",
    "copy_": "add_", "add_": "sub_", "mul_": "div_", "div_": "mul_", "add": "sub", "mul": "div", "maximum": "minimum",
    "hidden_dropout": "attention_dropout", "attention_dropout": "hidden_dropout", "row": "column", "column": "row",
    "triu": "tril", "tril": "triu", "exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg", "forward": "backward",
    "num_query_groups": "num_attention_heads", "hidden_size": "ffn_hidden_size", "eval": "train", "start": "stop",
}  # fmt: skip
"""Names, of attributes and functions, that are easily taken for one another."""
WRAPPERS = {"sum", "mean", "transpose", "flip", "exp", "sqrt", "rsqrt", "abs", "clamp", "neg", "log", "square", "float",
            "double", "t", "roll", "clone", "permute", "clamp_", "reciprocal"}  # fmt: skip
NOT_DROPPED = {"len", "range", "int", "isinstance", "issubclass", "str", "list", "tuple", "dict", "set", "frozenset",
               "sorted", "enumerate", "zip", "getattr", "setattr", "hasattr", "super", "type", "iter", "next", "repr",
               "cast", "id", "hash", "open", "map", "filter", "bytes", "partial", "empty", "append", "contiguous",
               "extend", "empty_like", "field", "replace", "print"}  # fmt: skip
SILENT = {"logger", "logging", "warnings", "notice", "warn", "warn_once", "notice_once", "cast", "TypeVar", "print",
          "Problem"}  # fmt: skip
UNSEEN_KEYWORDS = {"timeout", "maxsize", "stacklevel", "name", "num_warps", "num_stages", "non_blocking", "async_op",
                   "help", "memory_format", "device", "pin_memory", "repr", "kw_only", "strict", "exist_ok", "parents",
                   "doc", "daemon", "encoding"}  # fmt: skip
UNSEEN_FUNCTIONS = {"__repr__", "__str__", "extra_repr", "__format__"}


def mutants_of(path, text):
    """Every mutant of a file, by line."""
    return sorted(set(_Finder(path, text).run()))


class _Finder:
    def __init__(self, path, text):
        self.path, self.text = path, text
        self.lines = text.encode().split(b"\n")
        self.found = []

    def run(self):
        tree = ast.parse(self.text)
        for statement in tree.body:
            self._statement(statement, (1, len(self.lines)))
        return self.found

    # -- selected nodes -------------------------------------------------------------------------------------------

    def _statement(self, node, outside):
        """``outside``: lines of the class or file that this statement configures on import; None inside functions."""
        if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name not in UNSEEN_FUNCTIONS:
                self.span, self.on_import = (node.body[0].lineno, node.end_lineno), True
                for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                    self._expression(default)
                self._body(node.body, None)
            return
        if isinstance(node, ast.ClassDef):
            if any(_last_name(base).endswith(("Error", "Exception")) for base in node.bases):
                return  # its words
            self._body(node.body, (node.lineno, node.end_lineno))
            return
        if isinstance(node, ast.AnnAssign) and outside or isinstance(node, ast.Expr) and _is_text(node.value):
            return
        if isinstance(node, ast.Assign) and outside and isinstance(node.value, ast.Subscript):
            return  # a name for a type
        if isinstance(node, ast.If) and (_only_refuses(node) or ast.unparse(node.test) == "TYPE_CHECKING"):
            return self._body(node.orelse, outside)
        bodies = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        bodies += [item.body for item in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]]
        parts = [item for item in ast.iter_child_nodes(node) if isinstance(item, ast.expr | ast.withitem)]
        if isinstance(node, ast.AnnAssign):
            parts.remove(node.annotation)
        ends = [part.end_lineno for part in parts if isinstance(part, ast.expr)]
        self.span, self.on_import = outside or (node.lineno, max(ends, default=node.lineno)), outside is not None
        if not _is_silent(node):
            self._change_statement(node)
            for part in parts:
                self._expression(part)
        for body in bodies:
            self._body(body, outside)

    def _body(self, statements, outside):
        for statement in statements:
            self._statement(statement, outside)

    def _expression(self, node):
        if isinstance(node, ast.JoinedStr) or isinstance(node, ast.Call) and _is_silent(node):
            return
        if isinstance(node, ast.keyword) and node.arg in UNSEEN_KEYWORDS:
            return
        if isinstance(node, ast.Call) and _last_name(node.func) in ("isinstance", "issubclass"):
            return
        change = getattr(self, f"_change_{type(node).__name__.lower()}", None)
        if change is not None:
            change(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr | ast.keyword | ast.comprehension | ast.withitem | ast.slice):
                self._expression(child)

    # -- their changes --------------------------------------------------------------------------------------------

    def _change_statement(self, node):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) or isinstance(node, ast.AugAssign):
            self._put(node, "pass", "dropped statement")
        if isinstance(node, ast.AugAssign):
            self._swap_operator(node.target, node.value, type(node.op), ARITHMETIC, suffix="=")
        if isinstance(node, ast.If):
            self._negate(node.test)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.BinOp):
            if isinstance(node.value.op, ast.Mult | ast.Div | ast.MatMult):
                self._put(node.value, self._inner(node.value.left), "dropped scaling")
            if isinstance(node.value.op, ast.Add | ast.Sub):
                self._put(node.value, self._inner(node.value.left), "dropped term")

    def _change_compare(self, node):
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            self._swap_operator(left, right, type(op), COMPARISONS)

    def _change_binop(self, node):
        if isinstance(node.op, ast.BitOr) and (_is_none(node.right) or isinstance(node.left, ast.Subscript)):
            return  # a type
        if not _is_text(node.left):
            self._swap_operator(node.left, node.right, type(node.op), ARITHMETIC)

    def _change_boolop(self, node):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:]):
            self._between(left, right, rf"\b{old}\b", new, "and/or")

    def _change_unaryop(self, node):
        if isinstance(node.op, ast.Not):
            self._put(node, self._inner(node.operand), "negated condition")
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self._put(node, self._inner(node.operand), "dropped sign")

    def _change_ifexp(self, node):
        self._negate(node.test)

    def _change_comprehension(self, node):
        for test in node.ifs:
            self._negate(test)

    def _change_constant(self, node):
        value = node.value
        if isinstance(value, bool):
            self._put(node, str(not value), "constant")
        elif isinstance(value, int):
            for other in {value + 1, max(value - 1, 0)} - {value}:
                self._put(node, str(other), "constant")
        elif isinstance(value, float):
            self._put(node, repr(2 * value if value not in (0.0, 1.0) else value + 0.5), "constant")

    def _change_name(self, node):
        if node.id in SWAPPED and isinstance(node.ctx, ast.Load):
            self._put(node, SWAPPED[node.id], "swapped name")

    def _change_attribute(self, node):
        if node.attr in SWAPPED and isinstance(node.ctx, ast.Load):
            end = node.end_col_offset
            self._replace(node.end_lineno, end - len(node.attr.encode()), end, SWAPPED[node.attr], "swapped name")

    def _change_call(self, node):
        name = _last_name(node.func)
        if name == "range":
            for argument, change in zip(node.args, ("+ 1", "- 1") if len(node.args) > 1 else ("- 1",)):
                self._put(argument, f"({self._segment(argument)}) {change}", "off by one")
        elif isinstance(node.func, ast.Attribute) and name in WRAPPERS:
            self._put(node, self._segment(node.func.value), "dropped call")
        elif name.islower() and name not in NOT_DROPPED and node.args and _is_plain(node.args[0]):
            self._put(node, self._segment(node.args[0]), "dropped call")
        for first, second in zip(node.args, node.args[1:]):
            if name.islower() and first.lineno == second.end_lineno and _is_plain(first) and _is_plain(second):
                swapped = f"{self._segment(second)}, {self._segment(first)}"
                self._replace(first.lineno, first.col_offset, second.end_col_offset, swapped, "swapped arguments")
        arguments = [*node.args, *node.keywords]
        for left, right in zip(arguments, arguments[1:]):
            ignorable = isinstance(right, ast.keyword) and right.arg and right.arg not in UNSEEN_KEYWORDS
            if ignorable and left.end_lineno == right.end_lineno:
                self._replace(right.end_lineno, left.end_col_offset, right.end_col_offset, "", "ignored argument")

    def _change_subscript(self, node):
        if isinstance(node.slice, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            self._put(node.slice, "0", "wrong index")

    def _change_slice(self, node):
        for bound, change in ((node.lower, "+ 1"), (node.upper, "- 1")):
            if bound is not None:
                self._put(bound, f"({self._segment(bound)}) {change}", "off by one")
                self._put(bound, "", "dropped bound")

    # -- text -----------------------------------------------------------------------------------------------------

    def _negate(self, test):
        if not isinstance(test, ast.UnaryOp):  # its own change
            self._put(test, f"not ({self._segment(test)})", "negated condition")

    def _swap_operator(self, left, right, op, table, suffix=""):
        if op in table:
            old, new = table[op]
            old = old if old[0].isalpha() else re.escape(old + suffix)
            self._between(left, right, old, new + suffix, "operator")

    def _between(self, left, right, pattern, new, what):
        if left.end_lineno == right.lineno:
            start, end = left.end_col_offset, right.col_offset
            between = self.lines[right.lineno - 1][start:end].decode()
            self._replace(right.lineno, start, end, re.sub(pattern, new, between, count=1), what)

    def _segment(self, node):
        if node.lineno != node.end_lineno:
            return "\n"  # fits no line
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()

    def _inner(self, node):
        """A part of an expression that takes the place of the whole."""
        plain = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript)
        return self._segment(node) if plain else f"({self._segment(node)})"

    def _put(self, node, new, what):
        if node.lineno == node.end_lineno:
            self._replace(node.lineno, node.col_offset, node.end_col_offset, new, what)

    def _replace(self, line, start, end, new, what):
        before = self.lines[line - 1]
        after = before[:start] + new.encode() + before[end:]
        if after == before or "\n" in new:
            return
        self.found.append(Mutant(self.path, line, what, before.decode(), after.decode(), self.span, self.on_import))


def _is_text(node):
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_none(node):
    return isinstance(node, ast.Constant) and node.value is None


def _last_name(node):
    return getattr(node, "attr", None) or getattr(node, "id", "")


def _is_silent(node):
    """A call that only speaks."""
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return False
    owner = getattr(call.func, "value", None)
    return _last_name(call.func) in SILENT or (owner is not None and _last_name(owner) in SILENT)


def _only_refuses(node):
    return all(isinstance(item, ast.Raise) or _is_silent(item) for item in node.body)


def _is_plain(node):
    return isinstance(node, ast.Name | ast.Attribute)
