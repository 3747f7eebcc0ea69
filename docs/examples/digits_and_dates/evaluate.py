"""Load a published model of either network, and evaluate it on what is held out.

python -m evaluate digits runs/digits/average
"""

import json
import sys

import data
import losses
import nets  # noqa: F401, it registers the classes that a folder names
import zoo


def main(network: str, folder: str) -> None:
    """Print the means over the held-out part as JSON."""
    batch_size, loss_fn, read = {
        "digits": (96, losses.digits, data.digits),
        "dates": (128, losses.dates, data.dates),
    }[network]
    model, plan = zoo.load(folder), read(batch_size, 0).held_out
    step = zoo.make_eval_step(loss_fn, precision="fp32")
    sums: dict[str, float] = {}
    for k in range(plan.batches_per_epoch):
        for name, value in step(model, plan.batch(k))[1].items():
            sums[name] = sums.get(name, 0.0) + float(value)
    weight = sums.pop("tokens")
    print(json.dumps({f"eval_{name}": total / weight for name, total in sums.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
