"""The exceptions that users of kvist can meet.

    KvistError
    ├── UsageError             the caller's mistake; HTTP 400, exit status 2 on the command line
    │   ├── InvalidRequestError    a bad field in a request; carries `param`
    │   │   └── ContextLengthError     prompt or budget beyond the context or the pool; `code` context_length_exceeded
    │   └── ConfigError            options that contradict each other or this machine
    ├── ModelError             a model cannot be had or used; exit status 1
    │   ├── ModelNotFoundError     no such file, folder or name; HTTP 404
    │   ├── ModelFormatError       damaged, cut, foreign or incomplete file
    │   └── UnsupportedModelError  architecture, tokenizer or quantization that kvist does not know
    ├── DownloadError          a pull failed (network, checksum, full disk)
    └── EngineError            the engine failed a request for a reason of its own; HTTP 500
        └── EngineStoppedError     the engine is shut down; HTTP 503

Each message is one sentence that names the thing and the remedy. A misuse of an internal interface asserts instead.
This module knows nothing else of kvist.
"""


class KvistError(Exception):
    """Base of every exception that kvist raises for its users."""


class UsageError(KvistError, ValueError):
    """The caller asked for something that cannot be."""


class InvalidRequestError(UsageError):
    """A field of a request is out of its domain. `param` names the field, `code` is the OpenAI error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """A prompt (with its budget) that can never fit the context or the KV pool; the message has both sizes."""

    def __init__(self, message: str, *, param: str | None = "prompt") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ConfigError(UsageError):
    """Engine options that contradict each other, the model or this machine."""


class ModelError(KvistError):
    """A model cannot be had or used."""


class ModelNotFoundError(ModelError):
    """No file, folder, registry name or hub name answers to the given model."""


class ModelFormatError(ModelError):
    """The model's files are damaged, cut short, foreign or incomplete."""


class UnsupportedModelError(ModelError):
    """The model's architecture, tokenizer or quantization is not one that kvist knows."""


class DownloadError(KvistError):
    """A model could not be fetched, checked or stored."""


class EngineError(KvistError):
    """The engine failed a request for a reason of its own."""


class EngineStoppedError(EngineError):
    """The engine has been shut down or cannot go on."""
