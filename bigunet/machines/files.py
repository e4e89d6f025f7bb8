"""Machines in YAML files: one's own cluster beside those that are known by name.

A file holds the fields of `Machine`, its parts as sections of theirs, and `machine_file: 1`. Only
what has no default must be there; `across` is `inside` where it is left out, and `processor` may
be the name of a known one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from bigunet.errors import PlanError, fail
from bigunet.machines.known import MACHINES, PROCESSORS
from bigunet.machines.parts import FileSystem, Link, Machine, Processor, faults_of

_T = TypeVar("_T")

__all__ = [
    "MACHINE_FILE_VERSION",
    "load_machine",
    "machine",
    "machine_yaml",
    "pick",
    "save_machine",
]

MACHINE_FILE_VERSION = 1
_VERSION = "machine_file"
_SECTIONS: Mapping[str, type[Any]] = {
    "processor": Processor,
    "inside": Link,
    "across": Link,
    "network": Link,
    "file_system": FileSystem,
    "all_reduce": Link,
}
_TEXTS = {"name", "text", "scheduler"}


def machine(name: str | Path) -> Machine:
    """A machine by its name, upper or lower case, or from a YAML file by its path.

    Raises
    ------
    PlanError : for an unknown name or a malformed file.
    """
    text = str(name)
    if text.endswith((".yaml", ".yml")):
        return load_machine(Path(name))
    if text.lower() not in MACHINES:
        fail(
            PlanError,
            rule=f"a machine is one of {', '.join(MACHINES)}, or a YAML file",
            got=text,
            remedy="Choose one; write a file; or calibrate this machine with `bigunet.here.here`.",
        )
    return MACHINES[text.lower()]


def pick(machines: Mapping[str, _T], name: str) -> _T:
    """The entry of that name.

    Raises
    ------
    PlanError : for an unknown name.
    """
    if name not in machines:
        fail(
            PlanError,
            rule=f"a machine is one of {', '.join(machines)}",
            got=name,
            remedy="Choose one.",
        )
    return machines[name]


def machine_yaml(value: Machine) -> str:
    """The machine as the text of a file that `load_machine` reads back as an equal one."""
    plain = {_VERSION: MACHINE_FILE_VERSION, **dataclasses.asdict(value)}
    plain["processor"]["flops_per_second"] = dict(value.processor.flops_per_second)
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)


def save_machine(value: Machine, path: Path) -> None:
    """Write the machine to a YAML file, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(machine_yaml(value), encoding="utf-8")
    part.replace(path)


def load_machine(path: Path) -> Machine:
    """The machine in a YAML file.

    Raises
    ------
    PlanError : a file that is missing, no YAML, of another version, or with fields that are
        missing, unknown or out of range: each with its line.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(PlanError, rule=f"{path} is a readable YAML file", got=error, remedy="Mend the file.")
    reader = _Reader(loader)
    if not isinstance(root, yaml.MappingNode):
        reader.fault(root, "a machine file holds fields and values, such as `name: mine`")
        reader.stop(path)
    entries = reader.entries(root)
    version = entries.pop(_VERSION, None)
    if version is None or reader.value(version) != MACHINE_FILE_VERSION:
        reader.fault(
            version or root,
            f"{_VERSION} is {MACHINE_FILE_VERSION}, the version that this bigunet reads, not "
            f"{None if version is None else reader.value(version)!r}",
        )
        reader.end(path)
    if "inside" in entries:
        entries.setdefault("across", entries["inside"])
    values = reader.fields(Machine, entries, root)
    reader.end(path)
    return Machine(**values)


class _Reader:
    """Turns nodes, which know their lines, into values, and gathers the faults."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._faults: list[str] = []

    def fault(self, node: yaml.Node | None, text: str) -> None:
        line = 1 if node is None else node.start_mark.line + 1
        self._faults.append(f"line {line}: {text}")

    def end(self, path: Path) -> None:
        if self._faults:
            self.stop(path)

    def stop(self, path: Path) -> NoReturn:
        fail(
            PlanError,
            rule=f"{path} describes a machine",
            got="; ".join(dict.fromkeys(self._faults)),
            remedy="Mend these lines; `bigunet machines summit --yaml` prints a whole file.",
        )

    def value(self, node: yaml.Node) -> Any:
        """The plain value; None, with a fault, for what the safe loader refuses."""
        try:
            return self._loader.construct_object(node, deep=True)
        except yaml.YAMLError as error:
            self.fault(node, str(getattr(error, "problem", error)))
            return None

    def entries(self, node: yaml.MappingNode) -> dict[str, yaml.Node]:
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(self.value(key))
            if name in found:
                self.fault(key, f"{name} is given twice")
            found[name] = value
        return found

    def fields(
        self, kind: type[Any], entries: Mapping[str, yaml.Node], parent: yaml.Node
    ) -> dict[str, Any]:
        known = {f.name: f for f in dataclasses.fields(kind)}
        for name in [n for n in entries if n not in known]:
            self.fault(entries[name], f"{name} is no field; known are {', '.join(known)}")
        values: dict[str, Any] = {}
        for name, entry in known.items():
            if name not in entries:
                if entry.default is MISSING:
                    self.fault(parent, f"{name} is missing: {entry.metadata['text']}")
                continue
            if kind is Machine and name in _SECTIONS:
                part = self._part(name, entries[name])
                if part is not None:
                    values[name] = part
                continue
            value = self.value(entries[name])
            if entry.metadata["rule"] not in _TEXTS:
                value = _numbers(value)
            values[name] = value
        for name, text in faults_of(kind, values):
            self.fault(entries[name], text)
        return values

    def _part(self, name: str, node: yaml.Node) -> Any:
        kind = _SECTIONS[name]
        if isinstance(node, yaml.MappingNode):
            before = len(self._faults)
            values = self.fields(kind, self.entries(node), node)
            return None if len(self._faults) > before else kind(**values)
        value = self.value(node)
        if value is None and name == "all_reduce":
            return None
        if kind is Processor and value in PROCESSORS:
            return PROCESSORS[value]
        choice = f", or one of {', '.join(PROCESSORS)}" if kind is Processor else ""
        self.fault(node, f"{name} is a section of fields{choice}, not {value!r}")
        return None


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads 1e12, without a point, as a text: taken as the number that it is."""
    if isinstance(value, Mapping):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value
