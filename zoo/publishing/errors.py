"""The error of publishing."""


class PublishError(Exception):
    """A folder that can't be written as a model, or can't be opened as one."""
