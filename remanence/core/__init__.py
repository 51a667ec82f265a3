"""Deprecated: use the modules of `remanence.runtime`, `remanence.io`, `remanence.tokenizers` and `remanence.cli`."""

import sys
import warnings
from importlib import import_module

MOVED = {
    "runtime": "cache choices device errors graphs keywords module overrides ragged sampling shapes state terminal",
    "io": "files migrations outputs shipped tensors",
    "tokenizers": "converted tokens vocabulary",
    "cli": "console fields progress",
    "evaluate": "published",
}
"""The modules by their present package."""

warnings.warn(f"remanence.core is deprecated: {__doc__.partition(': ')[2]}", DeprecationWarning, stacklevel=2)
for _package, _modules in MOVED.items():
    for _name in _modules.split():
        globals()[_name] = sys.modules[f"{__name__}.{_name}"] = import_module(f"remanence.{_package}.{_name}")
