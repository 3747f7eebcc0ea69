"""Models published as folders, read and written: names, formats, files and checksums."""


class PublishError(Exception):
    """A folder that can't be written as a model, or can't be opened as one."""
