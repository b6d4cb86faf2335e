"""Methods by name, and their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from forerun.train.methods.draft import DraftMethod, SharedDraftMethod
from forerun.train.methods.feature import FeatureMethod, FeatureOptions
from forerun.train.methods.method import Method, Task, take_over
from forerun.train.methods.parallel import ParallelMethod, ParallelOptions
from forerun.train.methods.side import SideMethod, SideOptions
from forerun.train.student import StudentShape

Options = StudentShape | SideOptions | FeatureOptions | ParallelOptions

METHODS: dict[str, Options] = {
    "blockwise": SideOptions(),
    "draft": StudentShape(),
    "eagle": FeatureOptions(unroll=1, noise=0.1),
    "eagle3": FeatureOptions(),
    "medusa": SideOptions(),
    "mtp": FeatureOptions(),
    "parallel": ParallelOptions(),
}
"""Each with what it does if nothing else is said."""
LEARNING_RATES = {"blockwise": 1e-3, "medusa": 1e-3, "eagle3": 1e-3, "mtp": 1e-3, "parallel": 3e-3}
"""Of those that learn well with another one than most. eagle, whose layer has no norm before it, diverges with 1e-3."""


def method_options(name: str, given: Mapping[str, Any]) -> Options:
    """With what was given; an option that the method does not have is refused."""
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r} to train: use one of {', '.join(METHODS)}")
    known = [field.name for field in fields(METHODS[name])]
    for key in given:
        if key not in known:
            flags = ", ".join(f"--{option.replace('_', '-')}" for option in known)
            raise ValueError(f"{name} has no option --{key.replace('_', '-')}: it has {flags}")
    return replace(METHODS[name], **given)


def new_method(name: str, options: Options, task: Task) -> Method:
    made = _new_method(name, options, task)
    if task.begin is not None:
        if isinstance(made, DraftMethod):
            raise ValueError("--begin: a draft with matrices of its own cannot go on from another: leave it out")
        if isinstance(made, FeatureMethod):
            made.begin(task.begin)
        else:
            take_over(made.folder().tensors, task.begin)
    return made


def _new_method(
    name: str, options: Options, task: Task
) -> FeatureMethod | SideMethod | ParallelMethod | SharedDraftMethod | DraftMethod:
    match options:
        case StudentShape():
            return (SharedDraftMethod if options.shares(task.target.config) else DraftMethod)(options, task)
        case SideOptions():
            return SideMethod(name, options, task)
        case FeatureOptions():
            return FeatureMethod(name, options, task)
        case ParallelOptions():
            return ParallelMethod(options, task)
