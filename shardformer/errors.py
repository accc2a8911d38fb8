"""Error classes of ShardFormer, and functions that validate arguments and raise these errors.

An error states what happened, with the value that was passed, and what to do about it. The rule is included if it is
not obvious.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from textwrap import indent
from types import ModuleType

TRACEBACK_VARIABLE = "SHARDFORMER_TRACEBACK"


def is_traceback_enabled() -> bool:
    """Return whether ``SHARDFORMER_TRACEBACK`` is set, so that errors are shown with a full traceback."""
    return os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0")


DOCUMENTATION = Path(__file__).resolve().parents[1] / "docs" / "policies.md"
"""A page of the documentation, which exists in a checkout and not in an installed wheel."""


def replace_doc_paths_with_urls(text: str) -> str:
    """Replace paths such as docs/policies.md by URLs if the installed package lacks these files.

    Without a project URL named Documentation, the replacement is the name of the page.
    """
    if "docs/" not in text or DOCUMENTATION.is_file():
        return text
    urls = dict(url.split(", ", 1) for url in _get_project_urls())
    site = urls.get("Documentation", "").rstrip("/")
    page = rf"{site}/\1/" if site else r"the page '\1' of the documentation"
    return re.sub(r"\bdocs/([\w-]+)\.md\b", page, text)


def _get_project_urls() -> list[str]:
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        return metadata("shardformer").get_all("Project-URL") or []
    except PackageNotFoundError:
        return []


class ShardFormerError(Exception):
    """Base class of all errors that ShardFormer raises deliberately.

    Args:
        what: what happened, with the value that was passed.
        remedy: what to do about it.
        rule: the rule that was violated, if it is not obvious.

    Each argument is a sentence. The attributes have no full stop at the end, so that other sentences can include them.

    >>> print(ShardFormerError("tensor=3 does not divide 4 processes", remedy="Use a tensor size of 1, 2 or 4"))
    tensor=3 does not divide 4 processes. Use a tensor size of 1, 2 or 4.
    """

    def __init__(self, what: str, *, remedy: str, rule: str = "") -> None:
        self.what, self.rule, self.remedy = map(
            _strip_full_stop, (what, replace_doc_paths_with_urls(rule), replace_doc_paths_with_urls(remedy))
        )
        super().__init__(" ".join(_ensure_full_stop(part) for part in (self.what, self.rule, self.remedy) if part))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), self.what, rule=self.rule, remedy=self.remedy), ()


class ConfigError(ShardFormerError):
    """Raised for an option, or a combination of options, that is not supported."""


class LaunchError(ShardFormerError):
    """Raised if processes, environment variables or process groups do not match the parallel layout."""


class PolicyError(ShardFormerError):
    """Raised if a policy does not match its model, for example because a rule matches no module."""


class InputError(ShardFormerError):
    """Raised for invalid input, such as token IDs outside the vocabulary or data that differs between ranks."""


class WorkerError(ShardFormerError):
    """Raised if a worker process died, hung or raised an exception."""


def check_argument(argument_name: str, value: object, is_valid: bool, rule: str, remedy: str) -> None:
    """Raise ConfigError with the name and value of an argument unless ``is_valid`` is true.

    >>> check_argument("stage", "x", isinstance("x", int), "A stage is a number", "Set stage=1")
    Traceback (most recent call last):
    shardformer.errors.ConfigError: stage='x' is not valid. A stage is a number. Set stage=1.
    """
    _raise_unless_valid(argument_name, value, is_valid, "is not valid", remedy, rule)


def _raise_unless_valid(
    argument_name: str, value: object, is_valid: bool, problem: str, remedy: str, rule: str = ""
) -> None:
    if not is_valid:
        owner, _, argument = argument_name.rpartition(".")
        argument_and_value = f"{owner}({argument}={value!r:.80})" if owner else f"{argument}={value!r:.80}"
        raise ConfigError(f"{argument_and_value} {problem}.", rule=rule, remedy=remedy)


def check_int(
    argument_name: str, value: object, minimum: int = 1, *, unit: str = "", example: int | None = None
) -> None:
    """Raise ConfigError unless ``value`` is an integer that is at least ``minimum``.

    Args:
        argument_name: name of the argument, or class and argument joined by a dot.
        unit: unit of the value.

    >>> check_int("Throughput.window", 0, unit="steps", example=20)
    Traceback (most recent call last):
    shardformer.errors.ConfigError: Throughput(window=0) is not an integer of at least 1 (in steps). Set window=20.
    """
    is_valid = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    problem = f"is not an integer of at least {minimum}{unit and f' (in {unit})'}"
    suggested = example or max(minimum, 1)
    if isinstance(value, str) and value.isdecimal() and int(value) >= minimum:
        suggested = int(value)
    _raise_unless_valid(argument_name, value, is_valid, problem, f"Set {_get_argument_name(argument_name)}={suggested}")


def check_number(
    argument_name: str,
    value: object,
    *,
    minimum: float | None = None,
    upper_bound: float | None = None,
    unit: str = "",
    example: float,
) -> None:
    """Raise ConfigError unless ``value`` is a number in the allowed range, by default any number above 0.

    >>> check_number("timeout_s", 0, unit="seconds", example=600)
    Traceback (most recent call last):
    shardformer.errors.ConfigError: timeout_s=0 is not a number above 0 (in seconds). Set timeout_s=600.
    """
    is_valid = isinstance(value, int | float) and not isinstance(value, bool)
    is_valid = is_valid and (value > 0 if minimum is None else value >= minimum)  # type: ignore[operator]
    is_valid = is_valid and (upper_bound is None or value < upper_bound)  # type: ignore[operator]
    limits = "above 0" if minimum is None else f"of at least {minimum:g}"
    limits += "" if upper_bound is None else f" and below {upper_bound:g}"
    problem = f"is not a number {limits}{unit and f' (in {unit})'}"
    _raise_unless_valid(argument_name, value, is_valid, problem, f"Set {_get_argument_name(argument_name)}={example:g}")


def check_choice(argument_name: str, value: object, choices: Iterable[object], rule: str = "") -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``, and suggest similar choices.

    >>> check_choice("schedule", "1f1d", ["gpipe", "1f1b"])
    Traceback (most recent call last):
    shardformer.errors.ConfigError: schedule='1f1d' is not one of 'gpipe', '1f1b'. Did you mean '1f1b'?
    """
    known = list(choices)
    is_bool = isinstance(value, bool)
    is_valid = any(isinstance(value, type(n)) and is_bool == isinstance(n, bool) and value == n for n in known)
    if is_valid:
        return
    problem = "is not valid" if rule else f"is not one of {', '.join(map(repr, known))}"
    near = suggest_similar_names(value, map(str, known))
    numbers = [n for n in known if isinstance(n, int)]
    same_text = [n for n in known if str(n) == str(value)]
    suggested: object = next((n for n in known if n is not None), None)
    if same_text:
        suggested, near = same_text[0], ""
    elif isinstance(value, int) and numbers and not is_bool:
        suggested, near = min(numbers, key=lambda n: abs(n - value)), ""
    remedy = near if near.startswith("Did") else f"Set {_get_argument_name(argument_name)}={suggested!r}"
    _raise_unless_valid(argument_name, value, False, problem, remedy, rule)


