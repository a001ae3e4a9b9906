"""What each JSON Schema keyword becomes in a schema that llguidance can enforce. Called by `json_schema.py`.

The functions take a keyword's value and return what may be written for it; None if it cannot be enforced.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Any, TypeGuard

# They restrict nothing. Keywords that start with "x-" are annotations too.
ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment"),
        *("$defs", "definitions", "title", "description", "default", "example", "examples", "readOnly"),
        *("writeOnly", "deprecated", "contentMediaType", "contentEncoding", "contentSchema"),
        *("discriminator", "externalDocs", "xml", "propertyOrdering"),
    )
)
# Keyword -> values with which it allows everything. llguidance takes none of them otherwise.
HARMLESS: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "contains": (),
    "minContains": (0,),
    "maxContains": (),
    "if": (),
    "then": (True, {}),
    "else": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}, {"type": "string"}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
# Keywords of JSON Schema, of any draft: others are annotations that are not known here.
RESTRICTING = frozenset(
    (
        *HARMLESS,
        *(
            "$ref",
            "enum",
            "allOf",
            "anyOf",
            "oneOf",
            "properties",
            "patternProperties",
            "required",
            "pattern",
        ),
        *("multipleOf", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    )
)
# Read once all others are.
LATER = frozenset(("propertyNames", "unevaluatedProperties", "unevaluatedItems"))
# Keywords without effect unless another one stands beside them.
DEPENDENT: Mapping[str, tuple[str, ...]] = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
APPLICATORS = frozenset(("allOf", "anyOf", "oneOf", "$ref"))
# They apply to the same value, and nothing is read of them.
UNREAD_APPLICATORS = frozenset(
    ("if", "dependentSchemas", "dependencies", "contains", "$dynamicRef", "$recursiveRef", "not")
)
COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
# What llguidance's regular expressions of formats let through: days and seconds that are in no calendar, and
# digits without an end.
_DAY = r"0{0,3}[1-9][0-9]*-(?:02-(?:[01][0-9]|2[0-8])|(?:0[13-9]|1[0-2])-[0-9]{2})"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+-][0-9]{2}:[0-9]{2})"
FORMAT_PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "duration": r"^P(?:T?[0-9]{1,9}[A-Z])+$",
}
TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
# Names of Python's and other languages' types, which tools of many frameworks use.
ALIASES: Mapping[str, str] = {
    "str": "string",
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "dict": "object",
    "none": "null",
    "None": "null",
}
ANY_TYPE = "any"
# llguidance reads bounds as 64-bit integers and floats: the largest float below 2^63.
LARGEST = 9223372036854774784
_MAX_MULTIPLE = 0xFFFFFFFF
# ASCII, as in ECMA-262; \S leaves out all spaces of Unicode, which ECMA-262's does too.
_CLASSES: Mapping[str, str] = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": r"[ \t\n\r\f\v]",
    "S": r"[^\s\x{FEFF}]",
}
_ESCAPED = (
    r"\\[pP]\{\w+(?:=\w+)?\}|\\u\{(?P<code>[0-9a-fA-F]{1,6})\}|\\c(?P<control>[A-Za-z])|\\(?P<escaped>[\s\S])"
)
# What ECMA-262 and Rust's `regex` spell differently, or what the latter cannot match.
_OUTSIDE = re.compile(
    _ESCAPED + r"|(?P<unsupported>\(\?(?:<?[=!]|>|P=|\())|(?P<nothing>\[\])|(?P<all>\[\^\])|(?P<open>\[\^?)"
    r"|(?P<literal>\{(?!\d+(?:,\d*)?\}))|(?P<dot>\.)|[\s\S]"
)
_INSIDE = re.compile(_ESCAPED + r"|(?P<close>\])|(?P<literal>[\[&~]|(?<=-)-)|[\s\S]")
_SPELLED = {"nothing": r"[^\s\S]", "all": r"[\s\S]", "dot": r"[^\n\r\x{2028}\x{2029}]"}


def is_number(value: Any) -> TypeGuard[int | float]:  # Any, here and below: JSON
    return isinstance(value, int | float) and not isinstance(value, bool)


def type_of(value: Any) -> str:
    """Return the JSON type of a value; a float is a "number" even if it is whole."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def fits_type(value: Any, types: Collection[str]) -> bool:
    """Return whether a value is of one of these types. A whole number is an integer and a number."""
    name = type_of(value)
    is_whole = name == "integer" or (name == "number" and value.is_integer())
    return name in types or (name == "integer" and "number" in types) or (is_whole and "integer" in types)


