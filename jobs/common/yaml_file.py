"""Reads YAML files of settings and rejects base-60 numbers. `config_loading.py` and `render/` interpret
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ...cluster.errors import ConfigError

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _SixtiesError(yaml.YAMLError):
    """A value that YAML 1.1 reads as a base-60 number, which is never intended (`replicas: 1:4` is 64)."""

    def __init__(self, node: yaml.Node) -> None:
        self.line: int = node.start_mark.line + 1
        written = node.value
        super().__init__(f'{written} without quotes is a base-60 number in YAML. Write "{written}".')


class _Loader(yaml.SafeLoader):
    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:  # Any: yaml's own
        if node.tag in _NUMBERS and ":" in node.value:
            raise _SixtiesError(node)
        return super().construct_scalar(node)


def read_yaml(file: Path) -> Any:  # Any: YAML
    """Read a YAML file; ConfigError if that fails or a number is base-60."""
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"config: {file} cannot be read: {error.strerror}.", param="config") from None
    except _SixtiesError as error:
        raise ConfigError(f"config: {file}, line {error.line}: {error}", param="config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"config: {file} is not valid YAML: {where}", param="config") from None


def check_new_file(file: Path, *, force: bool) -> None:
    """Raise ConfigError if a file that may have been edited by hand would be replaced."""
    if file.exists() and not force:
        raise ConfigError(
            f"output: {file} exists already. Give another name, or --force to replace it.", param="output"
        )
