"""The one error tree. A class names the boundary that was crossed, and also subclasses the builtin it resembles.

    PalaestraError
    ├── ConfigError (ValueError)            a flag, file, row or environment that cannot work        exit 2
    │   ├── ImageError                      an image that is missing, broken or too large
    │   └── TaskError                       one task or dataset row that cannot work
    └── InfraError                          the world's failure: retried at its source, never scored
        ├── EngineError                     whom the agent asks                                      exit 4
        │   ├── EngineUnavailable (ConnectionError)   unreachable, overloaded, timed out: worth retrying
        │   ├── EngineRefused (PermissionError)       wrong key, unknown model, bad request: retrying cannot help
    │   │   └── ContextExceeded                   the conversation no longer fits the model's window
        │   └── EngineReplyError (ValueError)         the reply is not what the protocol promises
        ├── SandboxError                    where commands run
        │   ├── IsolationUnavailable        isolation was asked for and cannot be had                exit 5
        │   ├── SlotLost (ConnectionError)  the slot or its server died under us
        │   ├── StaleLease (PermissionError)  a former holder of a slot called late
        │   └── AcquireTimeout (TimeoutError)  no slot came free in time
        ├── TrainerError                    who learns from the groups
        │   ├── TrainerUnavailable (ConnectionError)  its server did not answer for too long
        │   └── TrainerRefused (ValueError)           its server will not have this environment or groups, or is none
        ├── ToolUnavailable (ConnectionError)  what a tool asks (a provider, a recording) failed or has no answer
        ├── CannotGoOn                      a rollout that was cut off cannot be taken up where it was
        ├── ToolStuck (TimeoutError)        a tool call that did not come back, nor kept its own time limit
        ├── ToolServerError                 a server of tools: an MCP server, or `palaestra serve tools`
        │   ├── ToolServerUnavailable (ConnectionError)  unreachable, ended or too slow
        │   ├── ToolServerRefused (PermissionError)      wrong token, no such call: retrying cannot help
        │   └── ToolServerReplyError (ValueError)        the reply is not what the protocol promises
        ├── PrepareError                    a task's set-up failed: the task is to blame, not the agent
        └── GraderError                     the check did not run or did not report: no score, never 0.0

Three outcomes are never mixed. The model's mistake is a tool result that the model reads. The world's failure is one of
these errors, recorded on the trajectory and left unscored. Our own bug raises whatever Python raises.

Expected file errors inside a slot (`FileNotFoundError`, `IsADirectoryError`, `PermissionError`, …) are plain builtins:
tools show them to the model.
"""

from __future__ import annotations

from typing import ClassVar

from palaestra.core.types import Blame


class PalaestraError(Exception):
    """Base of all errors that are not bugs. `exit_code` is what the command line returns for it."""

    exit_code: ClassVar[int] = 1


class ConfigError(PalaestraError, ValueError):
    """A flag, file or environment that cannot work; the message says how to mend it."""

    exit_code = 2


class DiskError(PalaestraError, OSError):
    """A file of a run cannot be written. What was written before is whole, and can be gone on with."""


class ImageError(ConfigError):
    """An image that is missing, broken or too large. The message names it."""


class TaskError(ConfigError):
    """One task or dataset row that cannot work. The run leaves it out, says so, and goes on with the rest."""


class InfraError(PalaestraError):
    """The world's failure. `blame` says whose; a rollout that ends with it has no reward."""

    blame: ClassVar[Blame] = Blame.RUN


class EngineError(InfraError):
    """The model server failed."""

    blame = Blame.ENGINE
    exit_code = 4


class EngineUnavailable(EngineError, ConnectionError):
    """Unreachable, overloaded or too slow; the client has already retried with back-off."""


class EngineRefused(EngineError, PermissionError):
    """The server understood and said no (key, model, parameters): retrying cannot help."""


class ContextExceeded(EngineRefused):
    """The conversation does not fit the model's window. Once a rollout is under way, that is the agent's doing."""


class EngineReplyError(EngineError, ValueError):
    """The reply does not have the shape that the protocol promises."""


class SandboxError(InfraError):
    """A slot or its server failed."""

    blame = Blame.SANDBOX


class IsolationUnavailable(SandboxError):
    """Isolation was asked for and this machine cannot give it. Raised before the first command runs."""

    exit_code = 5


class SlotLost(SandboxError, ConnectionError):
    """The slot's init, its server or the connection to it is gone."""


class StaleLease(SandboxError, PermissionError):
    """The caller's lease has ended; the slot belongs to somebody else, or to nobody."""


class AcquireTimeout(SandboxError, TimeoutError):
    """No slot came free within the time allowed."""


class TrainerError(InfraError):
    """The trainer's server failed. No rollout is to blame, and what was finished is on disk."""


class TrainerUnavailable(TrainerError, ConnectionError):
    """Unreachable for longer than the environment has patience; it has tried again all the while."""


class TrainerRefused(TrainerError, ValueError):
    """The server said no, or is no trainer's server: trying again cannot help."""


class ToolUnavailable(InfraError, ConnectionError):
    """What a tool asks failed: a provider is down or refuses, or a recording lacks the call. Not the model's doing."""

    blame = Blame.TOOL


class CannotGoOn(InfraError):
    """What a cut-off rollout had come to cannot be brought back: it begins anew. Never the end of a rollout."""


class ToolStuck(InfraError, TimeoutError):
    """A tool call did not come back within the run's limit, which is far above the tool's own."""

    blame = Blame.TOOL


class ToolServerError(InfraError):
    """A server of tools failed. The message names the server and the way out."""

    blame = Blame.TOOL


class ToolServerUnavailable(ToolServerError, ConnectionError):
    """It could not be reached or started, ended in the middle, or did not answer in time."""


class ToolServerRefused(ToolServerError, PermissionError):
    """It understood and said no: trying again cannot help."""


class ToolServerReplyError(ToolServerError, ValueError):
    """Its reply does not have the shape that the protocol promises."""


class PrepareError(InfraError):
    """A task's set-up failed, so no rollout of it can start."""

    blame = Blame.TASK


class GraderError(InfraError):
    """The check could not run, did not run its tests, or did not report."""

    blame = Blame.GRADER
