"""Command-line options made from a spec's fields, so that no field is listed twice."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
import yaml

from bigunet.errors import SpecError, fail
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["load_yaml", "with_spec"]

_HELP = {
    "levels": "Resolutions, joined by levels - 1 poolings.",
    "convs": "Convolutions in each block.",
    "channels": "Width of the first level.",
    "kernel": "Side of the square kernel, odd.",
    "in_channels": "Bands of the image.",
    "classes": "Channels of the output.",
    "growth": "Factor of the width from a level to the next one down.",
    "max_channels": "Upper bound of the width.",
    "norm": "Normalisation after each convolution.",
    "up": "Up-sampling by 2.",
    "padding_mode": "How convolutions continue the image at its border.",
    "steps": "Optimiser steps.",
    "tile": "Side of the tiles that are trained on, in pixels.",
    "batch": "Tiles in a step.",
    "learning_rate": "Peak learning rate.",
    "precision": "Arithmetic of the network.",
    "seed": "Seed of everything random.",
}


def load_yaml(path: Path) -> dict[str, Any]:
    """A mapping read by YAML's safe loader.

    Raises
    ------
    SpecError : for a file that is missing, no YAML or no mapping.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(SpecError, rule=f"{path} is a readable YAML file", got=error, remedy="Mend the file.")
    if not isinstance(values, dict):
        fail(
            SpecError,
            rule=f"{path} holds a mapping of fields to values",
            got=type(values).__name__,
            remedy="Write lines such as `levels: 5`.",
        )
    return values


def _option(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    """The option of one field: None stands for 'not given'."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(a for a in get_args(hint) if a is not type(None))
    elif get_origin(hint) is Literal:
        hint = Literal[get_args(hint)]
    text = _HELP.get(field.name, "").strip()
    shown = f"{text} [default: {field.default}]".strip()
    name = "--" + field.name.replace("_", "-")
    option: Any
    if get_origin(hint) is tuple:
        option = Annotated[str | None, typer.Option(name, help=f"{shown} Comma-separated.")]
    elif hint is bool:
        option = Annotated[bool | None, typer.Option(f"{name}/--no-{name[2:]}", help=shown)]
    else:
        option = Annotated[hint | None, typer.Option(name, help=shown)]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option
    )


def _numbers(text: str, name: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        fail(SpecError, rule=f"{name} is numbers with commas between", got=text, remedy="1,2.5,1")


def _gather(kind: type[Any], key: str, values: dict[str, Any]) -> tuple[Any, frozenset[str]]:
    """The spec from a YAML file (its section `key`, where it has one) and the options given.

    Also the names of the fields that either of them set.
    """
    path: Path | None = values.pop(f"{key}_file")
    given: dict[str, Any] = {}
    if path is not None:
        loaded = load_yaml(path)
        given = dict(loaded.get(key, loaded))
    for field in dataclasses.fields(kind):
        value = values.pop(field.name)
        if value is not None:
            is_tuple = isinstance(value, str) and field.name == "class_weights"
            given[field.name] = _numbers(value, field.name) if is_tuple else value
    return kind.from_dict(given), frozenset(given)


def with_spec(*kinds: type[UNetSpec] | type[TrainSpec]) -> Callable[..., Callable[..., None]]:
    """Give a command the options of these specs; it is called with `spec=` and `train=`.

    A command with a parameter `given` gets the names of the fields that the user set.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        keys = {UNetSpec: "spec", TrainSpec: "train"}
        names = {keys[kind] for kind in kinds} | {"given"}
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [p for name, p in own.items() if name not in names]
        for kind in kinds:
            key = keys[kind]
            option = Annotated[
                Path | None,
                typer.Option(f"--{key}", help="YAML file with these fields; options override it."),
            ]
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(
                inspect.Parameter(f"{key}_file", keyword, default=None, annotation=option)
            )
            hints = typing.get_type_hints(kind)
            parameters += [_option(f, hints[f.name]) for f in dataclasses.fields(kind)]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given: frozenset[str] = frozenset()
            for kind in kinds:
                values[keys[kind]], fields = _gather(kind, keys[kind], values)
                given |= fields
            if "given" in own:
                values["given"] = given
            command(**values)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
