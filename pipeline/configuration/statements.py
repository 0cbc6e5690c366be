"""Reads gin text as a list of statements, without executing any of it.

Nothing here imports, registers or binds, so a gin file can be inspected before it is trusted.
Includes are expanded in place. Every statement records where it was written. Text that cannot be
read raises a `UserError` with a message of one line.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gin import config_parser

from pipeline.utils.errors import UserError
from pipeline.utils.files import error_kind

COMMAND_LINE = "--gin_bindings"
_PACKAGE = "pipeline"

# A string whose quotes are missing, for example Acrobot-v1, ALE/Pong-v5 or my_envs:Maze-v0.
_BARE_WORDS = re.compile(r"[\w./~][\w./:~ -]*")
# Numbers that Python's literals lack: infinities, NaN and fractions.
_NO_LITERALS = re.compile(r"[+-]?(inf|infinity|nan|[\d_.e+-]+ */ *[\d_.e+-]+)", re.IGNORECASE)
_OTHER_LANGUAGES = {"true": "True", "false": "False", "none": "None", "null": "None"}


def shipped_folder() -> Path:
    """Returns the folder of shipped configs.

    It is inside the installed package, or beside the package in a checkout.
    """
    package = Path(__file__).parents[1]
    installed = package / "gin_configs"
    return installed if installed.is_dir() else package.parent / "gin_configs"


def shipped_names() -> list[str]:
    """Returns the names of shipped configs (`dqn_cartpole`, `agents/dqn`), complete runs first."""
    folder = shipped_folder()
    paths = (path for path in folder.rglob("*.gin") if path.is_file())
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in paths]
    return sorted(names, key=lambda name: ("/" in name, name))


def find_file(name: str, folders: Sequence[Path]) -> Path:
    """Returns the first file among `folders` / `name`, with or without `.gin`.

    Raises:
      UserError: If there is none. The message suggests the nearest shipped configs and files.
    """
    # No file name has a null character, and Python 3.13 cannot expand a user name that has one.
    path = Path(name if "\0" in name else os.path.expanduser(name))
    for folder in folders:
        for candidate in (folder / path, folder / f"{path}.gin"):
            if os.path.isfile(candidate):  # Unlike pathlib's, it never raises.
                return candidate
    hint = suggest(name.removesuffix(".gin"), [*shipped_names(), *_beside(path, folders[0])])
    raise UserError(f"no gin file or shipped config is named {name!r}.{hint}")


def _beside(path: Path, folder: Path) -> list[str]:
    try:
        return [str(path.with_name(x.stem)) for x in (folder / path).parent.glob("*.gin")]
    except (OSError, ValueError):  # No file can have such a name.
        return []


def list_configs() -> list[tuple[str, str]]:
    """Returns (name, first comment line) of every shipped config, complete runs first."""
    return [(name, _first_comment(find_file(name, [shipped_folder()]))) for name in shipped_names()]


def _first_comment(path: Path) -> str:
    lines = (line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines())
    return next((line.lstrip("# ") for line in lines if line.startswith("#")), "")


def suggest(name: str, names: Iterable[str]) -> str:
    """Returns ' Nearest: a, b.', or an empty string if no name is near."""
    known = sorted(set(names))
    near = difflib.get_close_matches(name, known, n=3)
    part = re.compile(rf"(^|[_/.]){re.escape(name.lower())}")  # pong suggests dqn_pong
    near += [other for other in known if part.search(other.lower()) and other not in near]
    return f" Nearest: {', '.join(near[:3])}." if near else ""


@dataclass(frozen=True)
class Reference:
    """Reference to a configurable: `@scope/name`, or `@scope/name()` if it is evaluated."""

    name: str
    evaluate: bool

    def __repr__(self) -> str:
        return f"@{self.name}" + "()" * self.evaluate


@dataclass(frozen=True)
class Macro:
    """Use of a macro: `%name`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


def value_of(value: Any, macros: Mapping[str, Any]) -> Any:
    """Returns what a macro stands for, also if that is a macro; any other value as it is."""
    while isinstance(value, Macro) and value.name in macros:
        value = macros[value.name]
    return value


