"""Every error the project raises on purpose.

::

    C2KVError                      exit code 1: the job or a verification failed
     +-- InputError                exit code 2: the caller can put it right
     |    +-- ConfigError          unknown key, wrong type, value out of range
     |    +-- CorpusError          unreadable or invalid document source
     |    +-- ModelError           model cannot be found or loaded
     |    |    +-- UnsupportedModelError   its architecture breaks the method's maths
     |    +-- TemplateError        chat template cannot be cut into segments
     |    +-- SidecarError         sidecar unreadable, or made for another base model
     |    +-- RatioError           ratio not a positive integer, or not trained
     |    +-- StoreFormatError     not a store, or a store of another format version
     |    +-- IdentityError        store content of another model, sidecar or ratio
     |    +-- ContextLengthError   more positions asked for than the model has
     +-- StoreError                the store failed at run time (I/O, conflict)
     +-- TrainingError             a training run cannot go on
          +-- NonFiniteLossError   its loss is not a number
          +-- StaleAttemptError    a later attempt at the same run has taken over

Messages are one line: what was expected, what came, what to do.
"""


class C2KVError(Exception):
    """Root of all errors raised on purpose; ``exit_code`` is what a command exits with."""

    exit_code: int = 1


class InputError(C2KVError):
    """Something given by the caller is wrong and can be corrected."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration has an unknown key, a wrong type or a value out of range."""


class CorpusError(InputError):
    """A document source is missing, unreadable or holds invalid rows."""


class ModelError(InputError):
    """A model cannot be found or loaded."""


class UnsupportedModelError(ModelError):
    """The architecture, or a setting of it, breaks the method's maths."""


class TemplateError(InputError):
    """The chat template cannot be rendered as prefix, documents and question."""


class SidecarError(InputError):
    """A sidecar directory is unreadable or belongs to another base model."""


class RatioError(InputError):
    """A ratio is not a positive integer, or not one the sidecar was trained for."""


class StoreFormatError(InputError):
    """The location holds no store, or one of another format version."""


class IdentityError(InputError):
    """Stored slots were made by another model, tokenizer, sidecar or setting."""


class ContextLengthError(InputError):
    """A context asks for more positions than the model has."""


class StoreError(C2KVError):
    """The store failed while running: I/O error or lasting write conflict."""


class TrainingError(C2KVError):
    """A training run cannot go on; what it has saved stays."""


class NonFiniteLossError(TrainingError):
    """The loss of a step is not a number; the batch is saved beside the run."""


class StaleAttemptError(TrainingError):
    """A later attempt at the same run has taken over; this one must not write any more."""