def count(value: Any) -> int | None:
    """Return a count that may be written as a float without a fraction."""
    return int(value) if is_number(value) and value >= 0 and value == value // 1 else None


def is_rounded(value: Any, is_copied: bool = False) -> bool:
    """Return whether a constant holds an integer that llguidance rounds. `is_copied`: Manta writes it."""
    if isinstance(value, list | dict):
        return any(map(is_rounded, value if isinstance(value, list) else value.values()))
    if is_copied or not isinstance(value, int):
        return False
    try:
        return int(float(value)) != value
    except OverflowError:
        return True


def multiple(value: Any) -> int | float | None:
    """Return a `multipleOf` that llguidance can represent: a 32-bit integer and a power of ten."""
    if not is_number(value) or not 0 < value <= _MAX_MULTIPLE:
        return None
    scaled = float(value)
    while scaled % 1:
        scaled *= 10
        if scaled > _MAX_MULTIPLE:
            return None
    return value


def types(value: Any) -> tuple[list[str], bool]:
    """Return the known types of a `type` keyword (none: any), and whether others were there."""
    names = value if isinstance(value, list) else [value]
    known = [ALIASES.get(name, name) for name in names if isinstance(name, str)]
    if ANY_TYPE in known:
        return [], False
    found = [name for name in dict.fromkeys(known) if name in TYPES]
    return found, len(known) < len(names) or any(name not in TYPES for name in known)


def pattern(value: Any) -> str | None:
    """Return a pattern of ECMA-262 in Rust's syntax; None if that cannot be matched, or is no pattern.

    It matches no text that ECMA-262's does not match.
    """
    if not isinstance(value, str):
        return None
    written: list[str] = []
    is_class, at = False, 0
    while at < len(value):
        piece = (_INSIDE if is_class else _OUTSIDE).match(value, at)
        assert piece is not None, "the last alternative matches any character"
        text = _spelled(piece, is_class)
        if text is None:
            return None
        if piece.lastgroup in ("open", "close"):
            is_class = piece.lastgroup == "open"
        written.append(text)
        at = piece.end()
    found = "".join(written)
    return found if _is_well_formed(found) else None


def ascii_classes(regex: str) -> str:
    r"""Return a regular expression of Rust's in which `\d`, `\w` and `\s` are ASCII."""
    return re.sub(r"\\([\s\S])", lambda escape: _CLASSES.get(escape[1], escape[0]), regex)


def _spelled(piece: re.Match[str], is_class: bool) -> str | None:
    match piece.lastgroup:
        case "unsupported":
            return None
        case "code":
            return rf"\x{{{piece['code']}}}"
        case "control":
            return rf"\x{ord(piece['control']) % 32:02x}"
        case "escaped":
            return _escape(piece["escaped"], is_class)
        case "literal":
            return "\\" + piece[0]
        case name:
            return _SPELLED.get(name or "", piece[0])


def _escape(char: str, is_class: bool) -> str | None:
    if char in _CLASSES:
        return _CLASSES[char]
    if char in "tnrvfxupP":
        return "\\" + char
    if is_class:
        return {"b": r"\x08", "0": r"\x00"}.get(char) or (None if char.isalnum() else re.escape(char))
    # Anchors of Python; other letters and digits look around or refer back.
    return {"0": r"\x00", "A": "^", "Z": "$", "z": "$"}.get(char) or (
        None if char.isalnum() else re.escape(char)
    )


