"""Errors that users see. Each message states the problem and its remedy."""


class SplitserveError(Exception):
    """Base of all errors that Splitserve raises on purpose."""


class ConfigError(SplitserveError):
    """A setting, or a combination of settings, that cannot work."""


class CheckpointError(SplitserveError):
    """A checkpoint that cannot be served: unknown architecture, missing or misshapen tensor, unreadable file."""


class WireError(SplitserveError):
    """Bytes from a socket that are not a message of our schema version."""


class HandshakeError(SplitserveError):
    """Two workers whose KV memory cannot be exchanged, or a worker that membership refuses for good."""


class DeviceLostError(SplitserveError):
    """The device can't run steps in this process any more."""
