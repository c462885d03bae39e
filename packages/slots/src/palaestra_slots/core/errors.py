"""All errors that are not bugs. The name of a class states which part failed; a class also derives from the builtin
that it resembles.

Three kinds of failure are kept apart. The model's mistake is a tool result that the model reads. An infrastructure
failure is an `InfraError`; it is recorded in the trajectory, which gets no score. A bug in Palaestra raises whatever
Python raises.

Expected file errors inside a slot (`FileNotFoundError`, …) are plain builtins: tools show them to the model.
"""

from __future__ import annotations

from typing import ClassVar

from palaestra_slots.core.types import Blame


class PalaestraError(Exception):
    """Base of all errors that are not bugs. A command that fails with such an error ends with `exit_code`."""

    exit_code: ClassVar[int] = 1


class ConfigError(PalaestraError, ValueError):
    """An unusable flag, file or environment. The message explains the fix."""

    exit_code = 2


class DiskError(PalaestraError, OSError):
    """A run's file cannot be written. Everything written before is intact, and the run can resume from it."""


class ImageError(ConfigError):
    """An image that is missing, broken or too large. The message names it."""


class PullError(ImageError):
    """A registry failed, refused a request, or sent something else than it was asked for."""

    exit_code = 1


class TaskError(ConfigError):
    """One unusable task or dataset row. The run leaves it out, reports it, and continues with the rest."""


class AlreadySolved(TaskError):
    """A task whose own check accepts the workspace in which nothing was done."""


class WorkError(PalaestraError, RuntimeError):
    """The agent's work failed when a score called it: it raised, ended its process, or returned no plain JSON. A score
    that does not catch this error is 0."""


class InfraError(PalaestraError):
    """An infrastructure failure. `blame` names the part that failed; a rollout that ends with this error has no
    reward."""

    blame: ClassVar[Blame] = Blame.RUN


class EngineError(InfraError):
    """The model server failed. `by_request` means that this request, which an agent may have written, may be the cause:
    the server failed on it, refused it, or did not answer it in time."""

    blame = Blame.ENGINE
    exit_code = 4
    by_request = False


class EngineUnavailable(EngineError, ConnectionError):
    """The model server is still unreachable, overloaded or too slow after the client's retries."""


class EngineRefused(EngineError, PermissionError):
    """The server rejected the request (key, model, parameters): retrying cannot help."""

    by_request = True


class ContextExceeded(EngineRefused):
    """The conversation does not fit the model's window. During a rollout, this counts as the agent's failure.
    `window_tokens` is the size of the window, if the server reported it."""

    window_tokens: int | None = None


class ReplyWithheld(EngineRefused):
    """The provider's content filter withheld or cut the reply, so the model did not end it. That is a result, which a
    resumed run keeps. `tokens` are those that were read and written all the same, if the reply has their numbers."""

    blame = Blame.FILTER
    tokens: tuple[int, int] = (0, 0)


class EngineReplyError(EngineError, ValueError):
    """The reply does not have the shape that the protocol requires."""

    by_request = True


class SandboxError(InfraError):
    """A sandbox or its server failed."""

    blame = Blame.SANDBOX


class IsolationUnavailable(SandboxError):
    """This machine cannot provide the requested isolation. Raised before the first command runs."""

    exit_code = 5


class SlotLost(SandboxError, ConnectionError):
    """The slot's server or the connection to it ended, or a fault of the machine ended the slot's first process."""


class SlotEnded(SlotLost):
    """The slot's own commands ended it: they used up the memory that its first process shares with them, or killed or
    stopped that process. During a rollout, this counts as the agent's failure. The slot can still be sealed."""


class StaleLease(SandboxError, PermissionError):
    """The caller's lease has ended; the slot may have another holder."""


class AcquireTimeout(SandboxError, TimeoutError):
    """No slot became free in time."""


class TrainerError(InfraError):
    """The trainer or its server failed. No rollout is to blame, and finished rollouts are on disk."""


class TrainerUnavailable(TrainerError, ConnectionError):
    """The trainer was unreachable, in spite of retries, for longer than the environment waits for it."""


class TrainerRefused(TrainerError, ValueError):
    """The server rejected the environment or its groups, or is not a trainer's server: retrying cannot help."""


class ToolUnavailable(InfraError, ConnectionError):
    """A tool's backend failed: a provider is down or refuses the request, or a recording lacks the call."""

    blame = Blame.TOOL


class CannotResume(InfraError):
    """The state of an interrupted rollout cannot be restored, so the rollout starts again."""


class ToolStuck(InfraError, TimeoutError):
    """A tool call did not return within the run's limit, which is far above the tool's own limit."""

    blame = Blame.TOOL


class ToolServerError(InfraError):
    """A tool server failed. The message names the server and the fix."""

    blame = Blame.TOOL


class ToolServerUnavailable(ToolServerError, ConnectionError):
    """The tool server could not be reached or started, ended early, or did not answer in time."""


class ToolServerRefused(ToolServerError, PermissionError):
    """The tool server rejected the request: retrying cannot help."""


class ToolServerReplyError(ToolServerError, ValueError):
    """The tool server's reply does not have the shape that the protocol requires."""


class PlatformError(InfraError):
    """A chat platform of the gateway failed. The message names the platform."""


class PlatformUnavailable(PlatformError, ConnectionError):
    """The platform does not answer or limits the rate; a later try can succeed. `retry_after_s` is the wait that the
    platform requests."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PlatformRefused(PlatformError, PermissionError):
    """The platform rejects the token, the chat or the message: retrying cannot help."""

    exit_code = 2


class PrepareError(InfraError):
    """A task's setup failed, so no rollout of it can start."""

    blame = Blame.TASK


class GraderError(InfraError):
    """The check could not run, did not run its tests, or did not report a result."""

    blame = Blame.GRADER