class Import(NamedTuple):
    """Import of a module. `text` is the whole statement, in any of gin's forms."""

    module: str
    text: str
    origin: str


class Binding(NamedTuple):
    """Binding `scope/selector.parameter = value`. Without a parameter, it defines a macro."""

    scope: str
    selector: str
    parameter: str
    value: Any
    origin: str

    @property
    def name(self) -> str:
        scoped = f"{self.scope}/{self.selector}" if self.scope else self.selector
        return f"{scoped}.{self.parameter}" if self.parameter else scoped

    @property
    def file(self) -> str:
        """Returns the path of the file that has the binding, or `COMMAND_LINE`."""
        return self.origin.rpartition(":")[0] or self.origin

    @property
    def short_name(self) -> str:
        """Returns the name without the module path that gin allows before a selector."""
        return self._replace(selector=self.selector.rpartition(".")[2]).name


def leaves(value: Any) -> Iterator[Any]:
    """Yields the values inside nested lists, tuples and dictionaries (including keys)."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


class Source(NamedTuple):
    """Piece of gin text: a file, or one value of `--gin_bindings`."""

    text: str
    path: Path | None
    label: str = COMMAND_LINE

    @classmethod
    def read(cls, path: Path) -> Source:
        try:
            resolved = path.resolve()
            return cls(path.read_text(encoding="utf-8-sig"), resolved, _label(resolved))
        except UnicodeDecodeError as error:
            raise UserError(f"cannot read {path}: {error}") from error
        except OSError as error:
            raise error_kind(error)(f"cannot read {path}: {error}") from error

    def at(self, line: int) -> str:
        return f"{self.label}:{line}" if self.path else self.label

    @property
    def folders(self) -> list[Path]:
        """Returns the folders that `include` searches: the file's own, then the shipped one."""
        return [self.path.parent if self.path else Path(), shipped_folder()]


def scan(
    source: Source, allow_imports: bool = False, above: tuple[Path | None, ...] = ()
) -> Iterator[Import | Binding]:
    """Yields the statements of `source` in order, with those of included files in place.

    Args:
      source: Text to read.
      allow_imports: Whether modules from outside this package may be imported.
      above: Files that include `source`, directly or indirectly.

    Raises:
      UserError: If there is bad syntax, a missing or circular include, dynamic registration, or an
        import from outside this package while `allow_imports` is False.
    """
    for statement in _parse(source):
        origin = source.at(statement.location.line_num)
        if isinstance(statement, config_parser.ImportStatement):
            # The program itself imports everything in this package that gin can bind.
            if statement.module.split(".")[0] != _PACKAGE:
                _check_import(statement, origin, allow_imports)
                yield Import(statement.module, statement.format(), origin)
        elif isinstance(statement, config_parser.BindingStatement):
            scope, selector, parameter, value, _ = statement
            yield Binding(scope, selector, parameter, value, origin)
        elif isinstance(statement, config_parser.IncludeStatement):
            included = _included(statement.filename, source, origin)
            if included.path in (source.path, *above):
                raise UserError(f"{origin}: {statement.filename!r} includes itself.")
            yield from scan(included, allow_imports, (source.path, *above))


def _included(name: str, source: Source, origin: str) -> Source:
    try:
        return Source.read(find_file(name, source.folders))
    except UserError as error:
        raise type(error)(f"{origin}: {error}") from None


def _check_import(
    statement: config_parser.ImportStatement, origin: str, allow_imports: bool
) -> None:
    if statement.module.startswith("__gin__."):
        raise UserError(
            f"{origin}: `{statement.format()}` is refused: it lets a gin file call any function. "
            "Decorate what you want to configure with @gin.configurable and import its module."
        )
    if not allow_imports:
        raise UserError(
            f"{origin}: `{statement.format()}` is refused: a gin file is code, and this import "
            f"runs a module from outside `{_PACKAGE}`. If you trust it, add "
            "--allow_gin_imports (in Python: allow_gin_imports=True)."
        )