def _is_well_formed(regex: str) -> bool:
    """Return whether Python reads it, once what only Rust reads is replaced."""
    readable = re.sub(r"\\[pP]\{[^}]*\}|\\x\{[0-9a-fA-F]+\}", "a", regex).replace("(?<", "(?P<")
    for text in _CLASSES.values():
        readable = readable.replace(text, "0-9")  # Python warns of a class within a class
    try:
        re.compile(readable)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def bounds(schema: Mapping[str, Any]) -> tuple[dict[str, int | float], list[str]]:
    """Return the bounds of numbers that llguidance reads rightly, and the keywords that it cannot enforce."""
    found: dict[str, int | float] = {}
    left_out: list[str] = []
    for name in BOUNDS & schema.keys():
        value, sign = schema[name], 1 if name.endswith("aximum") else -1
        other = "maximum" if sign > 0 else "minimum"
        if value is False and name != other:  # of draft 4
            continue
        if value is True and name != other and is_number(schema.get(other)):
            value = schema[other]
        if not is_number(value) or sign * value <= -LARGEST:
            left_out.append(name)
        elif sign * value > LARGEST:
            found.setdefault(other, sign * LARGEST)
        else:
            found[name] = value
    low, high = (
        next((found[name] for name in names if name in found), None)
        for names in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"))
    )
    if low is not None and high is not None and high - low < 1:
        # llguidance would accept a value that bounds exclude: 0 in 0 < x < 0.5.
        for name in ("exclusiveMinimum", "exclusiveMaximum"):
            if name in found and found[name] == found[name] // 1:
                found.setdefault(name.replace("exclusiveM", "m"), found.pop(name))
                left_out.append(name)
    return found, left_out


def is_harmless(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword that is not enforced restricts nothing."""
    if name not in RESTRICTING:
        return False
    companions = DEPENDENT.get(name, ())
    return (bool(companions) and not any(each in schema for each in companions)) or value in HARMLESS.get(
        name, ()
    )


def may_be(schema: Mapping[str, Any], name: str) -> bool:
    """Return whether a schema's `type` allows a type."""
    found, _ = types(schema["type"]) if "type" in schema else ([], False)
    return not found or name in found


def exclude_each_other(patterns: list[str]) -> bool:
    """Return whether it is plain to see that no name matches two of the patterns: they begin differently."""
    beginnings = [_beginning(each) for each in patterns]
    return all(
        not one.startswith(other) and not other.startswith(one) for one, other in combinations(beginnings, 2)
    )


def _beginning(pattern: str) -> str:
    found = re.match(r"\^([\w-]*)([*?{]?)", pattern)
    if found is None or "|" in pattern:
        return ""
    return found[1][:-1] if found[2] else found[1]


def property_names(names: Any, values: Any) -> dict[str, Any] | None:
    """Return `properties` or `patternProperties` for a `propertyNames`; None if neither says the same."""
    if not isinstance(names, Mapping):
        return None
    said = {name: value for name, value in names.items() if name not in ANNOTATIONS and name != "type"}
    if "type" in names and not may_be(names, "string"):
        return None
    allowed = said.get("enum", [said["const"]] if "const" in said else None)
    if len(said) == 1 and isinstance(allowed, list):
        return {"properties": {name: values for name in allowed if isinstance(name, str)}}
    if said.keys() == {"pattern"} and (found := pattern(said["pattern"])) is not None:
        return {"patternProperties": {found: values}}
    low, high = (count(said.get(name, default)) for name, default in (("minLength", 0), ("maxLength", 4096)))
    if said and said.keys() <= {"minLength", "maxLength"} and low is not None and high is not None:
        return {"patternProperties": {rf"^[\s\S]{{{low},{high if 'maxLength' in said else ''}}}$": values}}
    return None


def uncounted_properties(schema: dict[str, Any], is_merged: bool) -> list[str]:
    """Take minProperties and maxProperties out of a schema where llguidance cannot count; return the names.

    It counts names that are not in `properties`, without seeing that one is repeated, if all that are there
    are required; else it knows only "at most one" and "at least one".
    """
    required = set(schema.get("required", ()))
    optional = schema.get("properties", {}).keys() - required
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    low, high = schema.get("minProperties", 0) - len(required), schema.get("maxProperties")
    left_out: list[str] = []
    if low <= 0:
        schema.pop("minProperties", None)
    elif is_closed and low > len(optional):  # no object has as many names; llguidance allows one without
        del schema["minProperties"]
        left_out.append("minProperties")
        low = 0
    if high is not None and is_closed and len(optional | required) <= high and not is_merged:
        del schema["maxProperties"]
        high = None
    is_counted = not is_merged and (
        not optional or (is_closed and low <= 1 and high in (None, len(required) + 1))
    )
    if is_counted and low > 1:
        left_out.append("minProperties")  # a name may be repeated
    for name in () if is_counted else ("minProperties", "maxProperties"):
        if name in schema:
            del schema[name]
            left_out.append(name)
    return left_out
