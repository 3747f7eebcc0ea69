import jax.numpy as jnp
import test_loop
from test_loop import config, training

import zoo
from zoo import callbacks


class Recording(callbacks.Callback):
    name = "recording"

    def __init__(self):
        self.arrays = {"sum": jnp.zeros(())}
        self.calls = []

    def on_step(self, loop, step, state, metrics):
        self.arrays = {"sum": self.arrays["sum"] + metrics["loss"]}
        self.values["steps"] = self.values.get("steps", 0) + 1
        self.calls.append(("step", step))


no_curves = test_loop.no_curves


def fit(config, *given, **options):
    with zoo.Run(config) as run:
        return zoo.fit(run, training(**options), callbacks=given)


def test_state_is_resumed(tmp_path):
    a, b, c = Recording(), Recording(), Recording()
    fit(config(tmp_path / "a", steps=12), a)
    fit(config(tmp_path / "b", steps=8), b)
    fit(config(tmp_path / "b", steps=12), c)
    assert c.calls == a.calls[8:]
    assert a.values == c.values == {"steps": 12}
    assert float(a.arrays["sum"]) == float(c.arrays["sum"]) != 0
