"""YAML as people read it: no key twice, no number in another base than it looks."""

from __future__ import annotations

import re
from typing import Any

from sparkdl.errors import SetupError

try:
    import yaml  # type: ignore[import-untyped]
except ImportError as error:
    raise SetupError(
        'jobs need PyYAML: pip install "sparkdl-torch[jobs]" in the driver\'s Python'
    ) from error

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)


class YamlError(ValueError):
    """What is wrong with a text, and in which line; no value is quoted."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's, without dates, and with the numbers of YAML 1.2: ``1e-3``, not ``010``."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [each for each in known if not each[0].endswith((":int", ":float", ":timestamp"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in keys:
                raise YamlError(f"has a duplicate key '{key.value}'{_where(key.start_mark)}")
            keys.add(name)
        return node


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse(text: str) -> Any:
    """What a text holds.

    Raises:
        YamlError: it is not what a person would take it for.
    """
    try:
        return yaml.load(text, _Loader)
    except YamlError:
        raise
    except yaml.MarkedYAMLError as error:
        # Not what it found there: that may be a password, taken for an alias or a tag.
        problem = re.sub(r"\b(alias|anchor|handle|tag) '.*'", r"\1", str(error.problem))
        raise YamlError(f"is not valid YAML: {problem}{_where(error.problem_mark)}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
        raise YamlError(
            "is not valid YAML: a value has no meaning, or is nested too deeply"
        ) from None


def _where(mark: Any) -> str:
    return "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
