"""The failure of a transfer, whatever carries it out."""


class TransferError(Exception):
    """The transport, the device or the peer failed; the bytes of this transfer can't be trusted, and may still land
    later."""
