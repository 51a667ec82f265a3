"""What an evaluation is known by does not change with the names of fields: journals of earlier versions go on."""

import torch

from remanence.evaluate import Subject
from remanence.evaluate.run import describe
from remanence.train import TrainConfig


def test_a_recipe_is_known_by_its_first_names():
    recipe = TrainConfig(init_from="model")
    found = describe(Subject(torch.device("cpu"), recipe=recipe))["recipe"]
    assert found["start"] == "model" and "init_from" not in found
    assert TrainConfig.from_dict(found) == recipe
