"""The exception tree of hypic_rag.

Every error a caller can provoke derives from :class:`HypicError`, and its message says what was
expected, what came, and what to do::

    HypicError
    ├── ConfigError             a setting, an option or an argument is wrong
    ├── ModelError
    │   ├── ModelLoadError      the checkpoint can't be found or read
    │   ├── UnsupportedModelError   the architecture has no family here
    │   └── SelfTestError       the model fails the exactness check at load
    ├── StoreError
    │   ├── StoreFormatError    the folder is no store, or one of another version
    │   ├── StoreAccessError    the folder can't be written, is full, or is in use
    │   └── StateMismatchError  a segment state doesn't fit the model or the request
    ├── DocumentError           a document can't be read
    ├── WorkerError             worker processes can't encode a segment
    ├── ServerError             the server can't listen where it should
    └── RequestError
        ├── EmptyStoreError     nothing has been ingested
        └── ContextLengthError  the prompt doesn't fit the model's context
"""


class HypicError(Exception):
    """Base of every error raised on purpose by this package.

    ``exit_code`` is what the command line returns for it: 2 for wrong use, 1 for everything else.
    """

    exit_code: int = 1


class ConfigError(HypicError):
    """A setting, an option or an argument is wrong."""

    exit_code = 2


class ModelError(HypicError):
    """A model can't be used."""


class ModelLoadError(ModelError):
    """The checkpoint can't be found or read."""


class UnsupportedModelError(ModelError):
    """The architecture has no family in this package."""


class SelfTestError(ModelError):
    """The model gives other results in pieces than it gives as a whole."""


class StoreError(HypicError):
    """The store can't do what was asked."""


class StoreFormatError(StoreError):
    """The folder is no store, or a store of another version."""


class StoreAccessError(StoreError):
    """The store's folder can't be read or written, is full, or is in use."""


class StateMismatchError(StoreError):
    """A segment state doesn't fit the model or the request it was offered to."""


class DocumentError(HypicError):
    """A document can't be read."""


class WorkerError(HypicError):
    """Worker processes can't encode a segment: they die or fail over it."""


class ServerError(HypicError):
    """The server can't listen at the address it was given."""


class RequestError(HypicError):
    """A request can't be answered as it stands."""


class EmptyStoreError(RequestError):
    """Nothing has been ingested, so there's nothing to answer from."""


class ContextLengthError(RequestError):
    """The prompt doesn't fit the model's context."""