def check_bool(argument_name: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is True or False."""
    _raise_unless_valid(
        argument_name,
        value,
        isinstance(value, bool),
        "is not True or False",
        f"Set {_get_argument_name(argument_name)}=True",
    )


def check_names_are_known(given_names: Iterable[object], known_names: Iterable[str], problem: str, rule: str) -> None:
    """Raise ConfigError if any of the names is unknown, and suggest similar names.

    >>> check_names_are_known(["tensr"], ["tensor", "data"], "There is no axis", "The axes are tensor and data")
    Traceback (most recent call last):
    shardformer.errors.ConfigError: There is no axis 'tensr'. The axes are tensor and data. Did you mean 'tensor'?
    """
    names = list(known_names)
    for name in given_names:
        if name not in names:
            raise ConfigError(f"{problem} {name!r}.", rule=rule, remedy=suggest_similar_names(name, names))


def check_callable(argument_name: str, value: object, rule: str) -> None:
    """Raise ConfigError unless ``value`` is callable or None."""
    is_valid = value is None or callable(value)
    _raise_unless_valid(
        argument_name, value, is_valid, "is not a function", f"Pass a function, or omit {argument_name}", rule
    )


OLDEST_RELEASES = {"accelerate": "1.12", "lightning": "2.5", "peft": "0.18", "trl": "1.16"}
"""Oldest supported releases of the libraries of ``shardformer.integrations``, as in pyproject.toml."""


def check_minimum_library_version(library_name: str, installed_version: str) -> None:
    """Raise ConfigError if the installed release of a library is too old.

    >>> check_minimum_library_version("trl", "1.15")
    Traceback (most recent call last):
    shardformer.errors.ConfigError: trl 1.15 is installed, but ShardFormer needs trl 1.16 or newer. Run pip ...
    """
    oldest = OLDEST_RELEASES[library_name]
    found, least = ([int(number) for number in re.findall(r"\d+", text)[:3]] for text in (installed_version, oldest))
    if found < least:
        raise ConfigError(
            f"{library_name} {installed_version} is installed, but ShardFormer needs {library_name} {oldest} or newer.",
            remedy=f"Run pip install --upgrade '{library_name}>={oldest}'.",
        )


def _get_argument_name(argument_path: str) -> str:
    return argument_path.rpartition(".")[2]


def get_first_message_line(exception: BaseException) -> str:
    """Return the first line of an exception's message, without the final period."""
    return (str(exception).strip() or type(exception).__name__).splitlines()[0].rstrip(".")


def suggest_similar_names(unknown_name: object, known_names: Iterable[str]) -> str:
    """Suggest similar names, as in ``Did you mean 'tensor'?``, or list the known names if none is similar."""
    names, text = sorted(set(known_names)), str(unknown_name)
    same = [n for n in names if n.lower() == text.lower()]
    close = same or get_close_matches(text, names, n=3, cutoff=0.7 if len(text) <= 4 else 0.4)
    similarity = [SequenceMatcher(None, n, text).ratio() for n in close]  # in descending order
    close = [n for n, ratio in zip(close, similarity) if ratio > similarity[0] - 0.2]
    if close:
        return "Did you mean " + " or ".join(repr(c) for c in close) + "?"
    shown = ", ".join(repr(n) for n in names[:8])
    return f"Known names: {shown}{', ...' if len(names) > 8 else ''}." if names else "No names are known."


_FINAL_STOPS = re.compile(r"(?<=[^.])\.{1,2}$")
_HINT = re.compile(r"Did you mean [^?]*\?\s*")


def format_error_for_terminal(error: ShardFormerError) -> str:
    """Format an error for the terminal, with the rule and the remedy on indented lines below the message."""
    return format_error(type(error).__name__, error.what, error.rule, error.remedy)


def format_error(class_name: str, message: str, rule: str, remedy: str) -> str:
    """Format an error for the terminal from its class name, message, rule and remedy."""
    hint = _HINT.search(remedy)
    meant = hint[0].strip() if hint else ""
    rest = _HINT.sub("", remedy, count=1).strip(" ")
    below = [_ensure_full_stop(part) for part in (meant, rule, rest) if part.strip()]
    return "\n".join([f"{class_name}: {_ensure_full_stop(message)}", *(indent(part, "  ") for part in below)])


def _strip_full_stop(sentence: str) -> str:
    return sentence if sentence.endswith("...") else _FINAL_STOPS.sub("", sentence)


def _ensure_full_stop(sentence: str) -> str:
    return sentence if sentence.endswith((".", "\n", "!", "?")) else f"{sentence}."


def import_optional_module(
    module_name: str, feature_name: str, pip_extra: str, alternative_action: str = "", library_name: str | None = None
) -> ModuleType:
    """Import a module of an optional dependency. Raises ConfigError if it is not installed.

    Args:
        feature_name: what needs the library.
        pip_extra: the extra of this package that installs it.
        alternative_action: what to do instead of installing it, as an infinitive.
        library_name: name of the library, if it is not the first part of ``module_name``.
    """
    package = module_name.partition(".")[0]
    try:
        import_module(package)
        return import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{feature_name} requires {library_name or package}, which is not installed.",
            remedy=f"Run pip install 'shardformer[{pip_extra}]'"
            + (f", or {alternative_action}" if alternative_action else ""),
        ) from error


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes with a unit, such as "2.1 GB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message, as in "rank 3" or "ranks 0, 2"."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
