"""One train step for every family: losses, optimizers, and a step compiled once per bucket."""
