"""A draft model from nothing: the first layers of a model, with its own embedding, norm and head.

It drafts badly, which is what tests of rejection want; it is no drafter to use.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def first_layers(folder: Path, target: Path, layers: int) -> Path:
    """Write a folder that holds the first `layers` layers of the model in `folder`."""
    target.mkdir(parents=True)
    for file in folder.glob("*.json"):
        if file.name not in {"config.json", "forerun.json"} and not file.name.endswith(".index.json"):
            shutil.copy(file, target / file.name)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (target / "config.json").write_text(json.dumps(config))
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            number = re.search(r"\.layers\.(\d+)\.", name)
            if number is None or int(number[1]) < layers:
                tensors[name] = tensor
    save_file(tensors, target / "model.safetensors")
    return target
