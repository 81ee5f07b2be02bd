"""YAML as people read it: no key twice, no number in another base than it looks."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import set_loader

MODE = "plain-yaml"
"""The name under which jsonargparse's parsers find ``parse``."""

_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_OTHER_BASE = re.compile(r"[-+]?(?:0[0-9_]+|0o[0-7_]+|[0-9][0-9_]*(?::[0-9]+)+(?:\.[0-9_]*)?)")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's, without dates, and with the floats of YAML 1.2 (``1e-3``)."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, found) for tag, found in known if not tag.endswith((":float", ":timestamp"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


class YamlError(yaml.YAMLError):  # type: ignore[misc]
    """What is wrong with a text, and in which line; no value is quoted."""


def read(path: str) -> Any:
    """What a file holds.

    Raises:
        YamlError: it is not what a person would take it for.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    return parse(Path(path).read_text(encoding="utf-8"))


def parse(text: str) -> Any:
    """What a text holds.

    Raises:
        YamlError: it is not what a person would take it for.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _check(node)
        found = None if node is None else loader.construct_document(node)
    except YamlError:
        raise
    except yaml.MarkedYAMLError as error:
        # Not what it found there: that may be a password, taken for an alias or a tag.
        problem = re.sub(r"\b(alias|anchor|handle|tag) '.*'", r"\1", str(error.problem))
        raise YamlError(f"is not valid YAML: {problem}{_where(error.problem_mark)}") from None
    except (yaml.YAMLError, ValueError) as error:
        what = "a character that YAML does not allow" if isinstance(error, yaml.YAMLError) else ""
        raise YamlError(f"is not valid YAML: {what or 'a value that has no meaning'}") from None
    except RecursionError:
        raise YamlError("is nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()
    if (
        isinstance(found, dict)
        and found
        and all(v is None for v in found.values())
        and "\n" not in text
    ):
        said = text.strip(" {}").replace(" ", "")  # an option's value such as `host:` or `{a,b}`
        if said in (f"{key}:" for key in found) or {*said.split(",")} == {*found}:
            return text
    return found


def is_decimal(text: str) -> bool:
    """Whether a text cannot be a number in another base."""
    return _OTHER_BASE.fullmatch(text) is None


def _check(root: Any) -> None:
    left, seen = [root], set()
    while left:
        node = left.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            times = Counter((key.tag, str(key.value)) for key, _ in node.value)
            for key, value in node.value:
                if times[key.tag, str(key.value)] > 1:
                    again = [one for one, _ in node.value if one.value == key.value][1]
                    raise YamlError(f"has a duplicate key '{key.value}'{_where(again.start_mark)}")
                left += [key, value]
        elif isinstance(node, yaml.SequenceNode):
            left += node.value
        elif not node.style and not is_decimal(node.value):
            raise YamlError(
                "has a number that begins with 0 or has a colon, which would be read in base 8 or "
                f"60{_where(node.start_mark)}. Write it as a decimal number, or in quotes"
            )


def _where(mark: Any) -> str:
    return "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"


set_loader(MODE, parse, (yaml.YAMLError,))