class _Inert(config_parser.ParserDelegate):
    """Keeps references and macros as names, without resolving them."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


class _Parser(config_parser.ConfigParser):
    """Refuses a minus sign before a macro or a reference, which gin's parser drops."""

    def _maybe_parse_basic_type(self) -> tuple[bool, Any]:
        has_minus = self._current_token.string == "-"
        is_literal, value = super()._maybe_parse_basic_type()
        if has_minus and not is_literal:
            self._raise_syntax_error("only a number can follow a minus sign")
        return is_literal, value


def _parse(source: Source) -> list[Any]:
    # Python's tokenizer raises errors of other kinds on null characters and lone carriage returns.
    text = source.text.replace("\r\n", "\n").replace("\r", "\n")
    source = source._replace(text=text)
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise UserError(f"{source.at(line)}: remove the null character.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text[: error.start].count("\n") + 1
        raise UserError(f"{source.at(line)}: it is not UTF-8.") from None
    try:
        return list(_Parser(text, _Inert()))
    except SyntaxError as error:  # gin's errors hold a Location, the tokenizer's a similar tuple.
        line = error.args[1][1] if len(error.args) > 1 else 1
        raise UserError(_explain_syntax(source, line, str(error.args[0]))) from None
    except tokenize.TokenError as error:
        is_open = "EOF" in error.args[0] or "unterminated" in error.args[0]
        message = error.args[0] + (": is a bracket or quote left open?" if is_open else ".")
        raise UserError(f"{source.at(error.args[1][0])}: {message}") from None
    except TypeError as error:  # raised for the key of a dictionary
        message = f"a list or a dictionary cannot be the key of a dictionary ({error})"
        raise UserError(f"{source.at(1)}: {message}.") from None
    except (RecursionError, MemoryError):
        raise UserError(f"{source.at(1)}: a value is nested too deeply.") from None


def _explain_syntax(source: Source, line_number: int, message: str) -> str:
    lines = source.text.split("\n")  # as the tokenizer counts them
    line = lines[line_number - 1].strip() if line_number <= len(lines) else ""
    corrected = _with_quotes(line, source)
    if corrected:
        return f"{source.at(line_number)}: {corrected}"
    token = re.search(r"Failed to parse token '(.*)'", message)
    reason = f"{token[1]} is not a Python literal (a string needs quotes)" if token else message
    return f"{source.at(line_number)}: cannot read `{line}`: {reason.rstrip('.')}."


def _with_quotes(line: str, source: Source) -> str | None:
    """Returns a hint with the corrected line if its value is a bare word, or None."""
    key, _, value = (part.strip() for part in line.partition("="))
    value = value.split(" #")[0].rstrip()
    if _NO_LITERALS.fullmatch(value):
        need = "a finite number, or None where there may be no limit"
        need = "a decimal number, such as 0.5" if "/" in value else need
        return f"{key} = {value}: write {need}; a text needs quotes."
    if not re.fullmatch(r"[\w./]+", key) or not _BARE_WORDS.fullmatch(value) or _is_literal(value):
        return None
    if re.fullmatch(r"[\d_. ]+", value):  # such as 007, a number that Python does not read
        return None
    literal = _OTHER_LANGUAGES.get(value.lower())
    quoted = literal or repr(value)
    text = f"{key} = {quoted}" if source.path else f'{COMMAND_LINE}="{key}={quoted}"'
    if literal:
        return f"{value} is written {literal}: {text}"
    reference = f". If it names a function or a class, write @{value}" * value.isidentifier()
    return f"strings need quotes, {value} has none: {text}{reference}"


def _is_literal(value: str) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _label(path: Path) -> str:
    """Returns a short name of a file.

    This is its path from the parent of the shipped folder if it is shipped, or else its path from
    the current folder if it is in there, so that only shipped files begin with `gin_configs/`.
    """
    shipped, here = shipped_folder().resolve(), Path.cwd()
    if path.is_relative_to(shipped):
        return path.relative_to(shipped.parent).as_posix()
    if path.is_relative_to(here):
        label = path.relative_to(here).as_posix()
        return f"./{label}" if label.startswith(f"{shipped.name}/") else label
    return str(path)
