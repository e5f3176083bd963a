"""What the trainers are made of: their typed configurations, and validation."""

import dataclasses

import numpy as np
import pytest

from examples.kit.held_out import HeldOut
from examples.llama import options as llama
from examples.nanomoe import options as nanomoe

ARGV = "--preset tiny --magma --steps 20 --batch-size 16 --seed 3 --out run --log-every 5"


def of_llama(*more):
    return llama.resolve(llama.parser().parse([*ARGV.split(), *more]))


def test_options_become_typed_parts():
    config = of_llama("--scan-layers", "--accumulate", "2", "--mesh", "fsdp=2", "--prompt", "x")
    assert config.model.scan_layers and config.model.hidden_size == 32
    assert (config.text.batch_size, config.text.seq_len, config.text.seed) == (16, 32, 3)
    assert (config.optimizer.masking, config.optimizer.mask_key) == ("magma", 3)
    assert (config.optimizer.steps, config.optimizer.warmup) == (20, 2)
    assert (config.run.prompt, config.run.log_every, str(config.run.out)) == ("x", 5, "run")
    assert dict(config.devices.mesh) == {"data": 4, "fsdp": 2, "tensor": 1}
    assert config.options["learning_rate"] == config.optimizer.learning_rate == 3e-3

    config = nanomoe.parse([*ARGV.split(), "--experts-as-blocks"])
    assert config.experts_as_blocks and config.optimizer.b2 == 0.95
    assert (config.text.packing, config.text.batch_size, config.log_every) == ("concat", 16, 5)
    assert config.options["out"] == "run" and config.options["weight_decay"] == 0.1


@pytest.mark.parametrize("config", [of_llama, lambda: nanomoe.parse(ARGV.split())])
def test_a_configuration_does_not_change(config):
    config = config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.preset = "nano"
    with pytest.raises(TypeError):
        config.options["seed"] = 4


def test_what_a_checkpoint_compares_has_the_names_that_it_always_had_and_the_controls():
    names = """preset scan_layers remat dtype packing batch_size seq_len optimizer magma skip_update
        control multiplier survival_prob temperature mask_key lazy learning_rate steps warmup
        weight_decay clip seed"""
    assert list(of_llama().decisive()) == names.split()


def test_validation_weighs_tokens_and_spreads_its_batches():
    held_out = HeldOut(lambda: iter({"inputs": np.array([i])} for i in range(10)), 10)
    seen = []

    def losses(batch):
        seen.append(int(batch["inputs"][0]))
        tokens = 1 + seen[-1] % 2
        return np.float32(seen[-1] * tokens), np.float32(tokens)

    assert held_out.validate(losses) == (1 * 20 + 2 * 25) / 15
    assert seen == list(range(10))
    seen.clear()
    assert held_out.validate(losses, limit=5) == 4
    assert seen == [0, 2, 4, 6, 8]
